"""A sample's tokens: ids of its texts, placeholders of its media, and which of them are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from federation.model.chunk import MARK_SAMPLE, MARK_UNTRAINED, RecordStatus
from federation.model.media import MediaRule
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT
from msd_daemon.sources.record_fault import RecordFault, missing

if TYPE_CHECKING:
    from msd_daemon.transforms.media_pipeline import MediaItem

Ids = npt.NDArray[np.int32]
Line = tuple[int, int, int, int]
"""A mark: kind, first token, tokens, units."""


@dataclass(slots=True)
class DecodedMedia:
    """One image, sound or video, ready to be placed."""

    kind: int
    """Index of its rule in the job's media."""
    item: MediaItem


@dataclass(slots=True)
class SampleTokens:
    """Tokens of one sample, or of the samples of one record one behind the other."""

    ids: Ids
    """With UNTRAINED_BIT where the job has masks. Shape (tokens,)."""
    marks: list[Line] = field(default_factory=list)
    items: list[tuple[int, tuple[int, ...], npt.NDArray[Any]]] = field(default_factory=list)
    """(index of the rule, line of the item table, units) of each item in order."""
    trained_tokens: int = 0


class TokenBuilder:
    """Puts texts and media one behind the other.

    Args:
        media: The job's rules.
        row_tokens_min: Tokens of the shortest row: an item has to fit one.
    """

    def __init__(self, media: tuple[MediaRule, ...], row_tokens_min: int) -> None:
        self._media = media
        self._row_tokens_min = row_tokens_min

    def build(
        self,
        parts: Sequence[npt.NDArray[Any] | DecodedMedia],
        bos_id: int | None,
        eos_id: int | None,
    ) -> SampleTokens:
        """Return the tokens of a sample, nothing where it has no part.

        Args:
            parts: Ids of texts without BOS and EOS, and media.
            bos_id: Put before it.
            eos_id: Put behind it.

        Raises:
            RecordFault: An item does not fit any row, or a text spells a placeholder.
        """
        pieces: list[npt.NDArray[Any]] = []
        sample = SampleTokens(np.zeros(0, np.int32))
        at = 0

        def add(ids: npt.NDArray[Any]) -> None:
            nonlocal at
            pieces.append(ids)
            at += len(ids)

        def add_untrained(token: int | None) -> None:
            if token is not None:
                sample.marks.append((MARK_UNTRAINED, at, 1, 0))
                add(np.array([token | UNTRAINED_BIT], np.int32))

        if bos_id is not None and len(parts):
            add(np.array([bos_id], np.int32))
        for part in parts:
            if not isinstance(part, DecodedMedia):
                self._check_text(part)
                add(part)
                continue
            rule, item = self._media[part.kind], part.item
            self.check_fit(part)
            add_untrained(rule.begin_id)
            sample.marks.append((part.kind, at, item.tokens, len(item.data)))
            line = (at, item.tokens, len(item.data), *item.grid)
            sample.items.append((part.kind, line, item.data))
            add(np.full(item.tokens, rule.placeholder_id | UNTRAINED_BIT, np.int32))
            add_untrained(rule.end_id)
        if eos_id is not None and len(parts):
            add(np.array([eos_id], np.int32))
        if pieces:
            sample.ids = np.concatenate(pieces).astype(np.int32, copy=False)
        sample.trained_tokens = at - sum(line[2] for line in sample.marks)
        return sample

    def _check_text(self, ids: npt.NDArray[Any]) -> None:
        """Refuse a text that spells a placeholder: a model would look for an item there."""
        for rule in self._media:
            if (ids == rule.placeholder_id).any():
                raise missing(
                    f"the text spells the token of {rule.modality} ({rule.placeholder_id}); take it "
                    "out, or write where the item stands as <image>, <video> or <audio>"
                )

    def check_fit(self, part: DecodedMedia) -> None:
        """Refuse an item that is empty, or that no row can hold.

        Raises:
            RecordFault: It has none, or more tokens or units than a row.
        """
        rule, item = self._media[part.kind], part.item
        if item.tokens < 1 or not len(item.data):
            raise RecordFault(
                RecordStatus.UNDECODABLE,
                f"{rule.modality} of {item.tokens} tokens and {len(item.data)} units: it is empty",
            )
        if item.tokens > self._row_tokens_min or len(item.data) > rule.row_units_max:
            raise RecordFault(
                RecordStatus.TOO_LARGE,
                f"{rule.modality} of {item.tokens} tokens and {len(item.data)} units, a row has "
                f"{self._row_tokens_min} and {rule.row_units_max}: lower its pixels or seconds, or "
                "raise the batch's limits",
            )

    def place(
        self, ids: npt.NDArray[Any], is_trained: npt.NDArray[np.bool_], media: list[DecodedMedia]
    ) -> SampleTokens:
        """Return the tokens of a rendered chat, its placeholder ids spread over their items.

        Args:
            ids: Of the whole text, one placeholder an item. Shape (tokens,).
            is_trained: Shape (tokens,).
            media: In the order of their placeholders, of each kind.

        Raises:
            RecordFault: Placeholders and media differ in number, or an item does not fit any row.
        """
        sample = SampleTokens(ids.astype(np.int32))
        kinds = self._kinds_of(ids, media)
        if len(kinds):
            sample, is_trained = self._spread(sample.ids, is_trained, kinds, media)
        in_item = np.zeros(len(sample.ids), np.bool_)
        for _, begin, tokens, _ in sample.marks:
            in_item[begin : begin + tokens] = True
        sample.marks += _untrained_runs(~is_trained & ~in_item)
        sample.marks.sort(key=lambda line: line[1])
        sample.ids[~is_trained | in_item] |= UNTRAINED_BIT
        sample.trained_tokens = int(np.count_nonzero(is_trained & ~in_item))
        return sample

    def _kinds_of(self, ids: npt.NDArray[Any], media: list[DecodedMedia]) -> dict[int, int]:
        """Return by place of a placeholder which of the media stands there."""
        found: dict[int, int] = {}
        for kind, rule in enumerate(self._media):
            places = np.flatnonzero(ids == rule.placeholder_id).tolist()
            numbers = [at for at, part in enumerate(media) if part.kind == kind]
            if len(places) != len(numbers):
                raise missing(
                    f"the chat has {len(places)} placeholders of {rule.modality}, the record "
                    f"{len(numbers)} of them"
                )
            found |= dict(zip(places, numbers, strict=True))
        return found

    def _spread(
        self,
        ids: Ids,
        is_trained: npt.NDArray[np.bool_],
        kinds: dict[int, int],
        media: list[DecodedMedia],
    ) -> tuple[SampleTokens, npt.NDArray[np.bool_]]:
        repeats = np.ones(len(ids), np.int64)
        for place, number in kinds.items():
            self.check_fit(media[number])
            repeats[place] = media[number].item.tokens
        starts = np.cumsum(repeats) - repeats
        sample = SampleTokens(np.repeat(ids, repeats))
        for place in sorted(kinds):
            part = media[kinds[place]]
            begin, item = int(starts[place]), part.item
            sample.marks.append((part.kind, begin, item.tokens, len(item.data)))
            line = (begin, item.tokens, len(item.data), *item.grid)
            sample.items.append((part.kind, line, item.data))
        return sample, np.repeat(is_trained, repeats)


def join_samples(samples: Sequence[SampleTokens]) -> SampleTokens:
    """Return the samples of one record one behind the other; each begins at a mark of its own."""
    samples = [sample for sample in samples if len(sample.ids)]
    if len(samples) == 1:
        return samples[0]
    joined = SampleTokens(np.zeros(0, np.int32))
    begin = 0
    for sample in samples:
        if begin:
            joined.marks.append((MARK_SAMPLE, begin, 0, 0))
        joined.marks += [(kind, at + begin, n, units) for kind, at, n, units in sample.marks]
        joined.items += [
            (kind, (line[0] + begin, *line[1:]), data) for kind, line, data in sample.items
        ]
        joined.trained_tokens += sample.trained_tokens
        begin += len(sample.ids)
    if samples:
        joined.ids = np.concatenate([sample.ids for sample in samples])
    return joined


def _untrained_runs(is_untrained: npt.NDArray[np.bool_]) -> list[Line]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_untrained.astype(np.int8), [0]))))
    pairs = edges.reshape(-1, 2).tolist()
    return [(MARK_UNTRAINED, begin, end - begin, 0) for begin, end in pairs]
