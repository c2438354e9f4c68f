"""How much memory this process may use: the machine's RAM, or its cgroup's limit if smaller."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNLIMITED_BYTES_MIN = 1 << 60
"""cgroup v1 writes "no limit" as a number just under 2**63."""


def ram_bytes() -> int:
    """Return the RAM of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_limit_bytes() -> int | None:
    """Return the memory limit of this process's cgroup, None where there is none."""
    for path in _LIMIT_FILES:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED_BYTES_MIN:
            return int(text)
    return None


def usable_memory_bytes() -> int:
    """Return the smaller of RAM and cgroup limit."""
    return min(ram_bytes(), cgroup_limit_bytes() or ram_bytes())
