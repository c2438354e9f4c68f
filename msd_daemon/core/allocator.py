"""Ranges of a memory: lent in whole pages, first fit. Pure; offsets and sizes are bytes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

PAGE_BYTES = 4096
"""Granularity of pieces."""


class Piece(NamedTuple):
    """A lent range of the pool."""

    offset_bytes: int
    size_bytes: int


class Allocator:
    """First fit over a sorted list of free ranges.

    Args:
        capacity_bytes: Of the memory.
        taken: Pieces that are lent already; no two overlap.
    """

    def __init__(self, capacity_bytes: int, taken: Iterable[Piece] = ()) -> None:
        self.capacity_bytes = capacity_bytes
        self._starts: list[int] = []
        self._sizes: list[int] = []
        end = 0
        for start, size in [*sorted(taken), (capacity_bytes, 0)]:
            if start > end:
                self._starts.append(end)
                self._sizes.append(start - end)
            end = start + size
        self.free_bytes = sum(self._sizes)

    def take(self, size_bytes: int) -> Piece | None:
        """Return a piece of at least `size_bytes`, or None where no free range is long enough."""
        size = round_up_page(size_bytes)
        for place, free in enumerate(self._sizes):
            if free < size:
                continue
            start = self._starts[place]
            if free == size:
                del self._starts[place], self._sizes[place]
            else:
                self._starts[place] += size
                self._sizes[place] -= size
            self.free_bytes -= size
            return Piece(start, size)
        return None

    def give_back(self, piece: Piece) -> None:
        """Return a piece, joining it with free neighbours."""
        start, size = piece
        place = bisect.bisect_left(self._starts, start)
        self.free_bytes += size
        if place < len(self._starts) and start + size == self._starts[place]:
            size += self._sizes[place]
            del self._starts[place], self._sizes[place]
        if place > 0 and self._starts[place - 1] + self._sizes[place - 1] == start:
            self._sizes[place - 1] += size
            return
        self._starts.insert(place, start)
        self._sizes.insert(place, size)

    def largest_free_bytes(self) -> int:
        """Return the length of the longest free range."""
        return max(self._sizes, default=0)


def round_up_page(size_bytes: int) -> int:
    """Return the size of the piece that is lent for so many bytes."""
    return -(-max(size_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
