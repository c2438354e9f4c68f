"""What each step of a job with media must hold, worked out once more: the oracle with caps of units.

Takes the order, the draw and the tails from `oracle`; what masks and media change of packing is
written here from the docstrings of `federation.planning.packing` and `best_fit`: documents are cut
at images, rows have a cap for each modality, no later part of a document goes before a former one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.support.media_corpus import (
    BLOCK_RECORDS,
    LINES_BLOCK_BYTES,
    STREAM_BLOCK_RECORDS,
    MadeSource,
)
from tests.support.media_oracle import (
    IGNORED,
    UNITS_MAX,
    DropError,
    PayloadOracle,
    Sample,
    Segment,
    cuts,
)
from tests.support.oracle import SLACK, Oracle, _Queue
from tests.support.oracle_order import Document, Source
from tests.support.oracle_packing import Fragment

MODALITIES = ("image", "audio")
"""In the order of the job's rules."""
_PART = 1 << 32


@dataclass(frozen=True, eq=False)
class MediaDocument(Document):
    """A record with its sample, cut."""

    sample: Sample | None = None

    def end_of(self, begin: int) -> int:
        """Return where the piece ends that begins here."""
        assert self.sample is not None
        return dict(cuts(self.sample))[begin]

    def units(self, begin: int, length: int) -> tuple[int, ...]:
        """Return the units of each modality in a piece."""
        assert self.sample is not None
        numbers = {token.item for token in self.sample.tokens[begin : begin + length]} - {-1}
        held = [self.sample.items[number] for number in numbers]
        return tuple(
            sum(len(made.data) for modality, made in held if modality == name)
            for name in MODALITIES
        )


class _MediaQueue(_Queue):
    """Pieces end where the sample is cut."""

    def peek(self, number: int, row_tokens: int) -> Fragment | None:
        found = super().peek(number, row_tokens)
        if found is None:
            return None
        assert isinstance(found.document, MediaDocument)
        found.length = found.document.end_of(found.offset) - found.offset
        return found


class MediaRow(NamedTuple):
    """A row: its segments, and a weight for each label that is trained."""

    segments: list[Segment]
    loss_weights: list[float]


