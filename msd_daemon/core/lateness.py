"""Which process does nothing although it has work: stopped, stuck in the kernel, or waiting for ever.

Not heartbeats of a thread of its own, which beat on while the work is stuck, but signs of the work:
words it said, records it marked, CPU it used, bytes and pages it read. Time counts on the watcher's own clock and
only as far as it looked, so that a watcher that stood still declares nobody late for that. One stall
is told once. Pure: signs and the clock come in.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from msd_daemon.core.watchdog import LOOK_COUNTS_NS_MAX

STUCK_STATES = frozenset("TtD")
"""Of /proc/pid/stat: stopped by a signal or a debugger, or in an uninterruptible call."""


@dataclass
class _Seen:
    signs: Hashable
    looked_ns: int
    still_ns: int = 0
    is_told: bool = False


class Lateness:
    """Watches processes; each is named by its pid."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def look(self, pid: int, signs: Hashable, now_ns: int, *, is_busy: bool) -> float:
        """Take a look; return the seconds that a busy process gave no sign of work.

        Args:
            pid: Names it.
            signs: Differ from those of the last look where it did anything.
            now_ns: Of a monotonic clock.
            is_busy: True where it has something to do.
        """
        seen = self._seen.get(pid)
        if seen is None or seen.signs != signs or not is_busy:
            self._seen[pid] = _Seen(signs, now_ns)
            return 0.0
        since_ns, seen.looked_ns = now_ns - seen.looked_ns, now_ns
        seen.still_ns += min(since_ns, LOOK_COUNTS_NS_MAX)
        return seen.still_ns / 1e9

    def tell(self, pid: int) -> bool:
        """Return True once for each stall: where its consequence is due."""
        seen = self._seen.get(pid)
        if seen is None or seen.is_told:
            return False
        seen.is_told = True
        return True

    def was_told(self, pid: int) -> bool:
        """True while a stall lasts that had its consequence."""
        seen = self._seen.get(pid)
        return seen is not None and seen.is_told

    def forget(self, pid: int) -> None:
        """A process is no longer watched."""
        self._seen.pop(pid, None)


class LoopWatch:
    """Tells how long the watcher itself stood still.

    Args:
        period_s: Seconds between its looks.
        late_s: More than so many seconds late is a stall.
    """

    def __init__(self, period_s: float, late_s: float = 2.0) -> None:
        self._period_s = period_s
        self._late_s = late_s
        self._last_ns: int | None = None
        self.stalls_total = 0
        self.longest_s = 0.0

    def tick(self, now_ns: int) -> float:
        """Take note of a look; return the seconds that the loop stood still before it, 0 for none."""
        last_ns, self._last_ns = self._last_ns, now_ns
        if last_ns is None:
            return 0.0
        late_s = (now_ns - last_ns) / 1e9 - self._period_s
        if late_s <= self._late_s:
            return 0.0
        self.stalls_total += 1
        self.longest_s = max(self.longest_s, late_s)
        return late_s
