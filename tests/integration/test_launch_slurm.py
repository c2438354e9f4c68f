"""`msdctl up --slurm` in an allocation whose srun starts every node's task on this machine."""

from __future__ import annotations

import hashlib
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.allocation import STEPS, Allocation, allocation
from tests.support.hosts import hosts
from tests.support.ledger_case import Case, large_and_little
from tests.support.node import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def case(tmp_path_factory: Any) -> Case:
    return large_and_little(tmp_path_factory.mktemp("slurm"))


def wanted(case: Case) -> dict[int, list[str]]:
    return {
        step: sorted(hashlib.blake2b(row, digest_size=12).hexdigest() for row in rows)
        for step, rows in case.wanted(STEPS).items()
    }


def lines_of(job: Allocation, rank: int) -> int:
    path = job.folder / f"rank-{rank}.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_ranks_find_the_daemons_of_their_job_and_all_ends(tmp_path: Path, case: Case) -> None:
    with allocation(tmp_path) as job:
        nodes = job.up()
        assert sorted(nodes) == ["n01", "n02"]
        assert nodes["n01"]["planner"].startswith("tcp://127.0.0.1:")
        assert not nodes["n02"]["planner"]
        again = job.msdctl("up", "--slurm")
        assert again.returncode == 78
        assert "holds a launch of this job already" in again.stderr

        ranks = job.start_ranks(case.job, 2)
        assert ranks.wait(80) == 0, job.logs()
        rows, runs = job.rows(4)
        assert rows == wanted(case)
        assert runs == {f"{job.job}.0.{ranks.pid}"}

        secrets = sorted(path.name for path in Path(nodes["n02"]["socket"]).parent.glob("keys/*"))
        assert secrets == ["n02.pub", "n02.secret", "planner-1.pub"]
        assert not list(job.shared.rglob("*.secret"))

        done = job.msdctl("down", "--slurm")
        assert (done.returncode, done.stdout) == (0, "2 nodes ended\n"), done.stderr
        wait_until(lambda: not job.processes(), lambda: f"{job.processes()} to end")
        assert not list(Path(nodes["n02"]["socket"]).parent.glob("keys/*"))
        assert sorted(path.name for path in job.shared.iterdir()) == [
            "n01.log",
            "n02.log",
            "srun.log",
        ]
        assert job.msdctl("down", "--slurm").returncode == 4


def test_a_planner_and_a_daemon_that_die_come_back_and_the_stream_is_the_same(
    tmp_path: Path, case: Case
) -> None:
    with allocation(tmp_path) as job:
        nodes = job.up()
        ranks = job.start_ranks(case.job, 1, "--slow")
        wait_until(lambda: lines_of(job, 0) >= 5, job.logs, 60)
        job.process("msd_daemon.planner_app").kill()
        wait_until(lambda: lines_of(job, 0) >= 9, job.logs, 60)
        job.process("-m msd_daemon ", f"{nodes['n02']['socket']} ").kill()
        lost = "went away: state_dict\\(\\) still works"
        wait_until(lambda: re.search(lost, job.logs()) is not None, job.logs, 60)
        ranks.terminate()  # a trainer's ranks stand and fall together
        ranks.wait(20)
        again = job.start_ranks(case.job, 1)
        assert again.wait(90) == 0, job.logs()
        rows, runs = job.rows(2)
        assert rows == wanted(case)
        assert runs == {f"{job.job}.0.{step.pid}" for step in (ranks, again)}
        assert "msd-daemon ended with status -9" in (job.shared / "n02.log").read_text()
        assert "msd-planner ended with status -9" in (job.shared / "n01.log").read_text()