class MediaOracle(Oracle):
    """Steps of a job with masks, `best_fit` packing and rows of one shape.

    Args:
        job: The job map.
        made: Its sources, five at most.
        payload: Makes samples of records.
    """

    def __init__(
        self, job: Mapping[str, Any], made: Sequence[MadeSource], payload: PayloadOracle
    ) -> None:
        self._payload = payload
        super().__init__(job, [source_of(one, payload) for one in made])
        self._queues = [
            _MediaQueue(queue.documents, queue.epochs, queue.long) for queue in self._queues
        ]
        self._caps = tuple(UNITS_MAX[name] for name in MODALITIES)

    def _needs_nothing(
        self, pool: list[Fragment], limit: int | None, before: list[Fragment]
    ) -> bool:
        if super()._needs_nothing(pool, limit, before):
            return True
        held = [units_of(fragment) for fragment in pool]
        return any(
            sum(units[place] for units in held) >= self._rows * cap + self._rows * cap // SLACK
            for place, cap in enumerate(self._caps)
        )

    def _pack(
        self, pool: list[Fragment], carried_count: int, left: int | None
    ) -> tuple[list[list[Fragment]], list[Fragment]]:
        assert left is None
        row_of = self._best_fit(pool, carried_count)
        for place, fragment in enumerate(pool):
            if row_of[place] < 0:
                for other, later in enumerate(pool):
                    if later.is_of(fragment) and later.offset > fragment.offset:
                        row_of[other] = -1
        rows: list[list[Fragment]] = [[] for _ in range(self._rows)]
        for place, fragment in enumerate(pool):
            if row_of[place] >= 0:
                rows[row_of[place]].append(fragment)
        return rows, [fragment for place, fragment in enumerate(pool) if row_of[place] < 0]

    def _best_fit(self, pool: list[Fragment], carried_count: int) -> dict[int, int]:
        own = []
        for fragment in pool:
            parts = zip(units_of(fragment), self._caps, strict=True)
            own.append(
                fragment.length + sum(units * self._row_tokens // cap for units, cap in parts)
            )
        ranks = [
            max(
                own[n]
                for n, other in enumerate(pool)
                if other.is_of(fragment) and other.offset >= fragment.offset
            )
            for fragment in pool
        ]
        order = sorted(range(len(pool)), key=lambda n: (pool[n].drawn_step, -ranks[n]))
        self._free = [[self._row_tokens, *self._caps] for _ in range(self._rows)]
        carried, drawn = order[:carried_count], order[carried_count:]
        everything = [self._segments_max] * self._rows
        if not carried:
            return self._placed(pool, drawn, everything)
        caps = (self._row_tokens, *self._caps)
        taken = [(pool[n].length, *units_of(pool[n])) for n in range(len(pool))]
        full_count = sum(
            any(size == cap for size, cap in zip(taken[n], caps, strict=True)) for n in drawn
        )
        quarters = max(
            5 * sum(taken[n][place] for n in carried) // (4 * cap) for place, cap in enumerate(caps)
        )
        needed = max(quarters, len(carried) // self._segments_max) + 1
        usable = max(self._rows - full_count, min(needed, self._rows))
        part = max(1, self._segments_max // 4, 5 * len(carried) // (4 * usable))
        part = min(part, self._segments_max)
        room = [part if row < usable else 0 for row in range(self._rows)]
        found = self._placed(pool, carried, room)
        room = [
            room[row] + self._segments_max - part if row < usable else self._segments_max
            for row in range(self._rows)
        ]
        found |= self._placed(pool, [n for n in carried if found[n] < 0], room)
        return found | self._placed(pool, drawn, room)

    def _placed(self, pool: list[Fragment], places: list[int], room: list[int]) -> dict[int, int]:
        found = {}
        for place in places:
            taken = (pool[place].length, *units_of(pool[place]))
            parts = [units * _PART // cap for units, cap in zip(taken[1:], self._caps, strict=True)]
            lead = parts.index(max(parts)) + 1 if any(parts) else 0
            fitting = [
                (free[lead], row)
                for row, free in enumerate(self._free)
                if room[row] and all(left >= size for left, size in zip(free, taken, strict=True))
            ]
            found[place] = -1
            if fitting:
                _, row = min(fitting)
                found[place] = row
                room[row] -= 1
                self._free[row] = [
                    left - size for left, size in zip(self._free[row], taken, strict=True)
                ]
        return found

    def _row(self, fragments: list[Fragment]) -> Any:
        segments = []
        for fragment in fragments:
            assert isinstance(fragment.document, MediaDocument)
            assert fragment.document.sample is not None
            name = self._sources[fragment.source].name
            begin, end = fragment.offset, fragment.offset + fragment.length
            segments.append(self._payload.segment(name, fragment.document.sample, begin, end))
        labels = [label for segment in segments for label in segment.labels]
        return MediaRow(segments, [float(label != IGNORED) for label in labels])


def units_of(fragment: Fragment) -> tuple[int, ...]:
    assert isinstance(fragment.document, MediaDocument)
    return fragment.document.units(fragment.offset, fragment.length)


def source_of(made: MadeSource, payload: PayloadOracle) -> Source:
    """Return a source as the oracle takes it."""
    shards: list[list[Document]] = []
    number = 0
    for shard in made.shards:
        begin = 0
        shards.append([])
        for record in shard:
            status, sample = "ok", None
            try:
                sample = payload.sample_of(made, record)
            except DropError as drop:
                status = str(drop)
            tokens = [token.token for token in sample.tokens] if sample else []
            shards[-1].append(
                MediaDocument(number, tokens, record.size_bytes, begin, status, sample)
            )
            begin += record.size_bytes + 1
            number += 1
    return Source(
        made.name,
        made.kind,
        shards,
        window_shards=2,
        window_records=16,
        window_bytes=8 << 20,
        interleave=2,
        block_bytes=LINES_BLOCK_BYTES,
        block_records=BLOCK_RECORDS,
        stream_block_records=STREAM_BLOCK_RECORDS,
        block_counts=made.block_counts,
    )


def row_digest(segments: Sequence[Segment]) -> bytes:
    """Return what stands for a row and all that lies in it."""
    return hashlib.blake2b(repr(list(segments)).encode(), digest_size=16).digest()
