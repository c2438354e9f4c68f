"""Fields that a batch makes on first use, from its boundaries: numpy and torch alike.

A middle pipeline stage has no array as large as the tokens in its slot, so what it needs of that
size is made here, on the device that the boundaries are on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msd_client import torch_adapter
from msd_client.contract.context_parallel import ArrayOps, CpLayout, NumpyOps, rank_places


class Deal(NamedTuple):
    """How a microbatch was dealt to context-parallel ranks, and which of them reads it."""

    layout: CpLayout = "zigzag_row"
    cp_count: int = 1
    cp_rank: int = 0


def array_ops(array: Any) -> ArrayOps:
    """Return the operations for arrays of this kind."""
    return torch_adapter.TorchOps(array.device) if torch_adapter.is_tensor(array) else NumpyOps()


def local_places(bounds: Any, shape: tuple[int, int], deal: Deal) -> Any:
    """Return the place in the whole microbatch of each token of one rank.

    Args:
        bounds: Boundaries in places (`cu_seqlens_padded`), int32.
        shape: (rows, row_tokens) of the whole microbatch.
        deal: Whose tokens.

    Returns:
        Flat places, int32, shape (rows, row_tokens // cp_count), on the device of `bounds`.
    """
    return rank_places(deal.layout, deal.cp_count, deal.cp_rank, shape, bounds, array_ops(bounds))


def gathered_places(bounds: Any, shape: tuple[int, int], deal: Deal, *, is_flat: bool) -> Any:
    """Return the places of all ranks' tokens in the order in which an all-gather joins them.

    Returns:
        Rank after rank, int32: shape (rows, row_tokens), each row's parts one after the other, or
        where `is_flat` (1, rows * row_tokens), the ranks' flattened rows one after the other.
    """
    parts = [
        local_places(bounds, shape, deal._replace(cp_rank=rank)) for rank in range(deal.cp_count)
    ]
    if is_flat:
        parts = [part.reshape(1, -1) for part in parts]
    return parts[0] if len(parts) == 1 else array_ops(bounds).concatenate(parts, 1)


def segment_numbers(bounds: Any, places_count: int) -> Any:
    """Return the segment number of every place of the whole microbatch.

    Args:
        bounds: Boundaries in places; entries may be repeated at the end.
        places_count: rows * row_tokens.

    Returns:
        int32, shape (places_count,).
    """
    ops = array_ops(bounds)
    return ops.repeat(ops.arange(len(bounds) - 1), bounds[1:] - bounds[:-1], places_count)


def position_ids(bounds: Any, places: Any, segment_ids: Any) -> Any:
    """Return the position inside its segment of each token, given its place and its segment."""
    return places - bounds[segment_ids]
