"""A job on several nodes: the plans are a single host's, each node is told its part of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from federation.cluster_messages import (
    AwaitedRanks,
    JobClosed,
    NodeRefused,
    StartRefused,
    StopJob,
)
from federation.messages import JobFailed
from federation.model.job import BatchRule
from msd_client.contract.errors import (
    ErrorBudgetExceededError,
    SessionClosedError,
    WorkerLostError,
    encode_error,
)
from msd_client.contract.state import StreamState
from tests.support.fake_cluster import FakeCluster
from tests.support.metadata import initial_state, make_job, make_spec, random_corpus
from tests.support.planned_job import PlannedJob

STEPS = 60


@pytest.fixture(scope="module")
def case() -> Any:
    specs = [
        make_spec("a", 3), make_spec("b", 2), make_spec("c", 4, "streaming", interleave=2),
        make_spec("d", 3),
    ]  # fmt: skip
    corpora = [random_corpus(spec, 5, lambda rng: rng.randint(1, 20), 3, 12) for spec in specs]
    return make_job(specs, BatchRule(8, 32)), corpora


@pytest.fixture
def clusters(tmp_path: Path, case: Any) -> Iterator[Callable[..., FakeCluster]]:
    made: list[FakeCluster] = []

    def make(ranks: dict[str, list[int]], seed: int, other: Any = None) -> FakeCluster:
        made.append(FakeCluster(tmp_path, *(other or case), ranks, seed))
        return made[-1]

    yield make
    for cluster in made:
        cluster.planner.abandon()


def single_host(folder: Path, case: Any, state: StreamState, steps: int, dp: int = 4) -> list[Any]:
    """Return the plans of one host."""
    job, corpora = case
    planned = PlannedJob(folder / "single", job, corpora)
    planned.begin(state, dp=dp)
    plans = [planned.read() for _ in range(steps)]
    planned.close()
    return plans


def rows_of(plan: Any) -> list[Any]:
    columns = list(
        zip(
            plan.row.tolist(), plan.source.tolist(), plan.block_key.tolist(), plan.index.tolist(),
            plan.offset.tolist(), plan.length.tolist(), strict=True,
        )
    )  # fmt: skip
    return [[it[1:] for it in columns if it[0] == row] for row in range(plan.rows)]


def check(cluster: FakeCluster, plans: list[Any], steps: range) -> None:
    for step in steps:
        rows = cluster.rows(step)
        assert sorted(map(tuple, rows.values())) == sorted(
            tuple(content) for content in rows_of(plans[step])
        )
        for node in cluster.nodes.values():
            assert node.plans[step].stream_digest == plans[step].stream_digest
            assert node.plans[step].delta.encode() == plans[step].delta.encode()
        cluster.check_exports(step)


RANKS = {
    "two": {"n0": [0, 1], "n1": [2, 3]},
    "loader": {"n0": [0, 1, 2, 3], "n1": [], "n2": []},
    "uneven": {"n0": [0], "n1": [1, 2, 3], "n2": []},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RANKS)
def test_nodes_together_read_what_one_host_reads(
    tmp_path: Path, case: Any, clusters: Any, name: str, seed: int
) -> None:
    job, _ = case
    state = initial_state(job)
    plans = single_host(tmp_path, case, state, STEPS)
    cluster = clusters(RANKS[name], seed)
    cluster.start(state, {"dp": 4})
    cluster.run(lambda: cluster.steps() >= STEPS)
    check(cluster, plans, range(STEPS))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("at", [0, 1, 17])
def test_a_planner_that_takes_over_goes_on_with_the_same_stream(
    tmp_path: Path, case: Any, clusters: Any, seed: int, at: int
) -> None:
    job, _ = case
    state = initial_state(job)
    plans = single_host(tmp_path, case, state, STEPS)
    cluster = clusters(RANKS["uneven"], seed)
    cluster.start(state, {"dp": 4})
    for step in (at, at + 9, at + 20):
        cluster.run(lambda step=step: cluster.record and cluster.steps() >= step)
        cluster.replace_planner()
    cluster.run(lambda: cluster.steps() >= STEPS)
    check(cluster, plans, range(STEPS))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["n1", "n2"])
def test_a_node_that_is_lost_changes_nothing_for_the_others(
    tmp_path: Path, case: Any, clusters: Any, name: str, seed: int
) -> None:
    job, _ = case
    state = initial_state(job)
    plans = single_host(tmp_path, case, state, STEPS)
    cluster = clusters(RANKS["loader"], seed)
    cluster.start(state, {"dp": 4})
    cluster.run(lambda: cluster.steps() >= 15)
    cluster.nodes["n0"].is_holding = seed % 2 == 1
    for _ in range(10):
        cluster.planner.advance()
    cluster.lose(name)
    cluster.nodes["n0"].is_holding = False
    cluster.run(lambda: cluster.steps() >= STEPS)
    check(cluster, plans, range(20, STEPS))


def test_a_lost_node_and_a_lost_planner_together(tmp_path: Path, case: Any, clusters: Any) -> None:
    job, _ = case
    state = initial_state(job)
    plans = single_host(tmp_path, case, state, STEPS)
    cluster = clusters(RANKS["loader"], 5)
    cluster.start(state, {"dp": 4})
    cluster.run(lambda: cluster.steps() >= 15)
    del cluster.nodes["n2"], cluster.workers["n2"]
    cluster.replace_planner()
    cluster.run(lambda: cluster.steps() >= STEPS)
    check(cluster, plans, range(20, STEPS))


def test_units_of_media_go_only_where_a_first_stage_is(case: Any, clusters: Any) -> None:
    cluster = clusters({"n0": [0, 1], "n1": [2, 3], "n2": []}, 0)
    cluster.start(initial_state(case[0]), {"pp": 2, "dp": 2})
    cluster.run(lambda: cluster.steps() >= 5)
    begin = cluster.nodes["n0"].begin
    assert begin is not None
    given = {
        (begin.nodes[export.consumer], export.has_units)
        for node in cluster.nodes.values()
        for exports in node.exports.values()
        for export in exports
    }
    assert given == {("n0", True), ("n1", False)}


def test_hundreds_of_nodes_that_die_drain_and_join_read_what_one_host_reads(
    tmp_path: Path, clusters: Any
) -> None:
    nodes, steps = 200, 8
    specs = [make_spec(f"s{number}", 3) for number in range(40)]
    corpora = [random_corpus(spec, 5, lambda rng: rng.randint(16, 32), 12, 40) for spec in specs]
    case = make_job(specs, BatchRule(nodes, 32)), corpora
    state = initial_state(case[0])
    plans = single_host(tmp_path, case, state, steps, dp=nodes)
    ranks = {f"n{rank}": [rank] for rank in range(nodes)} | {
        f"l{number}": [] for number in range(8)
    }
    cluster = clusters(ranks, 7, case)
    cluster.start(state, {"dp": nodes})
    cluster.run(lambda: cluster.steps() >= 3, 200_000, look_every=200)
    assert {node for nodes in cluster.owners().nodes for node in nodes} > set(range(20))
    cluster.lose("l3")
    cluster.workers["n7"] = 0  # drained
    cluster.planner.reassign("node n7 is drained")
    cluster.run(lambda: cluster.steps() >= 5, 200_000, look_every=200)
    cluster.replace_planner()
    cluster.run(lambda: cluster.steps() >= steps, 200_000, look_every=200)
    check(cluster, plans, range(steps - 2, steps))


def failures(cluster: FakeCluster, name: str) -> list[JobFailed]:
    return [it for it in cluster.nodes[name].told if isinstance(it, JobFailed)]


def run_dry(cluster: FakeCluster) -> None:
    """Deliver all that is on its way."""
    cluster.run(lambda: not cluster.to_planner and not any(cluster.to_nodes.values()))


@pytest.mark.parametrize(
    "message",
    [
        NodeRefused(encode_error(WorkerLostError("no loader worker stays alive"))),
        NodeRefused(encode_error(ErrorBudgetExceededError("a fault of data, here alone"))),
        StopJob(encode_error(SessionClosedError("stopped by msdctl stop"))),
    ],
    ids=["worker", "data", "stop"],
)
def test_ranks_elsewhere_are_told_at_once_that_a_node_fails(
    case: Any, clusters: Any, message: Any
) -> None:
    cluster = clusters({"n0": [0, 1], "n1": [2, 3], "n2": []}, 3)
    cluster.may_fail = True
    cluster.start(initial_state(case[0]), {"dp": 4})
    cluster.run(lambda: cluster.steps() >= 15)
    cluster.nodes["n1"].say(message)
    cluster.run(lambda: len(cluster.failed) == 2)
    run_dry(cluster)
    assert not failures(cluster, "n1"), "its ranks know already"
    for name in ("n0", "n2"):
        (failure,) = failures(cluster, name)
        assert failure.next_step == 0
        assert failure.error["message"].endswith(message.error["message"])
        assert failure.error["message"].startswith("node n1: ") == isinstance(message, NodeRefused)


@pytest.mark.parametrize("seed", range(3))
def test_a_loading_node_that_fails_is_replaced_by_the_others(
    tmp_path: Path, case: Any, clusters: Any, seed: int
) -> None:
    state = initial_state(case[0])
    plans = single_host(tmp_path, case, state, STEPS)
    cluster = clusters(RANKS["loader"], seed)
    cluster.start(state, {"dp": 4})
    cluster.run(lambda: cluster.steps() >= 15)
    failing = cluster.nodes["n2"]
    failing.say(NodeRefused(encode_error(WorkerLostError("no loader worker stays alive"))))
    cluster.run(lambda: any(isinstance(it, JobClosed) for it in failing.told))
    del cluster.nodes["n2"]
    cluster.to_nodes.pop("n2")
    cluster.to_planner = deque(it for it in cluster.to_planner if it[0] != "n2")
    del cluster.workers["n2"]
    cluster.run(lambda: cluster.steps() >= STEPS)
    check(cluster, plans, range(20, STEPS))


def test_a_fault_of_data_that_each_node_reaches_is_not_told_twice(case: Any, clusters: Any) -> None:
    cluster = clusters(RANKS["two"], 2)
    cluster.may_fail = True
    cluster.start(initial_state(case[0]), {"dp": 4})
    cluster.run(lambda: cluster.steps() >= 15)
    cluster.planner.fail(ErrorBudgetExceededError("block 3 of web is damaged"))
    cluster.run(lambda: len(cluster.failed) == 2)
    run_dry(cluster)
    for name in cluster.nodes:
        (failure,) = failures(cluster, name)
        assert failure.next_step > 0, "what was planned before is served"
    # One that fails before it gets there, for a reason of its own, ends it for all.
    cluster.nodes["n0"].say(NodeRefused(encode_error(WorkerLostError("its constructor"))))
    run_dry(cluster)
    assert [it.next_step for it in failures(cluster, "n1")][1:] == [0]


def test_ranks_that_start_from_other_states_are_named(
    tmp_path: Path, case: Any, clusters: Any
) -> None:
    job, _ = case
    cluster = clusters(RANKS["two"], 1)
    cluster.nodes["n0"].start(initial_state(job), {"dp": 4})
    planned = single_host(tmp_path, case, initial_state(job), 1)
    cluster.nodes["n1"].start(initial_state(job).apply(planned[0].delta), {"dp": 4})

    def refusals() -> list[StartRefused]:
        told = [message for node in cluster.nodes.values() for message in node.told]
        return [message for message in told if isinstance(message, StartRefused)]

    cluster.run(lambda: len(refusals()) == 2)
    assert all("ranks [2, 3]" in it.error["message"] for it in refusals())


def test_ranks_that_are_missing_are_named(tmp_path: Path, case: Any, clusters: Any) -> None:
    job, _ = case
    cluster = clusters(RANKS["two"], 1)
    cluster.nodes["n0"].start(initial_state(job), {"dp": 4})
    cluster.run(lambda: bool(cluster.nodes["n0"].told))
    assert cluster.nodes["n0"].told == [AwaitedRanks([2, 3])]


def refusals(cluster: FakeCluster, name: str) -> list[str]:
    told = cluster.nodes[name].told
    return [message.error["message"] for message in told if isinstance(message, StartRefused)]


def test_ranks_that_can_not_be_of_one_run_are_refused_after_a_while(
    case: Any, clusters: Any
) -> None:
    job, _ = case
    cluster = clusters({"n0": [0, 1, 2, 3], "n1": []}, 1)
    cluster.start(initial_state(job), {"dp": 4})
    cluster.run(lambda: cluster.steps() >= 5)
    for mesh, ranks, why in (
        ({"dp": 2}, [0], "bring another mesh than ranks [0, 1, 2, 3] on node n0"),
        ({"dp": 4}, [1], "ranks [1] on node n1 are on node n0, too"),
    ):
        cluster.nodes["n1"].told.clear()
        cluster.nodes["n1"].start(initial_state(job), mesh, ranks)
        read = max(cluster.nodes["n0"].plans)
        cluster.run(lambda read=read: max(cluster.nodes["n0"].plans) >= read + 20)  # it reads on
        assert not refusals(cluster, "n1")
        cluster.clock_ns += 7 * 10**9
        cluster.run(lambda: bool(refusals(cluster, "n1")))
        assert why in refusals(cluster, "n1")[0]
        assert not refusals(cluster, "n0")


def test_ranks_of_a_run_that_is_to_follow_wait_for_the_lost_node(
    tmp_path: Path, case: Any, clusters: Any
) -> None:
    job, _ = case
    state = initial_state(job)
    cluster = clusters({"n0": [0, 1], "n1": [2, 3], "n2": []}, 2)
    cluster.start(state, {"dp": 4})
    cluster.run(lambda: cluster.steps() >= 5)
    cluster.silent.add("n1")
    for name, ranks in (("n0", [0]), ("n2", [1])):
        cluster.nodes[name].start(state, {"dp": 2}, ranks)
    for _ in range(50):  # longer than others would wait
        cluster.clock_ns += 10**9
        cluster.planner.advance()
    cluster.nodes["n0"].plans.clear()
    cluster.lose("n1")
    cluster.run(lambda: cluster.nodes["n0"].generation == 2 and cluster.steps() >= STEPS)
    assert not refusals(cluster, "n0") + refusals(cluster, "n2")
    plans = single_host(tmp_path, case, state, STEPS, dp=2)
    check(cluster, plans, range(STEPS))
