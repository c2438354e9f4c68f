"""msgpack with limits: the only serialisation on any wire or in any state file of msd.

Everything a peer sends is hostile until it passed here: the frame size is checked by the caller
first, all msgpack limits are set, nesting is bounded and extension types are refused.
"""

from __future__ import annotations

from typing import Any, Never

import msgpack

from msd_client.contract.errors import ProtocolError

CONTROL_BYTES_MAX = 16 << 20
"""Largest control message on a local socket (a job text or a state with room to spare)."""
ITEMS_MAX = 1 << 20
"""Most entries of one array or map of a control message."""


def pack(message: object) -> bytes:
    """Return the msgpack form of plain maps, lists, scalars and bytes.

    Raises:
        ProtocolError: It holds a number that 64 bits do not, or a text that is no Unicode.
    """
    try:
        packed = msgpack.packb(message, use_bin_type=True)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ProtocolError(
            f"a message can't be sent: {error}; give a smaller number, or a text of UTF-8"
        ) from error
    assert isinstance(packed, bytes)
    return packed


def unpack(frame: bytes | memoryview, *, bytes_max: int = CONTROL_BYTES_MAX) -> Any:
    """Return the message of a frame.

    Raises:
        ProtocolError: The frame is larger than `bytes_max` or is no valid message.
    """
    size = len(frame)
    if size > bytes_max:
        raise ProtocolError(
            f"message of {size} bytes exceeds {bytes_max} bytes: the peer is broken or too new",
            size_bytes=size,
            limit_bytes=bytes_max,
        )
    try:
        return msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=min(size, ITEMS_MAX),
            max_map_len=min(size, ITEMS_MAX),
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"message of {size} bytes is not valid msgpack: {error}") from error


def unpack_map(frame: bytes | memoryview, *, bytes_max: int = CONTROL_BYTES_MAX) -> dict[str, Any]:
    """Return the message of a frame that must be a map with string keys.

    Raises:
        ProtocolError: It is not.
    """
    message = unpack(frame, bytes_max=bytes_max)
    if not isinstance(message, dict):
        raise ProtocolError(f"expected a map, got {type(message).__name__}")
    return message


def _refuse_extension(code: int, _data: bytes) -> Never:
    raise ProtocolError(f"msgpack extension type {code} is not part of the contract")
