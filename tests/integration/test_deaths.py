"""Deaths that a job does not survive, and several at once; single ones: test_kills.py."""

from __future__ import annotations

import contextlib
import os
import random

import psutil
import pytest

from msd_client.contract.errors import AvailabilityError
from tests.support.node import (
    run_ranks,
    text_job,
    wait_until,
)

pytestmark = pytest.mark.processes

STEPS = 60
SEED = int(os.environ.get("MSD_TEST_SEED", random.SystemRandom().randrange(1 << 30)))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    print(f"MSD_TEST_SEED={SEED}")
    return text_job(tmp_path_factory.mktemp("data"), texts={"sources": 4})


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


def test_a_worker_that_dies_again_and_again_fails_the_job_with_a_typed_error(start_node, job):
    node = start_node("--loader-workers", "1")

    def kill(data, step, record):
        for child in node.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == "msd-loader":
                    child.kill()

    with pytest.raises(AvailabilityError, match="loader 0"):
        run_ranks(node, job, {"dp": 1}, 400, on_step=kill)


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


def test_a_daemon_without_its_fork_server_says_so_and_ends(start_node, tmp_path, job):
    node = start_node(folder=tmp_path / "n")
    server = node.fork_server()

    def kill(data, step, record):
        if step.number == 6:
            server.kill()

    with pytest.raises(AvailabilityError):
        run_ranks(node, job, {"dp": 1}, 400, on_step=kill)
    node.process.wait(20)
    assert "the fork server is gone" in node.log
    # The next one takes over at once: nothing of the first is in its way.
    assert run_ranks(start_node(folder=tmp_path / "n"), job, {"dp": 1}, 3)[0].steps == [0, 1, 2]
