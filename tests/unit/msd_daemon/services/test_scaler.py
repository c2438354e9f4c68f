"""The scaler between what it sees and who carries it out: shares ahead, deals, workers, refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from federation.model.job import BatchRule, MixturePoint, MixtureSchedule
from msd_client.contract.errors import ConfigError, NotFoundError
from msd_daemon.core.loader_costs import LoaderCosts, ReadCost
from msd_daemon.services import scaler as scaler_module
from msd_daemon.services.scaler import Scaler
from msd_daemon.services.source_loaders import Reading
from tests.support.metadata import make_job, make_spec

SECOND_NS = 1_000_000_000
TOKENS = 100
"""Of a step."""


class World:
    """Fakes of a generation and its workers; ranks take ten steps a second."""

    def __init__(
        self, points: tuple[MixturePoint, ...], unit: Any = "tokens", loaders: int = 2
    ) -> None:
        specs = [make_spec("a"), make_spec("b")]
        job = make_job(specs, BatchRule(4, 25))
        self.job = replace(job, mixture=MixtureSchedule(unit, points))
        self.costs = LoaderCosts(2)
        self.readings = [Reading((0,), 1.0, is_parked=False, blocks=50) for _ in specs]
        self.read_by: list[list[float]] = []
        self.deals: list[tuple[int, tuple[int, ...]]] = []
        self.ahead: list[tuple[int, int]] = []
        self.parked: list[int] = []
        self.generation: Any = SimpleNamespace(
            opened=SimpleNamespace(step=0, shares=[0.5, 0.5]),
            totals=SimpleNamespace(tokens=0, steps=0, wanted=[], skipped_steps=0),
            steps=SimpleNamespace(released_step=-1),
            is_hungry=False, moves_total=0, next_plan_step=0,
            awaited_sources=frozenset(), is_worker_busy=lambda _worker: True,
            waiting_events=lambda _step: ([], []),
            reading=lambda source: self.readings[source],
            read_by=self.read_by.append,
            deal_source=self.deal_source,
            fetch_ahead=lambda source, blocks: self.ahead.append((source, blocks)),
            park_sources=self.parked.extend,
            may_leave=lambda _worker: self.may_leave,
            state_bytes=b"",
        )  # fmt: skip
        self.may_leave = True
        self.takes_deals = True
        numbers = list(range(loaders))
        self.workers: Any = SimpleNamespace(loaders=numbers, drop_loader=numbers.pop)
        self.started: list[Any] = []
        self.now_ns = 0

    def deal_source(self, source: int, workers: tuple[int, ...]) -> bool:
        self.deals.append((source, workers))
        if self.takes_deals:
            self.readings[source] = self.readings[source]._replace(workers=tuple(workers))
        return self.takes_deals

    def made(self, loaders_max: int = 2, *, scaling: bool = True) -> Scaler:
        config: Any = SimpleNamespace(
            scaling=scaling, loader_workers=2, loader_workers_min=1, loader_workers_max=loaders_max
        )
        owner: Any = SimpleNamespace(generation=self.generation, is_over=False)
        return Scaler(owner, self.job, config, self.workers, self.costs, self._do_soon)

    def _do_soon(self, work: Any) -> None:
        self.started.append(work)
        work.close()

    def run(self, scaler: Scaler, seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            self.now_ns += SECOND_NS // 2
            steps = 10 * self.now_ns // SECOND_NS
            self.generation.steps.released_step = steps - 1
            self.generation.next_plan_step = self.generation.totals.steps = steps
            self.generation.totals.tokens = TOKENS * steps
            scaler.look(self.generation, self.now_ns)

    def cost(self, source: int, ns_per_token: int, tokens_per_sample: int = 1) -> None:
        for _ in range(40):
            tokens = 10 * tokens_per_sample
            self.costs.add(source, 10, tokens, ReadCost(cpu_ns=ns_per_token * tokens))


@pytest.fixture(autouse=True)
def _no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    state = SimpleNamespace(
        progress=np.zeros((32, 2), np.int64), dropped=np.zeros((32, 2), np.int64)
    )
    monkeypatch.setattr(scaler_module, "StreamState", SimpleNamespace(decode=lambda _: state))


EQUAL = MixturePoint(0, {"a": 1, "b": 1})


def within_a_loop(act: Any) -> None:
    async def run() -> None:
        act()

    asyncio.run(run())


def test_a_heavy_source_is_dealt_to_more_workers_and_the_reason_is_kept() -> None:
    def act() -> None:
        world = World((EQUAL,))
        scaler = world.made()
        world.cost(0, 3_000_000)  # 1000 tokens a second, half of them: 1.5 workers
        world.cost(1, 1_000)
        world.run(scaler, 30)
        assert world.readings[0].workers == (0, 1)
        status = scaler.status()
        assert status["sources"][0]["load"] == pytest.approx(1.5, rel=0.15)
        assert status["last"][0]["source"] == "a"
        scaler.close()

    within_a_loop(act)


def test_sources_are_read_by_what_comes_before_it_is_there() -> None:
    def act() -> None:
        flip = MixturePoint(300, {"a": 0, "b": 1})
        world = World((EQUAL, flip))
        scaler = world.made()
        world.run(scaler, 10)
        assert world.read_by == [[0.5, 0.5]]
        world.run(scaler, 9)  # 12 s before the flip it is seen
        assert world.read_by[-1] == [0.5, 1.0]
        scaler.close()

    within_a_loop(act)


def test_shares_of_samples_become_loads_by_the_samples_lengths() -> None:
    def act() -> None:
        world = World((EQUAL,), unit="samples")
        scaler = world.made()
        world.cost(0, 1_000_000, tokens_per_sample=9)
        world.cost(1, 1_000_000, tokens_per_sample=1)
        world.run(scaler, 30)
        loads = [entry["load"] for entry in scaler.status()["sources"]]
        assert loads[0] == pytest.approx(9 * loads[1], rel=0.1)
        scaler.close()

    within_a_loop(act)


def test_a_deal_that_could_not_be_said_is_tried_again() -> None:
    def act() -> None:
        world = World((EQUAL,))
        world.takes_deals = False
        scaler = world.made()
        world.cost(0, 3_000_000)
        world.run(scaler, 8)
        assert len(world.deals) > 2
        assert scaler.status()["last"] == []
        scaler.close()

    within_a_loop(act)


def test_workers_are_started_in_the_background_and_leave_only_when_they_may() -> None:
    def act() -> None:
        world = World((EQUAL,))
        scaler = world.made(loaders_max=4)
        world.cost(0, 5_000_000)
        world.run(scaler, 8)
        assert len(world.started) == 1  # one start at a time
        world.may_leave = False
        scaler.allow(1)
        world.run(scaler, 2)
        assert len(world.workers.loaders) == 2
        world.may_leave = True
        world.run(scaler, 2)
        assert len(world.workers.loaders) == 1
        scaler.close()

    within_a_loop(act)


def test_switched_off_it_moves_what_was_asked_for_alone() -> None:
    def act() -> None:
        world = World((EQUAL,))
        scaler = world.made(scaling=False)
        world.cost(0, 3_000_000)
        world.cost(1, 1_000)
        world.run(scaler, 8)
        assert world.deals == []
        scaler.pin("b", 2)
        assert {source for source, _ in world.deals} == {1}
        assert world.read_by  # it reads ahead of the schedule all the same
        scaler.close()

    within_a_loop(act)


def test_what_cannot_be_is_refused_by_name_and_limit() -> None:
    def act() -> None:
        scaler = World((EQUAL,)).made(loaders_max=4)
        with pytest.raises(NotFoundError, match="a, b"):
            scaler.pin("c", 1)
        with pytest.raises(ConfigError, match="1 to 4"):
            scaler.pin("a", 5)
        with pytest.raises(ConfigError, match="one of 0 to 1 for each"):
            scaler.pin("a", 2, [0, 7])
        with pytest.raises(ConfigError, match="1 to 4"):
            scaler.allow(5)
        scaler.close()

    within_a_loop(act)


def test_what_a_profile_says_narrows_no_deal_before_this_run_measured_it() -> None:
    def act() -> None:
        world = World((EQUAL,))
        world.readings = [Reading((0, 1), 1.0, is_parked=False, blocks=1) for _ in range(2)]
        for source in range(2):
            world.costs.know(source, 1000, 1000, ReadCost(cpu_ns=1_000_000))
        scaler = world.made()
        world.run(scaler, 20)
        assert world.deals == []
        world.cost(0, 1_000)
        world.run(scaler, 30)
        assert [source for source, _ in world.deals] == [0]
        scaler.close()

    within_a_loop(act)


def test_a_source_that_ranks_wait_for_gets_more_than_its_load_says() -> None:
    def act() -> None:
        world = World((EQUAL,))
        scaler = world.made()
        world.cost(0, 10_000)
        world.cost(1, 10_000)
        world.generation.is_hungry = True
        world.generation.awaited_sources = frozenset({1})
        world.run(scaler, 10)
        assert [(source, sorted(workers)) for source, workers in world.deals] == [(1, [0, 1])]
        assert "ranks wait for it" in scaler.status()["last"][0]["reason"]
        scaler.close()

    within_a_loop(act)


def test_a_move_by_hand_is_told_as_pending_until_its_former_loaders_are_done() -> None:
    def act() -> None:
        world = World((EQUAL,))
        scaler = world.made()
        world.takes_deals = False
        assert scaler.pin("b", 2)["is_pending"]
        world.takes_deals = True
        scaler.pin("b", 2)
        assert scaler.status()["sources"][1]["partitions_pending"] is None
        world.readings[1] = world.readings[1]._replace(is_moving=True)
        assert scaler.status()["sources"][1]["partitions_pending"] == 2
        assert scaler.pin("b", 2)["is_pending"]
        world.readings[1] = world.readings[1]._replace(is_moving=False)
        assert not scaler.pin("b", 2)["is_pending"]
        assert scaler.status()["sources"][0]["partitions_pending"] is None
        scaler.close()

    within_a_loop(act)
