"""Orders to loader workers that die: none is lost, none is given twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from federation.messages import JobOpened
from federation.model.job import BatchRule
from msd_daemon.core.allocator import PAGE_BYTES
from msd_daemon.core.budget import PoolSums
from msd_daemon.core.readahead import GrantOrder, ReadAhead
from msd_daemon.core.steps import StepsState
from msd_daemon.core.warm_pool import WarmPool
from msd_daemon.services.source_loaders import SourceLoaders
from msd_daemon.workers.messages import ChunkNotice
from tests.support.metadata import make_job, make_spec

CHUNK = 4 * PAGE_BYTES


class Workers:
    """Two loader workers; keeps their orders."""

    def __init__(self) -> None:
        self.loaders = [0, 1]
        self.opened: list[tuple[int, dict[str, Any]]] = []
        self.fetched: list[tuple[int, dict[str, Any]]] = []
        self.copied: list[tuple[int, dict[str, Any]]] = []

    def open_loader(self, worker: int, order: dict[str, Any]) -> None:
        self.opened.append((worker, order))

    def fetch(self, worker: int, order: dict[str, Any]) -> None:
        self.fetched.append((worker, order))

    def copy(self, worker: int, order: dict[str, Any]) -> None:
        self.copied.append((worker, order))


class Made:
    def __init__(self, carried: list[list[int]] | None = None) -> None:
        specs = [make_spec("a"), make_spec("b"), make_spec("c")]
        self.workers = Workers()
        self.warm = WarmPool(16 * CHUNK, None, specs, [[0, 4], [0, 5], [0, 6]], ())
        self.pool = self.warm.pool
        self.readahead = ReadAhead(self.pool, CHUNK)
        loaders_of: dict[int, list[int]] = {}
        self.steps = StepsState(
            self.pool, first_step=0, microbatch_rows=1, rings={}, loaders_of=loaders_of
        )
        self.loaders = SourceLoaders(
            make_job(specs, BatchRule(4, 8)), 1, workers=self.workers, warm=self.warm,
            readahead=self.readahead, steps=self.steps,
            opened=JobOpened(0, [[0, 4], [0, 5], [0, 6]], carried or [], [0, 1], [0.3, 0.3, 0.3], []),
            sums=PoolSums(2, 0, 0, 0, 3, 0, 16 * CHUNK, CHUNK, CHUNK), loaders_of=loaders_of,
        )  # fmt: skip

    def worker_dies(self, worker: int) -> None:
        self.loaders.worker_lost(worker)

    def grants(self) -> list[int]:
        orders = self.readahead.next_orders()
        assert all(isinstance(order, GrantOrder) for order in orders)
        return sorted(self.readahead.loaders[order.loader].source_index for order in orders)


@pytest.fixture
def made():
    return Made()


def test_a_source_that_opens_while_its_worker_is_replaced_begins_with_the_new_one(made):
    made.loaders.open_source(0)
    made.worker_dies(1)
    made.loaders.open_source(1)  # of the worker that is not there
    assert [worker for worker, _ in made.workers.opened] == [0]
    made.readahead.starved([0, 1])
    assert made.grants() == [0]
    made.loaders.worker_back(1)
    (_, (worker, order)) = made.workers.opened
    assert (worker, order["source"], order["index"]) == (1, 1, 5)
    assert made.grants() == [1]


def test_a_worker_that_dies_twice_is_opened_once_each_time(made):
    made.loaders.open_source(0)
    assert made.grants() == [0]
    made.worker_dies(0)
    made.worker_dies(0)
    assert made.pool.room_bytes == made.pool.allocator.capacity_bytes
    made.loaders.worker_back(0)
    assert len(made.workers.opened) == 2
    assert made.grants() == [0]


CARRIED = [[0, 0, 2, 0, 5]]


def fetched(order):
    lengths = np.array([5], np.int32)
    return ChunkNotice(
        order["loader"], order["task"], 1, order["offset"], 64, order["block_key"], -1, False,
        False, True, 1, 0, "", lengths, np.zeros(1, np.uint8), np.array([2], np.int32),
    )  # fmt: skip


def test_carried_records_are_fetched_once_their_worker_is_back():
    made = Made(CARRIED)
    made.loaders.open_source(0)
    made.worker_dies(0)
    made.loaders.carried.wish(CARRIED)
    made.loaders.carried.order_fetches()
    assert made.workers.fetched == []
    assert made.loaders.carried.is_fetching
    made.loaders.worker_back(0)
    ((worker, order),) = made.workers.fetched
    assert worker == 0
    made.loaders.carried.fetched(fetched(order))
    assert not made.loaders.carried.is_fetching
    assert made.steps.is_carried((0, 0, 2, 0))


def test_a_fetch_that_its_worker_died_over_is_ordered_again_in_the_same_piece():
    made = Made(CARRIED)
    made.loaders.open_source(0)
    made.loaders.carried.wish(CARRIED)
    made.loaders.carried.order_fetches()
    made.worker_dies(0)
    made.loaders.carried.order_fetches()
    made.worker_dies(0)
    made.loaders.worker_back(0)
    (_, first), (_, second) = made.workers.fetched
    assert first["offset"] == second["offset"]
    assert first["task"] != second["task"]
    made.loaders.carried.fetched(fetched(second))
    assert not made.loaders.carried.is_fetching


def test_nothing_is_copied_by_a_worker_that_is_being_replaced(made, monkeypatch):
    made.loaders.open_source(0)
    made.pool.lend(13 * CHUNK)  # room is scarce
    piece = made.pool.lend(CHUNK)
    chunk = made.pool.published(
        piece.offset_bytes, CHUNK, loader=0, source_index=0, block_key=0, first_index=0, records=9
    )
    located = made.pool.locate(0, 0, 2, 0)
    wish = SimpleNamespace(
        key=(0, 0, 2, 0), located=located, length=5, media_sizes=(), first_token=0
    )
    monkeypatch.setattr(made.steps, "copy_wishes", lambda _limit: [wish])
    made.worker_dies(0)
    free_bytes = made.pool.allocator.free_bytes
    made.loaders.carried.order_copies()
    assert made.workers.copied == []
    assert made.pool.room_bytes == free_bytes
    made.loaders.worker_back(0)
    made.loaders.carried.order_copies()
    assert len(made.workers.copied) == 1
    assert chunk.is_pinned
    made.worker_dies(0)
    assert not chunk.is_pinned
    assert made.pool.room_bytes == free_bytes
