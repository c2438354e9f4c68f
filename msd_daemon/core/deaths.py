"""How often workers of a job may end before the job does. Pure: the clock comes in."""

from __future__ import annotations

DEATHS_WINDOW_S = 20.0
DEATHS_MAX = 6


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
