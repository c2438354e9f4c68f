"""A daemon's life: one at a time, drained on a signal, started where none answers, gone when idle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

import msd_client
from msd_client import session
from msd_client.contract.errors import (
    ConfigError,
    DaemonUnavailableError,
    DeadlineError,
    JobError,
    MeshMismatchError,
    SessionClosedError,
)
from msd_client.control import request
from msd_daemon.descriptors import is_readable
from tests.support.node import DEADLINES, run_ranks, text_job, wait_until
from tests.support.sources import ROOT

pytestmark = pytest.mark.processes


def test_a_second_daemon_is_refused_and_the_first_one_goes_on(start_node):
    node = start_node()
    second = subprocess.run(
        [sys.executable, "-m", "msd_daemon", "--socket", str(node.socket), "--runtime-dir", str(node.folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert second.returncode == 1
    assert f"pid {node.process.pid}" in second.stderr
    assert node.request("ping")["pid"] == node.process.pid


def test_a_killed_daemons_lock_and_socket_do_not_hinder_the_next_one(start_node, tmp_path):
    first = start_node(folder=tmp_path / "n")
    children = first.children()
    first.process.kill()
    first.process.wait(10)
    wait_until(
        lambda: not any(c.is_running() and c.status() != "zombie" for c in children), "children"
    )
    second = start_node(folder=tmp_path / "n")
    assert second.request("ping")["pid"] == second.process.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_ranks_finish_and_new_ones_are_refused(start_node, tmp_path, number):
    node = start_node()
    job = text_job(tmp_path)
    taken = threading.Event()
    finish = threading.Event()
    steps: list[int] = []

    def read() -> None:
        with node.connect(job, {"dp": 1}, 0) as data:
            for step in data.train:
                for _ in step:
                    pass
                steps.append(step.number)
                taken.set()
                if len(steps) == 3:
                    finish.wait(20)
                if len(steps) == 6:
                    return

    thread = threading.Thread(target=read)
    thread.start()
    assert taken.wait(20), node.log
    # The whole process group, as a batch system does it: workers must outlive the signal.
    node.process.send_signal(number)
    for child in node.children():
        child.send_signal(number)
    wait_until(lambda: node.request("status")["daemon"]["is_draining"], "draining")
    with pytest.raises(SessionClosedError):
        node.connect({**job, "name": "late"}, {"dp": 1}, 0)
    finish.set()
    thread.join(20)
    assert steps == [0, 1, 2, 3, 4, 5]
    assert node.process.wait(20) == 0


def test_connect_starts_a_daemon_where_none_answers_and_it_ends_when_idle(tmp_path, monkeypatch):
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o750)
    monkeypatch.setenv("MSD__DAEMON__RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("msd_client.daemon_start.IDLE_EXIT_S", 1.0)
    job = text_job(tmp_path)
    with msd_client.connect(job, mesh={"dp": 1}, rank=0, as_="numpy", deadlines=DEADLINES) as data:
        step = next(iter(data.train))
        assert step.number == 0
        pid = request(runtime / "msd.sock", {"verb": "ping"})["pid"]
    wait_until(lambda: not is_alive(pid), "the daemon to end", 30)
    assert not (runtime / "msd.sock").exists()


def is_alive(pid: int) -> bool:
    try:
        done, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return os.path.exists(f"/proc/{pid}")
    return done == 0


def test_without_a_daemon_the_error_says_how_to_start_one(tmp_path):
    with pytest.raises(DaemonUnavailableError, match="msd-daemon"):
        msd_client.connect({"schema": 1}, mesh={"dp": 1}, rank=0, daemon=tmp_path / "none.sock")


def test_a_jobs_faults_reach_the_trainer_all_at_once(start_node, tmp_path):
    job = text_job(tmp_path)
    job["mixture"] = {"unit": "tokens", "0": {"s0": -1, "s1": 1, "s2": 1}}
    job["batch"] = {**job["batch"], "rowz": 3}
    with pytest.raises(JobError) as caught:
        start_node().connect(job, {"dp": 1}, 0)
    text = str(caught.value)
    assert "rowz" in text
    assert "s0" in text


def test_a_mesh_that_does_not_fit_is_refused_with_the_numbers(start_node, tmp_path):
    with pytest.raises(MeshMismatchError, match=r"16.*3"):
        start_node().connect(text_job(tmp_path), {"dp": 3}, 0)


def test_a_rank_that_is_there_already_is_refused_by_pid(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path)
    with node.connect(job, {"dp": 2}, 0), pytest.raises(MeshMismatchError, match=str(os.getpid())):
        node.connect(job, {"dp": 2}, 0)


def test_a_job_that_cannot_fit_its_budget_is_refused_with_the_sums(start_node, tmp_path):
    node = start_node(
        environ={"MSD__MEMORY__MEMORY_BYTES": "8Mi", "MSD__MEMORY__POOL_BYTES": "6Mi"}
    )
    job = text_job(tmp_path, batch={"rows": 64, "row_tokens": 65536, "microbatch_rows": 8})
    with pytest.raises(ConfigError, match="planned steps"):
        node.connect(job, {"dp": 1}, 0)


def test_a_stopped_job_ends_for_all_ranks_with_a_typed_error(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path)

    def stop(data, step, record):
        if step.number == 2 and data.rank == 0:
            node.request("stop", job="small")

    with pytest.raises(SessionClosedError, match="stopped"):
        run_ranks(node, job, {"dp": 2}, 50, on_step=stop)
    wait_until(lambda: not node.request("jobs")["jobs"], "the job to end")
    assert run_ranks(node, job, {"dp": 2}, 2)[0].steps == [0, 1]


def test_a_submitted_job_is_joined_by_name(start_node, tmp_path):
    import json

    node = start_node()
    job = text_job(tmp_path)
    answer = node.request("submit", text=json.dumps(job), base_dir=str(tmp_path), name="small")
    assert answer["name"] == "small"
    assert node.request("jobs")["jobs"][0]["state"] == "submitted"
    assert run_ranks(node, "small", {"dp": 1}, 2)[0].steps == [0, 1]


def test_a_finite_job_ends_on_all_ranks_in_the_same_step(start_node, tmp_path):
    records = run_ranks(start_node(), text_job(tmp_path, steps=7), {"dp": 2, "tp": 2}, None)
    assert [record.steps for record in records] == [list(range(7))] * 4


def at_rest(node) -> bool:
    try:
        names = sorted(child.name() for child in node.children())
    except psutil.NoSuchProcess:
        return False  # one is leaving just now
    return names == ["msd-fork_server", "msd-planner"] and not node.request("jobs")["jobs"]


def test_jobs_run_one_after_another_without_leaving_anything(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path)
    run_ranks(node, job, {"dp": 2}, 2)
    wait_until(lambda: at_rest(node), "workers to end")
    pids = {child.pid for child in node.children()}
    descriptors = len(os.listdir(f"/proc/{node.process.pid}/fd"))
    for _ in range(3):
        run_ranks(node, job, {"dp": 2}, 2)
        wait_until(lambda: at_rest(node), "workers to end")
    assert {child.pid for child in node.children()} == pids
    wait_until(
        lambda: len(os.listdir(f"/proc/{node.process.pid}/fd")) <= descriptors,
        "descriptors to close",
    )


def test_a_rank_that_leaves_while_the_daemon_is_busy_is_seen_to_leave(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path, steps=1, batch={"rows": 2})
    with node.connect(job, {"dp": 1}, 0) as data:
        (batch,) = next(iter(data.train))
        # Nothing is sent to it after the end of the stream: only its leaving can tell of it.
        wait_until(lambda: is_readable(data.train._session.fileno()), "the end")
        node.process.send_signal(signal.SIGSTOP)
        try:
            del batch  # its release, then the goodbye, then an end with the daemon's word unread
            data.close()
        finally:
            node.process.send_signal(signal.SIGCONT)
    wait_until(node.is_at_rest, node.holdings)


def test_a_rank_waits_for_a_daemon_that_stands_still(start_node, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(session, "CONNECT_TIMEOUT_S", 0.1)
    node = start_node()
    job = text_job(tmp_path, steps=1, batch={"rows": 2})
    node.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match="did not answer 'hello'"):
            node.connect(job, {"dp": 1}, 0, deadlines={"join_s": 0.3})
        caplog.clear()

        def go_on() -> None:
            wait_until(lambda: "does not answer: waiting for it" in caplog.text, "a warning")
            node.process.send_signal(signal.SIGCONT)

        thread = threading.Thread(target=go_on)
        thread.start()
        with node.connect(job, {"dp": 1}, 0) as data:
            assert len([batch.tokens for step in data.train for batch in step]) == 1
        thread.join()
    finally:
        node.process.send_signal(signal.SIGCONT)
