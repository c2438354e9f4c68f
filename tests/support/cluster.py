"""A cluster on this machine: a planner and daemons, each its own node, over loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from federation.key_files import generate
from tests.support.node import Node, is_over, running_node, wait_until
from tests.support.sources import ROOT


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class PlannerProcess:
    """A planner of its own."""

    name: str
    endpoint: str
    folder: Path
    store: str
    prefix: tuple[str, ...] = ()
    """A command that executes the planner's in its own place."""
    environ: dict[str, str] = field(default_factory=dict)
    keys_dir: Path | None = None
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "planner.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.prefix,
                    sys.executable, "-m", "msd_daemon.planner_app", "--name", self.name,
                    "--listen", self.endpoint, "--state-dir", str(self.folder),
                    "--store", self.store,
                    *(["--keys-dir", str(self.keys_dir)] if self.keys_dir else []),
                ],
                cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **self.environ},
            )  # fmt: skip

    @property
    def log(self) -> str:
        path = self.folder / "planner.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def forget(self) -> None:
        """Lose the store and all journals."""
        for path in Path(self.store.removeprefix("sqlite://")).parent.glob("plan.db*"):
            path.unlink()
        shutil.rmtree(self.folder.parent / "jobs")

    @property
    def says_that_it_leads(self) -> bool:
        lines = [line for line in self.log.splitlines() if "planner_life: " in line]
        return bool(lines) and "leads, term" in lines[-1] and "stands by" not in lines[-1]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


@dataclass
class Spread:
    """Nodes by rank."""

    nodes: list[Node]
    cluster: Cluster

    @property
    def log(self) -> str:
        return self.cluster.story()

    def connect(self, job: Any, mesh: Any, rank: int, **options: Any) -> Any:
        return self.nodes[rank].connect(job, mesh, rank, **options)

    @property
    def socket(self) -> Any:
        return self.nodes[0].socket


@dataclass
class Cluster:
    """Planners and nodes."""

    folder: Path
    planners: list[PlannerProcess]
    keys_dir: Path | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def add(self, name: str, *arguments: str, prefix: tuple[str, ...] = (), **environ: str) -> Node:
        """Start a node's daemon; `prefix` as running_node's."""
        endpoints = ", ".join(
            f'"{f"{planner.name}@" if planner.keys_dir else ""}{planner.endpoint}"'
            for planner in self.planners
        )
        if self.keys_dir is not None and "MSD__FEDERATION__KEYS_DIR" not in environ:
            self.make_keys(name)
            environ = {**environ, "MSD__FEDERATION__KEYS_DIR": str(self.keys_dir / name)}
        node = self._stack.enter_context(
            running_node(
                self.folder / name, *arguments, prefix=prefix,
                environ={
                    "MSD__FEDERATION__NODE": name,
                    "MSD__FEDERATION__PLANNERS": f"[{endpoints}]",
                    **environ,
                },
            )
        )  # fmt: skip
        self.nodes[name] = node
        return node

    def make_keys(self, name: str) -> None:
        """Make a node's keys, and list them with the planners."""
        assert self.keys_dir is not None
        own = self.keys_dir / name
        if own.exists():
            return
        own.mkdir(parents=True)
        generate(own, name)
        for planner in self.planners:
            assert planner.keys_dir is not None
            shutil.copy(own / f"{name}.pub", planner.keys_dir)
            shutil.copy(planner.keys_dir / f"{planner.name}.pub", own)

    def kill(self, name: str) -> None:
        """Kill a node's daemon; its workers end with it."""
        node = self.nodes.pop(name)
        children = node.children()
        node.process.kill()
        node.process.wait(10)
        wait_until(lambda: all(map(is_over, children)), f"{children} to end")

    def leader(self) -> PlannerProcess:
        """Return the planner that leads."""
        leading = [
            planner
            for planner in self.planners
            if planner.process is not None and planner.says_that_it_leads
        ]
        assert len(leading) == 1, self.story()
        return leading[0]

    def spread(self, *names: str) -> Spread:
        """Return what connects rank n to the n-th of these nodes' daemons, as a test's node."""
        return Spread([self.nodes[name] for name in names], self)

    def until_joined(self, *names: str) -> None:
        """Wait until the planners know these nodes: a job that begins before leaves them out."""
        self.until(
            lambda: all(
                any(f"node {name} joins" in planner.log for planner in self.planners)
                for name in names
            ),
            f"{names} to join",
        )

    def story(self) -> str:
        """Return the ends of all logs."""
        logs = [(planner.name, planner.log) for planner in self.planners]
        logs += [(name, node.log) for name, node in list(self.nodes.items())]
        return "\n".join(f"== {name}\n{log[-2500:]}" for name, log in logs)

    def until(self, is_done: Any, what: str, timeout_s: float = 40) -> None:
        wait_until(is_done, lambda: f"{what}\n{self.story()}", timeout_s)


@contextlib.contextmanager
def running_cluster(
    folder: Path, planners: int = 1, *, has_keys: bool = False
) -> Iterator[Cluster]:
    """Start planners that share a store; nodes are added by the test."""
    made = [
        PlannerProcess(
            f"p{number}", f"tcp://127.0.0.1:{free_port()}", folder / f"p{number}",
            f"sqlite://{folder}/plan.db",
        )
        for number in range(planners)
    ]  # fmt: skip
    keys_dir = folder / "keys" if has_keys else None
    for planner in made if keys_dir is not None else ():
        planner.keys_dir = keys_dir / planner.name  # type: ignore[operator]
        planner.keys_dir.mkdir(parents=True)
        generate(planner.keys_dir, planner.name)
    cluster = Cluster(folder, made, keys_dir)
    try:
        for planner in made:
            planner.start()
        with cluster._stack:
            yield cluster
    finally:
        for planner in made:
            planner.kill()
