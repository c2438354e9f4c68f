"""Where a thread's time goes: computing, waiting for a CPU, or waiting for something else.

Linux counts for each thread how long it was ready to run and had no CPU (`schedstat`, second number);
without that wait left out, a busy machine looks like a slow disk.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple


class Spent(NamedTuple):
    """Of one thread between two readings; nanoseconds."""

    wall_ns: int
    cpu_ns: int
    delay_ns: int
    """Ready to run without a CPU; 0 where the kernel does not tell."""

    @property
    def wait_ns(self) -> int:
        """Neither computing nor ready to: reads, the user's code, locks."""
        return max(self.wall_ns - self.cpu_ns - self.delay_ns, 0)

    def since(self, earlier: Spent) -> Spent:
        """Return what was spent since an earlier reading."""
        return Spent(*(now - then for now, then in zip(self, earlier, strict=True)))


class WorkClock:
    """Reads the calling thread's times; keeps one file open. Belongs to the thread that made it."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def read(self) -> Spent:
        """Return the times so far; only differences mean something."""
        delay_ns = 0
        if self._fd >= 0:
            delay_ns = int(os.pread(self._fd, 96, 0).split()[1])
        return Spent(time.monotonic_ns(), time.thread_time_ns(), delay_ns)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
