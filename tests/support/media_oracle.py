"""What records of `media_corpus` become, token by token in plain loops: the yardstick of payload.

Written from docs/media.md, EXPERIENCE.md E11, E12, E18 and the job's keys. Pixels and frames alone
are the decoders' own, made of the bytes that the test wrote; which record is a sample, its tokens,
what of it is trained, where its media stand and where it is cut is worked out here once more.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from msd_daemon.transforms.media_pipeline import MediaError, MediaItem, Pipeline, open_pipeline
from tests.support.media_corpus import (
    ASSISTANT,
    AUDIO,
    BEGIN,
    END,
    EOS,
    IMAGE,
    ROW_FRAMES,
    ROW_PATCHES,
    ROW_TOKENS,
    TURN_END,
    USER,
    Item,
    MadeSource,
    Record,
    Turn,
)

IGNORED = -100
UNITS_MAX = {"image": ROW_PATCHES, "audio": ROW_FRAMES}
MERGE = 2


class PlacedItem(NamedTuple):
    """An item in a segment."""

    modality: str
    place: int
    """Of its first token in the segment."""
    tokens: int
    grid: tuple[int, ...]
    """Time, height, width in patches; frames of a sound."""
    digest: bytes
    """Of its units."""


class Segment(NamedTuple):
    """A piece of a sample as a row has to hold it."""

    source: str
    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    positions: tuple[tuple[int, ...], ...]
    """Time, height and width."""
    items: tuple[PlacedItem, ...]


class Token(NamedTuple):
    """One token of a sample."""

    token: int
    is_trained: bool
    item: int = -1
    """Number of the item that it stands for."""


@dataclass
class Sample:
    """One record's tokens and items."""

    tokens: list[Token] = field(default_factory=list)
    items: list[tuple[str, MediaItem]] = field(default_factory=list)


class DropError(Exception):
    """The record is no sample; the text is the name of its status."""


def unit_digest(units: Any) -> bytes:
    """Return what stands for an item's units: dtype, shape and bytes."""
    array = np.ascontiguousarray(units)
    head = f"{array.dtype.str} {array.shape}".encode()
    return hashlib.blake2b(head + array.tobytes(), digest_size=12).digest()


