"""What a planner is told, by the planner that died and by the one that takes over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from federation.messages import ChunksPublished, StepReleased, StepSeconds
from federation.model.chunk import ChunkMeta
from federation.model.job import BatchRule
from msd_daemon.services import planner_feed
from msd_daemon.services.planner_feed import PlannerFeed
from tests.support.metadata import make_job, make_spec

START = [[0, 0], [0, 0]]


class Wire:
    """Keeps what was sent, and runs what was put off."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.later: list[Any] = []

    def send_planner(self, message: Any, frames: tuple[bytes, ...] = ()) -> None:
        self.sent.append(message)

    def turn(self) -> list[Any]:
        """End a turn of the loop; return what was sent since the last."""
        while self.later:
            self.later.pop(0)()
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def feed(wire):
    job = make_job([make_spec("a", 2, "streaming"), make_spec("b", 4)], BatchRule(4, 8))
    return PlannerFeed(wire, job, first_step=5, released_every_steps=2, call_soon=wire.later.append)


def chunk(source, block_key, first, count, *, is_end=False, is_lane_end=False):
    return ChunkMeta(
        source, block_key, first, np.ones(count, np.int32), np.zeros(count, np.uint8), is_end, 0,
        is_lane_end,
    )  # fmt: skip


def plan_behind(*cursors):
    return SimpleNamespace(cursors_after=lambda: list(cursors))


def places(messages):
    return [
        (source, block_key, first, is_lane_end)
        for message in messages
        if isinstance(message, ChunksPublished)
        for source, block_key, first, _, _, _, is_lane_end, _, _ in message.chunks
    ]


def test_the_chunks_of_a_turn_go_in_one_message(wire, feed):
    feed.chunk_came(chunk(0, 0, 0, 3))
    feed.chunk_came(chunk(1, 0, 0, 3))
    assert wire.sent == []
    (message,) = wire.turn()
    assert places([message]) == [(0, 0, 0, False), (1, 0, 0, False)]
    assert wire.turn() == []


def test_what_is_read_while_another_planner_replays_comes_behind_what_is_here(wire, feed):
    feed.chunk_came(chunk(1, 0, 0, 3, is_end=True))
    wire.turn()
    feed.plan_came(plan_behind((1, 0, 1, 4)))
    feed.chunk_came(chunk(1, 1 << 16, 0, 3))  # its flush is due, and finds no planner
    feed.planner_away()
    assert wire.turn() == []
    feed.chunk_came(chunk(1, 2 << 16, 0, 3))
    assert wire.turn() == []
    feed.chunk_came(chunk(1, 3 << 16, 0, 3))
    feed.planner_back(4, START)
    sent = wire.turn()
    assert places(sent) == [(1, window << 16, 0, False) for window in range(4)]
    assert sent[-1] == StepReleased(4)
    feed.chunk_came(chunk(1, 4 << 16, 0, 3))
    assert places(wire.turn()) == [(1, 4 << 16, 0, False)]


def test_the_end_of_a_lane_is_told_though_its_last_block_was_drawn(wire, feed):
    feed.chunk_came(chunk(0, 0, 0, 3, is_end=True, is_lane_end=True))
    feed.chunk_came(chunk(0, 1, 0, 3, is_end=True))
    feed.plan_came(plan_behind((0, 1, 0, 1)))
    for _ in range(2):  # and to the one behind it
        feed.planner_away()
        feed.planner_back(4, START)
        assert places(wire.turn()) == [(0, 1, 0, False), (0, 2, 0, True)]
    feed.plan_came(plan_behind((0, 3, 0, 1)))
    feed.planner_away()
    feed.planner_back(4, START)
    assert places(wire.turn()) == []


def test_the_end_of_a_lane_is_told_to_a_planner_that_stands_behind_it(wire):
    """What other nodes may lack is kept longer than what a planner that takes over needs."""
    job = make_job([make_spec("a", 2, "streaming", interleave=2)], BatchRule(4, 8))
    feed = PlannerFeed(
        wire, job, first_step=5, released_every_steps=2, kept_steps=9, call_soon=wire.later.append
    )
    feed.chunk_came(chunk(0, 0, 0, 3, is_end=True))
    feed.chunk_came(chunk(0, 1, 0, 3, is_end=True, is_lane_end=True))
    feed.chunk_came(chunk(0, 2, 0, 3, is_end=True))
    feed.chunk_came(chunk(0, 4, 0, 3, is_end=True))
    wire.turn()
    feed.plan_came(plan_behind((0, 2, 1, 4)))
    feed.planner_away()
    feed.planner_back(4, [[2, 1]])
    assert places(wire.turn()) == [(0, 2, 0, False), (0, 3, 0, True), (0, 4, 0, False)]
    feed.planner_away()
    feed.planner_back(4, [[1, 1]])
    assert places(wire.turn()) == [(0, 1, 0, True), (0, 2, 0, False), (0, 4, 0, False)]


def test_a_dropped_chunk_is_told_all_the_same(wire, feed):
    """Its planner knew of it too; who needs it has it read again."""
    feed.chunk_came(chunk(0, 0, 0, 3))
    feed.chunk_came(chunk(0, 0, 0, 2))  # read again into a smaller piece
    feed.planner_away()
    feed.planner_back(4, START)
    (message, _) = wire.turn()
    assert [row[3] for row in message.chunks] == [3]


def test_released_steps_are_told_at_once_and_all_of_them_to_a_new_planner(wire, feed):
    feed.released(5)
    assert wire.turn() == []
    feed.released(6)
    assert wire.turn() == [StepReleased(6)]
    feed.planner_away()
    feed.released(9)
    assert wire.turn() == []
    feed.planner_back(9, START)
    assert wire.turn() == [StepReleased(9)]
    feed.released(10)
    assert wire.turn() == []
    feed.released(11)
    assert wire.turn() == [StepReleased(11)]


def test_times_are_bounded_and_lost_with_their_planner(wire, feed, monkeypatch):
    monkeypatch.setattr(planner_feed, "REPORTS_A_TURN_MAX", 2)
    for rank in range(3):
        feed.step_seconds(7, rank, 10)
    assert wire.turn() == [StepSeconds([[7, 0, 10], [7, 1, 10]])]
    feed.step_seconds(8, 0, 10)
    feed.planner_away()
    assert wire.turn() == []
    feed.planner_back(7, START)
    assert wire.turn() == [StepReleased(7)]


def test_many_chunks_go_in_several_messages(wire, feed, monkeypatch):
    monkeypatch.setattr(planner_feed, "CHUNKS_A_MESSAGE_MAX", 2)
    for block in range(5):
        feed.chunk_came(chunk(0, block, 0, 3, is_end=True))
    assert [len(message.chunks) for message in wire.turn()] == [2, 2, 1]


def test_a_closed_feed_is_silent(wire, feed):
    feed.chunk_came(chunk(0, 0, 0, 3))
    feed.close()
    assert wire.turn() == []
