"""Gather: segments of the pool become rows of a slot, the one payload copy of the system.

The C kernel is taken where it was built, else the numpy twin; `MSD_GATHER=numpy` forces the twin.
Both write the same bytes and refuse the same input.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from msd_daemon.gather import numpy_twin
from msd_daemon.gather.segment_columns import SEGMENT_BYTES, SEGMENT_COLUMNS, SegmentColumns

__all__ = [
    "KERNEL",
    "SEGMENT_BYTES",
    "SEGMENT_COLUMNS",
    "GatherResult",
    "SegmentColumns",
    "gather_rows",
]

Array = npt.NDArray[Any]
Pool = memoryview | bytes | bytearray


def _load_kernel() -> Any:
    if os.environ.get("MSD_GATHER", "") == "numpy":
        return None
    try:
        return importlib.import_module("msd_daemon.gather._kernel")
    except ImportError:
        return None


_kernel = _load_kernel()

KERNEL: Literal["c", "numpy"] = "numpy" if _kernel is None else "c"
"""Which of the two was chosen at import."""


class GatherResult(NamedTuple):
    """Counts of a filled microbatch, padding segments included in the first two."""

    segments: int
    """Segments written; cu_seqlens has one entry more."""
    max_seqlen: int
    """Tokens of the longest segment."""
    valid_tokens: int
    """Labels that are trained."""


def gather_rows(
    pool: Pool,
    segments: SegmentColumns,
    shape: tuple[int, int],
    tokens_out: Array | None,
    labels_out: Array | None,
    position_ids_out: Array | None,
    *,
    pad_id: int,
    ignore_label: int,
    labels: Literal["shifted", "aligned"],
    is_joined: bool,
    cu_seqlens_out: Array | None = None,
    segment_source_out: Array | None = None,
    kernel: Literal["c", "numpy"] | None = None,
) -> GatherResult:
    """Fill one microbatch from the pool; what no segment covers becomes padding.

    Every byte of the token outputs is written. A gap (behind a row's last segment, or between
    segments) is a segment of its own: `pad_id`, `ignore_label`, positions from 0, source -1.
    Separate documents: labels never cross a segment. Joined: they run on through adjacent segments
    of a row; the row's last place is ignored (`aligned`: its first). After an error the outputs
    hold parts of both; abort the slot. Does not block; the C kernel runs without the GIL.

    Args:
        pool: The mapped pool, chunks as in `msd_daemon.shm.chunk_layout`.
        segments: Sorted by (row, column), no overlap.
        shape: (rows, row_tokens).
        tokens_out: int32 or int64, shape (rows, row_tokens), C-contiguous; None leaves it out.
        labels_out: As `tokens_out`.
        position_ids_out: int32, as `tokens_out`.
        pad_id: Token id of padding.
        ignore_label: Label where nothing is trained.
        labels: Convention, see EXPERIENCE.md E6.
        is_joined: True for `documents: joined`.
        cu_seqlens_out: int32, room for segments + paddings + 1.
        segment_source_out: int32, room for segments + paddings.
        kernel: Overrides the choice of the import, for tests and measurements.

    Returns:
        Counts of segments, the longest of them, and trained labels.

    Raises:
        ValueError: A segment, chunk header, offset or place is out of bounds, segments overlap or
            are not sorted, an output has the wrong size, or boundaries do not fit theirs.
    """
    rows, row_tokens = shape
    _check_outputs(tokens_out, labels_out, position_ids_out, cu_seqlens_out, segment_source_out)
    flags = (numpy_twin.LABELS_ALIGNED if labels == "aligned" else 0) | (
        numpy_twin.DOCUMENTS_JOINED if is_joined else 0
    )
    outputs = (tokens_out, labels_out, position_ids_out, cu_seqlens_out, segment_source_out)
    if (kernel or KERNEL) == "numpy":
        found = numpy_twin.gather(
            pool, segments, rows, row_tokens, *outputs, pad_id, ignore_label, flags
        )
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
            rows,
            row_tokens,
            *outputs,
            pad_id,
            ignore_label,
            flags,
        )
    return GatherResult(*found)


_WIDE = (np.dtype("<i4"), np.dtype("<i8"))
_NARROW = (np.dtype("<i4"),)
_OUTPUTS = (
    ("tokens", _WIDE),
    ("labels", _WIDE),
    ("position_ids", _NARROW),
    ("cu_seqlens", _NARROW),
    ("segment_source", _NARROW),
)


def _check_outputs(*outputs: Array | None) -> None:
    for (name, dtypes), output in zip(_OUTPUTS, outputs, strict=True):
        if output is None:
            continue
        if output.dtype not in dtypes or not output.flags.c_contiguous:
            raise ValueError(
                f"output {name} is {output.dtype}, expected C-contiguous {' or '.join(map(str, dtypes))}"
            )
