"""Column encodings of MDS shards (format version 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.packed_values import (
    Decode,
    array_of,
    content,
    json_value,
    listed,
    raw_image,
    real_number,
    scalar,
    text,
    unpack,
    whole_number,
)
from msd_daemon.sources.record import RawRecord

_BAD_ENCODING = int(RecordStatus.BAD_ENCODING)
_BAD_SYNTAX = int(RecordStatus.BAD_SYNTAX)
_UNREADABLE = int(RecordStatus.UNREADABLE)

_ARRAY_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_NUMBERS = tuple(_ARRAY_DTYPES.values())
_PICKLE = "pkl"

_DECODERS: dict[str, Decode] = {
    "bytes": content,
    "str": text,
    "int": scalar("int64"),
    "str_int": whole_number,
    "str_float": real_number,
    "str_decimal": text,  # as it was written: exact
    "json": json_value,
    "jpeg": content,
    "png": content,
    "pil": raw_image,
    "jpeg_array": listed(content, 0),
    "jpegarray": listed(content, 0),
    "list[jpeg]": listed(content, 4),
    "list[png]": listed(content, 4),
    "list[pil]": listed(raw_image, 4),
    **{name: scalar(name) for name in _NUMBERS},
}


@dataclass(frozen=True)
class MdsColumn:
    """A column as index.json has it."""

    name: str
    encoding: str
    size_bytes: int
    """0: each value's size stands in its sample."""


def decoder_of(column: MdsColumn) -> Decode:
    """Return the decoder of a column.

    Raises:
        ConfigError: It is pickled, or of an encoding that is not known.
    """
    name, _, rest = column.encoding.partition(":")
    if name == _PICKLE:
        raise ConfigError(
            f"column {column.name!r} is pickled (pkl), which is not read as it can run code: leave "
            "the column out, or write it anew as json, bytes or ndarray"
        )
    if name == "ndarray":
        return _array_decoder(column, rest)
    if rest or name not in _DECODERS:
        known = ", ".join([*_DECODERS, "ndarray"])
        raise ConfigError(
            f"column {column.name!r} has the encoding {column.encoding!r}, known are {known}"
        )
    return _DECODERS[name]


def _array_decoder(column: MdsColumn, parameters: str) -> Decode:
    """Return the decoder of `ndarray`, `ndarray:dtype` or `ndarray:dtype:shape`."""
    dtype_name, _, shape_text = parameters.partition(":")
    try:
        shape = [int(axis) for axis in shape_text.split(",")] if shape_text else None
    except ValueError:
        shape = [0]
    if (dtype_name and dtype_name not in _NUMBERS) or (shape and min(shape) < 1):
        raise ConfigError(f"column {column.name!r} has the encoding {column.encoding!r}: no array")

    def decode(data: bytes) -> npt.NDArray[Any]:
        at = 0
        name = dtype_name
        if not name:
            (code,) = unpack("<B", data, 0)
            name, at = _ARRAY_DTYPES.get(code, ""), 1
            if not name:
                raise ValueError(f"an array of dtype code {code}")
        axes, at = (shape, at) if shape is not None else _read_shape(data, at)
        return array_of(data[at:], np.dtype(name).newbyteorder("<"), axes)

    return decode


def _read_shape(data: bytes, at: int) -> tuple[list[int], int]:
    (head,) = unpack("<B", data, at)
    count, width = head >> 2, 1 << (head & 3)
    end = at + 1 + count * width
    if end > len(data):
        raise ValueError(f"a shape of {count} axes in {len(data)} bytes")
    axes = np.frombuffer(data, np.dtype(f"<u{width}"), count, at + 1)
    return [int(axis) for axis in axes], end


class SampleReader:
    """Takes samples apart.

    Args:
        columns: Of the shard, in its order.
        wanted: Names of those that are read, None for all.

    Raises:
        ConfigError: A column that is wanted cannot be read.
    """

    def __init__(self, columns: Iterable[MdsColumn], wanted: Iterable[str] | None) -> None:
        names = None if wanted is None else frozenset(wanted)
        self._columns = [
            (column, decoder_of(column) if names is None or column.name in names else None)
            for column in columns
        ]
        self._head_bytes = 4 * sum(not column.size_bytes for column, _ in self._columns)

    def record(self, data: bytes, place: int) -> RawRecord:
        """Return the record of a sample's bytes."""
        try:
            sizes = self._sizes(data)
        except ValueError as error:
            return RawRecord(place, b"", _UNREADABLE, str(error))
        fields: dict[str, Any] = {}
        fields_bytes, at = 0, self._head_bytes
        for (column, decode), size in zip(self._columns, sizes, strict=True):
            raw, at = data[at : at + size], at + size
            if decode is None:
                continue
            try:
                fields[column.name] = decode(raw)
            except UnicodeDecodeError as error:
                fault = f"column {column.name!r} is not UTF-8 at byte {error.start}"
                return RawRecord(place, b"", _BAD_ENCODING, fault)
            except (ValueError, OverflowError) as error:
                status = _BAD_SYNTAX if column.encoding == "json" else _UNREADABLE
                fault = f"column {column.name!r} ({column.encoding}): {error}"
                return RawRecord(place, b"", status, fault)
            fields_bytes += size
        return RawRecord(place, b"", fields=fields, fields_bytes=fields_bytes)

    def _sizes(self, data: bytes) -> list[int]:
        if len(data) < self._head_bytes:
            raise ValueError(f"a sample of {len(data)} bytes, its sizes take {self._head_bytes}")
        given = iter(np.frombuffer(data, "<u4", self._head_bytes // 4).tolist())
        sizes = [column.size_bytes or next(given) for column, _ in self._columns]
        if self._head_bytes + sum(sizes) != len(data):
            raise ValueError(
                f"a sample of {len(data)} bytes, its columns take {self._head_bytes + sum(sizes)}"
            )
        return sizes
