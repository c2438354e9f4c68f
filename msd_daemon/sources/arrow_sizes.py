"""Raw bytes of each row of an Arrow array, before anything is made of it.

A few bytes can stand for gigabytes (dictionaries, run ends, views, null lists of large lists), so
what a row would take is summed first and too large ones are never converted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Sizes = npt.NDArray[np.int64]

_VIEW_BYTES = 16


def row_bytes(arrow: Any, array: Any) -> Sizes:
    """Return the raw bytes of each row. Shape (rows,).

    Args:
        arrow: The module pyarrow.
        array: Any array, validated.
    """
    types, kind = arrow.types, array.type
    if isinstance(kind, arrow.BaseExtensionType):
        return row_bytes(arrow, array.storage)
    if types.is_null(kind):
        return np.zeros(len(array), dtype=np.int64)
    if types.is_dictionary(kind):
        return _picked(row_bytes(arrow, array.dictionary), array.indices)
    if types.is_run_end_encoded(kind):
        return _run_bytes(arrow, array)
    if types.is_struct(kind):
        parts = [row_bytes(arrow, part) for part in array.flatten()]
        return sum(parts, np.zeros(len(array), dtype=np.int64))
    if types.is_union(kind):
        return _union_bytes(arrow, array)
    if types.is_nested(kind):
        return _list_bytes(arrow, array)
    if types.is_binary_view(kind) or types.is_string_view(kind):
        return _view_bytes(array)
    if types.is_boolean(kind):
        return np.ones(len(array), dtype=np.int64)
    if _is_binary(types, kind):
        return _binary_bytes(array)
    return np.full(len(array), kind.bit_width // 8, dtype=np.int64)


def _is_binary(types: Any, kind: Any) -> bool:
    checks = (types.is_binary, types.is_string, types.is_large_binary, types.is_large_string)
    return any(check(kind) for check in checks)


def _binary_bytes(array: Any) -> Sizes:
    offsets = _offsets(array.buffers()[1], _offset_bits(array.type), array.offset, len(array))
    return np.where(_is_there(array), np.diff(offsets), 0)


def _offset_bits(kind: Any) -> int:
    return 64 if str(kind).startswith("large_") else 32


def _offsets(buffer: Any, bits: int, first: int, rows: int) -> Sizes:
    if buffer is None or buffer.size == 0:  # an array without rows may have none
        return np.zeros(rows + 1, dtype=np.int64)
    dtype = np.dtype("<i8" if bits == 64 else "<i4")
    found = np.frombuffer(buffer, dtype, rows + 1, first * dtype.itemsize)
    return found.astype(np.int64)


def _is_there(array: Any) -> npt.NDArray[np.bool_]:
    if not array.null_count:
        return np.ones(len(array), dtype=np.bool_)
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _view_bytes(array: Any) -> Sizes:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array), dtype=np.int64)
    begin = array.offset * _VIEW_BYTES
    words = np.frombuffer(buffer, "<i4", len(array) * _VIEW_BYTES // 4, begin)
    lengths = words[:: _VIEW_BYTES // 4].astype(np.int64)
    return np.where(_is_there(array), lengths, 0)


def _list_bytes(arrow: Any, array: Any) -> Sizes:
    types, kind = arrow.types, array.type
    first, rows = array.offset, len(array)
    if types.is_fixed_size_list(kind):
        begins = (first + np.arange(rows, dtype=np.int64)) * kind.list_size
        ends = begins + kind.list_size
    elif types.is_list_view(kind) or types.is_large_list_view(kind):
        bits = 64 if types.is_large_list_view(kind) else 32
        _, offsets, sizes = array.buffers()[:3]
        begins = _numbers(offsets, bits, first, rows)
        ends = begins + _numbers(sizes, bits, first, rows)
    else:
        bits = 64 if types.is_large_list(kind) else 32
        offsets = _offsets(array.buffers()[1], bits, first, rows)
        begins, ends = offsets[:-1], offsets[1:]
    values = array.values if not types.is_map(kind) else _map_entries(arrow, array)
    there = _is_there(array)
    if not there.any():
        return np.zeros(rows, dtype=np.int64)
    low, high = int(begins[there].min()), int(ends[there].max())
    totals = np.zeros(high - low + 1, dtype=np.int64)
    np.cumsum(row_bytes(arrow, values.slice(low, high - low)), out=totals[1:])
    found = np.zeros(rows, dtype=np.int64)
    found[there] = totals[ends[there] - low] - totals[begins[there] - low]
    return found


def _numbers(buffer: Any, bits: int, first: int, rows: int) -> Sizes:
    dtype = np.dtype("<i8" if bits == 64 else "<i4")
    if buffer is None or not rows:
        return np.zeros(rows, dtype=np.int64)
    return np.frombuffer(buffer, dtype, rows, first * dtype.itemsize).astype(np.int64)


def _map_entries(arrow: Any, array: Any) -> Any:
    return arrow.StructArray.from_arrays([array.keys, array.items], ["key", "value"])


def _picked(sizes: Sizes, indices: Any) -> Sizes:
    there = _is_there(indices)
    places = indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    if not len(sizes):
        return np.zeros(len(places), dtype=np.int64)
    if int(places.min(initial=0)) < 0 or int(places.max(initial=0)) >= len(sizes):
        raise ValueError(f"an index beyond the {len(sizes)} values of its dictionary")
    return np.where(there, sizes[places], 0)


def _run_bytes(arrow: Any, array: Any) -> Sizes:
    ends = array.run_ends.to_numpy().astype(np.int64)
    places = np.searchsorted(ends, np.arange(len(array)) + array.offset, side="right")
    sizes = row_bytes(arrow, array.values)
    found: Sizes = (
        sizes[np.minimum(places, len(sizes) - 1)] if len(sizes) else np.zeros(0, np.int64)
    )
    return found


def _union_bytes(arrow: Any, array: Any) -> Sizes:
    codes = array.type_codes.to_numpy().astype(np.int64)
    is_dense = array.type.mode == "dense"
    offsets = array.offsets.to_numpy().astype(np.int64) if is_dense else np.arange(len(array))
    found = np.zeros(len(array), dtype=np.int64)
    for number, code in enumerate(array.type.type_codes):
        rows = np.flatnonzero(codes == code)
        if len(rows):
            found[rows] = row_bytes(arrow, array.field(number))[offsets[rows]]
    return found
