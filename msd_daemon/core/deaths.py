"""How often workers of a job may end before the job does, and how long one waits for its successor.

Pure: the clock comes in.
"""

from __future__ import annotations

DEATHS_WINDOW_S = 20.0
DEATHS_MAX = 6
FIRST_DELAY_S = 0.1
DELAY_S_MAX = 2.0
WELL_AFTER_S = 5.0
"""A worker that served so long ended of something new."""


class Deaths:
    """How often workers of a job ended lately: a record that kills its reader must not loop."""

    def __init__(self) -> None:
        self._times: list[float] = []

    @property
    def count(self) -> int:
        """Deaths inside the window."""
        return len(self._times)

    def is_too_many(self, now_s: float) -> bool:
        """Count one more death; True where they come too fast."""
        self._times = [t for t in self._times if now_s - t < DEATHS_WINDOW_S] + [now_s]
        return len(self._times) > DEATHS_MAX


class BackOff:
    """How long the successor of each worker waits: 0, 0.1, 0.2, 0.4 s and so on, at most 2.

    Places are named by anything hashable; a worker that served for a while begins anew.
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[int, float]] = {}

    def delay_s(self, place: object, now_s: float) -> float:
        """Count an end at a place; return how long to wait before the next one starts there."""
        count, last_s = self._known.get(place, (0, now_s))
        if now_s - last_s > WELL_AFTER_S:
            count = 0
        self._known[place] = (count + 1, now_s)
        if not count:
            return 0.0
        return float(min(FIRST_DELAY_S * 2 ** min(count - 1, 16), DELAY_S_MAX))
