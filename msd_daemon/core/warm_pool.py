"""What a pool still holds when another generation begins: told to its planner, not read again. Pure.

From each source loader's run the part at and behind the new state's cursor is kept, where the run
has no gap there; the loader that takes the run over is opened behind it. Carried fragments that lie
in the pool stay where they are. Everything else is given up, and read again where it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from federation.model.chunk import ChunkMeta
from federation.model.job import SourceSpec
from federation.planning.kept_chunks import KeptChunks
from msd_daemon.core.chunk import Chunk, ChunkRun, Located, RecordPlace
from msd_daemon.core.pool import PoolState

Position = tuple[int, int]
"""(block key, index)."""


@dataclass(frozen=True)
class WarmStatistics:
    """Frozen snapshot of what a generation did not have to read."""

    chunks: int
    records: int
    used_bytes: int
    carried: int
    """Carried fragments."""


class WarmPool:
    """The pool of a generation, with what it takes over from the one before.

    Args:
        capacity_bytes: Of the pool.
        old: The pool of the generation before, whose workers are at rest; None where there is none.
        sources: The job's.
        cursors: (block key, index) of the first record that is wanted of each source.
        carried: (source, block key, index, offset, length) of each carried fragment.
    """

    def __init__(
        self,
        capacity_bytes: int,
        old: PoolState | None,
        sources: Sequence[SourceSpec],
        cursors: Sequence[Sequence[int]],
        carried: Iterable[Sequence[int]],
    ) -> None:
        self._cursors: list[Position] = [(key, index) for key, index in cursors]
        self._told = KeptChunks(sources)
        self._runs: dict[tuple[int, int, int], tuple[ChunkRun, list[Chunk]]] = {}
        """By source, part and parts: runs that go on from the cursor, with what they hold there."""
        self._chunks = self._records = self._used_bytes = 0
        places: list[tuple[RecordPlace, Located]] = []
        self._fragments = 0
        if old is not None and old.allocator.capacity_bytes == capacity_bytes:
            self._choose_runs(old)
            places = self._find_carried(old, carried)
        kept = {chunk for _, chunks in self._runs.values() for chunk in chunks}
        moved = {at.chunk: _renewed(at.chunk, is_drawn=True) for _, at in places}
        pieces = {chunk.piece for chunk in [*kept, *moved]}
        self.pool = PoolState(capacity_bytes, pieces)
        self.pool.enlist_singles((key, at._replace(chunk=moved[at.chunk])) for key, at in places)

    @property
    def statistics(self) -> WarmStatistics:
        """What was taken over."""
        return WarmStatistics(self._chunks, self._records, self._used_bytes, self._fragments)

    def _choose_runs(self, old: PoolState) -> None:
        for run, chunks in old.runs():
            cursor = self._cursors[run.source_index]
            ahead = [chunk for chunk in chunks if not _is_before(chunk, cursor)]
            if run.begin > cursor or not ahead:
                continue
            key = (run.source_index, *run.own)
            rival = self._runs.get(key)
            if rival is None or rival[1][-1].end < ahead[-1].end:
                self._runs[key] = (run, ahead)

    def _find_carried(
        self, old: PoolState, carried: Iterable[Sequence[int]]
    ) -> list[tuple[RecordPlace, Located]]:
        """Return where carried fragments lie, those left out that lie in the runs' kept chunks."""
        kept = {chunk for _, chunks in self._runs.values() for chunk in chunks}
        by_block: dict[tuple[int, int], list[Chunk]] = {}
        for _, chunks in old.runs():
            for chunk in chunks:
                by_block.setdefault((chunk.source_index, chunk.block_key), []).append(chunk)
        singles: dict[RecordPlace, list[tuple[RecordPlace, Located]]] = {}
        for key, at in old.places():
            singles.setdefault((*key[:3], -1), []).append((key, at))
        found: dict[RecordPlace, Located] = {}
        for source, block_key, index, offset, length in carried:
            record = (source, block_key, index, -1)
            chunks = by_block.get((source, block_key), [])
            holding = [c for c in chunks if 0 <= index - c.first_index < c.records]
            if any(chunk in kept for chunk in holding):
                self._fragments += 1
            elif holding:
                found[record] = Located(holding[-1], index - holding[-1].first_index, 0)
                self._fragments += 1
            else:
                for key, at in singles.get(record, ()):
                    if key[3] in (-1, offset) and offset + length <= at.end_tokens:
                        found[key] = at
                        self._fragments += 1
                        break
        return list(found.items())

    def claim(
        self, source: int, loaders: Sequence[int], parts: Sequence[tuple[int, int]] = ()
    ) -> list[Position]:
        """Hand what is kept of a source to its loaders; return where each goes on.

        Args:
            source: Its number.
            loaders: Its source loaders here, all of them, at once.
            parts: Which part each is, of how many; default: they are all parts, in order.
        """
        cursor = self._cursors[source]
        owns = parts or [(part, len(loaders)) for part in range(len(loaders))]
        positions = []
        for own, loader in zip(owns, loaders, strict=True):
            self.pool.loader_opened(loader, source, own, cursor)
            run, chunks = self._runs.pop((source, *own), (None, []))
            if run is not None:
                for meta in run.lane_ends:
                    self._told.add(meta)
                for chunk in [*run.drawn, *chunks]:
                    assert chunk.meta is not None
                    self._told.add(chunk.meta)
            for chunk in chunks:
                self.pool.enlist(_renewed(chunk, loader=loader))
                self._chunks += 1
                self._records += chunk.records
                self._used_bytes += chunk.used_bytes
            positions.append(chunks[-1].end if chunks else cursor)
        if cursor != (0, 0):  # else nothing was drawn yet
            self._told.forget([(source, *cursor, 1)])
        return positions

    def metas(self) -> list[ChunkMeta]:
        """Return what the planner is to be told of the sources that were claimed, once."""
        return list(self._told.chunks())

    def release_unclaimed(self) -> None:
        """Give up what is kept of sources that nobody opened."""
        for _, chunks in self._runs.values():
            for chunk in chunks:
                self.pool.dropped(chunk.piece)
        self._runs.clear()


def _is_before(chunk: Chunk, cursor: Position) -> bool:
    """Return True where a chunk ends before a cursor; at a stream's beginning none does."""
    if cursor == (0, 0):
        return False
    block_key, index = cursor
    return chunk.block_key < block_key or (chunk.block_key == block_key and chunk.end[1] <= index)


def _renewed(chunk: Chunk, *, loader: int = -1, is_drawn: bool = False) -> Chunk:
    """Return a chunk that nothing needs yet, in the same place."""
    fresh = replace(
        chunk,
        loader=loader,
        is_drawn=is_drawn,
        step_pins=0,
        carried_pins=0,
        is_gone=False,
        run=None,
    )
    if is_drawn:
        fresh.first_index, fresh.meta = -1, None
    return fresh
