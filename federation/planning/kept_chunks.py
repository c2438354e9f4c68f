"""Metadata of the chunks that are not drawn yet: what another planner, or another cut, begins with.

A planner that goes on from a state where its loaders do not is given these chunks, as loaders would
send them after a restore: the next one after a planner's death, and the new queues of a planner
whose `row_tokens` change. Bounded by what loaders read ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from federation.model.chunk import ChunkMeta
from federation.model.job import SourceSpec
from msd_client.contract.position import pack_block_key, unpack_block_key

Place = tuple[int, int]
"""(block key, index) of a chunk's first record."""
Cursor = tuple[int, int, int, int]
"""(source, block key, index, tokens drawn of that record), as StepPlan.cursors_after has it."""


class KeptChunks:
    """Chunks of all sources from their cursors on."""

    def __init__(self, specs: Sequence[SourceSpec]) -> None:
        self._lanes = [spec.lane_count for spec in specs]
        self._places: list[list[Place]] = [[] for _ in specs]
        self._metas: list[list[ChunkMeta]] = [[] for _ in specs]

    @property
    def count(self) -> int:
        """Number of chunks kept."""
        return sum(map(len, self._places))

    def chunks(self) -> Iterator[ChunkMeta]:
        """Yield what is kept, each source's in order.

        The order matters: that a window has no block is told by the first block of a later one.
        """
        for metas in self._metas:
            yield from metas

    def chunks_from(self, cursors: Sequence[Sequence[int]]) -> Iterator[ChunkMeta]:
        """Yield what a planner that stands there has to know, each source's in order.

        Args:
            cursors: Of each source [block key, index]; what lies in blocks before is no news, but for
                the ends of lanes: those are told as `forget` would have them told.
        """
        for source, (block_key, *_) in enumerate(cursors):
            metas = self._metas[source]
            passed = bisect_left(self._places[source], (block_key, 0))
            ends = [it for it in metas[:passed] if it.is_lane_end and _is_block_filled(it)]
            told = [_told_later(meta, self._lanes[source]) for meta in ends]
            yield from sorted(
                [*told, *metas[passed:]], key=lambda it: (it.block_key, it.first_index)
            )

    def add(self, meta: ChunkMeta, position: Place = (0, 0)) -> None:
        """Keep a chunk unless all of it is known.

        Args:
            meta: The chunk.
            position: First record of its source that is not known; what lies before it is no news.
        """
        if (meta.block_key, meta.first_index + len(meta.lengths)) < position:
            return
        places, metas = self._places[meta.source_index], self._metas[meta.source_index]
        key = (meta.block_key, meta.first_index)
        place = bisect_left(places, key)
        if place == len(places) or places[place] != key:
            places.insert(place, key)
            metas.insert(place, meta)
        elif _reach(metas[place]) < _reach(meta):
            metas[place] = meta

    def forget(self, cursors: Iterable[Cursor]) -> None:
        """Drop what lies before these cursors, each of another source.

        A lane's end that its last block told is told by an empty block from then on, as a loader
        does that starts behind it.
        """
        for source, *cursor, drawn_tokens in cursors:
            if not drawn_tokens:
                continue  # nothing was drawn yet: the cursor's own record is not known
            places, metas = self._places[source], self._metas[source]
            count = 0
            while count < len(places) and _is_before(metas[count], *cursor):
                count += 1
            told = [meta for meta in metas[:count] if meta.is_lane_end and _is_block_filled(meta)]
            del places[:count], metas[:count]
            for meta in told:
                self.add(_told_later(meta, self._lanes[source]), (cursor[0], cursor[1]))


def _told_later(meta: ChunkMeta, lanes: int) -> ChunkMeta:
    """Return the empty block that tells a lane's end at its next turn."""
    epoch, window, block = unpack_block_key(meta.block_key)
    return replace(
        meta,
        block_key=pack_block_key(epoch, window, block + lanes),
        first_index=0,
        lengths=np.zeros(0, np.int32),
        status=np.zeros(0, np.uint8),
        is_block_end=True,
        marks=None,
    )


def _is_before(meta: ChunkMeta, block_key: int, index: int) -> bool:
    if meta.block_key != block_key:
        return meta.block_key < block_key
    return meta.first_index + len(meta.lengths) <= index


def _is_block_filled(meta: ChunkMeta) -> bool:
    return meta.first_index + len(meta.lengths) > 0


def _reach(meta: ChunkMeta) -> tuple[int, bool]:
    return len(meta.lengths), meta.is_block_end
