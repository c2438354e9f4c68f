"""`msdctl up --ray` on a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from msd_client.msdctl.demo import MICROBATCH_ROWS, ROW_TOKENS, ROWS
from msd_client.msdctl.demo_sources import folder_sources
from tests.support.ledger_case import Case, large_and_little
from tests.support.node import is_over, wait_until
from tests.support.sources import ROOT

pytest.importorskip("ray", reason="ray is not installed: pip install 'msd[ray]'")
pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(300)]

STEPS = 40
MARK = "MSD_TEST_RAY_MARK"
RUNTIME_DIRS = Path(f"/tmp/msd-{os.getuid()}")


@dataclass
class RayCluster:
    """Two nodes of Ray; a process that we start has the mark, and so have all that Ray starts."""

    folder: Path
    address: str
    environ: dict[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=self.environ, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    def msdctl(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(
            "-m", "msd_client.msdctl.main", verb, "--ray", self.address, "--json", *arguments
        )

    def up(self) -> dict[str, dict[str, Any]]:
        done = self.msdctl("up")
        assert done.returncode == 0, done.stderr + self.logs()
        return {node["node"]: node for node in json.loads(done.stdout)["nodes"]}

    def start_trainer(self, ranks: int, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "trainer.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.support.ray_trainer", self.address, str(ranks),
                 *arguments],
                cwd=ROOT, env=self.environ, stdout=log, stderr=log,
            )  # fmt: skip

    def kill_actor(self, node: str) -> None:
        """Kill the process of a node's actor, as a fault would."""
        code = (
            "import sys, os, signal, ray\n"
            "ray.init(sys.argv[1], log_to_driver=False, logging_level='error')\n"
            "actor = ray.get_actor('msd-node-' + sys.argv[2], namespace='msd')\n"
            "os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)\n"
        )
        done = self.run("-c", code, self.address, node)
        assert done.returncode == 0, done.stderr

    def processes(self, word: str = "") -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.environ().get(MARK) == self.environ[MARK]
                if is_ours and not is_over(process) and word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def logs(self) -> str:
        paths = [*self.folder.glob("*.log"), *RUNTIME_DIRS.glob("ray-*/*.log")]
        recent = sorted(paths, key=lambda path: path.stat().st_mtime)[-4:]
        return "\n".join(
            f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in recent
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: Any) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("ray")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MSD_")} | {
        MARK: folder.name + str(os.getpid()),
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "MSD__MEMORY__MEMORY_BYTES": "512Mi",
        "MSD__WORKERS__LOADER_WORKERS": "1",
        "MSD__DEADLINES__RESTART_GRACE_S": "0",
    }
    with (folder / "ray.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_nodes"], cwd=ROOT, env=environ,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    made = RayCluster(folder, "", environ)
    there = set(RUNTIME_DIRS.glob("ray-*"))
    try:
        line = process.stdout.readline().decode()
        assert line.startswith("address "), (line, made.logs())
        made.address = line.split()[1]
        yield made
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
        left = made.processes()
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        wait_until(lambda: all(map(is_over, left)), f"{left} to end")
        for path in set(RUNTIME_DIRS.glob("ray-*")) - there:
            shutil.rmtree(path)


