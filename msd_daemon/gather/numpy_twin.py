"""The gather in numpy: same bytes and same refusals as `_kernel.c`, for machines without a compiler.

Kept close to the C text on purpose: a property test holds the two against each other. Slower by
about 5-10 times, as every segment costs a few numpy calls.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_daemon.gather.segment_columns import SegmentColumns
from msd_daemon.shm.chunk_layout import (
    CHUNK_ALIGN_BYTES,
    CHUNK_MAGIC,
    CHUNK_VERSION,
    FLAG_HAS_INDEX,
    HEADER_BYTES,
)

LABELS_ALIGNED = 1
DOCUMENTS_JOINED = 2

Array = npt.NDArray[Any]

_HEADER = struct.Struct("<IHHiiqiIIIq")
_SPAN = struct.Struct("<qq")
_TOKEN_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<i4")}


@dataclass
class _Sink:
    """Outputs as flat arrays, and what has been counted so far."""

    row_tokens: int
    tokens: Array | None
    labels: Array | None
    position_ids: Array | None
    boundaries: Array | None
    segment_source: Array | None
    boundaries_max: int
    counting: Array
    pad_id: int
    ignore_label: int
    boundary_count: int = 0
    longest: int = 0


def gather(
    pool: memoryview | bytes | bytearray,
    segments: SegmentColumns,
    rows: int,
    row_tokens: int,
    tokens: Array | None,
    labels: Array | None,
    position_ids: Array | None,
    cu_seqlens: Array | None,
    segment_source: Array | None,
    pad_id: int,
    ignore_label: int,
    flags: int,
) -> tuple[int, int, int]:
    """Fill the outputs; see `msd_daemon.gather.gather_rows`.

    Raises:
        ValueError: A segment, chunk header or place is out of bounds.
    """
    sink = _open_sink(
        rows,
        row_tokens,
        (tokens, labels, position_ids, cu_seqlens, segment_source),
        pad_id,
        ignore_label,
    )
    is_aligned, is_joined = bool(flags & LABELS_ALIGNED), bool(flags & DOCUMENTS_JOINED)
    view = memoryview(pool).cast("B")
    columns = [
        getattr(segments, name).tolist()
        for name in ("chunk_offset", "sample", "sample_offset", "length", "row", "column", "source")
    ]
    cursor, is_filled, valid_tokens = 0, False, 0
    for i, (chunk, sample, offset, length, row, column, source) in enumerate(
        zip(*columns, strict=True)
    ):
        found = _resolve(view, i, chunk, sample, offset, length)
        if not (0 <= row < rows and column >= 0 and length <= row_tokens - column):
            raise ValueError(
                f"segment {i}: place (row {row}, column {column}) is outside the microbatch"
            )
        at = row * row_tokens + column
        if at < cursor:
            raise ValueError(
                f"segment {i}: place {at} overlaps or precedes the segment before it, "
                f"which ends at {cursor}"
            )
        if at > cursor:
            _put_padding(sink, cursor, at, i)
            is_filled = False
        is_continued = is_joined and is_filled and column > 0
        _put_segment(sink, at, found, is_continued=is_continued, is_aligned=is_aligned)
        valid_tokens += length - (not is_continued)
        cursor, is_filled = at + length, True
        _close_boundary(sink, cursor, source, length, i)
    _put_padding(sink, cursor, rows * row_tokens, segments.count)
    return sink.boundary_count, sink.longest, valid_tokens


def _open_sink(
    rows: int,
    row_tokens: int,
    outputs: tuple[Array | None, ...],
    pad_id: int,
    ignore_label: int,
) -> _Sink:
    if rows < 1 or row_tokens < 1 or rows * row_tokens > np.iinfo(np.int32).max:
        raise ValueError(f"shape ({rows}, {row_tokens}) is empty or beyond int32")
    flat = [
        None if output is None else output.reshape(-1)  # C-contiguous, so this is a view
        for output in outputs
    ]
    for name, output in zip(("tokens", "labels", "position_ids"), flat, strict=False):
        if output is not None and output.size != rows * row_tokens:
            raise ValueError(f"output {name} has {output.size} items, expected {rows * row_tokens}")
    boundaries, segment_source = flat[3], flat[4]
    limits = [np.iinfo(np.int64).max]
    if boundaries is not None:
        limits.append(boundaries.size - 1)
    if segment_source is not None:
        limits.append(segment_source.size)
    sink = _Sink(
        row_tokens=row_tokens,
        tokens=flat[0],
        labels=flat[1],
        position_ids=flat[2],
        boundaries=boundaries,
        segment_source=segment_source,
        boundaries_max=min(limits),
        counting=np.arange(row_tokens, dtype=np.int32),
        pad_id=pad_id,
        ignore_label=ignore_label,
    )
    if boundaries is not None:
        if boundaries.size < 1:
            raise ValueError("segment 0: boundary 0 where the slot has room for -1 segments")
        boundaries[0] = 0
    return sink


def _resolve(view: memoryview, i: int, at: int, sample: int, offset: int, length: int) -> Array:
    """Return the tokens of a segment as a view of the pool."""
    if at < 0 or at % CHUNK_ALIGN_BYTES or at > len(view) - HEADER_BYTES:
        raise ValueError(
            f"segment {i}: chunk offset {at} is outside the pool of {len(view)} bytes or not "
            "64-byte aligned"
        )
    magic, version, width, _, records, _, _, flags, payload_offset, _, payload_bytes = (
        _HEADER.unpack_from(view, at)
    )
    if magic != CHUNK_MAGIC or version != CHUNK_VERSION or width not in _TOKEN_DTYPES:
        raise ValueError(f"segment {i}: no chunk header at pool offset {at} (magic {magic})")
    room = len(view) - at
    columns_end = HEADER_BYTES + 8 * (records + 1) + -(-records // 8) * 8
    if flags & FLAG_HAS_INDEX:
        columns_end += -(-4 * records // 8) * 8
    if (
        records < 0
        or payload_offset < columns_end
        or payload_offset % CHUNK_ALIGN_BYTES
        or payload_offset > room
        or not 0 <= payload_bytes <= room - payload_offset
    ):
        raise ValueError(
            f"segment {i}: chunk header states sizes ({payload_bytes}) that do not fit the "
            f"{room} bytes behind it"
        )
    if not 0 <= sample < records:
        raise ValueError(f"segment {i}: sample {sample} of a chunk of {records} records")
    start, end = _SPAN.unpack_from(view, at + HEADER_BYTES + 8 * sample)
    if not 0 <= start <= end <= payload_bytes // width:
        raise ValueError(
            f"segment {i}: chunk offsets end at token {end} of a payload of "
            f"{payload_bytes // width}"
        )
    if offset < 0 or length <= 0 or length > end - start - offset:
        raise ValueError(
            f"segment {i}: span ends at token {offset + length} of a record of {end - start}, "
            "or is empty"
        )
    place = at + payload_offset + (start + offset) * width
    found: Array = np.frombuffer(view, _TOKEN_DTYPES[width], length, place)
    return found


def _put_segment(
    sink: _Sink, at: int, found: Array, *, is_continued: bool, is_aligned: bool
) -> None:
    end = at + len(found)
    if sink.tokens is not None:
        sink.tokens[at:end] = found
    if sink.position_ids is not None:
        sink.position_ids[at:end] = sink.counting[: len(found)]
    if sink.labels is None:
        return
    if is_aligned:
        sink.labels[at:end] = found
        if not is_continued:
            sink.labels[at] = sink.ignore_label
        return
    if is_continued:
        sink.labels[at - 1] = found[0]
    sink.labels[at : end - 1] = found[1:]
    sink.labels[end - 1] = sink.ignore_label


def _close_boundary(sink: _Sink, end: int, source: int, length: int, i: int) -> None:
    if sink.boundary_count >= sink.boundaries_max:
        raise ValueError(
            f"segment {i}: boundary {sink.boundary_count + 1} where the slot has room for "
            f"{sink.boundaries_max} segments"
        )
    if sink.segment_source is not None:
        sink.segment_source[sink.boundary_count] = source
    sink.boundary_count += 1
    if sink.boundaries is not None:
        sink.boundaries[sink.boundary_count] = end
    sink.longest = max(sink.longest, length)


def _put_padding(sink: _Sink, start: int, stop: int, i: int) -> None:
    """Pad flattened places, cut at row ends: one segment per row."""
    while start < stop:
        row_end = (start // sink.row_tokens + 1) * sink.row_tokens
        end = min(row_end, stop)
        if sink.tokens is not None:
            sink.tokens[start:end] = sink.pad_id
        if sink.labels is not None:
            sink.labels[start:end] = sink.ignore_label
        if sink.position_ids is not None:
            sink.position_ids[start:end] = sink.counting[: end - start]
        _close_boundary(sink, end, -1, end - start, i)
        start = end
