"""Whether the statistics of a row group say that a condition holds for none of its rows."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from msd_daemon.sources.where_arrow import Bound


def excludes(
    arrow: Any, schema: Any, bounds: Mapping[str, tuple[bytes, bytes]], conditions: Sequence[Bound]
) -> bool:
    """Tell whether one of the conditions can hold for no row.

    Args:
        arrow: The module pyarrow.
        schema: Of the file.
        bounds: Least and greatest value of columns, as parquet writes them.
        conditions: Each holds for every record that is kept.
    """
    for condition in conditions:
        pair = bounds.get(condition.column)
        if pair is None:
            continue
        kind = schema.field(condition.column).type
        least, greatest = (_decode(arrow.types, kind, raw) for raw in pair)
        constant = condition.constant
        if isinstance(constant, str):
            constant = constant.encode()
        if (
            least is None
            or greatest is None
            or isinstance(constant, bytes) != isinstance(least, bytes)
        ):
            continue
        if not Bound(condition.column, condition.operator, constant).may_hold(least, greatest):
            return True
    return False


def _decode(types: Any, kind: Any, raw: bytes) -> int | float | bytes | None:
    """Return a bound, None where its order is not that of Python's values."""
    if types.is_string(kind) or types.is_large_string(kind):
        return raw  # UTF-8 sorts as its code points do
    if types.is_signed_integer(kind):
        width = 8 if kind.bit_width == 64 else 4
        return int.from_bytes(raw, "little", signed=True) if len(raw) == width else None
    if types.is_float32(kind) or types.is_float64(kind):
        width = 8 if types.is_float64(kind) else 4
        if len(raw) != width:
            return None
        value: float = struct.unpack("<d" if width == 8 else "<f", raw)[0]
        return None if math.isnan(value) else value
    return None
