"""Integer columns in as few bytes as their values take: carried fragments are most of a state.

Per column: its least value (int64), a width (1, 2, 4 or 8), then values less that least, unsigned.
The same bytes everywhere, which no compression library promises over its versions.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_HEAD = struct.Struct("<qB")
_WIDTHS = (1, 2, 4, 8)


def pack_columns(columns: Int64Array) -> bytes:
    """Return columns as bytes. Shape (c, n)."""
    parts: list[bytes] = []
    for column in columns:
        least = int(column.min()) if len(column) else 0
        span = int(column.max()) - least if len(column) else 0
        width = next(width for width in _WIDTHS if span < 1 << (8 * width))
        # Wraps where a column spans more than int64 holds; so does the way back.
        rest = column.astype(np.uint64) - np.uint64(least % (1 << 64))
        parts += [_HEAD.pack(least, width), rest.astype(f"<u{width}").tobytes()]
    return b"".join(parts)


def unpack_columns(data: bytes, count: int, length: int) -> Int64Array:
    """Return `count` columns of `length` values.

    Raises:
        ValueError: The bytes are not so many columns.
    """
    found = np.empty((count, length), np.int64)
    at = 0
    for column in found:
        if len(data) - at < _HEAD.size:
            raise ValueError(f"{len(data)} bytes are no {count} columns")
        least, width = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if width not in _WIDTHS or len(data) - at < width * length:
            raise ValueError(f"{len(data)} bytes are no {count} columns of {length} values")
        values = np.frombuffer(data, f"<u{width}", length, at).astype(np.uint64)
        column[:] = (values + np.uint64(least % (1 << 64))).view(np.int64)
        at += width * length
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow {count} columns")
    return found
