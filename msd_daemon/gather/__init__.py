"""Gather: segments of the pool become rows of a slot, the one payload copy of the system.

The C kernel is taken where it was built, else the numpy twin; `MSD_GATHER=numpy` forces the twin.
Both write the same bytes and refuse the same input.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.kernel_stamp import load_kernel
from msd_client.contract.context_parallel import CpLayout, deal_rows
from msd_daemon.gather import fragment_finder, numpy_twin
from msd_daemon.gather.fragment_finder import FoundFragments
from msd_daemon.gather.gather_rule import GatherOutputs, GatherRule
from msd_daemon.gather.segment_columns import SEGMENT_BYTES, SEGMENT_COLUMNS, SegmentColumns
from msd_daemon.shm.fragment_columns import FragmentColumns

__all__ = [
    "KERNEL",
    "SEGMENT_BYTES",
    "SEGMENT_COLUMNS",
    "FoundFragments",
    "GatherOutputs",
    "GatherResult",
    "GatherRule",
    "SegmentColumns",
    "copy_spans",
    "deal_ranks",
    "find_fragments",
    "gather_rows",
    "join_runs",
    "send_spans",
    "sort_rows",
    "store_bytes",
]

Array = npt.NDArray[Any]
Pool = memoryview | bytes | bytearray


def _load_kernel() -> Any:
    if os.environ.get("MSD_GATHER", "") == "numpy":
        return None
    return load_kernel("msd_daemon.gather._kernel", Path(__file__).parent)


_kernel = _load_kernel()

KERNEL: Literal["c", "numpy"] = "numpy" if _kernel is None else "c"
"""Which of the two was chosen at import."""


class GatherResult(NamedTuple):
    """Counts of a filled microbatch, padding segments included in the first two."""

    segments: int
    """Segments written; boundaries have one entry more."""
    max_seqlen: int
    """Places of the longest segment; a row's with `is_constant`."""
    valid_tokens: int
    """Labels that are trained and weigh more than 0, whatever outputs there are."""


def gather_rows(
    pool: Pool,
    segments: SegmentColumns,
    shape: tuple[int, int],
    outputs: GatherOutputs,
    rule: GatherRule,
    *,
    kernel: Literal["c", "numpy"] | None = None,
) -> GatherResult:
    """Fill one microbatch from the pool; what no segment covers becomes padding.

    Every byte of the token outputs is written. A segment takes a multiple of `segment_multiple`
    places; those behind its tokens are padding that belongs to it, positions run on. A gap (behind
    a row's last segment, or between segments) is a segment of its own: `pad_id`, `ignore_label`,
    positions from 0, source -1. Separate documents: labels never cross a segment. Joined: they run
    on through segments of a row whose tokens touch; the row's last place is ignored (`aligned`: its
    first). After an error the outputs hold parts of both; abort the slot. Does not block; the C
    kernel runs without the GIL.

    Args:
        pool: The mapped pool, chunks as in `msd_daemon.shm.chunk_layout`.
        segments: Sorted by (row, column), no overlap.
        shape: (rows, row_tokens).
        outputs: Arrays to be written.
        rule: Conventions, see EXPERIENCE.md E6.
        kernel: Overrides the choice of the import, for tests and measurements.

    Returns:
        Counts of segments, the longest of them, and trained labels.

    Raises:
        ValueError: A segment, chunk header, offset or place is out of bounds, segments overlap or
            are not sorted, a source has no weight, an output has the wrong size, or boundaries do
            not fit theirs.
    """
    _check_outputs(outputs, rule)
    if (kernel or KERNEL) == "numpy":
        found = numpy_twin.gather(pool, segments, shape, outputs, rule)
    else:
        found = _kernel.gather(
            pool,
            segments.chunk_offset,
            segments.sample,
            segments.sample_offset,
            segments.length,
            segments.row,
            segments.column,
            segments.source,
            *shape,
            *outputs,
            rule.source_weights,
            rule.pad_id,
            rule.ignore_label,
            rule.segment_multiple,
            rule.flags,
        )
    if not rule.is_constant:
        return GatherResult(*found)
    count, _, valid_tokens = found
    for bounds in (outputs.cu_seqlens, outputs.cu_seqlens_padded):
        if bounds is not None:
            bounds[count + 1 :] = bounds[count]
    if outputs.segment_source is not None:
        outputs.segment_source[count:] = -1
    return GatherResult(count, shape[1], valid_tokens)


