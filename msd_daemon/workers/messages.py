"""Kinds and bodies of the frames between the daemon and its loader workers and constructors."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.chunk import ChunkMeta, Marks
from msd_daemon.core.loader_costs import NO_COST, ReadCost


class ToLoader(IntEnum):
    """Orders to a loader worker."""

    SETUP = 1
    """msgpack {job, pool_bytes, index_dir, stores}; the pool's descriptor rides along."""
    OPEN = 2
    """msgpack {loader, source, part, parts, block_key, index, until}."""
    GRANT = 3
    """Struct GRANT: fill this piece of the pool with the loader's next chunk."""
    SEEK = 4
    """msgpack {loader, block_key, index}."""
    FETCH = 5
    """msgpack {loader, source, block_key, indices, ...}: read these records again."""
    COPY = 6
    """msgpack {task, offset, bytes, chunks}: copy carried records out of their chunks."""
    CLOSE = 7
    """msgpack {loader}."""
    RESET = 8
    """msgpack {generation}: close all loaders; answered by RESET_DONE after all earlier answers."""
    STATISTICS = 9
    """Empty: answer with STATISTICS."""
    QUARANTINE = 10
    """msgpack {source, records [[shard, place, epoch, text]], suspects [[shard, first, last]]}."""
    BECOME = 11
    """Role, UTF-8: loader or shadow. The process is named by it."""
    UNTIL = 12
    """msgpack {loader, block_key}: begin no block at or behind it; grants come back DRY from there."""
    AHEAD = 13
    """msgpack {loader, blocks}: fetch so many of its blocks before they are needed."""


class FromLoader(IntEnum):
    """Answers of a loader worker."""

    READY = 1
    CHUNK = 2
    """Struct CHUNK_HEAD + fault text + lengths int32[n] + status uint8[n]; with CHUNK_FETCHED + index
    int32[n]; with CHUNK_MARKED + marks of each record int32[n] + their table int32[marks, 4]."""
    TOO_SMALL = 3
    """Struct GRANT: the piece is too small for the next record; `size_bytes` is what it needs."""
    FAILED = 4
    """msgpack {loader, error}: the loader cannot go on at all."""
    RESET_DONE = 5
    STATISTICS = 6
    DRY = 7
    """Struct GRANT: the source holds no record in a whole epoch; the piece comes back."""
    LOST = 9
    """msgpack {source, shard, block, epoch, records, text}: a shard can't be opened; the worker waits until
    QUARANTINE tells it the same."""
    BAD = 8
    """msgpack {source, block_key, records, more}: the bad records of the chunk that follows, see
    bad_notice."""


class ToConstructor(IntEnum):
    """Orders to a data constructor."""

    SETUP = 1
    """msgpack {pool_bytes}; the pool's descriptor rides along."""
    RING = 2
    """msgpack {ring, nbytes, layout, spec, rule, generation}; the ring's descriptor rides along."""
    BUILD = 3
    """Struct TASK_HEAD + segment columns (msd_daemon.gather.segment_columns); of jobs with groups, the
    group of each segment (msd_daemon.gather.group_column); where media may be
    encoded anywhere, + EncodeColumns of so many modalities (msd_daemon.gather.encode_columns)."""
    DROP_RINGS = 4
    """msgpack {generation}: unmap; answered by DROPPED."""


class FromConstructor(IntEnum):
    """Answers of a data constructor."""

    READY = 1
    FILLED = 2
    """Struct FILLED."""
    FAILED = 3
    """msgpack {ring, slot, sequence, error}."""
    DROPPED = 4


GRANT = struct.Struct("=IIQQQ")
"""loader, task, generation, pool offset, size in bytes."""
CHUNK_HEAD = struct.Struct("=IIQQQqiiIIIiIQQQQ")
"""loader, task, generation, pool offset, used bytes, block_key, first_index, records, flags,
window_blocks, fault bytes, source_index, marks, then ReadCost."""
CHUNK_BLOCK_END = 1
CHUNK_LANE_END = 2
CHUNK_FETCHED = 4
CHUNK_MARKED = 8

TASK_HEAD = struct.Struct("=IIQQQQIIQQQ")
"""ring, slot, sequence, generation, step, plan_step, microbatch, segments, valid_tokens, row_tokens,
modalities whose media may be encoded anywhere (0 = none)."""
FILLED = struct.Struct("=IIQQQQ")
"""ring, slot, sequence, generation, payload bytes, build nanoseconds."""


class Grant(NamedTuple):
    """Decoded GRANT."""

    loader: int
    task: int
    generation: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class ChunkNotice:
    """Decoded CHUNK frame."""

    loader: int
    task: int
    generation: int
    offset_bytes: int
    used_bytes: int
    block_key: int
    first_index: int
    is_block_end: bool
    is_lane_end: bool
    is_fetched: bool
    window_blocks: int
    source_index: int
    fault: str
    lengths: npt.NDArray[np.int32]
    status: npt.NDArray[np.uint8]
    indices: npt.NDArray[np.int32] | None = None
    """Fetched chunks only: index of each record."""
    marks: Marks | None = None
    cost: ReadCost = NO_COST

    @property
    def meta(self) -> ChunkMeta:
        """What the planner is told of it."""
        return ChunkMeta(
            self.source_index,
            self.block_key,
            self.first_index,
            self.lengths,
            self.status,
            self.is_block_end,
            self.window_blocks,
            self.is_lane_end,
            self.fault,
            self.marks,
        )


def decode_chunk(body: bytes) -> ChunkNotice:
    """Return the notice of a CHUNK frame."""
    (
        loader,
        task,
        generation,
        offset,
        used,
        block_key,
        first,
        records,
        flags,
        window_blocks,
        fault_bytes,
        source,
        marks_count,
        *cost,
    ) = CHUNK_HEAD.unpack_from(body)
    at = CHUNK_HEAD.size
    fault = body[at : at + fault_bytes].decode("utf-8", "replace")
    at += fault_bytes
    lengths = np.frombuffer(body, "<i4", records, at)
    at += 4 * records
    status = np.frombuffer(body, "u1", records, at)
    at += records
    indices = marks = None
    if flags & CHUNK_FETCHED:
        indices = np.frombuffer(body, "<i4", records, at)
        at += 4 * records
    if flags & CHUNK_MARKED:
        counts = np.frombuffer(body, "<i4", records, at)
        table = np.frombuffer(body, "<i4", 4 * marks_count, at + 4 * records)
        marks = Marks(counts, table.reshape(-1, 4))
    return ChunkNotice(
        loader,
        task,
        generation,
        offset,
        used,
        block_key,
        first,
        bool(flags & CHUNK_BLOCK_END),
        bool(flags & CHUNK_LANE_END),
        bool(flags & CHUNK_FETCHED),
        window_blocks,
        source,
        fault,
        lengths,
        status,
        indices,
        marks,
        ReadCost(*cost),
    )
