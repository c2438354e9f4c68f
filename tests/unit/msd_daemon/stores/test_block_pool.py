"""Blocks in memory: bounded, fetched once, neighbours together, some ahead; failures reach readers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from msd_client.contract.errors import StoreError
from msd_daemon.stores.block_pool import BlockPool
from msd_daemon.stores.disk_cache import DiskCache

BLOCK = 10
CONTENT = bytes(range(95))


class Thing:
    """An object of 95 bytes: ten blocks, the last of 5."""

    def __init__(self, fingerprint: str = "f" * 32) -> None:
        self.fingerprint = fingerprint
        self.size_bytes = len(CONTENT)
        self.is_closed = False
        self.fetched: list[tuple[int, int]] = []
        self.before: Callable[[], None] = lambda: None

    def fetch(self, begin: int, end: int) -> bytes:
        self.fetched.append((begin, end))
        self.before()
        return CONTENT[begin:end]


def pool_of(
    memory_bytes: int = 1000,
    threads: int = 0,
    request_blocks: int = 4,
    cache: DiskCache | None = None,
) -> BlockPool:
    return BlockPool(BLOCK, request_blocks * BLOCK, memory_bytes, threads, cache)


def block(number: int) -> bytes:
    return CONTENT[number * BLOCK : (number + 1) * BLOCK]


def test_neighbours_come_in_one_request_up_to_its_limit() -> None:
    pool, thing = pool_of(), Thing()
    assert [pool.take(thing, number, 9) for number in range(10)] == [block(n) for n in range(10)]
    assert thing.fetched == [(0, 40), (40, 80), (80, 95)]
    assert pool.take(thing, 3, 3) == block(3)
    assert len(thing.fetched) == 3


def test_only_what_is_missing_is_asked_for() -> None:
    pool, thing = pool_of(), Thing()
    pool.take(thing, 2, 2)
    pool.take(thing, 0, 4)
    pool.take(thing, 3, 4)
    assert thing.fetched == [(20, 30), (0, 20), (30, 50)]


def test_memory_is_bounded_and_used_blocks_go_first() -> None:
    pool, thing = pool_of(memory_bytes=50, request_blocks=2), Thing()
    for number in range(10):
        assert pool.take(thing, number, 9) == block(number)
        assert pool.kept_bytes <= 50
    assert thing.fetched == [(n, min(n + 20, 95)) for n in range(0, 95, 20)]
    pool.take(thing, 0, 0)
    assert thing.fetched[-1] == (0, 10)  # it had gone


def test_threads_read_ahead_within_half_of_the_memory() -> None:
    pool, thing = pool_of(memory_bytes=80, threads=2, request_blocks=2), Thing()
    pool.read_ahead(thing, 1, 9)
    assert pool.take(thing, 1, 1) == block(1)
    assert pool.take(thing, 3, 3) == block(3)
    assert sorted(thing.fetched) == [(10, 30), (30, 50)]  # 40 bytes, no more
    assert pool.take(thing, 2, 2) == block(2)
    assert len(thing.fetched) == 2
    pool.drop(thing.fingerprint)
    assert pool.take(thing, 4, 4) == block(4)
    assert thing.fetched[-1] == (40, 50)  # read ahead, unused, dropped
    assert pool.kept_bytes <= 80


def test_readers_of_one_block_share_its_request() -> None:
    pool, thing = pool_of(), Thing()
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(30)

    thing.before = wait
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(pool.take, thing, 0, 1)
        assert begun.wait(30)
        others = [threads.submit(pool.take, thing, number, number) for number in (0, 1, 0)]
        go_on.set()
        assert first.result(30) == block(0)
        assert [other.result(30) for other in others] == [block(0), block(1), block(0)]
    assert thing.fetched == [(0, 20)]


def test_a_failure_reaches_its_reader_and_leaves_nothing_pending() -> None:
    pool, thing = pool_of(threads=1), Thing()

    def fail() -> None:
        raise StoreError("s3://b/k cannot be read")

    thing.before = fail
    with pytest.raises(StoreError):
        pool.take(thing, 0, 3)
    pool.read_ahead(thing, 0, 3)
    with pytest.raises(StoreError):
        pool.take(thing, 0, 3)
    thing.before = lambda: None
    assert pool.take(thing, 0, 3) == block(0)


def test_what_was_asked_ahead_for_a_closed_file_is_not_fetched() -> None:
    pool, thing = pool_of(threads=1), Thing()
    thing.is_closed = True
    pool.read_ahead(thing, 0, 3)
    other = Thing()  # the same content, opened again
    assert pool.take(other, 2, 2) == block(2)
    assert thing.fetched == []


def test_the_disk_cache_stands_between_memory_and_store(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c", 1 << 20)
    first = Thing()
    pool_of(cache=cache).take(first, 2, 3)
    again = Thing()
    pool = pool_of(cache=cache)
    assert [pool.take(again, number, 5) for number in range(1, 6)] == [
        block(n) for n in range(1, 6)
    ]
    assert again.fetched == [(10, 20), (40, 50), (50, 60)]


def test_a_cached_block_of_another_size_is_not_believed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c", 1 << 20)
    thing = Thing()
    cache.put(thing.fingerprint, 9, b"123456")
    assert pool_of(cache=cache).take(thing, 9, 9) == block(9)
