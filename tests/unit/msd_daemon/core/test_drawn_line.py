"""Plans on their way through own records: what another node's are is not waited for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from federation.model.exports import Export
from federation.model.job import BatchRule
from federation.model.plan import StepPlan
from msd_daemon.core.drawn_line import DrawnLine
from msd_daemon.core.pool import PoolState
from tests.support.metadata import initial_state, make_job, make_spec, random_corpus
from tests.support.planned_job import PlannedJob


@pytest.fixture
def plans(tmp_path: Path) -> list[StepPlan]:
    specs = [make_spec("a", 3), make_spec("b", 2)]
    corpora = [random_corpus(spec, 5, lambda rng: rng.randint(1, 20), 3, 12) for spec in specs]
    planned = PlannedJob(tmp_path, make_job(specs, BatchRule(2, 16)), corpora)
    planned.begin(initial_state(planned.job))
    found = [planned.read() for _ in range(3)]
    planned.close()
    return found


def all_of(plan: StepPlan) -> np.ndarray:
    return np.arange(len(plan.source))


def test_sources_that_a_dead_node_shared_are_not_waited_for(plans: list[StepPlan]) -> None:
    """A source in parts over several nodes is dealt anew when one dies: the old parts' records that
    were not read yet come from whom they belong to now."""
    line = DrawnLine(PoolState(1 << 20), {}, lambda _source, _block_key: True)
    for plan in plans:
        exports = [Export.of_plan(plan, all_of(plan), 1)]
        line.add_plan(plan, all_of(plan), exports)
    assert line.take() is None
    left: list[str] = []
    line.leave(frozenset({0, 1}), plans[0].step, plans[-1].step + 1, lambda: left.append("left"))
    for plan in plans:
        placed = line.take()
        assert placed is not None
        assert placed.step == plan.step
        assert placed.own is not None
        assert len(placed.own) == 0
        assert placed.exports == ()
    assert left == ["left"]
    assert line.waiting_count == 0


def test_plans_before_a_change_are_waited_for(plans: list[StepPlan]) -> None:
    line = DrawnLine(PoolState(1 << 20), {}, lambda _source, _block_key: True)
    for plan in plans:
        line.add_plan(plan, all_of(plan))
    left: list[str] = []
    line.leave(frozenset({0, 1}), plans[1].step, plans[-1].step + 1, lambda: left.append("left"))
    assert line.take() is None
    assert line.missing() is not None
    assert not left
