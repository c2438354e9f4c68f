"""Memory and CPU of processes, as the kernel accounts them."""

from __future__ import annotations

import os
from typing import Any

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


def process_row(role: str, pid: int) -> dict[str, Any]:
    """Return a process for msdctl."""
    return {"role": role, "pid": pid, "cpu_s": cpu_s(pid), "memory": memory_of(pid)}
