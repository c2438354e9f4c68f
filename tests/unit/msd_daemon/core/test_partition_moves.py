"""Where partitions change hands: behind all that was read, inside the window where it can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from msd_client.contract.position import pack_block_key
from msd_daemon.core.partition_moves import NewPartition, plan_move
from msd_daemon.core.readahead import LoaderState


def state(part: int, parts: int, window: int, block: int, **changes: object) -> LoaderState:
    made = LoaderState(
        part, part, 0, part, parts, pack_block_key(0, window, block), 3,
        has_told=True, window_blocks=10,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def wanted(*workers: int) -> list[NewPartition]:
    return [NewPartition(part, len(workers), worker) for part, worker in enumerate(workers)]


def test_the_watermark_is_behind_the_loader_that_is_furthest():
    move = plan_move([state(0, 2, 1, 4), state(1, 2, 1, 7)], wanted(0, 1, 2), 0)
    assert move is not None
    assert move.watermark == pack_block_key(0, 1, 8)
    assert len(move.leaving) == 2
    assert [it.worker for it in move.coming] == [0, 1, 2]


def test_it_is_behind_the_block_that_is_read_now_too():
    reading = state(0, 1, 1, 4, is_block_end=True, is_granted=True)
    move = plan_move([reading], wanted(0, 1), 0)
    assert move is not None
    assert move.watermark == pack_block_key(0, 1, 6)


def test_behind_the_last_block_of_a_window_it_is_the_next_window():
    move = plan_move([state(0, 1, 1, 9)], wanted(2, 3), 0)
    assert move is not None
    assert move.watermark == pack_block_key(0, 2, 0)


def test_of_a_stream_it_is_a_block_of_each_lane_further():
    move = plan_move([state(0, 1, 0, 5, window_blocks=0)], wanted(0, 1), 4)
    assert move is not None
    assert move.watermark == pack_block_key(0, 0, 10)


def test_of_the_same_partitions_only_those_leave_that_have_another_worker():
    move = plan_move([state(0, 2, 1, 4), state(1, 2, 1, 7)], wanted(3, 1), 0)
    assert move is not None
    assert [it.part for it in move.leaving] == [0]
    assert [(it.part, it.worker) for it in move.coming] == [(0, 3)]
    assert move.watermark == pack_block_key(0, 1, 5)


def test_who_reads_what_is_wanted_stays():
    move = plan_move([state(0, 2, 1, 4), state(1, 2, 1, 7)], wanted(0, 1), 0)
    assert move is not None
    assert (move.leaving, move.coming) == ((), ())


@pytest.mark.parametrize("told", [[False], [True, False]])
def test_of_whom_nothing_came_nobody_knows_where_it_is(told):
    loaders = [state(part, len(told), 1, 4, has_told=has) for part, has in enumerate(told)]
    assert plan_move(loaders, wanted(2, 3, 4), 0) is None


def test_a_partition_without_any_block_holds_nobody_up():
    empty = state(1, 2, 0, 0, has_told=False, is_dry=True)
    move = plan_move([state(0, 2, 1, 4), empty], wanted(0), 0)
    assert move is not None
    assert move.watermark == pack_block_key(0, 1, 5)


def test_those_that_leave_already_are_let_be():
    leaving = state(0, 1, 1, 2, until=pack_block_key(0, 1, 3))
    move = plan_move([leaving, state(0, 2, 1, 4), state(1, 2, 1, 3)], wanted(5), 0)
    assert move is not None
    assert leaving not in move.leaving
