"""How fast the ranks take steps where nothing holds them up, as far as it was seen. Pure.

A rank that waits for data takes fewer steps than it could: the largest rate seen is believed, and
forgotten slowly.
"""

from __future__ import annotations

from collections import deque

SECOND_NS = 1_000_000_000
SPAN_NS = 3 * SECOND_NS
SPAN_STEPS = 8
"""A rate is of so long, and of so many steps, at least."""
KEPT_NS = 60 * SECOND_NS
FORGET_NS = 60 * SECOND_NS
"""In which a rate that is not reached any more is forgotten."""


class Consumption:
    """Of a generation."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque()
        self.steps_s = 0.0

    def restart(self) -> None:
        """Another generation begins: its steps count from 0 again. The rate is as it was."""
        self._seen.clear()

    def look(self, steps: int, now_ns: int) -> None:
        """Take note of how many steps all ranks released by now."""
        last_ns = self._seen[-1][0] if self._seen else now_ns
        self._seen.append((now_ns, steps))
        while len(self._seen) > 2 and now_ns - self._seen[1][0] > KEPT_NS:
            self._seen.popleft()
        self.steps_s -= self.steps_s * min(now_ns - last_ns, FORGET_NS) / FORGET_NS
        since = self._since(steps, now_ns)
        if since is not None:
            rate = (steps - since[1]) * SECOND_NS / (now_ns - since[0])
            self.steps_s = max(self.steps_s, rate)

    def _since(self, steps: int, now_ns: int) -> tuple[int, int] | None:
        """Return the last look that lies far enough back, else the first one of a whole span."""
        for at_ns, count in reversed(self._seen):
            if now_ns - at_ns >= SPAN_NS and steps - count >= SPAN_STEPS:
                return at_ns, count
        first = self._seen[0]
        return first if now_ns - first[0] >= SPAN_NS else None
