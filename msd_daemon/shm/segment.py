"""Makes shared-memory segments that have no name, cannot shrink and whose pages exist.

`shm` is a file on /dev/shm, unlinked at once; `memfd` a sealed memory file, which no small /dev/shm
limits; `auto` takes shm and falls back to memfd with a reason to log. Readers get a descriptor that
was opened again read-only. Nothing here outlives its descriptors, so nothing needs cleaning up.

`multiprocessing.shared_memory` is not used: an attaching process that exits deletes the segment
(python/cpython#82300).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msd_client.contract.errors import SegmentUnavailableError
from msd_client.contract.slot_fields import align_up

SegmentKind = Literal["shm", "memfd"]

PAGE_BYTES = 4096
SHM_DIRECTORY = "/dev/shm"  # noqa: S108 - the very mount that is meant
# A memfd is born 0777: whoever holds a read-only descriptor could open it again for writing.
_MODE = 0o600
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass
class Segment:
    """A made segment; its owner closes it once, after which mappings of it live on.

    The pages go when the last descriptor and mapping in any process are gone.
    """

    fd_read_write: int
    """For the owner and its writers."""
    fd_read_only: int
    """For readers, over SCM_RIGHTS."""
    nbytes: int
    kind: SegmentKind
    purpose: str
    fallback_reason: str = ""
    """`auto` only: why it is no shm, one line for the log; empty where it is."""

    def close(self) -> None:
        """Close both descriptors. Idempotent."""
        for name in ("fd_read_write", "fd_read_only"):
            fd = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                os.close(fd)


def make_segment(
    nbytes: int,
    kind: Literal["auto", "shm", "memfd"],
    purpose: str,
    *,
    shm_directory: str = SHM_DIRECTORY,
) -> Segment:
    """Make a segment with all its pages reserved.

    Args:
        nbytes: Wanted size, at least 1; rounded up to pages.
        kind: auto, shm or memfd.
        purpose: What it is for, in messages and in /proc (`ring 3`, `pool`).
        shm_directory: Where the tmpfs is mounted.

    Returns:
        The segment; the caller owns both descriptors.

    Raises:
        SegmentUnavailableError: It does not fit; needed and available bytes are named. Nothing is
            left behind.
    """
    if nbytes < 1:
        raise SegmentUnavailableError(f"{purpose} of {nbytes} bytes", needed_bytes=nbytes)
    nbytes = align_up(nbytes, PAGE_BYTES)
    _check_memory(nbytes, purpose)
    if kind == "memfd":
        return _make_memfd(nbytes, purpose)
    try:
        return _make_shm(nbytes, purpose, shm_directory)
    except SegmentUnavailableError as error:
        if kind == "shm":
            raise
        reason = error.message
    segment = _make_memfd(nbytes, purpose)
    segment.fallback_reason = f"{reason}; taking a sealed memory file instead"
    return segment


def available_memory_bytes() -> int:
    """Return the bytes that new pages may take: free memory, or what the cgroup leaves if less."""
    limits = [_meminfo_available()]
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, used = _read_number(limit_path), _read_number(used_path)
        if limit is not None and used is not None:
            limits.append(max(limit - used, 0))
    return min(limits)


def shm_available_bytes(shm_directory: str = SHM_DIRECTORY) -> int:
    """Return the free bytes of the tmpfs, 0 where there is none."""
    try:
        stats = os.statvfs(shm_directory)
    except OSError:
        return 0
    return stats.f_bavail * stats.f_frsize


def _make_shm(nbytes: int, purpose: str, directory: str) -> Segment:
    available = shm_available_bytes(directory)
    if available < nbytes:
        raise _does_not_fit(nbytes, available, purpose, directory)
    # Random and O_EXCL: nobody can guess or prepare the name in the moment before the unlink.
    path = f"{directory}/msd-{secrets.token_hex(16)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, _MODE)
    except OSError as error:
        raise SegmentUnavailableError(
            f"{purpose} cannot be made on {directory}: {error.strerror}; "
            "set memory.segment to memfd or mount a tmpfs there",
            needed_bytes=nbytes,
            available_bytes=available,
            mount=directory,
        ) from error
    os.unlink(path)
    return _finish(fd, nbytes, "shm", purpose, directory)


def _make_memfd(nbytes: int, purpose: str) -> Segment:
    fd = os.memfd_create(f"msd:{purpose}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    segment = _finish(fd, nbytes, "memfd", purpose, "memory")
    fcntl.fcntl(segment.fd_read_write, fcntl.F_ADD_SEALS, _SEALS)
    return segment


def _finish(fd: int, nbytes: int, kind: SegmentKind, purpose: str, where: str) -> Segment:
    """Reserve the pages, narrow the mode and open the reader's descriptor; close `fd` on failure."""
    try:
        os.fchmod(fd, _MODE)
        os.posix_fallocate(fd, 0, nbytes)
        # /proc and not the name: there is none any more, and dup() would stay writable.
        fd_read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        os.close(fd)
        available = shm_available_bytes(where) if kind == "shm" else available_memory_bytes()
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise _does_not_fit(nbytes, available, purpose, where) from error
        raise SegmentUnavailableError(
            f"{purpose} of {nbytes} bytes cannot be made: {error.strerror}",
            needed_bytes=nbytes,
            available_bytes=available,
        ) from error
    return Segment(fd, fd_read_only, nbytes, kind, purpose)


def _check_memory(nbytes: int, purpose: str) -> None:
    # Past the limit of a cgroup the kernel may kill instead of returning an error.
    available = available_memory_bytes()
    if nbytes > available:
        raise _does_not_fit(nbytes, available, purpose, "memory")


def _does_not_fit(nbytes: int, available: int, purpose: str, where: str) -> SegmentUnavailableError:
    remedy = (
        "lower the pool or the ring's slots"
        if where == "memory"
        else f"enlarge {where} (containers give 64 MiB; --shm-size), set memory.segment to memfd, "
        "or lower the pool or the ring's slots"
    )
    return SegmentUnavailableError(
        f"{purpose} needs {nbytes} bytes, {where} has {available} available: {remedy}",
        needed_bytes=nbytes,
        available_bytes=available,
        mount=where,
    )


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _read_number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(path).read_text(encoding="ascii"))
    return None
