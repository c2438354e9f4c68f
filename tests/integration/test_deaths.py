"""kill -9 of each process at random moments: the stream goes on equal, or a typed error says why."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading

import psutil
import pytest

from msd_client.contract.errors import AvailabilityError, DaemonUnavailableError
from tests.support.node import (
    RankRecord,
    global_rows,
    read_steps,
    run_ranks,
    running_node,
    text_job,
    wait_until,
    write_job,
)

pytestmark = pytest.mark.processes

STEPS = 60
SEED = int(os.environ.get("MSD_TEST_SEED", random.SystemRandom().randrange(1 << 30)))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    print(f"MSD_TEST_SEED={SEED}")
    return text_job(tmp_path_factory.mktemp("data"), texts={"sources": 4})


@pytest.fixture(scope="module")
def oracle(job, tmp_path_factory):
    with running_node(tmp_path_factory.mktemp("o")) as node:
        return run_ranks(node, job, {"dp": 1}, STEPS, keep_states=True)[0]


def expected(oracle):
    return {step: sorted(oracle.rows[step]) for step in range(STEPS)}


@pytest.mark.parametrize("victim", ["msd-loader", "msd-constructor", "msd-planner"])
def test_a_killed_child_is_replaced_and_the_stream_is_the_same(start_node, job, oracle, victim):
    node = start_node("--loader-workers", "2")
    moments = sorted(random.Random(f"{SEED}{victim}").sample(range(2, STEPS - 4), 3))
    killed: list[int] = []

    def kill(data, step, record):
        if data.rank == 0 and step.number in moments:
            child = node.child(victim)
            child.kill()
            killed.append(child.pid)

    records = run_ranks(node, job, {"dp": 2}, STEPS, on_step=kill, keep_states=True)
    assert len(killed) == 3
    assert global_rows(records, [0, 1]) == expected(oracle)
    assert records[0].states == oracle.states
    wait_until(lambda: not node.request("jobs")["jobs"], "the job to end")
    assert node.request("ping")["pid"] == node.process.pid


def test_all_children_killed_in_turn_and_a_changed_mixture_survive(start_node, job):
    weights = {"s0": 5, "s1": 1, "s2": 1, "s3": 0}
    plain: dict[str, object] = {}
    broken: dict[str, object] = {}
    for found, victims in ((plain, ()), (broken, ("msd-planner", "msd-loader", "msd-constructor"))):
        node = start_node()

        def act(data, step, record, found=found, victims=victims, node=node):
            if data.rank == 0 and step.number == 5:
                found["step"] = data.set_mixture(weights)
            if data.rank == 0 and victims and step.number in (9, 14, 19):
                node.child(victims[(step.number - 9) // 5]).kill()

        found["records"] = run_ranks(node, job, {"dp": 1}, 40, on_step=act)
    # The step from which a live change holds depends on how far planning was ahead.
    if plain["step"] == broken["step"]:
        assert plain["records"][0].rows == broken["records"][0].rows
    assert broken["records"][0].steps == list(range(40))


def test_a_killed_daemon_is_told_and_the_state_continues_the_stream(
    start_node, tmp_path, job, oracle
):
    node = start_node(folder=tmp_path / "n")
    children = []
    record = RankRecord()
    data = node.connect(job, {"dp": 1}, 0)

    def kill(data, step, record):
        if step.number == 11:
            children.extend(node.children())
            node.process.kill()

    with pytest.raises(DaemonUnavailableError):
        read_steps(data, record, STEPS, keep_states=True, on_step=kill)
    state = data.train.state_dict()
    data.close()
    last = record.steps[-1]
    assert state == oracle.states[last + 1]
    node.process.wait(10)
    wait_until(
        lambda: not any(c.is_running() and c.status() != "zombie" for c in children), "children"
    )
    second = start_node(folder=tmp_path / "n")
    rest = run_ranks(second, job, {"dp": 2}, 10, state=state)
    wanted = {step: sorted(oracle.rows[step]) for step in range(last + 1, last + 11)}
    assert global_rows(rest, [0, 1]) == wanted


def test_a_worker_that_dies_again_and_again_fails_the_job_with_a_typed_error(start_node, job):
    node = start_node("--loader-workers", "1")

    def kill(data, step, record):
        for child in node.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == "msd-loader":
                    child.kill()

    with pytest.raises(AvailabilityError, match="loader 0"):
        run_ranks(node, job, {"dp": 1}, 400, on_step=kill)


KILLED = """
import sys, os, signal
import msd_client
data = msd_client.connect(sys.argv[1], mesh={"dp": 2}, rank=int(sys.argv[2]), daemon=sys.argv[3], as_="numpy")
for step in data.train:
    for batch in step:
        pass
    if step.number == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_does_not_hold_up_the_other_group(start_node, tmp_path, job, oracle):
    node = start_node()
    path = write_job(tmp_path / "small.yaml", job)
    victim = subprocess.Popen([sys.executable, "-c", KILLED, str(path), "1", str(node.socket), "4"])
    try:
        with node.connect(path, {"dp": 2}, 0) as data:
            record = RankRecord()
            read_steps(data, record, 30, keep_states=True, on_step=None)
    finally:
        assert victim.wait(20) == -9
    assert record.steps == list(range(30))
    assert record.states == {step: oracle.states[step] for step in range(1, 31)}


def test_nothing_leaks_over_deaths(start_node, job):
    node = start_node()
    run_ranks(node, job, {"dp": 2}, 3)
    wait_until(lambda: not node.request("jobs")["jobs"], "the job to end")
    descriptors = len(os.listdir(f"/proc/{node.process.pid}/fd"))

    def kill(data, step, record):
        if data.rank == 0 and step.number in (4, 8, 12):
            for name in ("msd-loader", "msd-constructor", "msd-planner"):
                node.child(name).kill()

    run_ranks(node, job, {"dp": 2}, 30, on_step=kill)
    wait_until(lambda: not node.request("jobs")["jobs"], "the job to end")
    wait_until(
        lambda: len(os.listdir(f"/proc/{node.process.pid}/fd")) <= descriptors + 2,
        "descriptors to close",
    )
    assert threading.active_count() == 1


def test_a_killed_fork_server_fails_the_job_and_the_daemon_serves_the_next_one(start_node, job):
    node = start_node()

    def kill(data, step, record):
        if step.number == 6:
            loader = node.child("msd-loader")
            psutil.Process(loader.ppid()).kill()

    with pytest.raises(AvailabilityError):
        run_ranks(node, job, {"dp": 1}, 400, on_step=kill)
    wait_until(lambda: not node.request("jobs")["jobs"], "the job to end")
    assert run_ranks(node, job, {"dp": 1}, 3)[0].steps == [0, 1, 2]
