"""What a worker's death says of the record it was at. Pure.

A fault inside the process (a crash signal, an exit of its own) or a time over the limit is the
record's. A signal from outside (kill -9 by a person, the kernel that is out of memory) may be
anybody's: only where it meets the same record twice, the record is to blame. Where several records
were worked on at once, the next worker handles them one by one and finds the one.
"""

from __future__ import annotations

import signal
from collections import deque
from enum import Enum
from typing import Literal

from msd_daemon.shm.mark_page import Mark, MarkState

Cause = Literal["crash", "time", "outside"]

CRASH_SIGNALS = frozenset(
    {
        signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE,
        signal.SIGTRAP, signal.SIGSYS,
    }
)  # fmt: skip
MET_MAX = 256
"""Records that are remembered for one death."""


class Blame(Enum):
    """What follows from a death."""

    NONE = 0
    """The record may be innocent: it is tried again."""
    NARROW = 1
    """One of several: they are tried one by one."""
    RECORD = 2
    """This record is not touched any more."""


def cause_of(status: int, *, is_over_time: bool) -> Cause:
    """Return what ended a worker, by its exit code (negative: the signal)."""
    if is_over_time:
        return "time"
    if status > 0 or -status in CRASH_SIGNALS:
        return "crash"
    return "outside"


class Suspects:
    """Deaths of one job's loader workers."""

    def __init__(self) -> None:
        self._met: deque[tuple[int, int, int]] = deque(maxlen=MET_MAX)

    def died(self, mark: Mark | None, cause: Cause) -> Blame:
        """Take note of a death."""
        if mark is None or mark.state == MarkState.READING:
            return Blame.NONE  # a reader can't be told to leave out what it has not reached
        if mark.state == MarkState.WINDOW:
            return Blame.NARROW
        if cause != "outside" and mark.state == MarkState.RECORD:
            return Blame.RECORD
        place = (mark.source, mark.shard, mark.first_place)
        if place in self._met:
            return Blame.RECORD
        self._met.append(place)
        return Blame.NONE
