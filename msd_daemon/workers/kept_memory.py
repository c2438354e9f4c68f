"""Lets a process keep the memory that large messages come in.

glibc gives freed memory back to the kernel above a small limit, and faults it in again for the next
message of a mebibyte: a third of the cost of receiving it, measured. Elsewhere (musl) nothing is
changed.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_MMAP_BYTES_MAX = 32 << 20
"""The largest that glibc takes."""


def keep_memory(kept_bytes: int) -> bool:
    """Keep up to `kept_bytes` of freed memory; False where the C library has no such switch.

    Call it before other threads begin: they are to use the same memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _MMAP_BYTES_MAX),
        (_M_TRIM_THRESHOLD, kept_bytes),
    )
    return all(mallopt(option, value) == 1 for option, value in options)
