"""Work on shards by several processes: every task once, counts whole, a lost process named."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from msd_client.contract.errors import WorkerLostError
from msd_daemon.verbs.shard_pool import ShardPool, Tell


def open_square(factor: int) -> Callable[[int, Tell], int]:
    def work(task: int, tell: Tell) -> int:
        tell(1, task)
        return factor * task * task

    return work


def open_exit() -> Callable[[int, Tell], int]:
    def work(task: int, tell: Tell) -> int:
        os._exit(3)

    return work


def open_broken() -> Callable[[int, Tell], int]:
    def work(task: int, tell: Tell) -> int:
        raise KeyError(task)

    return work


@pytest.mark.parametrize("workers", [1, 2])
def test_every_task_is_done_once_and_counts_are_whole(workers: int) -> None:
    ticks: list[tuple[int, int]] = []
    pool = ShardPool(open_square, (3,), workers, lambda *counts: ticks.append(counts))
    found = dict(pool.run(range(20)))
    assert found == {task: 3 * task * task for task in range(20)}
    assert ticks[-1] == (20, 190)
    assert dict(pool.run([])) == {}


@pytest.mark.processes
def test_a_process_that_dies_is_told_with_its_shards() -> None:
    pool = ShardPool(open_exit, (), 2, lambda *_: None)
    with pytest.raises(WorkerLostError, match=r"died while shards 4, 5(, \d)* were in work"):
        list(pool.run([4, 5, 6]))


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_task_raises_is_raised(workers: int) -> None:
    with pytest.raises(KeyError):
        list(ShardPool(open_broken, (), workers, lambda *_: None).run(range(4)))
