"""What a worker and a user's transform tell each other, as bytes: plain values and arrays.

Both ends use this file; in the user's interpreter it is loaded by its path, so it needs only the
standard library and numpy (Python 3.10 or later). No pickle: a tag, a length, the content. Lists of
one number type go as one block, which keeps lists of ids as cheap as arrays. Both ends are on one
machine, so numbers have its byte order.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

DEPTH_MAX = 64
VALUES_MAX = 1 << 22
"""Most values of a frame; a list of numbers or an array counts as one."""
ALIGNMENT_BYTES = 16
DTYPES = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)
BLOCK_NUMBERS_MIN = 4

_LENGTH = struct.Struct("=cQ")
_INTEGER = struct.Struct("=cq")
_REAL = struct.Struct("=cd")
_BIG_BYTES_MAX = 1 << 12


class FrameError(ValueError):
    """A value has no form here, or bytes are no frame."""


class MediaPath(str):
    """Path of an image, sound or video that lies in a file of its own, as the record has it."""

    __slots__ = ()

    @property
    def path(self) -> str:
        """The path itself."""
        return str(self)


def encode(value: object, path_type: type[Any] = MediaPath) -> bytes:
    """Return the bytes of a value.

    Args:
        value: None, booleans, numbers, text, bytes, lists, tuples, maps with text as keys, arrays of
            numbers, and all that gives such an array (`__array__`: tensors, Pillow images).
        path_type: Type, with an attribute `path`, of paths of media.

    Raises:
        FrameError: It holds something else, or is nested too deep; says where.
    """
    encoder = _Encoder(path_type)
    encoder.value(value)
    return b"".join(encoder.parts)


def decode(frame: bytearray, start: int = 0, path_type: type[Any] = MediaPath) -> Any:
    """Return the value of a frame; arrays are writable views into it.

    Args:
        frame: The bytes.
        start: Where the value begins, a multiple of ALIGNMENT_BYTES.
        path_type: Made of the text of each path of media.

    Raises:
        FrameError: It is none.
    """
    decoder = _Decoder(frame, start, path_type)
    try:
        value = decoder.value(0)
    except (ValueError, struct.error, TypeError) as error:
        raise FrameError(f"no value at byte {decoder.at}: {error}") from error
    if decoder.at != len(frame):
        raise FrameError(f"{len(frame) - decoder.at} bytes behind the value")
    return value


class _Encoder:
    def __init__(self, path_type: type[Any]) -> None:
        self.parts: list[bytes | memoryview] = []
        self._path_type = path_type
        self._size_bytes = 0
        self._values = 0
        self._place: list[str | int] = []

    def value(self, value: Any) -> None:
        self._values += 1
        if self._values > VALUES_MAX:
            raise self._error(f"more than {VALUES_MAX} values, use arrays")
        kind = type(value)
        if kind is str:
            self._block(b"S", value.encode("utf-8", "surrogatepass"))
        elif kind is int:
            self._integer(value)
        elif kind is float:
            self._put(_REAL.pack(b"D", value))
        elif value is None or kind is bool:
            self._put(b"N" if value is None else b"T" if value else b"F")
        elif kind is bytes:
            self._block(b"B", value)
        elif kind is dict:
            self._map(value)
        elif kind is list or kind is tuple:
            self._list(value)
        elif kind is np.ndarray:
            self._array(value)
        else:
            self._other(value)

    def _other(self, value: Any) -> None:
        """Encode kinds that are seldom: subclasses, numpy's scalars, what turns into an array."""
        if isinstance(value, self._path_type):
            self._block(b"P", value.path.encode("utf-8", "surrogatepass"))
            return
        if isinstance(value, np.generic):
            self.value(value.item() if value.dtype.kind != "c" else np.asarray(value))
            return
        plain = next((kind for kind in _PLAIN if isinstance(value, kind)), None)
        if plain is not None:
            self.value(_PLAIN[plain](value))
        elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
            self._array(self._as_array(value))
        else:
            remedy = (
                " (a set has no order, give a list)" if isinstance(value, (set, frozenset)) else ""
            )
            raise self._error(f"{type(value).__module__}.{type(value).__name__}{remedy}")

    def _as_array(self, value: Any) -> np.ndarray[Any, Any]:
        try:
            return np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._error(f"{type(value).__name__} that gives no array: {error}") from error

    def _integer(self, value: int) -> None:
        if -(1 << 63) <= value < 1 << 63:
            self._put(_INTEGER.pack(b"I", value))
            return
        size_bytes = value.bit_length() // 8 + 1
        if size_bytes > _BIG_BYTES_MAX:
            raise self._error(f"an integer of {size_bytes} bytes")
        self._block(b"J", value.to_bytes(size_bytes, "little", signed=True))

    def _list(self, value: list[Any] | tuple[Any, ...]) -> None:
        if len(value) >= BLOCK_NUMBERS_MIN:
            kinds = set(map(type, value))
            if kinds == {int}:
                try:
                    self._block(b"i", array("q", value).tobytes())
                except OverflowError:
                    pass
                else:
                    return
            elif kinds == {float}:
                self._block(b"d", array("d", value).tobytes())
                return
        self._put(_LENGTH.pack(b"L", len(value)))
        for index, item in enumerate(value):
            self._inner(index, item)

    def _map(self, value: dict[Any, Any]) -> None:
        self._put(_LENGTH.pack(b"M", len(value)))
        for key, item in value.items():
            if not isinstance(key, str):
                raise self._error(f"a key of type {type(key).__name__}, write text")
            raw = key.encode("utf-8", "surrogatepass")
            self._put(_LENGTH.pack(b"K", len(raw)))
            self._put(raw)
            self._inner(key, item)

    def _inner(self, place: str | int, value: Any) -> None:
        self._place.append(place)
        if len(self._place) > DEPTH_MAX:
            raise FrameError(f"a sample nested deeper than {DEPTH_MAX}")
        self.value(value)
        self._place.pop()

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        if value.dtype.kind in "OUS":
            self.value(value.tolist())
            return
        if value.dtype.name not in DTYPES:
            raise self._error(f"an array of {value.dtype}")
        plain = np.asarray(value, value.dtype.newbyteorder("="), order="C")
        name = plain.dtype.name.encode()
        head = struct.pack(f"=cBB{plain.ndim}Q", b"A", len(name), plain.ndim, *plain.shape) + name
        self._put(head + bytes(-(self._size_bytes + len(head)) % ALIGNMENT_BYTES))
        if plain.size:
            self._put(plain.reshape(-1).view(np.uint8).data)

    def _block(self, tag: bytes, content: bytes) -> None:
        self._put(_LENGTH.pack(tag, len(content)))
        self._put(content)

    def _put(self, part: bytes | memoryview) -> None:
        self.parts.append(part)
        self._size_bytes += len(part)

    def _error(self, what: str) -> FrameError:
        place = "".join(f"[{part!r}]" for part in self._place)
        return FrameError(what + (f" at {place[:200]}" if place else ""))


