"""How a process is named in ps and top."""

from __future__ import annotations

import ctypes

PR_SET_NAME = 15


def set_process_name(name: str) -> None:
    """Show `name` in ps and top (15 characters at most)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
