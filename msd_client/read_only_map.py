"""Maps a ring's segment read-only into a trainer, on a 2 MiB boundary.

The daemon's `msd_daemon.shm.mapping` does more (populate, huge pages); this is the little that a
reader needs, as a trainer installs no daemon. The alignment lets the kernel use the huge pages that
the daemon made: attaching is then 50 times cheaper (RINGS.md 2b). Python's mmap is not used: its
`close()` succeeds under a live torch view.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from msd_client.contract.errors import SegmentUnavailableError

_HUGE_PAGE_BYTES = 2 << 20
_PROT_NONE, _PROT_READ = 0, 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 1, 2, 16, 32, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_read_only(fd: int, nbytes: int) -> Any:
    """Return a ctypes byte array over the mapped segment; it unmaps when its last user dies.

    Writing to it is a SIGSEGV. Whatever must stay valid keeps a reference to the array. A forked
    child may read it too and never unmaps it.

    Args:
        fd: Opened for reading; may be closed afterwards.
        nbytes: Bytes to map, a multiple of the page size.

    Raises:
        SegmentUnavailableError: The segment is smaller, or the kernel refuses.
    """
    seen = os.fstat(fd).st_size
    if not 0 < nbytes <= seen:
        # Pages beyond the end of the file would be a SIGBUS at first touch.
        raise SegmentUnavailableError(
            f"segment has {seen} bytes, {nbytes} are to be mapped",
            needed_bytes=nbytes,
            available_bytes=seen,
        )
    reserved_bytes = nbytes + _HUGE_PAGE_BYTES
    reserved = _mmap(
        None, reserved_bytes, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
    )
    if reserved == _MAP_FAILED or reserved is None:
        raise _refused(nbytes)
    address = -(-reserved // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    if _mmap(address, nbytes, _PROT_READ, _MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        error = _refused(nbytes)
        _munmap(reserved, reserved_bytes)
        raise error
    # The slack on both sides stays reserved, without memory, and goes with the mapping.
    base: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(base, _unmap, reserved, reserved_bytes, os.getpid()).atexit = False
    return base


def _refused(nbytes: int) -> SegmentUnavailableError:
    return SegmentUnavailableError(
        f"cannot map a segment of {nbytes} bytes: {os.strerror(ctypes.get_errno())}",
        needed_bytes=nbytes,
    )


def _unmap(address: int, nbytes: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the range may have become something else
        _munmap(address, nbytes)