class PayloadOracle:
    """Makes samples of records.

    Args:
        job: The job map.
        rules: The job's resolved media rules: decoders follow them.
    """

    def __init__(self, job: Mapping[str, Any], rules: Sequence[Any]) -> None:
        self._job = job
        self._pipelines: dict[str, Pipeline] = {
            rule.modality: open_pipeline(rule, None) for rule in rules
        }
        self._made: dict[bytes, MediaItem | None] = {}

    def status_of(self, source: MadeSource, record: Record) -> tuple[str, list[Segment]]:
        """Return a record's fate by name (`ok` or a status) and the pieces that rows get of it."""
        try:
            sample = self.sample_of(source, record)
        except DropError as drop:
            return str(drop), []
        return "ok", [self.segment(source.name, sample, *cut) for cut in cuts(sample)]

    def epoch(self, source: MadeSource) -> tuple[Counter[Segment], Counter[str]]:
        """Return how often one pass delivers each piece, and its records by fate."""
        pieces: Counter[Segment] = Counter()
        fates: Counter[str] = Counter()
        for record in source.records:
            fate, found = self.status_of(source, record)
            pieces.update(found)
            fates[fate] += 1
        return pieces, fates

    def sample_of(self, source: MadeSource, record: Record) -> Sample:
        """Return a record's sample.

        Raises:
            DropError: It is none.
        """
        section = source.section
        if record.fault == "bad_syntax":
            raise DropError(record.fault)
        if record.is_filtered:
            raise DropError("filtered")
        if record.key in source.excluded:
            raise DropError("excluded")
        if is_held_out(record.key, section.get("hold_out", 0)):
            raise DropError("held_out")
        if record.fault:
            raise DropError(record.fault)
        sample = Sample()
        parts = [part for part in record.parts if part != ()]
        if source.is_missing_left_out:
            parts = [p for p in parts if not (isinstance(p, Item) and p.content is None)]
        for part in parts:
            self._add(sample, part)
        if not sample.tokens:
            raise DropError("empty")
        is_chat = any(isinstance(part, Turn) for part in parts)
        ends_trained = sample.tokens[-1].is_trained if is_chat else True
        sample.tokens.append(Token(EOS, ends_trained))
        if (is_chat or sample.items) and not any(token.is_trained for token in sample.tokens):
            raise DropError("untrained")
        return sample

    def _add(self, sample: Sample, part: Any) -> None:
        if isinstance(part, Item):
            self._add_item(sample, part, is_framed=True)
        elif isinstance(part, Turn):
            sample.tokens.append(Token(ASSISTANT if part.is_assistant else USER, is_trained=False))
            for inner in part.parts:
                if isinstance(inner, Item):
                    self._add_item(sample, inner, is_framed=False)
                else:
                    sample.tokens += [Token(word, part.is_assistant) for word in inner]
            sample.tokens.append(Token(TURN_END, part.is_assistant))
        else:
            sample.tokens += [Token(word, is_trained=True) for word in part]

    def _add_item(self, sample: Sample, item: Item, *, is_framed: bool) -> None:
        made = self._decoded(item)
        count = tokens_of_item(item.modality, made)
        is_over = count > ROW_TOKENS or len(made.data) > UNITS_MAX[item.modality]
        if is_over:
            raise DropError("too_large")
        is_image = item.modality == "image"
        if is_framed and is_image:
            sample.tokens.append(Token(BEGIN, is_trained=False))
        number = len(sample.items)
        placeholder = IMAGE if is_image else AUDIO
        sample.tokens += [Token(placeholder, False, number)] * count
        sample.items.append((item.modality, made))
        if is_framed and is_image:
            sample.tokens.append(Token(END, is_trained=False))

    def _decoded(self, item: Item) -> MediaItem:
        if item.content is None:
            raise DropError("unreadable")
        if item.content not in self._made:
            rng = np.random.default_rng(0)  # no step of these jobs draws anything
            try:
                self._made[item.content] = self._pipelines[item.modality](item.content, rng)
            except MediaError:
                self._made[item.content] = None
        made = self._made[item.content]
        if made is None:
            raise DropError("undecodable")
        return made

    def segment(self, source: str, sample: Sample, begin: int, end: int) -> Segment:
        """Return a piece of a sample as a row holds it."""
        own = sample.tokens[begin:end]
        labels = [token.token if token.is_trained else IGNORED for token in own[1:]] + [IGNORED]
        items: list[PlacedItem] = []
        for place, token in enumerate(own):
            if token.item >= 0 and (not place or own[place - 1].item != token.item):
                modality, made = sample.items[token.item]
                count = sum(other.item == token.item for other in own)
                grid = tuple(made.grid) if modality == "image" else (len(made.data),)
                items.append(PlacedItem(modality, place, count, grid, unit_digest(made.data)))
        return Segment(
            source,
            tuple(token.token for token in own),
            tuple(labels),
            mrope(len(own), items),
            tuple(items),
        )


def tokens_of_item(modality: str, made: MediaItem) -> int:
    """Return the placeholder tokens of an item by the job's keys."""
    if modality == "audio":
        return math.ceil(len(made.data) / 4)
    t, h, w = made.grid
    assert t * h * w == len(made.data)
    return t * (h // MERGE) * (w // MERGE)


def is_held_out(key: str, share: float) -> bool:
    if not share:
        return False
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < math.ceil(Fraction(share) * (1 << 64))


def cuts(sample: Sample) -> Iterator[tuple[int, int]]:
    """Yield the pieces (begin, end) of a sample: as much as a row holds, no item cut."""
    begin, at = 0, 0
    held = dict.fromkeys(UNITS_MAX, 0)
    while at < len(sample.tokens):
        number = sample.tokens[at].item
        end, modality, units = at + 1, "", 0
        if number >= 0:
            modality, made = sample.items[number]
            units = len(made.data)
            while end < len(sample.tokens) and sample.tokens[end].item == number:
                end += 1
        is_over = bool(modality) and held[modality] + units > UNITS_MAX[modality]
        if end - begin > ROW_TOKENS or is_over:
            yield begin, at
            begin = at
            held = dict.fromkeys(UNITS_MAX, 0)
        if modality:
            held[modality] += units
        at = end
    yield begin, at


def mrope(length: int, items: Sequence[PlacedItem]) -> tuple[tuple[int, ...], ...]:
    """Return time, height and width of each place: text counts on, an image takes its grid."""
    axes: tuple[list[int], ...] = ([], [], [])
    starts = {item.place: item for item in items if item.modality == "image"}
    following = 0
    while len(axes[0]) < length:
        item = starts.get(len(axes[0]))
        if item is None:
            for axis in axes:
                axis.append(following)
            following += 1
            continue
        t, h, w = item.grid[0], item.grid[1] // MERGE, item.grid[2] // MERGE
        for frame in range(t):
            for row in range(h):
                for column in range(w):
                    for axis, place in zip(axes, (frame, row, column), strict=True):
                        axis.append(following + place)
        following += max(t, h, w)
    return tuple(map(tuple, axes))
