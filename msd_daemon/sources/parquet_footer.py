"""The footer of a parquet file, read without pyarrow: least and greatest values of columns.

pyarrow aborts the process where a column's metadata or statistics are damaged (its Python side lets
C++ exceptions through, seen with 26.0.1), so statistics are read here, from thrift's compact
protocol, with every length checked. Whatever does not fit gives no bounds, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msd_daemon.sources.byte_stream import ByteFile

_MAGIC = b"PAR1"
_FOOTER_BYTES_MAX = 8 << 20
"""Larger ones are not read here: their row groups are filtered by their values alone."""
_DEPTH_MAX = 32
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_GROUPS, _COLUMNS, _META, _PATH, _STATISTICS = 4, 1, 3, 3, 12
_GREATEST, _LEAST = 5, 6

Bounds = Mapping[str, tuple[bytes, bytes]]
"""Least and greatest value of a column by its name, as parquet writes them (PLAIN)."""


def group_bounds(file: ByteFile, columns: Iterable[str]) -> list[Bounds]:
    """Return the bounds of top-level columns in each row group; empty where they cannot be read.

    Raises:
        OSError: The file cannot be read.
    """
    footer = _read_footer(file)
    if not footer:
        return []
    try:
        root = _Reader(footer).struct()
        return [_bounds_of(group, frozenset(columns)) for group in root.get(_GROUPS, [])]
    except (ValueError, LookupError, AttributeError, TypeError):
        return []


def _read_footer(file: ByteFile) -> bytes:
    size_bytes = file.size_bytes
    tail = file.read_at(max(0, size_bytes - 8), 8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or not 0 < length <= min(_FOOTER_BYTES_MAX, size_bytes - 12):
        return b""
    return file.read_at(size_bytes - 8 - length, length)


def _bounds_of(group: Mapping[int, Any], columns: frozenset[str]) -> Bounds:
    found: dict[str, tuple[bytes, bytes]] = {}
    for column in group[_COLUMNS]:
        meta = column.get(_META, {})
        path = meta.get(_PATH, [])
        name = path[0].decode() if len(path) == 1 else ""
        statistics = meta.get(_STATISTICS, {})
        if name in columns and _LEAST in statistics and _GREATEST in statistics:
            found[name] = (statistics[_LEAST], statistics[_GREATEST])
    return found


class _Reader:
    """Reads thrift's compact protocol into plain values; structs are maps by field number."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > _DEPTH_MAX:
            raise ValueError("nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while True:
            head = self._byte()
            kind, step = head & 15, head >> 4
            if kind == 0:
                return fields
            number = number + step if step else self._zigzag()
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind == _DOUBLE:
            return self._take(8)
        if kind == _BINARY:
            return self._take(self._varint())
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind == _STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"thrift type {kind}")

    def _list(self, depth: int) -> list[Any]:
        if depth > _DEPTH_MAX:
            raise ValueError("nested too deeply")
        head = self._byte()
        kind, count = head & 15, head >> 4
        if count == 15:
            count = self._varint()
        if count > len(self._data) - self._at:
            raise ValueError(f"a list of {count} in {len(self._data)} bytes")
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError(f"{count} bytes of {len(self._data) - self._at}")
        self._at += count
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
