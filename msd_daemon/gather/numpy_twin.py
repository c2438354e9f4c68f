"""The gather in numpy: same bytes and same refusals as `native/kernel.c`, for machines without a compiler.

Kept close to the C text on purpose: a property test holds the two against each other. Slower by
about 5-10 times, as every segment costs a few numpy calls.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_client.contract.context_parallel import NumpyOps, rank_places
from msd_daemon.gather.gather_rule import GatherOutputs, GatherRule
from msd_daemon.gather.segment_columns import SegmentColumns
from msd_daemon.shm.chunk_header import (
    CHUNK_ALIGN_BYTES,
    CHUNK_MAGIC,
    CHUNK_VERSION,
    FLAG_HAS_INDEX,
    HEADER_BYTES,
)

Array = npt.NDArray[Any]

_HEADER = struct.Struct("<IHHiiqiIIIq")
_SPAN = struct.Struct("<qq")
_TOKEN_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<i4")}


@dataclass
class _Sink:
    """Outputs as flat arrays, and what has been counted so far."""

    row_tokens: int
    out: GatherOutputs
    rule: GatherRule
    boundaries_max: int
    counting: Array
    boundary_count: int = 0
    true_end: int = 0
    longest: int = 0
    valid_tokens: int = 0


def gather(
    pool: memoryview | bytes | bytearray,
    segments: SegmentColumns,
    shape: tuple[int, int],
    outputs: GatherOutputs,
    rule: GatherRule,
) -> tuple[int, int, int]:
    """Fill the outputs; see `msd_daemon.gather.gather_rows`.

    Raises:
        ValueError: A segment, chunk header or place is out of bounds.
    """
    rows, row_tokens = shape
    sink = _open_sink(rows, row_tokens, outputs, rule)
    multiple, weights = rule.segment_multiple, rule.source_weights
    view = memoryview(pool).cast("B")
    columns = [
        getattr(segments, name).tolist()
        for name in ("chunk_offset", "sample", "sample_offset", "length", "row", "column", "source")
    ]
    cursor, is_filled, weight = 0, False, np.float32(1)
    for i, (chunk, sample, offset, length, row, column, source) in enumerate(
        zip(*columns, strict=True)
    ):
        found = _resolve(view, i, chunk, sample, offset, length)
        extent = -(-length // multiple) * multiple
        if column % multiple:
            raise ValueError(
                f"segment {i}: column {column} is no multiple of segment_multiple {multiple}"
            )
        if not (0 <= row < rows and column >= 0 and extent <= row_tokens - column):
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
        before = weight
        if weights is not None:
            if not 0 <= source < len(weights):
                raise ValueError(
                    f"segment {i}: source {source} where {len(weights)} sources have a loss weight"
                )
            weight = weights[source]
        is_continued = rule.is_joined and is_filled and column > 0
        _put_segment(sink, at, found, is_continued=is_continued)
        _put_weights(sink, at, length, weight, before, is_continued=is_continued)
        if extent > length:
            _put_nothing(sink, at + length, at + extent)
        if sink.out.position_ids is not None:
            sink.out.position_ids[at : at + extent] = sink.counting[:extent]
        cursor, is_filled = at + extent, extent == length
        _close_boundary(sink, cursor, source, length, extent, i)
    _put_padding(sink, cursor, rows * row_tokens, segments.count)
    return sink.boundary_count, sink.longest, sink.valid_tokens


def deal_documents(source: Array, target: Array, bounds: Array, cp_count: int) -> None:
    """Deal a token field to context-parallel ranks; see `msd_daemon.gather.deal_ranks`.

    Raises:
        ValueError: The bounds do not cut the field into multiples of 2 * cp_count places.
    """
    wide = bounds.astype(np.int64)
    extents = wide[1:] - wide[:-1]
    is_sound = (
        len(extents) > 0
        and bounds[0] == 0
        and bounds[-1] == source.size == target.size
        and not (extents < 0).any()
        and not (extents % (2 * cp_count)).any()
    )
    if not is_sound:
        raise ValueError(
            f"bounds are no segments in multiples of {2 * cp_count} places that fill both arrays"
        )
    flat, shape = source.reshape(-1), (source.shape[0], source.shape[1])
    for rank in range(cp_count):
        places = rank_places("zigzag_document", cp_count, rank, shape, bounds, NumpyOps())
        target[rank] = flat[places]


def _open_sink(rows: int, row_tokens: int, outputs: GatherOutputs, rule: GatherRule) -> _Sink:
    if rows < 1 or row_tokens < 1 or rows * row_tokens > np.iinfo(np.int32).max:
        raise ValueError(f"shape ({rows}, {row_tokens}) is empty or beyond int32")
    if rule.segment_multiple < 1 or row_tokens % rule.segment_multiple:
        raise ValueError(
            f"segment_multiple {rule.segment_multiple} does not divide row_tokens {row_tokens}"
        )
    flat = GatherOutputs(
        *(
            None if output is None else output.reshape(-1)  # C-contiguous, so this is a view
            for output in outputs
        )
    )
    for name in ("tokens", "labels", "position_ids", "loss_weights"):
        output = getattr(flat, name)
        if output is not None and output.size != rows * row_tokens:
            raise ValueError(f"output {name} has {output.size} items, expected {rows * row_tokens}")
    bounds = [b for b in (flat.cu_seqlens, flat.cu_seqlens_padded) if b is not None]
    limits = [np.iinfo(np.int64).max, *(array.size - 1 for array in bounds)]
    if flat.segment_source is not None:
        limits.append(flat.segment_source.size)
    for array in bounds:
        if array.size < 1:
            raise ValueError("segment 0: boundary 0 where the slot has room for -1 segments")
        array[0] = 0
    counting = np.arange(row_tokens, dtype=np.int32)
    return _Sink(row_tokens, flat, rule, min(limits), counting)


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


def _put_segment(sink: _Sink, at: int, found: Array, *, is_continued: bool) -> None:
    """Write tokens and labels."""
    end, labels = at + len(found), sink.out.labels
    if sink.out.tokens is not None:
        sink.out.tokens[at:end] = found
    if labels is None:
        return
    if sink.rule.labels == "aligned":
        labels[at:end] = found
        if not is_continued:
            labels[at] = sink.rule.ignore_label
        return
    if is_continued:
        labels[at - 1] = found[0]
    labels[at : end - 1] = found[1:]
    labels[end - 1] = sink.rule.ignore_label


def _put_weights(
    sink: _Sink, at: int, length: int, weight: Any, before: Any, *, is_continued: bool
) -> None:
    """Write and count what the labels weigh.

    The label of a join lies in the segment before (shifted) or in this one (aligned).
    """
    is_aligned, out = sink.rule.labels == "aligned", sink.out.loss_weights
    if weight > 0:
        sink.valid_tokens += length - 1
    if is_continued and (weight if is_aligned else before) > 0:
        sink.valid_tokens += 1
    if out is None:
        return
    if is_aligned:
        out[at] = weight if is_continued else 0
        out[at + 1 : at + length] = weight
        return
    if is_continued:
        out[at - 1] = before
    out[at : at + length - 1] = weight
    out[at + length - 1] = 0


def _close_boundary(sink: _Sink, end: int, source: int, length: int, extent: int, i: int) -> None:
    if sink.boundary_count >= sink.boundaries_max:
        raise ValueError(
            f"segment {i}: boundary {sink.boundary_count + 1} where the slot has room for "
            f"{sink.boundaries_max} segments"
        )
    out = sink.out
    if out.segment_source is not None:
        out.segment_source[sink.boundary_count] = source
    sink.boundary_count += 1
    sink.true_end += length
    if out.cu_seqlens is not None:
        out.cu_seqlens[sink.boundary_count] = sink.true_end
    if out.cu_seqlens_padded is not None:
        out.cu_seqlens_padded[sink.boundary_count] = end
    sink.longest = max(sink.longest, extent)


def _put_nothing(sink: _Sink, start: int, end: int) -> None:
    """Write token, label and weight of places that hold nothing."""
    out = sink.out
    if out.tokens is not None:
        out.tokens[start:end] = sink.rule.pad_id
    if out.labels is not None:
        out.labels[start:end] = sink.rule.ignore_label
    if out.loss_weights is not None:
        out.loss_weights[start:end] = 0


def _put_padding(sink: _Sink, start: int, stop: int, i: int) -> None:
    """Pad flattened places, cut at row ends: one segment per row."""
    while start < stop:
        row_end = (start // sink.row_tokens + 1) * sink.row_tokens
        end = min(row_end, stop)
        _put_nothing(sink, start, end)
        if sink.out.position_ids is not None:
            sink.out.position_ids[start:end] = sink.counting[: end - start]
        _close_boundary(sink, end, -1, end - start, end - start, i)
        start = end


def copy_spans(
    source: memoryview, target: memoryview, from_: Array, to: Array, nbytes: Array
) -> None:
    """Copy runs of bytes; see `msd_daemon.gather.copy_spans`.

    Raises:
        ValueError: A span is out of bounds.
    """
    is_sound = (nbytes >= 0) & (from_ >= 0) & (to >= 0)
    is_sound &= (from_ <= len(source) - nbytes) & (to <= len(target) - nbytes)
    if not is_sound.all():
        raise ValueError(f"span {int(np.flatnonzero(~is_sound)[0])} is out of bounds")
    for begin, place, size in zip(from_.tolist(), to.tolist(), nbytes.tolist(), strict=True):
        target[place : place + size] = source[begin : begin + size]


def join_runs(target: Array, source: Array, nbytes: Array) -> tuple[Array, Array, Array]:
    """Return runs of bytes, joined; see `msd_daemon.gather.join_runs`."""
    if not len(target):
        return target, source, nbytes
    follows = (target[1:] == target[:-1] + nbytes[:-1]) & (source[1:] == source[:-1] + nbytes[:-1])
    heads = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    return target[heads], source[heads], np.add.reduceat(nbytes, heads)


PIECES_MAX = 1000
"""Of one sendmsg; IOV_MAX of Linux is 1024."""


def send_spans(
    sock: socket.socket,
    head: bytes | memoryview,
    pool: memoryview | bytes | bytearray,
    own: memoryview | bytes | bytearray,
    from_: Array,
    nbytes: Array,
    skip: int,
    limit: int | None,
) -> int:
    """Send runs of bytes; see `msd_daemon.gather.send_spans`.

    Raises:
        ValueError: A span is out of bounds, or `skip` or `limit` is below 0.
    """
    if skip < 0 or (limit is not None and limit < 0):
        raise ValueError("bytes to skip or to send are below 0")
    pool, own = memoryview(pool), memoryview(own)
    is_own = from_ >= len(pool)
    at = np.where(is_own, from_ - len(pool), from_)
    room = np.where(is_own, len(own), len(pool))
    is_sound = (nbytes >= 0) & (at >= 0) & (at <= room - nbytes)
    if not is_sound.all():
        raise ValueError(f"span {int(np.flatnonzero(~is_sound)[0])} is out of bounds")
    ends = np.cumsum(nbytes)
    begins = ends - nbytes
    firsts = np.maximum(begins, skip)
    lasts = ends if limit is None else np.minimum(ends, skip + limit)
    rows = np.flatnonzero(lasts > firsts)[:PIECES_MAX].tolist()
    pieces = []
    for row in rows:
        first = int(at[row] + firsts[row] - begins[row])
        memory = own if is_own[row] else pool
        pieces.append(memory[first : first + int(lasts[row] - firsts[row])])
    return sock.sendmsg([head, *pieces] if len(head) else pieces)
