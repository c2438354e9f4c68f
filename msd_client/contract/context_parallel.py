"""How the places of rows are dealt to context-parallel ranks. Pure arithmetic, numpy or torch alike.

A microbatch of `rows` rows of `row_tokens` places goes to `cp_count` ranks in equal parts of
[rows, row_tokens // cp_count]:

- `contiguous`: rank r has the r-th of cp_count equal parts of each row.
- `zigzag_row`: a row is cut into 2 * cp_count equal chunks, rank r has chunks r and
  2 * cp_count - 1 - r, in this order. Causal attention costs the same on every rank.
- `zigzag_document`: each segment (its padding included, and what is left of a row, too) is cut so;
  what Megatron-Core and TransformerEngine expect of packed sequences.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import MeshMismatchError

CpLayout = Literal["zigzag_row", "zigzag_document", "contiguous"]
CP_LAYOUTS: tuple[CpLayout, ...] = ("zigzag_row", "zigzag_document", "contiguous")


class ArrayOps(Protocol):
    """The array operations that numpy and torch spell differently."""

    def arange(self, count: int) -> Any:
        """Return 0 to `count` - 1 as int32."""

    def repeat(self, values: Any, counts: Any, total: int) -> Any:
        """Return each value `counts` times; `total` is the sum of the counts."""

    def concatenate(self, arrays: Any, axis: int) -> Any:
        """Return the arrays one after the other."""


class NumpyOps:
    """`ArrayOps` of numpy."""

    def arange(self, count: int) -> Any:
        """Return 0 to `count` - 1 as int32."""
        return np.arange(count, dtype=np.int32)

    def repeat(self, values: Any, counts: Any, total: int) -> Any:  # noqa: ARG002 - numpy sums itself
        """Return each value `counts` times."""
        return np.repeat(values, counts)

    def concatenate(self, arrays: Any, axis: int) -> Any:
        """Return the arrays one after the other."""
        return np.concatenate(arrays, axis)


def check_layout(
    layout: CpLayout,
    cp_count: int,
    *,
    row_tokens: int,
    segment_multiple: int,
    length_key: str = "row_tokens",
) -> None:
    """Refuse a context-parallel degree that rows or segments cannot be cut by.

    Args:
        layout: How rows are dealt.
        cp_count: Ranks that share a row.
        row_tokens: Places of a row.
        segment_multiple: What the places of a segment are a multiple of.
        length_key: What the job calls `row_tokens`.

    Raises:
        MeshMismatchError: `row_tokens` or `segment_multiple` is no multiple of what is needed.
    """
    if cp_count == 1:
        return
    needed = cp_count if layout == "contiguous" else 2 * cp_count
    attributes = {"cp": cp_count, "needed_multiple": needed}
    if row_tokens % needed:
        raise MeshMismatchError(
            f"cp {cp_count} with cp_layout {layout} cuts each row into {needed} parts, "
            f"{length_key} {row_tokens} is no multiple of it: make batch.{length_key} a multiple of "
            f"{needed} or lower cp",
            row_tokens=row_tokens,
            **attributes,
        )
    if layout == "zigzag_document" and segment_multiple % needed:
        raise MeshMismatchError(
            f"cp {cp_count} with cp_layout zigzag_document cuts each segment into {needed} parts, "
            f"segment_multiple {segment_multiple} is no multiple of it: set batch.segment_multiple "
            f"to a multiple of {needed} or take cp_layout zigzag_row",
            segment_multiple=segment_multiple,
            **attributes,
        )


def rank_places(
    layout: CpLayout,
    cp_count: int,
    cp_rank: int,
    shape: tuple[int, int],
    bounds: Any,
    ops: ArrayOps,
) -> Any:
    """Return which place of the whole microbatch each place of a rank's slice is.

    Args:
        layout: One of CP_LAYOUTS; `check_layout` holds.
        cp_count: Context-parallel ranks.
        cp_rank: One of them, from 0.
        shape: (rows, row_tokens) of the whole microbatch.
        bounds: Segment boundaries in places (`cu_seqlens_padded`), int32; zigzag_document alone
            reads them. Entries may be repeated at the end.
        ops: Of the kind of array that is wanted, and that `bounds` is.

    Returns:
        Flat places, int32, shape (rows, row_tokens // cp_count).
    """
    rows, row_tokens = shape
    length = row_tokens // cp_count
    local = ops.arange(rows * length)
    if layout == "zigzag_document" and cp_count > 1:
        extents = bounds[1:] - bounds[:-1]
        shares = extents // cp_count
        firsts = ops.repeat(bounds[:-1], shares, rows * length)
        chunk = ops.repeat(extents // (2 * cp_count), shares, rows * length)
        # Every extent is a multiple of cp_count, so a rank's part of it begins at first / cp_count.
        offset = local - firsts // cp_count
    else:
        row = local // length
        firsts, offset = row * row_tokens, local - row * length
        chunk = length // 2
    if layout == "contiguous" or cp_count == 1:
        places = firsts + cp_rank * length + offset
    else:
        # Chunk r first, then chunk 2 * cp_count - 1 - r: the second half lies further on.
        gap = (2 * cp_count - 2 - 2 * cp_rank) * chunk
        places = firsts + offset + cp_rank * chunk + (offset // chunk) * gap
    return places.reshape(rows, length)


def deal_rows(
    source: npt.NDArray[Any], target: npt.NDArray[Any], layout: CpLayout, cp_count: int
) -> None:
    """Copy whole rows into the ranks' slices, for the layouts that know no segments.

    Args:
        source: Shape (rows, row_tokens).
        target: Shape (cp_count, rows, row_tokens // cp_count), the same dtype.
        layout: contiguous or zigzag_row.
        cp_count: Context-parallel ranks.
    """
    rows, row_tokens = source.shape
    if layout == "contiguous":
        target[...] = source.reshape(rows, cp_count, -1).swapaxes(0, 1)
        return
    half = row_tokens // (2 * cp_count)
    chunks = source.reshape(rows, 2 * cp_count, half).swapaxes(0, 1)
    target[:, :, :half] = chunks[:cp_count]
    target[:, :, half:] = chunks[: cp_count - 1 : -1]
