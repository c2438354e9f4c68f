"""What nodes owe each other for steps, where sources change hands while steps are under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from federation.model.exports import Export
from federation.model.owners import Owners
from msd_daemon.core.drawn_line import Placed, PlacedExport, Places
from msd_daemon.core.shared_steps import SharedSteps, Want

A, B, C = range(3)
BEFORE = Owners(((A,), (B,), (C,)), (1, 1, 1))
AFTER = Owners(((A,), (B,), (A,)), (1, 1, 1))
"""Node C is gone: A loads what it loaded."""


class CountedPool:
    def __init__(self) -> None:
        self.unpinned: list[Any] = []

    def unpin_step(self, chunk: Any) -> None:
        self.unpinned.append(chunk)


@pytest.fixture
def pool() -> Any:
    return CountedPool()


def plan(step: int) -> Any:
    """A part with a segment of each source."""
    return SimpleNamespace(
        step=step, source=np.array([0, 1, 2], np.int32), block_key=np.zeros(3, np.int64)
    )


def placed(step: int, consumer: int) -> Placed:
    column = np.zeros(1, np.int32)
    export = Export(consumer, column + 2, np.zeros(1, np.int64), column, column, column + 4)
    given = PlacedExport(export, Places(["chunk"], [0], [0]))
    return Placed(step, None, Places([], [], []), (given,))


def after_c(pool: Any, node: int) -> SharedSteps:
    shared = SharedSteps(pool, BEFORE, node)
    assert shared.nodes_gone([C]) == [C]
    shared.change(AFTER, 5)
    return shared


def test_who_lacks_something_wants_it_of_the_new_owner(pool: Any) -> None:
    shared = after_c(pool, B)
    shared.want_again(plan(6), np.array([2]))
    assert list(shared.wants) == [Want(6, A, 1)]
    assert not shared.needless


def test_who_has_all_of_a_step_tells_the_new_owner_so(pool: Any) -> None:
    shared = after_c(pool, B)
    shared.want_again(plan(6), np.zeros(0, np.int64))
    assert not shared.wants
    # Not of what A gave before the change, too: that was taken, and said to be.
    assert list(shared.needless) == [Want(6, A, 1)]


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_consumer_has_is_not_kept_for_it(pool: Any, is_first: bool) -> None:
    shared = after_c(pool, A)
    if is_first:
        shared.declined(6, B, 1)
        shared.offer(placed(6, B), 1)
        assert not shared.offers
    else:
        shared.offer(placed(6, B), 1)
        assert shared.owes(6)
        assert shared.acked(6, B, 1)
    assert not shared.owes(6)
    assert pool.unpinned == ["chunk"]
    shared.offer(placed(7, B), 1)
    assert shared.owes(7), "another step is another parcel"


def test_what_was_declined_is_forgotten_behind_the_step(pool: Any) -> None:
    shared = after_c(pool, A)
    for step in range(5, 9):
        shared.declined(step, B, 1)
    shared.released(7)
    assert shared._declined == {(8, B, 1)}
