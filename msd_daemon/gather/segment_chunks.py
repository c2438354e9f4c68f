"""Segments by the chunks that they lie in, checked: for what is gathered beside the tokens."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from msd_daemon.gather.segment_columns import SegmentColumns
from msd_daemon.shm.chunk_header import CHUNK_ALIGN_BYTES
from msd_daemon.shm.chunk_layout import ChunkView

Places = npt.NDArray[np.int64]


def flat_places(segments: SegmentColumns, shape: tuple[int, int]) -> Places:
    """Return the first place of each segment in the flattened rows. Shape (segments,).

    Raises:
        ValueError: A segment lies outside the microbatch, or on the one before it.
    """
    rows, row_tokens = shape
    row = segments.row.astype(np.int64)
    column, length = segments.column.astype(np.int64), segments.length.astype(np.int64)
    is_inside = (row >= 0) & (row < rows) & (column >= 0) & (length > 0)
    is_inside &= column + length <= row_tokens
    places: Places = row * row_tokens + column
    is_inside[1:] &= places[1:] >= places[:-1] + length[:-1]
    if not is_inside.all():
        number = int(np.flatnonzero(~is_inside)[0])
        raise ValueError(
            f"segment {number}: place (row {row[number]}, column {column[number]}, "
            f"{length[number]} tokens) is outside the microbatch of {shape} or overlaps"
        )
    return places


def checked_numbers(segment_numbers: npt.NDArray[np.int32], count: int) -> Places:
    """Return the number of each segment in the microbatch, wide.

    Raises:
        ValueError: There are not as many as segments.
    """
    if segment_numbers.shape != (count,):
        raise ValueError(f"{segment_numbers.shape} segment numbers for {count} segments")
    return segment_numbers.astype(np.int64)


def by_chunk(segments: SegmentColumns) -> list[tuple[int, Places]]:
    """Return each chunk's place in the pool with the numbers of its segments."""
    order = np.argsort(segments.chunk_offset, kind="stable")
    ordered = segments.chunk_offset[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    bounds = [0, *cuts.tolist(), len(ordered)]
    return [(int(ordered[begin]), order[begin:end]) for begin, end in itertools.pairwise(bounds)]


def open_chunk(pool: memoryview, chunk_offset: int) -> ChunkView:
    """Return the chunk at a place of the pool.

    Raises:
        ValueError: There is none.
    """
    if not 0 <= chunk_offset <= len(pool) or chunk_offset % CHUNK_ALIGN_BYTES:
        raise ValueError(
            f"chunk offset {chunk_offset} is outside the pool of {len(pool)} bytes or not "
            f"{CHUNK_ALIGN_BYTES}-byte aligned"
        )
    return ChunkView(pool[chunk_offset:])


def token_starts(chunk: ChunkView, segments: SegmentColumns, own: Places) -> Places:
    """Return the first token in the chunk of each segment in it. Shape (own,).

    Args:
        chunk: The chunk.
        segments: All segments.
        own: Numbers of those in the chunk.

    Raises:
        ValueError: A segment lies outside its record, or there is no such record.
    """
    sample = segments.sample[own].astype(np.int64)
    if int(sample.min()) < 0 or int(sample.max()) >= chunk.records:
        raise ValueError(
            f"samples {sample.min()} to {sample.max()} of a chunk of {chunk.records} records"
        )
    offsets = chunk.offsets
    begins, ends = offsets[sample], offsets[sample + 1]
    offset = segments.sample_offset[own].astype(np.int64)
    length = segments.length[own].astype(np.int64)
    tokens = chunk.payload_bytes // chunk.header.token_bytes
    is_inside = (begins >= 0) & (begins <= ends) & (ends <= tokens) & (offset >= 0)
    is_inside &= length <= ends - begins - offset
    if not is_inside.all():
        number = int(np.flatnonzero(~is_inside)[0])
        raise ValueError(
            f"segment {own[number]}: tokens {offset[number]} to {offset[number] + length[number]} "
            f"of record {sample[number]}, which runs from {begins[number]} to {ends[number]} of "
            f"{tokens}"
        )
    starts: Places = begins + offset
    return starts
