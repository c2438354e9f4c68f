"""Blocks of remote objects in memory: fetched once, several in one request, some ahead of need.

One pool per process. What was read ahead and not yet used takes half of its bytes at most; used
blocks go first when room is needed. A block that two readers need is fetched by one of them.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from msd_client.contract.errors import MsdError
from msd_daemon.stores.disk_cache import DiskCache

Key = tuple[str, int]


class BlockObject(Protocol):
    """An object whose blocks are wanted."""

    @property
    def fingerprint(self) -> str:
        """What names its content."""
        ...

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        ...

    @property
    def is_closed(self) -> bool:
        """True where no one reads it any more."""
        ...

    def fetch(self, begin: int, end: int) -> bytes | bytearray:
        """Return exactly the bytes [begin, end).

        Raises:
            MsdError: They cannot be had.
        """
        ...


@dataclass(eq=False)
class _Run:
    """Neighbouring blocks being fetched."""

    target: BlockObject
    first: int
    stop: int
    is_ahead: bool
    done: threading.Event = field(default_factory=threading.Event)
    contents: dict[int, bytes] = field(default_factory=dict)

    def block_keys(self) -> list[Key]:
        return [(self.target.fingerprint, number) for number in range(self.first, self.stop)]


class BlockPool:
    """Blocks of all objects that a process reads; safe in any thread.

    Args:
        block_bytes: Size of a block; the last of an object is shorter.
        request_bytes_max: Most bytes of a request.
        memory_bytes_max: Most bytes kept.
        threads: Threads that read ahead; 0 reads nothing ahead.
        cache: The node's disk cache, if there is one.
    """

    def __init__(
        self,
        block_bytes: int,
        request_bytes_max: int,
        memory_bytes_max: int,
        threads: int,
        cache: DiskCache | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self.request_blocks = max(1, request_bytes_max // block_bytes)
        self._memory_bytes_max = memory_bytes_max
        self._thread_count = threads
        self._cache = cache
        self._lock = threading.Lock()
        self._used: OrderedDict[Key, bytes] = OrderedDict()
        self._fresh: OrderedDict[Key, bytes] = OrderedDict()
        self._pending: dict[Key, _Run] = {}
        self._kept_bytes = 0
        self._ahead_bytes = 0
        """Read ahead and not yet used, or being read ahead."""
        self._queue: queue.SimpleQueue[_Run] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def kept_bytes(self) -> int:
        """Bytes of the blocks in memory."""
        return self._kept_bytes

    def take(self, target: BlockObject, number: int, last: int) -> bytes:
        """Return a block.

        Args:
            target: The object.
            number: The block.
            last: Neighbours up to this one are fetched in the same request where they are missing.

        Raises:
            MsdError: It cannot be had.
        """
        key = (target.fingerprint, number)
        while True:
            with self._lock:
                content = self._find(key)
                if content is not None:
                    return content
                run = self._pending.get(key)
                is_mine = run is None
                if run is None:
                    run = self._begin(target, number, last, is_ahead=False)
            if is_mine:
                self._fetch(run)
                return run.contents[number]
            run.done.wait()
            content = run.contents.get(number)
            if content is not None:
                with self._lock:
                    self._find(key)  # it is used now
                return content
            # The one that fetched it failed: this reader tries itself and gets the error.

    def read_ahead(self, target: BlockObject, first: int, last: int) -> None:
        """Let threads fetch the blocks [first, last] that are missing, as far as the bytes allow."""
        if not self._thread_count:
            return
        while first <= last:
            with self._lock:
                key = (target.fingerprint, first)
                if key in self._fresh or key in self._used or key in self._pending:
                    first += 1
                    continue
                if self._ahead_bytes + self.block_bytes > self._memory_bytes_max // 2:
                    return
                run = self._begin(target, first, last, is_ahead=True)
            first = run.stop
            self._start_threads()
            self._queue.put(run)

    def drop(self, fingerprint: str) -> None:
        """Forget what was read ahead of an object that no one reads any more."""
        with self._lock:
            for key in [key for key in self._fresh if key[0] == fingerprint]:
                content = self._fresh.pop(key)
                self._kept_bytes -= len(content)
                self._ahead_bytes -= len(content)

    def _find(self, key: Key) -> bytes | None:
        content = self._used.get(key)
        if content is not None:
            self._used.move_to_end(key)
            return content
        content = self._fresh.pop(key, None)
        if content is not None:
            self._ahead_bytes -= len(content)
            self._used[key] = content
        return content

    def _begin(self, target: BlockObject, number: int, last: int, *, is_ahead: bool) -> _Run:
        """Note a run of missing blocks from `number` on as being fetched."""
        stop = number + 1
        latest = min(last, number + self.request_blocks - 1)
        room = (self._memory_bytes_max // 2 - self._ahead_bytes) // self.block_bytes
        if is_ahead:
            latest = min(latest, number + room - 1)
        while stop <= latest:
            key = (target.fingerprint, stop)
            if key in self._fresh or key in self._used or key in self._pending:
                break
            stop += 1
        run = _Run(target, number, stop, is_ahead)
        for key in run.block_keys():
            self._pending[key] = run
        if is_ahead:
            self._ahead_bytes += self._run_bytes(run)
        return run

    def _run_bytes(self, run: _Run) -> int:
        end = min(run.stop * self.block_bytes, run.target.size_bytes)
        return end - run.first * self.block_bytes

    def _fetch(self, run: _Run) -> None:
        try:
            self._load(run)
        finally:
            with self._lock:
                if run.is_ahead:
                    self._ahead_bytes -= self._run_bytes(run)
                for key in run.block_keys():
                    self._pending.pop(key, None)
                    content = run.contents.get(key[1])
                    if content is not None:
                        self._keep(key, content, is_fresh=run.is_ahead or key[1] != run.first)
                self._make_room()
            run.done.set()

    def _load(self, run: _Run) -> None:
        """Fill a run from the disk cache, and what is not there from the store."""
        missing: list[int] = []
        for number in range(run.first, run.stop):
            cached = self._cached(run.target, number)
            if cached is None:
                missing.append(number)
            else:
                run.contents[number] = cached
        while missing:
            count = 1
            while count < len(missing) and missing[count] == missing[0] + count:
                count += 1
            self._request(run, missing[0], count)
            missing = missing[count:]

    def _cached(self, target: BlockObject, number: int) -> bytes | None:
        if self._cache is None:
            return None
        content = self._cache.get(target.fingerprint, number)
        begin = number * self.block_bytes
        wanted = min(self.block_bytes, target.size_bytes - begin)
        return content if content is not None and len(content) == wanted else None

    def _request(self, run: _Run, first: int, count: int) -> None:
        begin = first * self.block_bytes
        end = min(begin + count * self.block_bytes, run.target.size_bytes)
        body = memoryview(run.target.fetch(begin, end))
        for number in range(first, first + count):
            at = (number - first) * self.block_bytes
            content = bytes(body[at : at + self.block_bytes])
            run.contents[number] = content
            if self._cache is not None:
                self._cache.put(run.target.fingerprint, number, content)

    def _keep(self, key: Key, content: bytes, *, is_fresh: bool) -> None:
        if key in self._used or key in self._fresh:
            return
        self._kept_bytes += len(content)
        if is_fresh:
            self._fresh[key] = content
            self._ahead_bytes += len(content)
        else:
            self._used[key] = content

    def _make_room(self) -> None:
        while self._kept_bytes > self._memory_bytes_max and self._used:
            self._kept_bytes -= len(self._used.popitem(last=False)[1])
        while self._kept_bytes > self._memory_bytes_max and self._fresh:
            size_bytes = len(self._fresh.popitem(last=False)[1])
            self._kept_bytes -= size_bytes
            self._ahead_bytes -= size_bytes

    def _start_threads(self) -> None:
        with self._lock:
            if len(self._threads) >= self._thread_count:
                return
            # Daemon threads: a stalled request must not keep a worker from leaving.
            thread = threading.Thread(target=self._serve, name="msd-read-ahead", daemon=True)
            self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            run = self._queue.get()
            if run.target.is_closed:
                self._abandon(run)
                continue
            try:
                self._fetch(run)
            except MsdError:
                continue  # whoever needs the block asks again and gets the error

    def _abandon(self, run: _Run) -> None:
        with self._lock:
            self._ahead_bytes -= self._run_bytes(run)
            for key in run.block_keys():
                self._pending.pop(key, None)
        run.done.set()
