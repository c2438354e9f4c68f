"""What an Arrow array holds, as plain Python: what recipes, templates and `where` work on.

Media as Hugging Face stores them ({bytes, path}) are their bytes, else a MediaPath. Dates and
times are text, decimals too (exact), durations whole numbers in their own unit, maps are dicts.
Lists of numbers at the top are numpy arrays, deeper ones lists.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable
from typing import Any

import numpy as np

from msd_daemon.sources.record import MediaPath

Fix = Callable[[Any], Any]
_MEDIA_FIELDS = {"bytes", "path"}


def plain_values(arrow: Any, array: Any) -> list[Any]:
    """Return the values of an array.

    Args:
        arrow: The module pyarrow.
        array: Any array, validated and of bounded size.

    Raises:
        UnicodeDecodeError: A text is not UTF-8.
        pyarrow.ArrowException: A value has no plain form.
    """
    array = _simple(arrow, array)
    if _is_number_list(arrow.types, array.type):
        return _arrays(array)
    fix = _fix_of(arrow, array.type)
    values: list[Any] = array.to_pylist()
    return values if fix is None else [None if v is None else fix(v) for v in values]


def _simple(arrow: Any, array: Any) -> Any:
    """Return an array of a type whose values are plain, as far as pyarrow can cast to one."""
    if isinstance(array.type, arrow.BaseExtensionType):
        return _simple(arrow, array.storage)
    if arrow.types.is_run_end_encoded(array.type):
        import pyarrow.compute

        return _simple(arrow, pyarrow.compute.run_end_decode(array))
    if arrow.types.is_dictionary(array.type):
        return _simple(arrow, array.dictionary_decode())
    kind = _simple_type(arrow, array.type)
    if kind == array.type:
        return array
    try:
        return array.cast(kind)
    except (arrow.ArrowNotImplementedError, arrow.ArrowInvalid):
        return array  # values are mended one by one


def _simple_type(arrow: Any, kind: Any) -> Any:
    types = arrow.types
    if types.is_temporal(kind) and not types.is_interval(kind):
        return arrow.int64() if types.is_duration(kind) else arrow.string()
    if types.is_decimal(kind):
        return arrow.string()
    if types.is_float16(kind):
        return arrow.float32()
    if types.is_struct(kind):
        return arrow.struct([f.with_type(_simple_type(arrow, f.type)) for f in kind.fields])
    for is_kind, make in (
        (types.is_large_list, arrow.large_list),
        (types.is_list, arrow.list_),
    ):
        if is_kind(kind):
            return make(kind.value_field.with_type(_simple_type(arrow, kind.value_type)))
    return kind


def _is_number_list(types: Any, kind: Any) -> bool:
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return bool(types.is_integer(kind.value_type) or types.is_floating(kind.value_type))


def _arrays(array: Any) -> list[Any]:
    """Return a numpy array for each list; one with nulls inside stays a list."""
    found: list[Any] = []
    for row in range(len(array)):
        scalar = array[row]
        values = scalar.values if scalar.is_valid else None
        if values is None:
            found.append(None)
        elif values.null_count:
            found.append(values.to_pylist())
        else:
            found.append(np.array(values.to_numpy(zero_copy_only=False)))
    return found


def _fix_of(arrow: Any, kind: Any) -> Fix | None:
    """Return what makes a value of `to_pylist` plain, None where it is."""
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return _fix_of(arrow, kind.storage_type) or _plain
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _fix_of(arrow, kind.value_type)
    if types.is_map(kind):
        keys, items = _fix_of(arrow, kind.key_type), _fix_of(arrow, kind.item_type)
        return lambda pairs: {_fixed(keys, key): _fixed(items, item) for key, item in pairs}
    if types.is_struct(kind):
        return _media if is_media(arrow, kind) else _struct_fix(arrow, kind)
    if types.is_union(kind):
        return _plain
    if types.is_nested(kind):
        inner = _fix_of(arrow, kind.value_type)
        return None if inner is None else lambda items: [_fixed(inner, item) for item in items]
    is_odd = types.is_temporal(kind) or types.is_decimal(kind) or types.is_float16(kind)
    return _plain if is_odd else None


def is_media(arrow: Any, kind: Any) -> bool:
    """Tell whether a struct is what Hugging Face keeps an image, sound or video in."""
    if {field.name for field in kind.fields} != _MEDIA_FIELDS or kind.num_fields != 2:
        return False
    content, path = kind.field("bytes").type, kind.field("path").type
    types = arrow.types
    holds_bytes = any(
        check(content) for check in (types.is_binary, types.is_large_binary, types.is_binary_view)
    )
    is_text = any(
        check(path) for check in (types.is_string, types.is_large_string, types.is_string_view)
    )
    return holds_bytes and (is_text or types.is_null(path))


def _media(value: dict[str, Any]) -> bytes | MediaPath | None:
    content, path = value["bytes"], value["path"]
    if content is not None:
        return bytes(content)
    return MediaPath(path) if path else None


def _struct_fix(arrow: Any, kind: Any) -> Fix | None:
    fixes = {field.name: _fix_of(arrow, field.type) for field in kind.fields}
    needed = {name: fix for name, fix in fixes.items() if fix is not None}
    if not needed:
        return None

    def fix(value: dict[str, Any]) -> dict[str, Any]:
        return {name: _fixed(needed.get(name), item) for name, item in value.items()}

    return fix


def _fixed(fix: Fix | None, value: Any) -> Any:
    return value if value is None or fix is None else fix(value)


def _plain(value: Any) -> Any:
    """Return any value that pyarrow gives as a plain one."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dt.timedelta):
        return value / dt.timedelta(microseconds=1)
    if isinstance(value, (dt.date, dt.time, decimal.Decimal)):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    return str(value)