def deal_ranks(
    source: Array,
    target: Array,
    layout: CpLayout,
    bounds: npt.NDArray[np.int32],
    *,
    kernel: Literal["c", "numpy"] | None = None,
) -> None:
    """Copy a whole token field into the slices of the context-parallel ranks.

    Args:
        source: Shape (rows, row_tokens), C-contiguous.
        target: Shape (cp_count, rows, row_tokens // cp_count), C-contiguous, the same dtype.
        layout: See `msd_client.contract.context_parallel`.
        bounds: Segment boundaries in places; zigzag_document alone reads them.
        kernel: As of `gather_rows`.

    Raises:
        ValueError: The bounds do not cut the field into multiples of 2 * cp_count places.
    """
    cp_count = target.shape[0]
    if layout != "zigzag_document":
        deal_rows(source, target, layout, cp_count)
    elif (kernel or KERNEL) == "numpy":
        numpy_twin.deal_documents(source, target, bounds, cp_count)
    else:
        _kernel.deal_documents(source, target, bounds, cp_count, source.itemsize)


def copy_spans(
    source: Pool,
    target: memoryview,
    from_: npt.NDArray[np.int64],
    to: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    *,
    kernel: Literal["c", "numpy"] | None = None,
) -> None:
    """Copy runs of bytes from one memory to another; the C kernel runs without the GIL.

    Args:
        source: The memory that they lie in.
        target: Writable.
        from_: First byte of each run in `source`. Shape (spans,), C-contiguous, as the others.
        to: First byte of each in `target`.
        nbytes: Bytes of each.
        kernel: As of `gather_rows`.

    Raises:
        ValueError: A run is out of bounds; nothing is copied.
    """
    if (kernel or KERNEL) == "numpy":
        numpy_twin.copy_spans(memoryview(source).cast("B"), target, from_, to, nbytes)
    else:
        _kernel.copy_spans(source, target, from_, to, nbytes)


def send_spans(
    sock: socket.socket,
    head: bytes | memoryview,
    pool: Pool,
    own: Pool,
    from_: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    skip: int = 0,
    limit: int | None = None,
    *,
    kernel: Literal["c", "numpy"] | None = None,
) -> int:
    """Send bytes from where they lie, in one call of the system; return how many it took.

    Args:
        sock: A stream.
        head: Sent first; may be empty.
        pool: A memory.
        own: Another, whose bytes are counted from `len(pool)` on.
        from_: First byte of each run. Shape (spans,), C-contiguous.
        nbytes: Bytes of each, as many; of about a thousand runs the rest is left to the next call.
        skip: So many bytes of the runs are left out at their beginning.
        limit: Not more bytes of the runs are sent; None: all.
        kernel: As of `gather_rows`.

    Raises:
        BlockingIOError: The system takes nothing now.
        OSError: The connection is lost.
        ValueError: A run is out of bounds, or `skip` or `limit` is below 0.
    """
    if (kernel or KERNEL) == "numpy":
        return numpy_twin.send_spans(sock, head, pool, own, from_, nbytes, skip, limit)
    limit = sys.maxsize if limit is None else limit
    sent: int = _kernel.send_spans(sock.fileno(), head, pool, own, from_, nbytes, skip, limit)
    return sent


