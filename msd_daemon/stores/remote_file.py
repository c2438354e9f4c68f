"""A shard in a store, read by position as a local file is; and either as a Python file object."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Protocol

from msd_client.contract.errors import CorruptRecordError
from msd_daemon.stores.answers import object_fingerprint
from msd_daemon.stores.block_pool import BlockPool
from msd_daemon.stores.disk_cache import DiskCache
from msd_daemon.stores.options import StoreOptions, configured_options
from msd_daemon.stores.store import open_store
from msd_daemon.stores.urls import parse_url

AHEAD_BYTES_MAX = 8 << 20
_SEQUENTIAL_FROM = 2
"""Block borders crossed one after the other before anything is read ahead of need."""


class Meter(Protocol):
    """Counts what is read."""

    read_bytes: int


class RemoteFile:
    """An open object, read by position; the caller closes it. Nothing is asked of the store yet.

    Args:
        path: Its URL.
        size_bytes: Its size as the manifest has it.
        fingerprint: Its fingerprint as the manifest has it, or the beginning of it; each answer is
            checked against it.
        meter: Counts what is read.
        options: Default: those of the process.

    Raises:
        ConfigError: The URL is faulty, or the store cannot be opened.
    """

    def __init__(
        self,
        path: str,
        size_bytes: int,
        fingerprint: str,
        meter: Meter,
        options: StoreOptions | None = None,
    ) -> None:
        options = options or configured_options()
        self.path = path
        self.size_bytes = size_bytes
        self.fingerprint = fingerprint
        self.is_closed = False
        self._key = parse_url(path).key
        self._store = open_store(path, options)
        self._pool = block_pool(options)
        self._meter = meter
        self._current = -1
        """The block read last; kept here, whatever the pool gives up."""
        self._content = b""
        self._crossed = 0
        self._ahead_to = -1
        self._advised_to = -1

    def read_at(self, offset: int, count: int) -> bytes:
        """Return up to `count` bytes at an offset, fewer only at the end of the object.

        Raises:
            CorruptRecordError: The object has changed since the manifest was frozen.
            StoreMissingError: It is no longer there.
            StoreError: It cannot be read.
        """
        end = min(offset + count, self.size_bytes)
        if end <= offset:
            return b""
        size = self._pool.block_bytes
        first, last = offset // size, (end - 1) // size
        parts = []
        for number in range(first, last + 1):
            content = self._block(number, last)
            begin = number * size
            parts.append(content[max(0, offset - begin) : min(size, end - begin)])
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._meter.read_bytes += len(data)
        return data

    def advise(self, offset: int, count: int) -> None:
        """Say which bytes are read next: they come in few requests, and nothing behind them."""
        end = min(offset + count, self.size_bytes)
        self._advised_to = (end - 1) // self._pool.block_bytes if end > offset else -1
        self._crossed = 0
        self._ahead_to = -1

    def fetch_ahead(self, begin: int, end: int) -> None:
        """Let threads fetch the bytes [begin, end), which are wanted soon; returns at once."""
        size = self._pool.block_bytes
        if end > begin:
            self._pool.read_ahead(self, begin // size, (end - 1) // size)

    def fetch(self, begin: int, end: int) -> bytes | bytearray:
        """Return exactly the bytes [begin, end), asked of the store and checked.

        Raises:
            CorruptRecordError: The object has changed since the manifest was frozen.
            StoreError: It cannot be read.
        """
        answer = self._store.read(self._key, begin, end)
        name = self._key.rpartition("/")[2]
        seen = object_fingerprint(name, answer.size_bytes, answer.validator)
        if answer.size_bytes != self.size_bytes:
            raise self._changed(
                f"has {answer.size_bytes} bytes, the frozen manifest says {self.size_bytes}"
            )
        if not seen.startswith(self.fingerprint):
            raise self._changed(f"has another ETag now ({answer.validator[:80]})")
        return answer.body

    def close(self) -> None:
        """Forget what was read ahead; calling again does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self._content = b""
            self._current = -1
            self._pool.drop(self.fingerprint)

    def _block(self, number: int, last: int) -> bytes:
        if number == self._current:
            return self._content
        if number == self._current + 1:
            self._crossed += 1
        else:
            self._crossed = 0
            self._ahead_to = -1
        wanted = max(last, min(self._advised_to, self._last_block()))
        if number <= self._advised_to:
            self._crossed = 0
        self._read_ahead(number, wanted)
        content = self._pool.take(self, number, wanted)
        self._current, self._content = number, content
        return content

    def _read_ahead(self, number: int, wanted: int) -> None:
        """Let threads fetch behind the block: what is wanted, or more with each block in sequence."""
        request = self._pool.request_blocks
        if wanted >= number + request:
            # What is wanted takes several requests: the next ones run while this one does.
            begin = max(self._ahead_to + 1, number + request)
            span, limit = 3 * request, wanted
        elif self._crossed >= _SEQUENTIAL_FROM:
            begin = max(self._ahead_to, number, wanted) + 1
            most = max(1, AHEAD_BYTES_MAX // self._pool.block_bytes)
            span = min(most, 1 << min(self._crossed - _SEQUENTIAL_FROM, 30))
            limit = self._last_block()
        else:
            return
        # Asked for again at the half, so that a request takes several blocks.
        if begin - number <= max(1, span // 2) or begin == number + request:
            to = min(begin + span - 1, limit)
            self._pool.read_ahead(self, begin, to)
            self._ahead_to = max(to, begin - 1)

    def _last_block(self) -> int:
        return (self.size_bytes - 1) // self._pool.block_bytes

    def _changed(self, what: str) -> CorruptRecordError:
        return CorruptRecordError(
            f"{self.path} {what}: restore the object or submit the job anew",
            shard=self.path,
            byte_offset=0,
        )


def open_remote(path: str, meter: Meter, options: StoreOptions | None = None) -> RemoteFile:
    """Open an object that no manifest has: its size and ETag are asked for.

    Raises:
        ConfigError: The URL is faulty.
        StoreMissingError: It is not there.
        StoreError: It cannot be read.
    """
    store = open_store(path, options)
    key = parse_url(path).key
    found = store.stat(key)
    name = key.rpartition("/")[2]
    fingerprint = object_fingerprint(name, found.size_bytes, found.validator)
    return RemoteFile(path, found.size_bytes, fingerprint, meter, options)


_pool: list[tuple[StoreOptions, int, BlockPool]] = []
_lock = threading.Lock()


def block_pool(options: StoreOptions) -> BlockPool:
    """Return the pool of this process; other options than before make a new one.

    Raises:
        PermissionDeniedError: The cache folder is another user's.
        ResourceError: It cannot be used.
    """
    with _lock:
        if _pool and _pool[0][:2] == (options, os.getpid()):
            return _pool[0][2]
        cache = None
        if options.cache_bytes_max:
            cache = DiskCache(Path(options.cache_dir), options.cache_bytes_max)
        pool = BlockPool(
            options.block_bytes,
            options.request_bytes_max,
            options.memory_bytes_max,
            options.read_ahead_threads,
            cache,
        )
        _pool[:] = [(options, os.getpid(), pool)]
        return pool
