"""Asks the kernel for a short time slice: the daemon runs briefly, and should not be cut short.

Since Linux 6.12 a task of the usual policy may ask for its own slice (sched_setattr, sched_runtime).
A short one means an early deadline: a reader that the daemon wakes does not preempt it, so the other
readers of the slot are woken first. Needs no privilege; older kernels ignore or refuse it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SLICE_NS = 100_000
"""The shortest slice the kernel takes."""

_NUMBERS = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def ask_for_short_slice(slice_ns: int = SLICE_NS) -> bool:
    """Ask for a slice of `slice_ns` for the calling thread; False where the kernel refuses."""
    number = _NUMBERS.get(platform.machine())
    if number is None:
        return False
    attributes = ctypes.create_string_buffer(
        _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, 0, 0, slice_ns, 0, 0)
    )
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(ctypes.c_long(number), 0, attributes, 0)
    return result == 0
