"""Workers that are stopped, grow, or die in a row: the stream is the uninterrupted run's (H21).

Stops are short here and 15 s and more in `make soak`, under the daemon's own limits.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from msd_daemon.services.processes import private_bytes
from tests.integration.test_quarantine import delivered, job_of, starting
from tests.integration.test_shadows import named, reading, stands, with_critical
from tests.support.node import Node, RankRecord, run_ranks, running_node, text_job, wait_until

pytestmark = pytest.mark.processes

STEPS = 40


@dataclass(frozen=True)
class Stop:
    """How long something is stopped, and from when on it is late."""

    stop_s: float
    settings: dict[str, str]


@pytest.fixture(
    params=[
        pytest.param(Stop(3.5, {"MSD__WORKERS__LATE_S": "1"}), id="short"),
        pytest.param(Stop(15.0, {}), id="long", marks=[pytest.mark.soak, pytest.mark.timeout(300)]),
    ]
)
def stop(request: pytest.FixtureRequest) -> Stop:
    found = request.param
    assert isinstance(found, Stop)
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return text_job(tmp_path_factory.mktemp("data"), texts={"sources": 4, "documents": 1200})


@pytest.fixture(scope="module")
def oracle(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankRecord]:
    with running_node(tmp_path_factory.mktemp("o")) as node:
        (record,) = run_ranks(node, job, {"dp": 1}, STEPS, keep_states=True)
    yield record


def standby(node: Node) -> dict[str, Any]:
    found = node.request("status")["jobs"][0]["standby"]
    assert isinstance(found, dict)
    return found


def stopped(process: psutil.Process) -> None:
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the stop")


@pytest.mark.parametrize("critical", [(), ("s0", "s1", "s2", "s3")], ids=["spare", "shadow"])
def test_a_stopped_loader_is_replaced_once_and_says_nothing_any_more(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord, stop: Stop, critical: tuple[str, ...]
) -> None:
    found: dict[str, Any] = {}

    def act(step: int) -> None:
        if step == 5:
            stands(node, "msd-spare", 1)
            if critical:
                stands(node, "msd-shadow", 1)
            (found["loader"],) = named(node, "msd-loader")
            stopped(found["loader"])
        if step == STEPS - 1:
            found["status"] = standby(node)

    arguments = ("--loader-workers", "1")
    with running_node(tmp_path / "n", *arguments, environ=stop.settings) as node:
        record = reading(node, with_critical(job, *critical), act)
        assert not found["loader"].is_running()
        log = node.log
    assert record.rows == oracle.rows
    assert record.states == oracle.states
    assert found["status"]["late"] == 1
    assert log.count("stopped by a signal or a debugger: it is killed and replaced") == 1


def test_a_loader_that_goes_on_in_time_is_not_late(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord
) -> None:
    def act(step: int) -> None:
        if step in (5, 9):
            (loader,) = named(node, "msd-loader")
            stopped(loader)
            time.sleep(1.5)  # the stop itself: far below late_s
            loader.resume()
        if step == STEPS - 1:
            assert standby(node)["late"] == 0
            assert sum(standby(node)["took_over"].values()) == 0

    with running_node(tmp_path / "n", "--loader-workers", "1") as node:
        assert reading(node, job, act).rows == oracle.rows


@pytest.mark.parametrize("role", ["spare", "shadow"])
def test_a_stopped_one_that_stands_by_is_not_taken(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord, role: str
) -> None:
    critical = ("s0", "s1", "s2", "s3") if role == "shadow" else ()

    def act(step: int) -> None:
        if step == 5:
            stands(node, "msd-spare", 1)
            stands(node, f"msd-{role}", 1)
            (waiting,) = named(node, f"msd-{role}")
            (loader,) = named(node, "msd-loader")
            stopped(waiting)
            loader.kill()
            wait_until(lambda: loader not in named(node, "msd-loader"), "its end")
            stands(node, "msd-loader", 1)
            assert named(node, "msd-loader") != [waiting]

    with running_node(tmp_path / "n", "--loader-workers", "1") as node:
        record = reading(node, with_critical(job, *critical), act)
    assert record.rows == oracle.rows
    assert record.states == oracle.states


def test_a_stopped_constructor_is_replaced(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord, stop: Stop
) -> None:
    def act(step: int) -> None:
        if step == 5:
            (constructor,) = named(node, "msd-constructor")
            stopped(constructor)
        if step == STEPS - 1:
            assert standby(node)["late"] == 1

    with running_node(tmp_path / "n", environ=stop.settings) as node:
        record = reading(node, job, act)
    assert record.rows == oracle.rows
    assert record.states == oracle.states


def test_a_stopped_daemon_declares_nobody_late(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord, stop: Stop
) -> None:
    found: dict[str, Any] = {}

    def workers(node: Node) -> set[int]:
        roles = ("msd-loader", "msd-constructor", "msd-planner")
        return {child.pid for role in roles for child in named(node, role)}

    def act(step: int) -> None:
        if step == 5:
            found["before"] = workers(node)
            os.kill(node.process.pid, signal.SIGSTOP)
            time.sleep(stop.stop_s)  # the stop itself
            os.kill(node.process.pid, signal.SIGCONT)
        if step == STEPS - 1:
            wait_until(lambda: "the daemon stood still for" in node.log, "the stall in the log")
            found["after"] = workers(node)
            assert standby(node)["late"] == 0
            assert node.request("status")["daemon"]["stalls"] >= 1

    with running_node(tmp_path / "n", environ=stop.settings) as node:
        record = reading(node, job, act)
    assert record.rows == oracle.rows
    assert found["before"] == found["after"]


def test_a_stopped_planner_is_waited_for(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord, stop: Stop
) -> None:
    found: dict[str, Any] = {}

    def act(step: int) -> None:
        if step == 5:
            (planner,) = named(node, "msd-planner")
            stopped(planner)
            time.sleep(stop.stop_s)  # the stop itself
            wait_until(lambda: "it is waited for" in node.log, "the stall in the log")
            planner.resume()
            wait_until(lambda: "goes on after" in node.log, "its end in the log")
            found["planner"] = planner
        if step == STEPS - 1:
            assert named(node, "msd-planner") == [found["planner"]]
            assert standby(node)["late"] == 0

    with running_node(tmp_path / "n", environ=stop.settings) as node:
        assert reading(node, job, act).rows == oracle.rows


def test_a_worker_that_leaks_is_replaced_and_nobody_notices(tmp_path: Path) -> None:
    leaks = dict.fromkeys(range(10, 110), "leak")
    job = job_of(tmp_path / "data", leaks)
    found: dict[str, Any] = {}

    def at_end(_data: Any) -> None:
        found["status"] = standby(node)

    def act(data: Any, step: Any, _record: Any) -> None:
        if step.number == 3:  # all is read ahead by now, or waits for the ranks
            wait_until(lambda: sum(standby(node)["took_over"].values()) > 0, "a successor")
            wait_until(lambda: len(named(node, "msd-loader")) == 1, "the old one to end")
            (loader,) = named(node, "msd-loader")
            assert private_bytes(loader.pid) < 120 << 20

    environ = {"MSD__WORKERS__MEMORY_BYTES": "120Mi"}
    with starting(tmp_path, "--loader-workers", "1", **environ) as node:
        records = run_ranks(node, job, {"dp": 1}, None, on_step=act, at_end=at_end)
        assert node.log.count(": replacing it") == 0
    assert found["status"]["recycled"] == 1
    assert sum(found["status"]["took_over"].values()) == 1
    assert delivered(records) == list(range(200))
