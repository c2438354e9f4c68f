"""A cluster on hosts of their own, and what ranks on them were given.

`HostRun` is a trainer's launcher over hosts; with one host and no namespaces it is the run that all
others are compared with.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from federation.key_files import generate
from msd_client.contract.errors import MsdError
from tests.support.cluster import Cluster, PlannerProcess
from tests.support.hosts import Host, Network
from tests.support.node import Node, wait_until
from tests.support.sources import ROOT

PLANNER_PORT = 7700
EXCHANGE_PORT = 7800
DEADLINES = {"first_batch_s": 100.0, "next_batch_s": 100.0, "join_s": 100.0}
Line = dict[str, Any]


@dataclass
class HostRun:
    """Ranks that read one job: start them, look how far they are, take what they were given.

    Args:
        folder: Of this run, made here.
        job: A job, or its file.
        mesh: Axes and sizes.
        places: Host of each rank.
        nodes: Daemon and command prefix of each host.
        more: Other facts of `tests.support.host_ranks`.
    """

    folder: Path
    job: Any
    mesh: Mapping[str, int]
    places: Sequence[str]
    nodes: Mapping[str, tuple[Node, tuple[str, ...]]]
    steps: int
    story: Callable[[], str] = str
    more: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        job = self.job
        if isinstance(job, dict):
            job = self.folder / "job.yaml"
            job.write_text(json.dumps(self.job))
        hosts = list(dict.fromkeys(self.places))
        facts = {
            "job": str(job), "mesh": dict(self.mesh), "steps": self.steps,
            "out": str(self.folder), "deadlines": DEADLINES,
            "sockets": {host: str(self.nodes[host][0].socket) for host in hosts},
            "ranks": {
                host: [rank for rank, place in enumerate(self.places) if place == host]
                for host in hosts
            },
            **self.more,
        }  # fmt: skip
        path = self.folder / f"facts-{self.attempt}.json"
        path.write_text(json.dumps(facts))
        for host in hosts:
            with (self.folder / f"ranks-{self.attempt}-{host}.log").open("wb") as log:
                self.processes[host] = subprocess.Popen(
                    [*self.nodes[host][1], sys.executable, "-m", "tests.support.host_ranks",
                     str(path), host],
                    cwd=ROOT, stdout=log, stderr=log,
                )  # fmt: skip

    @property
    def attempt(self) -> int:
        return int(self.more.get("attempt", 1))

    def lines(self, rank: int) -> list[Line]:
        """Return what a rank wrote down so far, by step."""
        path = self.folder / f"{self.attempt}-{rank}.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in whole if line.endswith("\n")]

    @property
    def reached(self) -> int:
        """The last step that every rank did; -1 before the first."""
        found = (self.lines(rank) for rank in range(len(self.places)))
        return min(lines[-1]["step"] if lines else -1 for lines in found)

    def until(self, step: int, timeout_s: float = 90) -> None:
        """Wait until every rank did a step, or the last one."""
        step = min(step, self.steps - 1)

        def is_there() -> bool:
            codes = [process.poll() for process in self.processes.values()]
            assert all(code in (None, 0) for code in codes), self.told()
            return self.reached >= step

        wait_until(is_there, lambda: f"step {step}; {self.told()}", timeout_s)

    def wait(self, timeout_s: float = 120) -> dict[str, int]:
        """Wait for the ranks of all hosts; return the exit codes."""
        deadline = time.monotonic() + timeout_s
        codes: dict[str, int] = {}
        try:
            for host, process in self.processes.items():
                codes[host] = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"ranks on {host} read on\n{self.told()}") from error
        finally:
            self.kill()
        return codes

    def finish(self, timeout_s: float = 120) -> HostRun:
        """Wait for all ranks to have done all steps."""
        codes = self.wait(timeout_s)
        assert not any(codes.values()), f"{codes}\n{self.told()}"
        assert self.reached == self.steps - 1
        return self

    def kill(self) -> None:
        """End the ranks that still run, as a launcher does."""
        for process in self.processes.values():
            if process.poll() is None:
                for child in _children(process.pid):
                    child.kill()
                process.kill()
                process.wait(10)

    def told(self) -> str:
        """Return how far ranks came, what they printed, and the cluster's story."""
        far = {
            rank: lines[-1]["step"] if (lines := self.lines(rank)) else None
            for rank in range(len(self.places))
        }
        logs = [
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob(f"ranks-{self.attempt}-*.log"))
        ]
        return "\n".join([f"ranks are at {far}", *logs, self.story()])

    # -- accounts ----------------------------------------------------------------------------------

    def check_equals(self, other: HostRun, *, but_states: Container[int] = ()) -> None:
        """Check that every rank was given what the same rank of another run was, byte for byte.

        Args:
            other: The other run.
            but_states: Steps behind which a state may or may not know of an event to come.
        """
        for rank in range(len(self.places)):
            mine, theirs = self._contents(rank, but_states), other._contents(rank, but_states)
            assert mine, f"rank {rank} was given nothing"
            for step, line in mine.items():
                assert line == theirs[step], f"rank {rank}, step {step}\n{self.told()}"

    def _contents(self, rank: int, but_states: Container[int]) -> dict[int, Line]:
        """Return what of a rank's lines is the stream's, by step."""
        found: dict[int, Line] = {}
        for line in self.lines(rank):
            left_out = {"ns", "state"} if line["step"] in but_states else {"ns"}
            kept = {key: value for key, value in line.items() if key not in left_out}
            assert found.setdefault(line["step"], kept) == kept
        return found

    def rows(self) -> dict[int, list[str]]:
        """Return each step's rows, each DP group's once, as a sorted multiset."""
        found: dict[int, list[str]] = {}
        for rank in first_ranks(self.mesh):
            for line in self.lines(rank):
                found.setdefault(line["step"], []).extend(line["rows"])
        return {step: sorted(rows) for step, rows in found.items()}