def find_fragments(
    pool: memoryview,
    fragments: FragmentColumns,
    *,
    kernel: Literal["c", "numpy"] | None = None,
) -> FoundFragments:
    """Return where the tokens of fragments lie; nothing that the pool says is believed.

    Args:
        pool: The mapped pool; its first byte is 64-byte aligned as its chunks are.
        fragments: Any number.
        kernel: As of `gather_rows`.

    Raises:
        ChunkCorruptError: A fragment lies outside its record, or its chunk is none or lies outside
            the pool.
    """
    if (kernel or KERNEL) == "c":
        columns = [
            np.require(getattr(fragments, name), dtype, ["C", "A"])
            for name, dtype in _FINDER_COLUMNS
        ]
        found = FoundFragments(*(np.empty(len(fragments), np.int64) for _ in range(4)))
        if _kernel.find_fragments(pool, *columns, *found) < 0:
            return found
    # Of the two this one says what is wrong.
    return fragment_finder.find_fragments(pool, fragments)


def sort_rows(
    *keys: npt.NDArray[np.int32] | npt.NDArray[np.int64],
    kernel: Literal["c", "numpy"] | None = None,
) -> npt.NDArray[np.int64]:
    """Return the order of rows by columns, as `numpy.lexsort`: the last key counts most.

    The C kernel sorts by those bytes of the keys that differ (a radix sort): a few passes for
    numbers that lie close together.

    Args:
        keys: Of shape (rows,), int32 or int64.
        kernel: As of `gather_rows`.
    """
    if (kernel or KERNEL) == "numpy":
        return np.lexsort(keys).astype(np.int64, copy=False)
    order, spare = np.empty((2, len(keys[0])), np.int64)
    _kernel.sort_columns(tuple(np.require(key, None, ["C", "A"]) for key in keys), order, spare)
    return order


def join_runs(
    target: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    *,
    kernel: Literal["c", "numpy"] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return runs of bytes in which those are one that follow each other at both ends.

    Args:
        target: First byte of each where it goes, ascending. Shape (spans,), overwritten as the others.
        source: First byte where it lies.
        nbytes: Bytes of each.
        kernel: As of `gather_rows`.
    """
    if (kernel or KERNEL) == "numpy":
        return numpy_twin.join_runs(target, source, nbytes)
    kept: int = _kernel.join_runs(target, source, nbytes)
    return target[:kept], source[:kept], nbytes[:kept]


def store_bytes(
    source: Pool, target: memoryview, *, kernel: Literal["c", "numpy"] | None = None
) -> None:
    """Copy bytes that nobody reads soon: the C kernel writes them past the caches.

    Args:
        source: Where they are.
        target: Writable, as long as `source`; they do not overlap.
        kernel: As of `gather_rows`.

    Raises:
        ValueError: The lengths differ.
    """
    if (kernel or KERNEL) == "numpy":
        target[:] = source
    else:
        _kernel.store_bytes(source, target)


_FINDER_COLUMNS = (
    ("chunk_offset", np.int64),
    ("chunk_bytes", np.int64),
    ("source", np.int32),
    ("sample", np.int32),
    ("first_token", np.int32),
    ("length", np.int32),
)
_WIDE = (np.dtype("<i4"), np.dtype("<i8"))
_NARROW = (np.dtype("<i4"),)
_FLOAT = (np.dtype("<f4"),)
_OUTPUTS = (
    ("tokens", _WIDE),
    ("labels", _WIDE),
    ("position_ids", _NARROW),
    ("loss_weights", _FLOAT),
    ("cu_seqlens", _NARROW),
    ("cu_seqlens_padded", _NARROW),
    ("segment_source", _NARROW),
)


def _check_outputs(outputs: GatherOutputs, rule: GatherRule) -> None:
    for (name, dtypes), output in zip(_OUTPUTS, outputs, strict=True):
        if output is None:
            continue
        if output.dtype not in dtypes or not output.flags.c_contiguous:
            raise ValueError(
                f"output {name} is {output.dtype}, expected C-contiguous {' or '.join(map(str, dtypes))}"
            )
    weights = rule.source_weights
    if weights is not None and (weights.dtype != "<f4" or not weights.flags.c_contiguous):
        raise ValueError(f"source_weights are {weights.dtype}, expected C-contiguous float32")
    if weights is None and outputs.loss_weights is not None:
        raise ValueError("output loss_weights needs source_weights")
