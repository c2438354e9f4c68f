"""Ranks that leave and come back, on any mesh: workers and pool waited for them, nothing is read twice."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import BudgetError, MeshMismatchError, UsageError
from msd_client.joined_job import Data
from tests.support.ledger import read_ledger
from tests.support.ledger_case import Case, make_case
from tests.support.node import (
    Node,
    RankRecord,
    global_rows,
    run_ranks,
    running_node,
    text_job,
    wait_until,
)

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]
GRACE = {"MSD__DEADLINES__RESTART_GRACE_S": "300"}
WAITING = "waiting for ranks"
STEPS = 40


@pytest.fixture
def node(start_node: StartNode) -> Node:
    return start_node("--loader-workers", "2", environ=GRACE)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four formats, streamed ones among them; s3 is a heavy source, read by every loader."""
    folder = tmp_path_factory.mktemp("data")
    job = text_job(folder, texts={"sources": 4, "documents": 2000})
    job["mixture"] = {"unit": "tokens", 0: {"s0": 1, "s1": 1, "s2": 6, "s3": 3}}
    job["defaults"] = {"shuffle": {"block_records": 64}}
    return job


@pytest.fixture(scope="module")
def whole(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RankRecord:
    """The uninterrupted run, on one rank."""
    with running_node(tmp_path_factory.mktemp("whole"), "--loader-workers", "2") as node:
        return run_ranks(node, job, {"dp": 1}, STEPS, keep_states=True)[0]


def job_of(node: Node) -> dict[str, Any]:
    (job,) = node.request("status")["jobs"]
    return dict(job)


def check_waits(node: Node) -> None:
    """Wait until the daemon has seen the last rank leave."""
    wait_until(lambda: job_of(node)["state"] == WAITING, "the job to wait for ranks")


def check_waits_or_gone(node: Node) -> None:
    """Wait until no rank of the run before is a member any more: else a new one is refused."""
    wait_until(lambda: not any(job["ranks"] for job in node.request("jobs")["jobs"]), "ranks to go")


def workers_of(node: Node) -> set[int]:
    return {worker["pid"] for worker in job_of(node)["workers"]}


def resume(
    node: Node, job: dict[str, Any], whole: RankRecord, dp: int, first: int, steps: int
) -> dict[str, Any]:
    """Go on at a step; check every row and state; return the job's status from the end."""
    if first:
        check_waits_or_gone(node)
    statuses: list[dict[str, Any]] = []
    records = run_ranks(
        node, job, {"dp": dp}, steps, state=whole.states[first] if first else None,
        keep_states=True, at_end=lambda data: statuses.append(job_of(node)),
    )  # fmt: skip
    for step, rows in global_rows(records, list(range(dp))).items():
        assert rows == sorted(whole.rows[step]), f"step {step}"
    for record in records:
        assert record.steps == list(range(first, first + steps))
        assert all(state == whole.states[step] for step, state in record.states.items())
    return statuses[0]


def test_ranks_come_back_to_what_was_read_on_any_mesh(
    node: Node, job: dict[str, Any], whole: RankRecord
) -> None:
    cold = resume(node, job, whole, 4, 0, 10)
    pids = workers_of(node)
    for number, (dp, first) in enumerate(((2, 10), (8, 15), (1, 18)), 2):
        check_waits(node)
        assert node.request("jobs")["jobs"][0]["state"] == WAITING
        status = resume(node, job, whole, dp, first, 3)
        assert status["generation"] == number
        assert status["mesh"] == [["dp", dp]]
        assert status["taken_over"]["records"] > 0
        assert status["reads"]["fetched_records"] == 0, "carried fragments lie in the pool"
        assert 0 < status["start_to_first_batch_ms"] <= status["join_to_first_batch_ms"]
        assert pids <= workers_of(node)  # a spare may have come since
    assert cold["taken_over"] == {"chunks": 0, "records": 0, "used_bytes": 0, "carried": 0}
    assert cold["join_to_first_batch_ms"] > 0
    node.request("stop", job="small")
    wait_until(node.is_at_rest, node.holdings)


@pytest.mark.parametrize("grace_s", ["300", "0"])
def test_no_record_of_an_epoch_is_read_twice(
    start_node: StartNode, tmp_path: Path, grace_s: str
) -> None:
    """Cut anywhere: what lay in the pool at the cut is not read again; without a grace period it is.

    What was still on its way as a rank left is not counted by its status.
    """
    environ = {"MSD__DEADLINES__RESTART_GRACE_S": grace_s}
    node = start_node("--loader-workers", "2", environ=environ)
    job = text_job(tmp_path, texts={"sources": 4, "documents": 200}, epochs=1)
    job["defaults"] = {"shuffle": {"block_records": 64}}
    rng = random.Random(7)
    read = fetched = 0
    state, dp = None, 1
    statuses: list[dict[str, Any]] = []
    for steps in (3, 1, 6, 4, None):
        records = run_ranks(
            node, job, {"dp": dp}, steps, state=state, keep_states=True,
            at_end=lambda data: statuses.append(job_of(node)),
        )  # fmt: skip
        state = records[0].states[max(records[0].states)]
        dp = rng.choice((1, 2, 4))
        check_waits_or_gone(node)
        read += statuses[-1]["reads"]["records"]
        fetched += statuses[-1]["reads"]["fetched_records"]
        statuses.clear()
    if grace_s == "0":
        assert read > 4 * 200
    else:
        assert 0 < read <= 4 * 200
        assert fetched == 0


def test_ranks_that_stay_load_an_older_state(
    node: Node, job: dict[str, Any], whole: RankRecord
) -> None:
    """A new generation of a living session goes on from the pool too; what is gone is read again."""
    with node.connect(job, {"dp": 1}, 0) as data:
        for back_to, count in ((4, 12), (2, 3), (0, 3)):
            for step, _ in zip(data.train, range(count), strict=False):
                rows = [bytes(row) for batch in step for row in batch.tokens]
                assert rows == whole.rows[step.number]
            data.train.load_state_dict(whole.states[back_to] if back_to else whole.states[1])
        next(iter(data.train))
        assert job_of(node)["generation"] == 4


def test_batches_of_earlier_generations_count_in_the_budget(
    start_node: StartNode, job: dict[str, Any], whole: RankRecord
) -> None:
    """Two at most may be held beside the running one's; dropped batches count no more."""
    node = start_node("--loader-workers", "1", environ=GRACE)
    held = []
    with node.connect(job, {"dp": 1}, 0) as data:
        for _ in range(3):
            held.append(next(iter(next(iter(data.train)))))
            data.train.load_state_dict(whole.states[2])
        with pytest.raises(UsageError, match="batches of 3 earlier generations"):
            next(iter(data.train))
        del held[0]
        assert next(iter(data.train)).number == 2
    (tokens,) = (batch.tokens for batch in held[:1])
    assert bytes(tokens[0]) == whole.rows[2][0]  # what is held stays what it was


def test_held_batches_that_do_not_fit_the_budget_refuse_another_generation(
    start_node: StartNode, job: dict[str, Any], whole: RankRecord
) -> None:
    wide = {
        **job,
        "name": "wide",
        "batch": {"rows": 16, "row_tokens": 16384, "microbatch_rows": 16},
    }
    sums: list[int] = []

    def measure(_data: Data) -> None:
        status = job_of(roomy)
        rings_bytes = sum(ring["bytes"] for ring in status["rings"])
        sums.append(status["pool_bytes"] + rings_bytes + rings_bytes // 2)

    roomy = start_node("--loader-workers", "1")
    run_ranks(roomy, wide, {"dp": 1}, 1, at_end=measure)
    environ = {**GRACE, "MSD__MEMORY__MEMORY_BYTES": str(sums[0])}
    node = start_node("--loader-workers", "1", environ=environ)
    with node.connect(wide, {"dp": 1}, 0) as data:
        state = data.train.state_dict()
        held = next(iter(next(iter(data.train))))
        data.train.load_state_dict(state)
        with pytest.raises(BudgetError, match="rings of batches that are still held"):
            next(iter(data.train))
        del held
        assert next(iter(data.train)).number == 0


def test_a_mesh_that_does_not_divide_the_batch_is_refused_and_the_job_waits_on(
    node: Node, job: dict[str, Any], whole: RankRecord
) -> None:
    resume(node, job, whole, 4, 0, 5)
    check_waits(node)
    with pytest.raises(MeshMismatchError) as caught:
        node.connect(job, {"dp": 3}, 0)
    assert "16" in str(caught.value) and "3" in str(caught.value)
    assert job_of(node)["state"] == WAITING
    assert job_of(node)["mesh"] == [["dp", 4]]
    assert resume(node, job, whole, 8, 5, 5)["taken_over"]["records"] > 0


def test_another_mesh_is_refused_while_ranks_are_here(node: Node, job: dict[str, Any]) -> None:
    with (
        node.connect(job, {"dp": 2}, 0),
        pytest.raises(MeshMismatchError, match="once all ranks left"),
    ):
        node.connect(job, {"dp": 4}, 0)


def test_a_rank_that_joins_and_leaves_again_ends_no_waiting(
    node: Node, job: dict[str, Any], whole: RankRecord
) -> None:
    resume(node, job, whole, 2, 0, 5)
    check_waits(node)
    with node.connect(job, {"dp": 4}, 0):
        assert job_of(node)["state"] == "joining"
    check_waits(node)
    assert resume(node, job, whole, 1, 5, 3)["taken_over"]["records"] > 0


@pytest.mark.parametrize("name", ["msd-loader", "msd-constructor"])
def test_a_worker_that_dies_meanwhile_ends_the_waiting(
    node: Node, job: dict[str, Any], whole: RankRecord, name: str
) -> None:
    resume(node, job, whole, 2, 0, 5)
    check_waits(node)
    node.child(name).send_signal(signal.SIGKILL)
    wait_until(node.is_at_rest, node.holdings)
    assert resume(node, job, whole, 2, 5, 3)["taken_over"]["records"] == 0


def test_a_planner_that_dies_meanwhile_is_replaced(
    node: Node, job: dict[str, Any], whole: RankRecord
) -> None:
    resume(node, job, whole, 2, 0, 5)
    check_waits(node)
    planner = node.child("msd-planner")
    planner.send_signal(signal.SIGKILL)
    wait_until(lambda: not planner.is_running(), "the planner to be gone")
    assert resume(node, job, whole, 4, 5, 3)["taken_over"]["records"] > 0


def test_a_stream_that_ended_is_not_waited_for(node: Node, job: dict[str, Any]) -> None:
    run_ranks(node, {**job, "steps": 4}, {"dp": 2}, None)
    wait_until(node.is_at_rest, node.holdings)


def test_the_grace_period_ends(start_node: StartNode, job: dict[str, Any]) -> None:
    node = start_node(environ={"MSD__DEADLINES__RESTART_GRACE_S": "0.3"})
    run_ranks(node, job, {"dp": 2}, 3)
    wait_until(node.is_at_rest, node.holdings)
    assert "no rank came back within 0.3 s" in node.log


def test_an_idle_daemon_ends_though_a_job_waits(start_node: StartNode, job: dict[str, Any]) -> None:
    node = start_node(environ={**GRACE, "MSD__DAEMON__IDLE_EXIT_S": "1"})
    run_ranks(node, job, {"dp": 2}, 3)
    assert node.process.wait(20) == 0
    assert "the daemon ends" in node.log


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    lengths = {"a": [[100] * 400]}
    yield make_case(
        tmp_path_factory.mktemp("large"),
        lengths,
        {"rows": 8, "row_tokens": 128, "microbatch_rows": 2},
    )


def test_a_job_that_needs_the_memory_ends_the_waiting(
    start_node: StartNode, job: dict[str, Any], large: Case
) -> None:
    node = start_node(environ={**GRACE, "MSD__MEMORY__MEMORY_BYTES": "24Mi"})
    run_ranks(node, job, {"dp": 1}, 3)
    check_waits(node)
    ledger = read_ledger(node, large.corpus, large.job, {"dp": 2}, 5)
    ledger.check_equals(large.wanted(5))
    assert [one["name"] for one in node.request("jobs")["jobs"]] == [large.job["name"]]
    assert "another job needs its memory" in node.log


def test_a_job_that_fits_beside_one_that_waits_leaves_it_alone(
    start_node: StartNode, job: dict[str, Any], large: Case
) -> None:
    node = start_node(environ={**GRACE, "MSD__MEMORY__MEMORY_BYTES": "64Mi"})
    run_ranks(node, job, {"dp": 1}, 3)
    check_waits(node)
    with node.connect(large.job, {"dp": 1}, 0):
        states = {one["name"]: one["state"] for one in node.request("jobs")["jobs"]}
        assert states["small"] == WAITING
        with pytest.raises(BudgetError):  # it fits beside neither, and one of them has ranks
            node.connect(
                {**large.job, "name": "more", "batch": {**large.job["batch"], "rows": 1 << 14}},
                {"dp": 1},
                0,
            )
