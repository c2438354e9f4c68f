"""At which pace ranks take steps that never waited for data: what the next start is planned for. Pure."""

from __future__ import annotations

LOOKS_MIN = 10
"""Seconds, as the daemon looks once a second."""
HUNGRY_MAX = 10
"""One look in so many may find a rank that waits."""


class PaceWatch:
    """Of one job. A pace that the data set would be taken for the ranks' own."""

    def __init__(self) -> None:
        self._looks = 0
        self._hungry = 0
        self._steps_s = 0.0

    def look(self, steps_s: float, is_hungry: bool) -> None:
        """Take note of a second in which steps were taken."""
        if steps_s <= 0:
            return
        self._looks += 1
        self._hungry += is_hungry
        self._steps_s = steps_s

    @property
    def step_ns(self) -> int:
        """Nanoseconds of a step; 0 where ranks waited, or not enough was seen."""
        if self._looks < LOOKS_MIN or self._hungry * HUNGRY_MAX > self._looks:
            return 0
        return round(1e9 / self._steps_s)
