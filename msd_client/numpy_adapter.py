"""numpy views of a slot, and copies of arrays of either kind; `torch_adapter` is its counterpart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from msd_client import torch_adapter
from msd_client.contract.ring_layout import PAYLOAD_OFFSET, TocField


def view_field(memory: Any, field: TocField) -> Any:
    """Return a read-only array over a field of a slot; it holds the slot while it lives."""
    count = math.prod(field.shape)
    if count == 0:
        return np.empty(field.shape, field.dtype)
    # Through a read-only memoryview, or numpy would let the user make the array writable again.
    flat: Any = np.frombuffer(
        memoryview(memory).toreadonly(),
        dtype=field.dtype,
        count=count,
        offset=PAYLOAD_OFFSET + field.offset_bytes,
    )
    return flat.reshape(field.shape)


def slice_of_rank(field: TocField, cp_rank: int) -> TocField:
    """Return one context-parallel rank's part of a field that lies rank by rank; others as they are."""
    if len(field.shape) < 3:  # boundaries, and media, which every rank sees whole
        return field
    nbytes = field.nbytes // field.shape[0]
    return TocField(
        field.name, field.dtype, field.shape[1:], field.offset_bytes + cp_rank * nbytes, nbytes
    )


def copy_array(value: Any) -> Any:
    """Return a private, writable copy of an array or tensor; anything else as it is."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.clone() if torch_adapter.is_tensor(value) else value


def to_numpy(value: Any) -> Any:
    """Return a tensor as an array, of the same bytes where those lie in host memory."""
    return value.detach().cpu().numpy() if torch_adapter.is_tensor(value) else value
