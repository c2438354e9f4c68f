"""Looks at processes by the kernel's accounts: state, CPU, and the wait for one."""

from __future__ import annotations

import os

from msd_daemon.core.looks import ProcessLook

_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def process_look(pid: int) -> ProcessLook:
    """Return a process's state and totals; of one that is gone, or in another pid namespace, none."""
    if pid <= 0:
        return ProcessLook(0, "")
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ProcessLook(pid, "")
    # utime, stime, cutime, cstime
    cpu_ns = sum(map(int, fields[11:15])) * _NS_PER_TICK
    return ProcessLook(pid, fields[0], cpu_ns, _queued_ns(pid))


def _queued_ns(pid: int) -> int:
    """Return for how long a process's first thread could have run and had no CPU; 0 if not known."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def usable_cpus() -> float:
    """Return how many CPUs this process may use: its affinity, and its control group's quota."""
    count = float(len(os.sched_getaffinity(0)))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            count = min(count, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    return count
