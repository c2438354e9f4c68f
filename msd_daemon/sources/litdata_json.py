"""LitData's packed form of nested lists and maps (format `json`), or plain JSON of older writers.

A byte says what follows, little-endian: 0 JSON, 1 texts, 2 int64s, 3 float64s, 4 truth values,
5 map, 6 maps of the same keys, 7 text, 8 int64, 9 float64, 10 truth value, 11 null.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from msd_daemon.sources.packed_values import json_value, unpack

_DEPTH_MAX = 64
_JSON, _TEXTS, _INTS, _FLOATS, _TRUTHS, _MAP, _MAPS, _TEXT, _INT, _FLOAT, _TRUTH, _NULL = range(12)
_TAGS_BELOW = 0x20
_ITEM_SHIFT = 0x10
_ITEM_TAGS = {0: _NULL, 1: _TEXT, 2: _INT, 3: _FLOAT, 4: _TRUTH}
"""Values inside of maps of the same keys: by their tag less 16."""


def nested_value(data: bytes) -> Any:
    """Return the value.

    Raises:
        ValueError: It is cut, nested too deeply, or of an unknown kind.
    """
    if not data or data[0] > _TAGS_BELOW:
        return json_value(data)
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at} bytes behind its end")
    return value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def value(self, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise ValueError("nested too deeply")
        tag = self._number("<B")
        if tag == _JSON:
            return json_value(self._take(self._number("<I")))
        if tag == _TEXTS:
            return [self._text() for _ in range(self._count(4))]
        if tag in (_INTS, _FLOATS):
            dtype = "<i8" if tag == _INTS else "<f8"
            return np.frombuffer(self._take(8 * self._count(8)), dtype).tolist()
        if tag == _TRUTHS:
            return [byte != 0 for byte in self._take(self._count(1))]
        if tag == _MAP:
            return {self._text(): self.value(depth + 1) for _ in range(self._count(5))}
        if tag == _MAPS:
            return self._maps()
        return self._single(tag)

    def _single(self, tag: int) -> Any:
        if tag == _TEXT:
            return self._text()
        if tag in (_INT, _FLOAT):
            return self._number("<q" if tag == _INT else "<d")
        if tag == _TRUTH:
            return self._number("<B") != 0
        if tag == _NULL:
            return None
        raise ValueError(f"a value of kind {tag}")

    def _maps(self) -> list[dict[str, Any]]:
        count = self._number("<I")
        keys = [self._text() for _ in range(self._count(4))]
        if count * max(len(keys), 1) > len(self._data) - self.at:
            raise ValueError(f"{count} maps in {len(self._data)} bytes")
        return [
            {
                key: self._single(_ITEM_TAGS.get(self._number("<B") - _ITEM_SHIFT, -1))
                for key in keys
            }
            for _ in range(count)
        ]

    def _count(self, item_bytes_min: int) -> int:
        count: int = self._number("<I")
        if count * item_bytes_min > len(self._data) - self.at:
            raise ValueError(f"{count} items in {len(self._data) - self.at} bytes")
        return count

    def _text(self) -> str:
        return self._take(self._number("<I")).decode()

    def _number(self, layout: str) -> Any:
        (value,) = unpack(layout, self._data, self.at)
        self.at += {"B": 1, "I": 4, "q": 8, "d": 8}[layout[1]]
        return value

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError(f"{count} bytes, {len(self._data) - self.at} are left")
        self.at += count
        return self._data[self.at - count : self.at]
