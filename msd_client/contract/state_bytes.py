"""Bytes of states and their differences: a checksummed frame of msgpack, little-endian columns."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import MsdError

Int64Array = npt.NDArray[np.int64]

_FORMAT = 1
_CHECKSUM_BYTES = 16
_HEAD_BYTES = 8 + 2 + _CHECKSUM_BYTES
_STATE_BYTES_MAX = 64 << 20


def frame(magic: bytes, body: dict[str, Any]) -> bytes:
    """Return a body as bytes: magic (8), format, checksum, msgpack."""
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    checksum = hashlib.blake2b(packed, digest_size=_CHECKSUM_BYTES).digest()
    return b"".join((magic, _FORMAT.to_bytes(2, "little"), checksum, packed))


def open_frame(magic: bytes, data: bytes, error: type[MsdError]) -> dict[str, Any]:
    """Return the body that `frame` wrote.

    Raises:
        MsdError: `error`: the bytes are of something else, cut short, damaged or of a newer format.
    """
    name = magic[3:].decode().lower()
    if len(data) < _HEAD_BYTES or bytes(data[:8]) != magic:
        raise error(f"these {len(data)} bytes are no msd {name}: the first bytes differ")
    if len(data) > _STATE_BYTES_MAX:
        raise error(f"a {name} of {len(data)} bytes exceeds {_STATE_BYTES_MAX}")
    form = int.from_bytes(data[8:10], "little")
    if form != _FORMAT:
        raise error(f"the {name} has format {form}, this release reads {_FORMAT}")
    packed = bytes(data[_HEAD_BYTES:])
    if hashlib.blake2b(packed, digest_size=_CHECKSUM_BYTES).digest() != bytes(data[10:_HEAD_BYTES]):
        raise error(f"the {name} is damaged or cut short: its checksum differs")
    try:
        body = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as cause:
        raise error(f"the {name} is no msgpack map: {cause}") from cause
    if not isinstance(body, dict):
        raise error(f"the {name} is no msgpack map")
    return body


def raw_bytes(array: Int64Array) -> bytes:
    """Return an array as little-endian int64."""
    return array.astype("<i8", copy=False).tobytes()


def int_columns(data: bytes, rows: int, columns: int | None = None) -> Int64Array:
    """Return what `raw_bytes` wrote. Shape (rows, columns).

    Raises:
        ValueError: The bytes are not so many.
    """
    values = np.frombuffer(data, "<i8").astype(np.int64, copy=False)
    if columns is None:
        if len(values) % rows:
            raise ValueError(f"{len(values)} values do not make {rows} columns")
        columns = len(values) // rows
    return values.reshape(rows, columns)


def int_rows(data: bytes, columns: int) -> Int64Array:
    """Return what `raw_bytes` wrote. Shape (rows, columns).

    Raises:
        ValueError: The bytes are no such rows.
    """
    values = np.frombuffer(data, "<i8").astype(np.int64, copy=False)
    return values.reshape(-1, columns) if columns else values.reshape(0, 0)


def optional_row(body: dict[str, Any], key: str) -> Int64Array | None:
    """Return one row of a body, None where it has none."""
    return int_columns(body[key], 1)[0] if key in body else None


def named_columns(
    body: dict[str, Any], key: str, names: tuple[str, ...], count: int, error: type[MsdError]
) -> Int64Array:
    """Return the columns that this release knows, by name; those that were not written are 0.

    Args:
        body: Has the columns at `key` and their names at `key`_columns.
        key: Says which.
        names: What this release knows.
        count: Values of a column.
        error: Raised for what it does not know.

    Raises:
        MsdError: `error`: something was counted that this release does not know.
        ValueError: Names and values do not belong together.
    """
    theirs = [str(name) for name in body[f"{key}_columns"]]
    values = int_columns(body[key], len(theirs), count)
    if theirs == list(names):
        return values
    found = np.zeros((len(names), count), np.int64)
    for name, column in zip(theirs, values, strict=True):
        if name in names:
            found[names.index(name)] = column
        elif column.any():
            raise error(
                f"the {key} column {name!r} is unknown to this release; use the release that wrote "
                "it, or a later one",
                seen=name,
            )
    return found


def checked_count(value: object) -> int:
    """Return a number of things that fit into a state.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, int) or not 0 <= value <= _STATE_BYTES_MAX:
        raise ValueError(f"{value!r} is no count")
    return value
