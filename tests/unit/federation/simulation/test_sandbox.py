"""Strategies tried on made-up steps: same samples for every chain, same figures as a simulation."""

import numpy as np
import pytest

from federation.model.cost import CostSpec
from federation.simulation.length_statistics import SourceLengths
from federation.simulation.sandbox import Sandbox
from msd_client.contract.errors import (
    ConfigError,
    MeshMismatchError,
    UsageError,
)
from tests.unit.msd_daemon.config.test_mixture_pages import blocks

COST = CostSpec("transformer", 300, 1)


def lengths_of(seed=0, count=800):
    rng = np.random.default_rng(seed)
    return {name: 1 + rng.geometric(0.004, count) for name in ("web", "code")}


def sandbox_of(**options):
    options = {"rows": 64, "row_tokens": 1024, "mesh": {"dp": 8}, "cost": COST} | options
    return Sandbox(lengths_of(), **options)


def balanced(graph, step=0, objective="step"):
    graph = graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model)
    return graph.balance("greedy", objective)


def test_chains_on_a_step_hold_the_same_samples_and_take_nothing():
    sandbox = sandbox_of()
    made = [
        balanced(sandbox.graph()).plan(),
        balanced(sandbox.graph(), objective="microbatch").plan(),
        sandbox.graph().mix(sandbox.graph().schedule).distribute("dp").plan(),
    ]
    assert len({one.membership for one in made}) == 1
    assert len({one.placement.dp.tobytes() for one in made}) == 3
    assert sandbox.step == 0
    assert sandbox.next_step().membership_digest == made[0].membership.hex()[:32]
    assert sandbox.step == 1
    second = balanced(sandbox.graph()).plan()
    assert second.membership != made[0].membership
    assert sandbox.next_step("random").membership_digest == second.membership.hex()[:32]


def test_chains_that_draw_otherwise_leave_no_trace():
    touched, untouched = sandbox_of(), sandbox_of()
    for step in range(6):
        graph = touched.graph()
        held = graph.delay(over_tokens=500, steps=4).mix(graph.schedule).distribute("dp").plan()
        plain = balanced(touched.graph()).plan()
        assert (held.membership == plain.membership) == (step % 4 == 0)
        wanted = untouched.next_step("native")
        assert plain.membership.hex()[:32] == wanted.membership_digest
        assert touched.next_step("native").stream_digest == wanted.stream_digest


def test_a_graph_of_a_step_that_is_planned_is_refused():
    sandbox = sandbox_of()
    graph = sandbox.graph()
    sandbox.next_step()
    with pytest.raises(UsageError, match="of step 0, which is planned"):
        graph.mix(graph.schedule)


def test_a_run_is_from_the_first_step_whatever_was_planned():
    sandbox = sandbox_of(mesh={"dp": 4, "pp": 4}, objective="pipeline")
    before = sandbox.run(steps=8)
    sandbox.next_step(balanced)
    assert sandbox.run("balanced", 8).plain() == before.plain()
    assert before.steps == 8
    assert (before.speedup_over_native > 1).all()
    native = sandbox.run("native", 8)
    assert (native.speedup_over_native == 1).all()
    assert np.array_equal(native.drawn_tokens, before.drawn_tokens)
    assert native.imbalance.mean() > before.imbalance.mean()
    assert sandbox.step == 1


def test_weights_nodes_and_further_fields_of_a_batch():
    sandbox = sandbox_of(
        weights={"web": 3, "code": 1},
        nodes=[rank // 4 for rank in range(8)],
        microbatch_rows=2,
        packing="best_fit_even",
    )
    found = sandbox.run(steps=6)
    tokens, _ = found.realised
    assert tokens[0] == pytest.approx(0.75, abs=0.03)
    assert found.crossing_bytes.min() >= 0
    assert sandbox.next_step().microbatch_count == 4


def test_varlen_steps_have_tokens_in_place_of_rows():
    sandbox = Sandbox(lengths_of(), step_tokens=50_000, row_tokens=2048, mesh={"dp": 3}, cost=COST)
    plan = sandbox.next_step()
    assert 50_000 <= plan.length.sum() < 52_048
    graph = balanced(sandbox.graph(), objective="pipeline")
    graph.plan()
    assert graph.speedup_over_native() > 0.9


def test_what_does_not_fit_is_refused():
    known = {"web": SourceLengths.of([100] * 50, records=50)}
    sandbox = Sandbox(known, rows=4, row_tokens=1000)
    assert sandbox.next_step().rows == 4
    with pytest.raises(ConfigError, match=r"rows \(4\) or step_tokens \(9\), not both"):
        Sandbox(known, rows=4, row_tokens=1000, step_tokens=9)
    with pytest.raises(ConfigError, match="no source has this name"):
        Sandbox(known, rows=4, row_tokens=1000, weights={"web": 1, "wob": 2})
    with pytest.raises(MeshMismatchError):
        Sandbox(known, rows=4, row_tokens=1000, mesh={"dp": 3})
    with pytest.raises(ConfigError, match="unknown"):
        sandbox.next_step("greedy")
    with pytest.raises(UsageError, match="comes after plan"):
        sandbox.graph().speedup_over_native()


@pytest.mark.parametrize(
    ("options", "named"),
    [({"row_tokens": -1}, "row_tokens is -1"), ({"row_tokens": True}, "row_tokens is True"),
     ({"row_tokens": 8.5}, "row_tokens is 8.5"), ({"rows": 0}, "rows is 0"),
     ({"rows": "4"}, "rows is '4'"), ({"rows": None}, "not both: give one"),
     ({"rows": None, "step_tokens": -5}, "step_tokens is -5")],
)  # fmt: skip
def test_sizes_that_are_none_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        Sandbox({"web": [100]}, **({"rows": 4, "row_tokens": 1000} | options))


@pytest.mark.parametrize(
    ("lengths", "named"),
    [({"web": [9], "code": ["a"]}, "source code: entry 0 of lengths is 'a'"), ({}, "lengths is"),
     ([5], r"lengths is \[5\]")],
)  # fmt: skip
def test_lengths_that_are_none_are_refused(lengths, named):
    with pytest.raises(ConfigError, match=named):
        Sandbox(lengths, rows=4, row_tokens=1000)


@pytest.mark.parametrize("returned", [None, 5, "graph"])
def test_a_strategy_returns_a_graph(returned):
    def forgetful(graph, step):
        return returned

    sandbox = sandbox_of()
    with pytest.raises(
        UsageError, match=r"strategy forgetful returned .* at step 0: return the graph"
    ):
        sandbox.next_step(forgetful)
    with pytest.raises(UsageError, match="strategy forgetful returned"):
        sandbox.run(forgetful, 2)
    with pytest.raises(UsageError, match="pass a name, or a function"):
        sandbox.next_step(None)
    assert sandbox.next_step().step == 0


def test_the_page_shows_what_works(capsys):
    (block,) = [block for block in blocks("planning.md", "python") if "Sandbox(" in block]
    exec(block, {})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "mix(schedule) -> distribute(dp) -> cost(cost_model) -> balance(greedy, step)"
    assert len(said) == 6