class _Decoder:
    def __init__(self, frame: bytearray, start: int, path_type: type[Any]) -> None:
        self.at = start
        self._start = start
        self._frame = frame
        self._view = memoryview(frame)
        self._path_type = path_type
        self._values = 0

    def value(self, depth: int) -> Any:
        self._values += 1
        if self._values > VALUES_MAX or depth > DEPTH_MAX:
            raise FrameError("too many values, or nested too deep")
        tag = bytes(self._take(1))
        if tag == b"S":
            return self._text()
        if tag == b"I":
            return struct.unpack("=q", self._take(8))[0]
        if tag == b"D":
            return struct.unpack("=d", self._take(8))[0]
        if tag in _SINGLE:
            return _SINGLE[tag]
        if tag == b"B":
            return bytes(self._take(self._length()))
        if tag == b"M":
            return self._map(depth)
        if tag == b"L":
            return [self.value(depth + 1) for _ in range(self._length())]
        return self._seldom(tag)

    def _seldom(self, tag: bytes) -> Any:
        if tag == b"A":
            return self._array()
        if tag in (b"i", b"d"):
            numbers = array("q" if tag == b"i" else "d")
            numbers.frombytes(self._take(self._length()))
            return numbers.tolist()
        if tag == b"P":
            return self._path_type(self._text())
        if tag == b"J":
            return int.from_bytes(
                self._take(min(self._length(), _BIG_BYTES_MAX)), "little", signed=True
            )
        raise FrameError(f"unknown tag {tag!r}")

    def _map(self, depth: int) -> dict[str, Any]:
        found = {}
        for _ in range(self._length()):
            if bytes(self._take(1)) != b"K":
                raise FrameError("a map without a key")
            key = self._text()
            found[key] = self.value(depth + 1)
        return found

    def _array(self) -> np.ndarray[Any, Any]:
        name_bytes, dimensions = self._take(2)
        shape = struct.unpack(f"={dimensions}Q", self._take(8 * dimensions))
        name = str(self._take(name_bytes), "ascii")
        if name not in DTYPES or dimensions > 32 or any(size >= 1 << 40 for size in shape):
            raise FrameError(f"no array: {name[:20]} {shape[:4]}")
        self._take(-(self.at - self._start) % ALIGNMENT_BYTES)
        dtype, count = np.dtype(name), 1
        for size in shape:
            count *= size
        begin = self.at
        self._take(count * dtype.itemsize)
        if not count:
            return np.empty(shape, dtype)
        return np.frombuffer(self._frame, dtype, count, begin).reshape(shape)

    def _text(self) -> str:
        return str(self._take(self._length()), "utf-8", "surrogatepass")

    def _length(self) -> int:
        length: int = struct.unpack("=Q", self._take(8))[0]
        if length > len(self._frame) - self.at:  # every value takes a byte at least
            raise FrameError(f"a length of {length} in a frame of {len(self._frame)} bytes")
        return length

    def _take(self, count: int) -> memoryview:
        end = self.at + count
        if end > len(self._frame):
            raise FrameError("the frame ends early")
        part = self._view[self.at : end]
        self.at = end
        return part


_SINGLE: dict[bytes, bool | None] = {b"N": None, b"T": True, b"F": False}
_PLAIN: dict[type[Any], Callable[[Any], Any]] = {
    str: str,
    int: int,
    float: float,
    bytes: bytes,
    bytearray: bytes,
    memoryview: bytes,
    list: list,
    tuple: list,
    Mapping: dict,
}
"""What subclasses and relatives of plain types turn into."""