def first_ranks(mesh: Mapping[str, int]) -> list[int]:
    """Return the first rank of each DP group."""
    from federation.model.place_tree import ClientPlaceTree

    return [int(ranks[0]) for ranks in ClientPlaceTree.from_mesh(mesh).group_ranks]


def _children(pid: int) -> list[Any]:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def read_on_one_host(
    node: Node, folder: Path, job: Any, mesh: Mapping[str, int], steps: int, **more: Any
) -> HostRun:
    """Return the finished run of all ranks on a daemon that is in no cluster."""
    places = ["here"] * math.prod(mesh.values())
    run = HostRun(
        folder, job, mesh, places, {"here": (node, ())}, steps, lambda: node.log[-4000:], more
    )
    run.start()
    return run.finish()


@dataclass
class HostCluster(Cluster):
    """Planners and nodes, each on a host of that name."""

    network: Network | None = None
    is_v6: bool = False
    runs: list[HostRun] = field(default_factory=list)
    """All that were started: they end with the cluster."""

    def endpoint(self, name: str, port: int) -> str:
        host = self.host(name)
        return f"tcp://{f'[{host.address6}]' if self.is_v6 else host.address}:{port}"

    def host(self, name: str) -> Host:
        assert self.network is not None
        return next(host for host in self.network.hosts if host.name == name)

    def join(self, name: str, *arguments: str, **environ: str) -> Node:
        """Start a node's daemon on its host."""
        host = self.host(name)
        return self.add(
            name, *arguments, prefix=host.prefix,
            MSD__FEDERATION__LISTEN=self.endpoint(name, EXCHANGE_PORT), **environ,
        )  # fmt: skip

    def run(
        self, folder: Path, job: Any, mesh: Mapping[str, int], places: Sequence[str], steps: int,
        **more: Any,
    ) -> HostRun:  # fmt: skip
        """Return started ranks: rank n on the host that `places` names n-th."""
        nodes = {name: (node, self.host(name).prefix) for name, node in self.nodes.items()}
        run = HostRun(folder, job, mesh, places, nodes, steps, self.story, more)
        self.runs.append(run)
        run.start()
        return run

    def planner(self, name: str) -> PlannerProcess:
        return next(planner for planner in self.planners if planner.name == name)

    def other(self, planner: PlannerProcess) -> PlannerProcess:
        """Return a planner that is not this one."""
        return next(other for other in self.planners if other is not planner)

    def msdctl(self, node: str, *arguments: str) -> dict[str, Any]:
        """Run msdctl on a host; return its JSON."""
        done = subprocess.run(
            [
                *self.host(node).prefix, sys.executable, "-m", "msd_client.msdctl.main",
                *arguments, "--json", "--socket", str(self.nodes[node].socket),
            ],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert not done.returncode, done.stderr + self.story()
        return dict(json.loads(done.stdout))

    def happened(self, node: str) -> list[str]:
        """Return what `msdctl cluster` says that happened, oldest first."""
        return [what for _, what in self.status(node)["events"]]

    def status(self, node: str) -> dict[str, Any]:
        """Return what `msdctl cluster` says on a host; nothing happened where no planner answers."""
        try:
            return self.nodes[node].request("cluster")
        except MsdError as error:
            return {"events": [], "nodes": [], "jobs": [], "term": 0, "error": error.message}


@contextlib.contextmanager
def host_cluster(
    folder: Path,
    network: Network,
    *,
    planners: Sequence[str] = ("p0",),
    store: str = "",
    planner_environ: Mapping[str, Mapping[str, str]] | None = None,
    is_v6: bool = False,
) -> Iterator[HostCluster]:
    """Start planners, each on its host; nodes join by the test.

    Args:
        folder: For all files.
        network: Hosts, named as planners and nodes are.
        planners: Names.
        store: URL that all planners share; default: SQLite, which this machine's share.
        planner_environ: By name.
        is_v6: All wires are IPv6.
    """
    cluster = HostCluster(folder, [], folder / "keys", network=network, is_v6=is_v6)
    for name in planners:
        keys = folder / "keys" / name
        keys.mkdir(parents=True)
        generate(keys, name)
        cluster.planners.append(
            PlannerProcess(
                name, cluster.endpoint(name, PLANNER_PORT), folder / name,
                store or f"sqlite://{folder}/plan.db", cluster.host(name).prefix,
                dict((planner_environ or {}).get(name, {})), keys,
            )
        )  # fmt: skip
    try:
        for planner in cluster.planners:
            planner.start()
        with cluster._stack:
            try:
                yield cluster
            finally:
                for run in cluster.runs:
                    run.kill()
    finally:
        for planner in cluster.planners:
            planner.kill()
