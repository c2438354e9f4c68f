"""How long the calling thread was ready to run and had no CPU, as Linux counts it.

Without it a busy machine would look like a slow disk: both keep a thread from running.
"""

from __future__ import annotations

import contextlib
import os
import threading

_OWN = threading.local()
"""Of each thread: its native id and the descriptor of its counters, opened once."""
_LINE_BYTES = 80


def run_delay_ns() -> int:
    """Return it since the thread began; 0 where the kernel does not count it.

    Source: Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat, second number.
    """
    if getattr(_OWN, "thread", 0) != threading.get_native_id():
        _open()
    if _OWN.fd < 0:
        return 0
    try:
        return int(os.pread(_OWN.fd, _LINE_BYTES, 0).split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _open() -> None:
    """Take the counters of this thread; those of a thread before a fork are not its own."""
    before = getattr(_OWN, "fd", -1)
    if before >= 0:
        with contextlib.suppress(OSError):
            os.close(before)
    _OWN.thread, _OWN.fd = threading.get_native_id(), -1
    with contextlib.suppress(OSError):
        _OWN.fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
