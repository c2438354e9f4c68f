"""Blocks of objects on the node's disk: shared by processes without a server, bounded, checked.

A block is a file named by the object's fingerprint and the block's number, so that it can never
be of another content. It is written aside and renamed; a crc32 stands before its bytes. The sum of
all sizes stands in the file `usage`, changed under its flock and raised before a block appears, so
that a process that dies leaves it too high, never too low. A block that would take it over the limit
first makes room: the longest unused go until a tenth is free, and the sum is counted anew.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from msd_client.contract.errors import ResourceError
from msd_client.contract.paths import prepare_private_dir

_HEAD = struct.Struct("<8sIQ")  # magic, crc32 of length and bytes, length
_MAGIC = b"MSDBLOCK"
_USAGE = struct.Struct("<q")
_SUFFIX = ".block"
_FREE_SHARE = 0.1


class _Entry(NamedTuple):
    used_ns: int
    size_bytes: int
    path: str


class DiskCache:
    """Blocks below a folder; a disk that is full or fails makes it miss, never fail.

    Args:
        folder: Shared by all processes of a user on a node.
        bytes_max: Most bytes of all block files together, headers included.

    Raises:
        PermissionDeniedError: The folder is another user's, or others may write to it.
        ResourceError: It cannot be written.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._temporary = folder / "filling"
        self._usage_path = folder / "usage"
        # Whoever may write into it may put anything into a batch.
        prepare_private_dir(folder, os.geteuid())
        try:
            self._temporary.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(self._usage_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise ResourceError(
                f"stores.cache_dir {folder} cannot be used ({error.strerror}): name a folder that "
                "the daemon may write, or set stores.cache_bytes_max to 0",
                path=str(folder),
            ) from error
        with self._locked() as usage:
            if not os.fstat(usage).st_size:
                self._write_usage(usage, sum(entry.size_bytes for entry in self._entries()))

    def get(self, fingerprint: str, block: int) -> bytes | None:
        """Return a block, None where it is not there or damaged; a damaged one is removed."""
        path = self._path(fingerprint, block)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            with open(descriptor, "rb", buffering=0) as file:
                size_bytes = os.fstat(descriptor).st_size
                head = file.read(_HEAD.size)
                content = self._checked(file.read(), head)
                if content is not None:
                    os.utime(descriptor)
                    return content
        except OSError:
            return None
        self._remove_damaged(path, size_bytes)
        return None

    def put(self, fingerprint: str, block: int, content: bytes | memoryview) -> None:
        """Keep a block; nothing happens where it is there already or the disk refuses."""
        size_bytes = _HEAD.size + len(content)
        path = self._path(fingerprint, block)
        if size_bytes > self._bytes_max or os.path.exists(path):
            return
        with suppress(OSError):
            self._fill(path, content, size_bytes)

    def _fill(self, path: str, content: bytes | memoryview, size_bytes: int) -> None:
        temporary = str(self._temporary / f"{os.path.basename(path)}.{os.getpid()}.{id(content):x}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # tells the living from what the dead left
                crc = zlib.crc32(content, zlib.crc32(_USAGE.pack(len(content))))
                file.write(_HEAD.pack(_MAGIC, crc, len(content)))
                view = memoryview(content)
                while view:
                    view = view[file.write(view) :]
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                with self._locked() as usage:
                    self._add(usage, temporary, path, size_bytes)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def _add(self, usage: int, temporary: str, path: str, size_bytes: int) -> None:
        if os.path.exists(path):
            return
        used = self._read_usage(usage)
        if used + size_bytes > self._bytes_max:
            used = self._make_room(usage, size_bytes)
        self._write_usage(usage, used + size_bytes)
        os.rename(temporary, path)

    def _make_room(self, usage: int, size_bytes: int) -> int:
        """Remove the longest unused blocks until a tenth is free; returns the bytes left."""
        entries = sorted(self._entries())
        used = sum(entry.size_bytes for entry in entries)
        target = min(int(self._bytes_max * (1 - _FREE_SHARE)), self._bytes_max - size_bytes)
        for entry in entries:
            if used <= target:
                break
            with suppress(FileNotFoundError):
                os.unlink(entry.path)
            used -= entry.size_bytes
        self._write_usage(usage, used)
        self._remove_leftovers()
        return used

    def _remove_leftovers(self) -> None:
        """Remove what processes that died while filling have left: no one holds its lock."""
        with os.scandir(self._temporary) as found:
            for entry in found:
                with suppress(OSError):
                    descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
                    try:
                        # A file without bytes may have been made just now, its lock still to come.
                        if os.fstat(descriptor).st_size:
                            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            os.unlink(entry.path)
                    finally:
                        os.close(descriptor)

    def _remove_damaged(self, path: str, size_bytes: int) -> None:
        with suppress(OSError), self._locked() as usage:
            os.unlink(path)
            self._write_usage(usage, max(0, self._read_usage(usage) - size_bytes))

    @staticmethod
    def _checked(content: bytes, head: bytes) -> bytes | None:
        if len(head) < _HEAD.size:
            return None
        magic, crc, length = _HEAD.unpack(head)
        if magic != _MAGIC or length != len(content):
            return None
        return content if zlib.crc32(content, zlib.crc32(_USAGE.pack(length))) == crc else None

    def _entries(self) -> Iterator[_Entry]:
        for folder in self._folders():
            with suppress(FileNotFoundError), os.scandir(folder) as found:
                for entry in found:
                    if entry.name.endswith(_SUFFIX):
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield _Entry(status.st_mtime_ns, status.st_size, entry.path)

    def _folders(self) -> list[str]:
        with os.scandir(self._folder) as found:
            return [entry.path for entry in found if len(entry.name) == 2 and entry.is_dir()]

    def _path(self, fingerprint: str, block: int) -> str:
        return str(self._folder / fingerprint[:2] / f"{fingerprint}-{block}{_SUFFIX}")

    @contextmanager
    def _locked(self) -> Iterator[int]:
        # Opened anew each time: the threads of a process must exclude each other too.
        descriptor = os.open(self._usage_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _read_usage(self, usage: int) -> int:
        raw = os.pread(usage, _USAGE.size, 0)
        if len(raw) < _USAGE.size or (value := int(_USAGE.unpack(raw)[0])) < 0:
            return self._bytes_max  # unknown: counted anew by making room
        return value

    def _write_usage(self, usage: int, value: int) -> None:
        os.pwrite(usage, _USAGE.pack(value), 0)
