"""What a gather writes and by which conventions; the columns of its input are `segment_columns`'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LABELS_ALIGNED = 1
DOCUMENTS_JOINED = 2


class GatherOutputs(NamedTuple):
    """Arrays of one microbatch, all C-contiguous; what is None is left out, the rest is the same."""

    tokens: Array | None = None
    """int32 or int64, shape (rows, row_tokens)."""
    labels: Array | None = None
    """int32 or int64, shape (rows, row_tokens)."""
    position_ids: Array | None = None
    """int32, shape (rows, row_tokens)."""
    loss_weights: Array | None = None
    """float32, shape (rows, row_tokens)."""
    cu_seqlens: Array | None = None
    """int32: cumulative true lengths; room for segments + paddings + 1."""
    cu_seqlens_padded: Array | None = None
    """int32: boundaries in places; room as `cu_seqlens`."""
    segment_source: Array | None = None
    """int32; room for segments + paddings."""


@dataclass(frozen=True, slots=True)
class GatherRule:
    """Conventions of a microbatch."""

    pad_id: int
    ignore_label: int
    """Label where nothing is trained."""
    labels: Literal["shifted", "aligned"] = "shifted"
    is_joined: bool = False
    """True for `documents: joined`."""
    segment_multiple: int = 1
    """A segment takes a multiple of so many places; divides row_tokens and every column."""
    is_constant: bool = False
    """True fills all entries of boundary outputs, see `boundaries: constant`."""
    source_weights: npt.NDArray[np.float32] | None = None
    """Loss weight of each source, by its index; None: every label weighs 1."""

    @property
    def flags(self) -> int:
        """The two choices as the kernels take them."""
        return (LABELS_ALIGNED if self.labels == "aligned" else 0) | (
            DOCUMENTS_JOINED if self.is_joined else 0
        )
