"""Which worker is too long at one record. Pure: marks and the clock come in.

Time counts only as far as the watchdog itself looked: a daemon that stood still for a minute knows
nothing of that minute, and a worker that somebody stopped does not work. Nothing is done at the
first look over the limit but to ask for a stack; the next look that finds the same record kills.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from msd_daemon.shm.mark_page import Mark, MarkState

LOOK_COUNTS_NS_MAX = 2_000_000_000
"""Most time that one look adds: looks come every second."""


class Finding(Enum):
    """What is to be done about a worker."""

    FINE = 0
    ASK = 1
    """Over its time: have it write its stack."""
    KILL = 2


@dataclass
class _Watched:
    sequence: int
    looked_ns: int
    worked_ns: int = 0
    is_asked: bool = False


class Watchdog:
    """Watches the workers of one job.

    Args:
        limit_s: Seconds that a worker may be at one record.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._watched: dict[int, _Watched] = {}

    def look(self, pid: int, mark: Mark | None, now_ns: int, *, is_stopped: bool) -> Finding:
        """Take a look at a worker.

        Args:
            pid: Names it.
            mark: What it is at.
            now_ns: Of a monotonic clock.
            is_stopped: True where a signal stopped it.
        """
        if mark is None or mark.state in (MarkState.AWAY, MarkState.READING):
            self._watched.pop(pid, None)
            return Finding.FINE
        known = self._watched.get(pid)
        if known is None or known.sequence != mark.sequence:
            self._watched[pid] = _Watched(mark.sequence, now_ns)
            return Finding.FINE
        since_ns, known.looked_ns = now_ns - known.looked_ns, now_ns
        if is_stopped:
            return Finding.FINE
        known.worked_ns += min(since_ns, LOOK_COUNTS_NS_MAX)
        if known.worked_ns < self.limit_s * 1e9:
            return Finding.FINE
        if not known.is_asked:
            known.is_asked = True
            return Finding.ASK
        return Finding.KILL

    def forget(self, pid: int) -> None:
        """A worker ended."""
        self._watched.pop(pid, None)
