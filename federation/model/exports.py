"""What one node gives another for a step: fragments of its sources that rows elsewhere need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.plan import StepPlan
from msd_client.contract.errors import ProtocolError

_COLUMNS = (
    ("source", "<i4"),
    ("block_key", "<i8"),
    ("index", "<i4"),
    ("offset", "<i4"),
    ("length", "<i4"),
)
_ROW_BYTES = sum(np.dtype(kind).itemsize for _, kind in _COLUMNS)


@dataclass(frozen=True, eq=False)
class Export:
    """Fragments for one consumer, in the order of its slice's segments; n of them."""

    consumer: int
    """Node, numbered as in the generation."""
    source: npt.NDArray[np.int32]
    block_key: npt.NDArray[np.int64]
    index: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int32]
    """First token in the record. Shape (n,)."""
    length: npt.NDArray[np.int32]
    has_units: bool = field(default=True, kw_only=True)
    """Whether images, sounds and videos go with them: only a node with a first pipeline stage reads
    more of them than where they stand."""

    @staticmethod
    def of_plan(
        plan: StepPlan, places: npt.NDArray[Any], consumer: int, *, has_units: bool = True
    ) -> Export:
        """Return these segments of a plan as an export."""
        columns = (getattr(plan, name)[places] for name, _ in _COLUMNS)
        return Export(consumer, *columns, has_units=has_units)

    def part(self, places: npt.NDArray[Any]) -> Export:
        """Return some of the fragments, by their numbers."""
        columns = (getattr(self, name)[places] for name, _ in _COLUMNS)
        return Export(self.consumer, *columns, has_units=self.has_units)

    @property
    def count(self) -> int:
        """Number of fragments."""
        return len(self.source)

    def segments(self) -> list[tuple[int, int, int, int, int]]:
        """Return (source, block key, index, offset, length) of each."""
        columns = [getattr(self, name).tolist() for name, _ in _COLUMNS]
        return list(zip(*columns, strict=True))


def encode_exports(exports: Sequence[Export]) -> tuple[list[list[int]], bytes]:
    """Return [consumer, count, 1 with units] of each, and one frame with all their columns."""
    frame = b"".join(
        getattr(export, name).astype(kind, copy=False).tobytes()
        for export in exports
        for name, kind in _COLUMNS
    )
    heads = [[export.consumer, export.count, int(export.has_units)] for export in exports]
    return heads, frame


def decode_exports(heads: Sequence[Sequence[int]], frame: bytes | memoryview) -> tuple[Export, ...]:
    """Return the exports of a message.

    Raises:
        ProtocolError: Counts and frame do not belong together.
    """
    try:
        counts = [(int(consumer), int(count), bool(units)) for consumer, count, units in heads]
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"exports are no [consumer, count, units]: {error}") from error
    if any(count < 0 for _, count, _ in counts) or len(frame) != _ROW_BYTES * sum(
        count for _, count, _ in counts
    ):
        raise ProtocolError(f"exports {counts[:8]} do not fit a frame of {len(frame)} bytes")
    exports = []
    start = 0
    for consumer, count, has_units in counts:
        columns = []
        for _, kind in _COLUMNS:
            columns.append(np.frombuffer(frame, kind, count, start))
            start += count * np.dtype(kind).itemsize
        exports.append(Export(consumer, *columns, has_units=has_units))
    return tuple(exports)
