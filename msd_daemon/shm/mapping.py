"""Maps a segment into this process: 2 MiB-aligned, populated, on huge pages where the kernel agrees.

Python's own mmap gives no alignment, keeps a hidden copy of the descriptor alive in every forked
child, and lets `close()` succeed under a live torch view (RINGS.md 2b, 3). So this goes to libc, and
a mapping is taken down only after the last view of it has died.

Owns address ranges of this process, never descriptors. The reader's side has its own smaller
version in `msd_client.read_only_map`, as a trainer installs no daemon.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from msd_client.contract.errors import SegmentUnavailableError

HUGE_PAGE_BYTES = 2 << 20

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 1, 2, 16, 32, 0x4000
# From the kernel's mman-common.h; Python 3.11's mmap module lacks them.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25
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
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """A mapped segment; made by `map_read_write` and `map_read_only`.

    `view` and every array over it keep the range mapped: `close()` gives up this object's own hold,
    and the range goes when the last view dies. A fork's child shares the pages but never unmaps
    what its parent mapped. Not thread-safe for `close`; views may die in any thread.
    """

    def __init__(self, address: int, nbytes: int, *, is_writable: bool, is_huge: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.is_writable = is_writable
        self.is_huge = is_huge
        """True where the kernel put the range on 2 MiB pages."""
        base: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        self._finalizer = weakref.finalize(base, _unmap, address, nbytes, os.getpid())
        self._finalizer.atexit = False
        view = memoryview(base).cast("B")
        self._view: memoryview | None = view if is_writable else view.toreadonly()

    @property
    def view(self) -> memoryview:
        """All bytes of the mapping; read-only where the mapping is.

        Raises:
            ValueError: The mapping was closed.
        """
        if self._view is None:
            raise ValueError(f"mapping of {self.nbytes} bytes was closed")
        return self._view

    @property
    def is_mapped(self) -> bool:
        """True until the range has really gone."""
        return self._finalizer.alive

    def close(self) -> bool:
        """Give up this object's hold; return True where the range is unmapped now. Idempotent."""
        self._view = None
        return not self._finalizer.alive


def map_read_write(
    fd: int, nbytes: int, *, should_populate: bool = True, should_collapse: bool = True
) -> Mapping:
    """Map a segment for writing.

    Args:
        fd: Opened for reading and writing; may be closed afterwards.
        nbytes: Bytes to map, a multiple of the page size.
        should_populate: Fault all pages in now; a first write then costs a tenth.
        should_collapse: Ask for 2 MiB pages (Linux 6.1+); quietly stays on 4 KiB where refused.

    Raises:
        SegmentUnavailableError: The kernel refuses; its reason stands in the message.
    """
    address = _map_aligned(fd, nbytes, _PROT_READ | _PROT_WRITE)
    if should_populate:
        _populate(address, nbytes, _MADV_POPULATE_WRITE)
    is_huge = should_collapse and _collapse(address, nbytes)
    return Mapping(address, nbytes, is_writable=True, is_huge=is_huge)


def map_read_only(fd: int, nbytes: int, *, should_populate: bool = False) -> Mapping:
    """Map a segment for reading; a write to it through ctypes or torch is a SIGSEGV.

    Args:
        fd: Opened for reading; may be closed afterwards.
        nbytes: Bytes to map, a multiple of the page size.
        should_populate: Fault all pages in now.

    Raises:
        SegmentUnavailableError: The kernel refuses; its reason stands in the message.
    """
    address = _map_aligned(fd, nbytes, _PROT_READ)
    if should_populate:
        _populate(address, nbytes, _MADV_POPULATE_READ)
    return Mapping(address, nbytes, is_writable=False, is_huge=False)


def _map_aligned(fd: int, nbytes: int, protection: int) -> int:
    """Reserve more than needed, then map over the aligned middle of it."""
    if nbytes <= 0:
        raise SegmentUnavailableError(f"a mapping of {nbytes} bytes", needed_bytes=nbytes)
    seen = os.fstat(fd).st_size
    if seen < nbytes:
        # Pages beyond the end of the file would be a SIGBUS at first touch.
        raise SegmentUnavailableError(
            f"segment has {seen} bytes, {nbytes} are to be mapped",
            needed_bytes=nbytes,
            available_bytes=seen,
        )
    reserved_bytes = nbytes + HUGE_PAGE_BYTES
    reserved = _mmap(
        None, reserved_bytes, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
    )
    if reserved == _MAP_FAILED or reserved is None:
        raise _refused("reserve addresses for", nbytes)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if _mmap(address, nbytes, protection, _MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        error = _refused("map", nbytes)
        _munmap(reserved, reserved_bytes)
        raise error
    page = os.sysconf("SC_PAGE_SIZE")
    end = -(-(address + nbytes) // page) * page
    if address > reserved:
        _munmap(reserved, address - reserved)
    if reserved + reserved_bytes > end:
        _munmap(end, reserved + reserved_bytes - end)
    return int(address)


def _populate(address: int, nbytes: int, advice: int) -> None:
    if _madvise(address, nbytes, advice) == 0:
        return
    number = ctypes.get_errno()
    if number in _MISSING_ADVICE:
        return  # before Linux 5.14: pages come at first touch, and fallocate has reserved them
    error = _refused("populate", nbytes, number)
    _munmap(address, nbytes)
    raise error


_MISSING_ADVICE = (22, 38)  # EINVAL, ENOSYS


def _collapse(address: int, nbytes: int) -> bool:
    whole = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    return whole > 0 and _madvise(address, whole, _MADV_COLLAPSE) == 0


def _refused(verb: str, nbytes: int, number: int | None = None) -> SegmentUnavailableError:
    reason = os.strerror(ctypes.get_errno() if number is None else number)
    return SegmentUnavailableError(
        f"cannot {verb} a segment of {nbytes} bytes: {reason}", needed_bytes=nbytes
    )


def _unmap(address: int, nbytes: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the range may have become something else
        _munmap(address, nbytes)
