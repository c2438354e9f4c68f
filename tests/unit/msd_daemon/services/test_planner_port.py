"""Orders to planners that die, take over, or answer for a generation that is over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from federation.messages import Envelope, JobOpened, OpenJob
from msd_client.contract.errors import PlannerUnavailableError, SessionClosedError
from msd_daemon.services.planner_port import PlannerPort


class Link:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, job: str, generation: int, message: Any, frames: tuple[bytes, ...] = ()) -> None:
        self.sent.append((generation, message))


def order(step=None):
    return OpenJob({}, [], b"", 4, "", step)


def opened(generation, step=3):
    return Envelope("j", generation, 1, 0, JobOpened(step, [], [], [], [], []))


@pytest.fixture
def links():
    return [Link(), Link(), Link()]


@pytest.fixture
def port(links):
    made = PlannerPort("j", links[0])
    made.next_generation()
    return made


async def test_an_order_that_a_planner_died_over_is_told_the_next_one(port, links):
    opening = asyncio.ensure_future(port.open(order()))
    await asyncio.sleep(0)
    assert not port.replaced(links[1])
    assert [message for _, message in links[1].sent] == [order()]
    port.take(opened(1))
    assert (await opening).step == 3


async def test_a_planner_that_has_the_order_is_not_told_it_twice(port, links):
    opening = asyncio.ensure_future(port.open(order()))
    await asyncio.sleep(0)
    assert not port.replaced(links[0])
    port.take(opened(1))
    await opening
    assert not port.replaced(links[0])
    assert len(links[0].sent) == 1
    assert port.replaced(links[1])


async def test_whoever_resumes_hears_the_answer_before_what_follows(port, links):
    heard: list[int] = []
    opening = asyncio.ensure_future(port.open(order(3), lambda found: heard.append(found.step)))
    await asyncio.sleep(0)
    port.take(opened(1, 7))
    assert heard == [7]
    assert (await opening).step == 7


async def test_a_generation_gives_up_the_opening_of_the_one_before(port, links):
    opening = asyncio.ensure_future(port.open(order(3)))
    await asyncio.sleep(0)
    assert port.next_generation() == 2
    with pytest.raises(PlannerUnavailableError):
        await opening
    port.take(opened(1))  # too late
    later = asyncio.ensure_future(port.open(order()))
    await asyncio.sleep(0)
    port.take(opened(1, 5))
    assert not later.done()
    port.take(opened(2, 6))
    assert (await later).step == 6


async def test_a_job_that_ends_waits_for_no_answer(port):
    opening = asyncio.ensure_future(port.open(order(3)))
    await asyncio.sleep(0)
    port.fail(SessionClosedError("over"))
    with pytest.raises(SessionClosedError):
        await opening


async def test_a_restart_that_was_cut_short_is_told_anew(port, links):
    heard: list[int] = []
    opening = asyncio.ensure_future(port.open(order(3), lambda found: heard.append(found.step)))
    await asyncio.sleep(0)
    opening.cancel()  # its planner died too
    await asyncio.gather(opening, return_exceptions=True)
    port.take(opened(1))
    assert heard == []
    assert port.replaced(links[2])