@pytest.mark.soak
def test_sigterm_to_every_process_leaves_ranks_time_to_save(tmp_path: Path, case: Case) -> None:
    with allocation(tmp_path) as job:
        up = job.start(
            sys.executable, "-m", "msd_client.msdctl.main", "up", "--slurm", "--interface", "lo",
            "--foreground",
        )  # fmt: skip
        wait_until(lambda: "ready" in (tmp_path / "job.log").read_text(), job.logs, 60)
        ranks = job.start_ranks(case.job, 1, "--slow")
        wait_until(lambda: lines_of(job, 0) >= 2 and lines_of(job, 1) >= 2, job.logs, 60)
        of_ranks = {
            child.pid for child in job.processes() if "launched_rank" in str(child.cmdline())
        }
        for process in job.processes():
            if process.pid not in of_ranks and process.pid != ranks.pid:
                process.send_signal(signal.SIGTERM)
        # Far more steps than were planned when the signal came: the planner is still there.
        assert ranks.wait(60) == 0, job.logs()
        assert up.wait(60) == 0, job.logs()
        rows, _ = job.rows(2)
        assert rows == wanted(case)
        wait_until(lambda: not job.processes(), lambda: f"{job.processes()} to end")


def test_a_node_that_does_not_come_up_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with allocation(tmp_path, "n[01-03]") as job:
        done = job.msdctl(
            "up", "--slurm", "--interface", "lo", "--timeout-s", "8", MSD_TEST_LOST_NODE="n02"
        )
        assert done.returncode == 5, done.stderr
        assert (
            "after 8 s nodes n02 said nothing, nodes n01, n03 are starting (logs: " in done.stderr
        )
        wait_until(lambda: not job.processes(), lambda: f"{job.processes()} to end")


def test_a_fault_of_one_node_is_told_with_its_reason(tmp_path: Path) -> None:
    with allocation(tmp_path, "n01") as job:
        done = job.msdctl("up", "--slurm", "--interface", "msd-none")
        assert done.returncode == 1, done.stderr
        assert "node n01: --interface: no interface 'msd-none' here; there are " in done.stderr
        assert "n01.log" in done.stderr or "NODE.log" in done.stderr
        wait_until(lambda: not job.processes(), lambda: f"{job.processes()} to end")


def test_outside_an_allocation_it_says_what_is_missing(tmp_path: Path) -> None:
    with allocation(tmp_path) as job:
        done = job.msdctl("up", "--slurm", SLURM_JOB_NODELIST="")
        assert done.returncode == 78
        assert "SLURM_JOB_NODELIST is not set" in done.stderr
        done = job.msdctl("up", "--slurm", SLURM_JOB_NODELIST="n[1-")
        assert (done.returncode, "a bracket is not closed" in done.stderr) == (78, True)
        done = job.msdctl("up", "--slurm", "--planners", "2")
        assert (done.returncode, "share an etcd" in done.stderr) == (78, True)
        done = job.msdctl("up", "--slurm", PATH="/nonexistent")
        assert (done.returncode, "srun is not on PATH" in done.stderr) == (78, True)


@pytest.mark.soak
def test_nodes_on_hosts_of_their_own_meet_by_their_addresses_and_keys(
    tmp_path: Path, case: Case
) -> None:
    with hosts("n01", "n02") as network:
        prefixes = {host.name: host.prefix for host in network.hosts}
        with allocation(tmp_path, hosts=prefixes) as job:
            nodes = job.up(interface="eth0")
            assert [node["address"] for node in nodes.values()] == [
                host.address for host in network.hosts
            ]
            assert nodes["n01"]["planner"].startswith(f"tcp://{network[0].address}:")
            ranks = job.start_ranks(case.job, 2)
            assert ranks.wait(80) == 0, job.logs()
            rows, _ = job.rows(4)
            assert rows == wanted(case)
            assert job.msdctl("down", "--slurm").returncode == 0


@pytest.mark.soak
def test_ranks_of_mpirun_inside_an_allocation_find_the_same_daemons(
    tmp_path: Path, case: Case
) -> None:
    with allocation(tmp_path) as job:
        job.up()
        ranks = job.start_ranks(case.job, 2, by="mpirun")
        assert ranks.wait(80) == 0, job.logs()
        rows, runs = job.rows(4)
        assert rows == wanted(case)
        assert runs == {f"prterun-n01-{ranks.pid}@1"}
        assert job.msdctl("down", "--slurm").returncode == 0
