"""Memory and CPU of processes, as the kernel accounts them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> dict[str, int]:
    """Return bytes of a process: `rss`, `pss_anon`, `pss_shmem`, `pss_file`; empty where it is gone."""
    wanted = {
        "Rss": "rss",
        "Pss_Anon": "pss_anon",
        "Pss_Shmem": "pss_shmem",
        "Pss_File": "pss_file",
    }
    found: dict[str, int] = {}
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
            for line in lines:
                name, _, rest = line.partition(":")
                if name in wanted:
                    found[wanted[name]] = int(rest.split()[0]) * 1024
    except OSError:
        return {}
    return found


def cpu_s(pid: int) -> float:
    """Return user and system seconds of a process, 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


class Activity(NamedTuple):
    """What a process did so far."""

    state: str
    """Of /proc/pid/stat: R, S, D, T, t, Z."""
    cpu_ticks: int
    major_faults: int
    read_bytes: int
    """Asked of the kernel, files and sockets; 0 where it may not be known."""


def activity(pid: int) -> Activity | None:
    """Return what a process did so far, None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    read_bytes = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/io", encoding="ascii") as lines:
        read_bytes = int(next(lines).split()[1])
    return Activity(fields[0], int(fields[11]) + int(fields[12]), int(fields[9]), read_bytes)


def is_stopped(pid: int) -> bool:
    """Tell whether a signal or a debugger stopped a process."""
    found = activity(pid)
    return found is not None and found.state in "Tt"


def private_bytes(pid: int) -> int:
    """Return the resident bytes of a process that are its own, 0 where it is gone; cheap."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


MemoryOf = Callable[[int], dict[str, int]]


def process_row(role: str, pid: int, memory: MemoryOf = memory_of) -> dict[str, Any]:
    """Return a process for msdctl."""
    return {"role": role, "pid": pid, "cpu_s": cpu_s(pid), "memory": memory(pid)}


class MemoryLately:
    """`memory_of` that may be some seconds old.

    The kernel walks all pages of a process for it, about a millisecond each: pages that ask every second
    must not cost that.
    """

    def __init__(self, age_s: float = 5.0) -> None:
        self._age_s = age_s
        self._known: dict[int, tuple[float, dict[str, int]]] = {}

    def of(self, pid: int) -> dict[str, int]:
        """Return the memory of a process; processes that nobody asks of are forgotten."""
        now_s = time.monotonic()
        found = self._known.get(pid)
        if found is None or now_s - found[0] > self._age_s:
            self._known = {
                known: it for known, it in self._known.items() if now_s - it[0] <= 2 * self._age_s
            }
            found = self._known[pid] = (now_s, memory_of(pid))
        return found[1]
