"""When a worker that grew beyond its memory mark is replaced. Pure: sizes and the clock come in.

A leak grows again after each replacement, slowly; work that needs more than the mark is above it at
once. So the next replacement of the same worker waits the longer the sooner it would come.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_WAIT_S = 10.0
WAIT_S_MAX = 600.0
SLOW_S = 120.0
"""A worker that took so long to grow leaks: it is replaced whenever it did."""


@dataclass
class _Known:
    last_s: float
    wait_s: float


class Watermark:
    """Of the loader workers of one job.

    Args:
        bytes_max: Private bytes above which one is replaced.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.recycled_total = 0
        self._known: dict[int, _Known] = {}

    def is_due(self, number: int, private_bytes: int, now_s: float) -> bool:
        """True where a worker is to be replaced now."""
        known = self._known.get(number)
        is_patient = known is None or now_s - known.last_s >= known.wait_s
        return private_bytes > self.bytes_max and is_patient

    def recycled(self, number: int, now_s: float) -> float:
        """A worker was replaced; return how long its successor is left alone at least."""
        self.recycled_total += 1
        known = self._known.get(number)
        if known is None or now_s - known.last_s > max(SLOW_S, 2 * known.wait_s):
            wait_s = FIRST_WAIT_S
        else:
            wait_s = min(2 * known.wait_s, WAIT_S_MAX)
        self._known[number] = _Known(now_s, wait_s)
        return wait_s
