"""Values that MDS and LitData shards hold as bytes: numbers, texts, arrays, lists of images.

Everything is checked against the bytes that are there; what does not fit is a ValueError that says
so (a UnicodeDecodeError for texts).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Decode = Callable[[bytes], Any]

ARRAY_AXES_MAX = 32
_PIL_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4, "LA": 2, "CMYK": 4, "YCbCr": 3, "HSV": 3}


def text(data: bytes) -> str:
    """Return a text."""
    return data.decode()


def content(data: bytes) -> bytes:
    """Return bytes as they are: an image or sound file, say."""
    return data


def scalar(dtype: str) -> Decode:
    """Return the decoder of one little-endian number."""
    kind = np.dtype(dtype).newbyteorder("<")

    def decode(data: bytes) -> Any:
        if len(data) != kind.itemsize:
            raise ValueError(f"{len(data)} bytes, {dtype} has {kind.itemsize}")
        return np.frombuffer(data, kind)[0].item()

    return decode


def whole_number(data: bytes) -> int:
    """Return a whole number written in digits."""
    if len(data) > 4096:
        raise ValueError(f"a number of {len(data)} digits")
    return int(data.decode())


def real_number(data: bytes) -> float:
    """Return a number written in digits."""
    if len(data) > 4096:
        raise ValueError(f"a number of {len(data)} digits")
    return float(data.decode())


def json_value(data: bytes) -> Any:
    """Return the value of a JSON text."""
    try:
        return json.loads(data.decode())
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def array_of(data: bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """Return the array of a shape that data are."""
    if len(shape) > ARRAY_AXES_MAX:
        raise ValueError(f"an array of {len(shape)} axes")
    needed = math.prod(shape) * dtype.itemsize
    if needed != len(data):
        raise ValueError(f"{len(data)} bytes, {dtype} {list(shape)} has {needed}")
    return np.frombuffer(data, dtype).reshape(shape)


def flat_array(dtype: np.dtype[Any]) -> Decode:
    """Return the decoder of an array of one axis whose length its bytes tell."""

    def decode(data: bytes) -> npt.NDArray[Any]:
        return array_of(data, dtype, [len(data) // dtype.itemsize])

    return decode


def raw_image(data: bytes) -> npt.NDArray[np.uint8]:
    """Return pixels that were stored as they are: u32 width, height, length of the mode, mode.

    Returns:
        Shape (height, width) or (height, width, channels).
    """
    width, height, mode_bytes = unpack("<3I", data, 0)
    if mode_bytes > len(data) - 12:
        raise ValueError(f"a mode of {mode_bytes} bytes")
    mode = data[12 : 12 + mode_bytes].decode()
    if mode not in _PIL_CHANNELS:
        raise ValueError(f"pixels of mode {mode!r}, which are not read")
    channels = _PIL_CHANNELS[mode]
    shape = [height, width] if channels == 1 else [height, width, channels]
    return array_of(data[12 + mode_bytes :], np.dtype(np.uint8), shape)


def listed(decode: Decode, begin: int) -> Decode:
    """Return the decoder of a list: u32 count, u32 size of each, then each.

    Args:
        decode: Of one item.
        begin: Bytes before the count.
    """

    def decode_list(data: bytes) -> list[Any]:
        (count,) = unpack("<I", data, begin)
        if count > (len(data) - begin - 4) // 4:
            raise ValueError(f"a list of {count} in {len(data)} bytes")
        sizes = np.frombuffer(data, "<u4", count, begin + 4).astype(np.int64)
        at = begin + 4 + 4 * count
        if at + int(sizes.sum()) != len(data):
            raise ValueError(f"{len(data)} bytes, its {count} items need {at + int(sizes.sum())}")
        found: list[Any] = []
        for size in sizes.tolist():
            found.append(decode(data[at : at + size]))
            at += size
        return found

    return decode_list


def unpack(layout: str, data: bytes, at: int) -> tuple[Any, ...]:
    try:
        return struct.unpack_from(layout, data, at)
    except struct.error:
        raise ValueError(f"{len(data)} bytes, too short for its header") from None
