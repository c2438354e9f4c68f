"""What batch systems and containers do to a node: a signal to the whole group, other pid namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import msd_client
from msd_client.contract.errors import DaemonUnavailableError, DeadlineError
from msd_client.control import request
from tests.support.node import (
    DEADLINES,
    NO_GRACE,
    Node,
    run_ranks,
    running_node,
    text_job,
    wait_until,
    write_job,
)
from tests.support.sources import ROOT

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]
OWN_GROUP = (
    sys.executable, "-c", "import os, sys; os.setpgid(0, 0); os.execvp(sys.argv[1], sys.argv[1:])",
)  # fmt: skip

TRAINER = """
import signal, sys
import msd_client

job, daemon, folder = sys.argv[1:]
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
states = msd_client.StateFolder(folder)
late = 0
with msd_client.connect(job, mesh={"dp": 1}, rank=0, daemon=daemon, as_="numpy") as data:
    for step in data.train:
        for batch in step:
            del batch
        if step.number == 3:
            print("running", flush=True)
        late += bool(asked)
        if late == 5:  # it goes on training for a while, and only then saves
            states.save(data.train.state_dict(), step=step.number + 1)
            break
print("saved", step.number + 1, flush=True)
"""


def test_a_signal_to_the_whole_group_leaves_time_for_a_last_checkpoint(
    start_node: StartNode, tmp_path: Path
) -> None:
    """Workers, constructor, planner and fork servers stay until the ranks have left."""
    node = start_node("--loader-workers", "2", prefix=OWN_GROUP)
    job = write_job(tmp_path / "job.yaml", text_job(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(job), str(node.socket), str(tmp_path / "states")],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, process_group=node.process.pid,
    ) as trainer:  # fmt: skip
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "running\n"
        names = {child.name() for child in node.children()}
        assert {"msd-loader", "msd-constructor", "msd-planner", "msd-fork_server"} <= names
        os.killpg(node.process.pid, signal.SIGTERM)
        told = trainer.stdout.readline()
        assert trainer.wait(30) == 0, node.log
    assert node.process.wait(30) == 0, node.log
    assert " is gone" not in node.log and "ended with status" not in node.log, node.log
    saved = msd_client.StateFolder(tmp_path / "states").newest()
    assert saved is not None
    assert told == f"saved {saved.step}\n"

    with running_node(tmp_path / "next", "--loader-workers", "1") as following:
        (oracle,) = run_ranks(following, job, {"dp": 1}, saved.step + 3, keep_states=True)
        assert saved.state == oracle.states[saved.step]
        (later,) = run_ranks(following, job, {"dp": 1}, 3, state=saved.state)
    assert later.rows == {s: rows for s, rows in oracle.rows.items() if s >= saved.step}


def test_a_daemon_without_ranks_ends_at_once_on_a_signal_to_its_group(
    start_node: StartNode,
) -> None:
    node = start_node(prefix=OWN_GROUP)
    os.killpg(node.process.pid, signal.SIGTERM)
    assert node.process.wait(20) == 0, node.log


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Node]:
    """A daemon in a pid namespace of its own: it sees no pid of its clients."""
    unshare = ["unshare", "-p", "-f", "--kill-child", "--mount-proc"]
    if os.getuid():
        unshare.insert(1, "-r")
    if (
        not shutil.which("unshare")
        or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no pid namespace can be made here")
    folder = tmp_path / "apart"
    folder.mkdir(mode=0o750)
    with (folder / "daemon.log").open("ab") as log:
        process = subprocess.Popen(
            [
                *unshare, sys.executable, "-m", "msd_daemon", "--socket", str(folder / "d.sock"),
                "--runtime-dir", str(folder), "--state-dir", str(folder / "state"),
            ],
            cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **NO_GRACE},
        )  # fmt: skip
    node = Node(process, folder / "d.sock", folder)

    def answers() -> bool:
        with contextlib.suppress(DaemonUnavailableError, DeadlineError):
            return bool(request(node.socket, {"verb": "ping"}))
        return process.poll() is not None

    try:
        wait_until(answers, "the daemon")
        yield node
        request(node.socket, {"verb": "shutdown"})
        assert process.wait(30) == 0, node.log
    finally:
        process.kill()
        process.wait(10)


READER = """
import sys, time
import msd_client

with msd_client.connect(sys.argv[1], mesh={"dp": 2}, rank=1, daemon=sys.argv[2], as_="numpy") as data:
    for step in data.train:
        held = list(step)
        print("reading", flush=True)
        sys.stdin.readline()
"""


def ranks_of(node: Node) -> dict[int, int]:
    jobs = node.request("status")["jobs"]
    return {r["rank"]: r["pid"] for job in jobs for r in job["ranks"]}


def test_a_reader_of_another_pid_namespace_dies_and_is_noticed(apart: Node, tmp_path: Path) -> None:
    """Its pid is of no use to the daemon: the end of its socket alone tells of its death."""
    job = write_job(tmp_path / "job.yaml", text_job(tmp_path))
    with (
        subprocess.Popen(
            [sys.executable, "-c", READER, str(job), str(apart.socket)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as reader,
        apart.connect(job, {"dp": 2}, 0, deadlines=DEADLINES) as data,
    ):  # fmt: skip
        steps = iter(data.train)
        first: Any = next(steps)
        assert first.number == 0
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        # For people it goes by the pid that it gave itself.
        assert ranks_of(apart) == {0: os.getpid(), 1: reader.pid}
        reader.kill()
        wait_until(lambda: list(ranks_of(apart)) == [0], "rank 1 to be gone")
        # It held all slots it was given: without its death being noticed nobody would go on.
        for step in steps:
            for batch in step:
                del batch
            if step.number == 30:
                break
    wait_until(lambda: not apart.request("jobs")["jobs"], "the job to end")