@pytest.fixture
def nodes(cluster: RayCluster) -> Iterator[dict[str, dict[str, Any]]]:
    """The nodes of a launch, which ends with the test."""
    found = cluster.up()
    yield found
    done = cluster.msdctl("down")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nodes"] == sorted(found)
    wait_until(
        lambda: not cluster.processes("msd_daemon"), lambda: f"{cluster.processes('msd_daemon')}"
    )
    for node in found.values():
        folder = Path(node["socket"]).parent
        assert not (folder / "launched").exists()
        assert not list(folder.glob("keys/*"))


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("with_planner", [False, True])
def test_a_stream_survives_the_kill_of_a_nodes_actor(
    cluster: RayCluster, nodes: dict[str, dict[str, Any]], tmp_path: Path, with_planner: bool
) -> None:
    case: Case = large_and_little(tmp_path / "corpus")
    assert [bool(node["planner"]) for node in nodes.values()] == [True, False]
    (tmp_path / "job.json").write_text(json.dumps(case.job))
    trainer = cluster.start_trainer(
        2, "tests.support.launched_rank", str(tmp_path / "job.json"), str(tmp_path), str(STEPS),
        "--slow",
    )  # fmt: skip
    wait_until(lambda: count_lines(tmp_path / "rank-1.jsonl") >= 6, cluster.logs, 90)
    (victim,) = [name for name, node in nodes.items() if bool(node["planner"]) == with_planner]
    cluster.kill_actor(victim)
    assert trainer.wait(150) == 0, cluster.logs()

    rows: dict[int, dict[int, list[str]]] = {}
    runs = set()
    for rank in range(2):
        for text in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines():
            line = json.loads(text)
            rows.setdefault(line["step"], {})[rank] = line["rows"]
            runs.add(line["run"])
    assert len(runs) > 1, "the kill was not noticed"
    wanted = {
        step: sorted(hashlib.blake2b(row, digest_size=12).hexdigest() for row in step_rows)
        for step, step_rows in case.wanted(STEPS).items()
    }
    assert {step: sorted(found[0] + found[1]) for step, found in rows.items()} == wanted


def test_the_demos_trainer_learns_though_an_actor_is_killed(
    cluster: RayCluster, nodes: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    found = folder_sources(ROOT / "docs").sources
    job = {
        "schema": 1, "stream": 1, "name": "demo", "seed": 17, "steps": 24,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {"rows": ROWS, "row_tokens": ROW_TOKENS, "microbatch_rows": MICROBATCH_ROWS},
        "sources": {source.name: source.section for source in found},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    trainer = cluster.start_trainer(
        4, "msd_client.msdctl.demo_trainer", "--job", str(tmp_path / "job.yaml"), "--socket", "auto",
        "--rendezvous", str(tmp_path / "rendezvous-ATTEMPT"), "--row-tokens", str(ROW_TOKENS),
        "--steps", "24", "--dp", "2", "--tp", "2",
    )  # fmt: skip
    first, second = nodes.values()
    wait_until(lambda: released_step(cluster, first["socket"]) >= 3, cluster.logs, 100)
    cluster.kill_actor(second["node"])
    assert trainer.wait(150) == 0, cluster.logs()
    told = (cluster.folder / "trainer.log").read_text()
    assert "attempt 1: " in told, "the kill was not noticed"
    losses = [float(loss) for loss in re.findall(r'"loss": ([0-9.]+)', told)]
    assert losses[-1] < 4.5, losses  # of a byte drawn by chance 5.5


def released_step(cluster: RayCluster, socket: str) -> int:
    done = cluster.run("-m", "msd_client.msdctl.main", "cluster", "--socket", socket, "--json")
    jobs = json.loads(done.stdout)["jobs"] if done.returncode == 0 else []
    return min((node["released_step"] for job in jobs for node in job["nodes"]), default=-1)


def test_a_second_launch_is_refused_and_a_fault_ends_all(cluster: RayCluster) -> None:
    done = cluster.msdctl("down")
    assert (done.returncode, "has no launch of msd" in done.stderr) == (4, True), done.stderr
    done = cluster.msdctl("up", "--interface", "msd-none")
    assert done.returncode == 1, done.stderr
    assert "no interface 'msd-none' here; there are " in done.stderr
    wait_until(
        lambda: not cluster.processes("msd_daemon"), lambda: f"{cluster.processes('msd_daemon')}"
    )
    cluster.up()
    done = cluster.msdctl("up")
    assert (done.returncode, "has a launch of msd already" in done.stderr) == (78, True)
    assert cluster.msdctl("down").returncode == 0
