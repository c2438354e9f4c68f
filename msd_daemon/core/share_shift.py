"""Which sources' shares grew much of late: their loaders may not be up to it yet. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GREW_BY = 0.1
"""A share that grew by so much of the whole has grown,"""
GREW_TIMES = 2.0
"""or by so many times, from something that counts to something that counts more:"""
COUNTS_FROM = 0.02
FORGET_NS = 600_000_000_000
BASE_NS = 60_000_000_000
"""Shares are compared with those of so long ago: a slow ramp is a growth too."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A share that grew."""

    before: float
    at_ns: int


class ShareShift:
    """Of the sources of one job."""

    def __init__(self) -> None:
        self._base: list[float] = []
        self._base_ns = 0
        self._shifts: dict[int, Shift] = {}

    def take(self, shares: Sequence[float], now_ns: int) -> None:
        """Take note of the shares that the last plan was to have."""
        if len(shares) != len(self._base):
            self._base, self._base_ns = list(shares), now_ns
            return
        for source, (before, share) in enumerate(zip(self._base, shares, strict=True)):
            grew = share >= before + GREW_BY or (
                share >= COUNTS_FROM and share >= GREW_TIMES * before
            )
            if grew:
                self._shifts[source] = Shift(before, now_ns)
                self._base[source] = share
            elif share < before - GREW_BY:
                self._base[source] = share
                self._shifts.pop(source, None)
        if now_ns - self._base_ns >= BASE_NS:
            self._base, self._base_ns = list(shares), now_ns
        for source, shift in list(self._shifts.items()):
            if now_ns - shift.at_ns >= FORGET_NS:
                del self._shifts[source]

    def of(self, source: int) -> Shift | None:
        """Return the growth of a source's share, None where there was none."""
        return self._shifts.get(source)
