"""Everything that goes wrong between the hosts of a cluster while a job runs, from a seed; then accounts.

As `tests.support.chaos` on one host: a launcher that starts all ranks anew, from their last whole
state, on hosts that live, whenever one is gone; faults come upon each other. What ranks of every
attempt wrote down is compared with the oracle.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from msd_client.contract.errors import MsdError
from tests.support.chaos_rank import TOLD
from tests.support.etcd import EtcdCluster
from tests.support.host_cluster import HostCluster, HostRun
from tests.support.host_ranks import KILLED
from tests.support.hosts import Host
from tests.support.node import is_over, wait_until

NODES = ("n0", "n1", "n2")
PLANNERS = ("p0", "p1")
SLOW = ("n1", "p1")
"""Hosts with a cable that can be made slow."""
KINDS = (
    "cut node", "cut planner", "deaf node", "deaf planner", "deaf nodes", "lossy node", "slow node",
    "slow planner", "kill daemon", "stop daemon", "kill exchange", "stop exchange", "kill loader",
    "kill planner", "stop planner", "kill leader", "stop leader", "kill rank", "die node",
    "kill store", "stop store",
)  # fmt: skip
POLL_S = 0.02
PAUSE_S = 0.3
SAVE_EVERY = 7


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and for how long."""

    kind: str
    behind_step: int
    seconds: float
    lot: float
    """Which of several: 0 <= lot < 1."""

    def __str__(self) -> str:
        return f"{self.kind} {self.seconds:.1f} s behind {self.behind_step}"

    def of(self, things: list[Any]) -> Any:
        return things[int(self.lot * len(things))]


def draw_faults(rng: random.Random, steps: int, seconds: tuple[float, float]) -> list[Fault]:
    """Return faults in the order of their steps; some come one upon the other."""
    at = sorted(rng.randrange(0, steps * 4 // 5) for _ in range(rng.randint(2, 5)))
    for place in range(1, len(at)):
        if rng.random() < 0.4:
            at[place] = at[place - 1]
    return [Fault(rng.choice(KINDS), step, rng.uniform(*seconds), rng.random()) for step in at]


@dataclass
class ClusterChaos:
    """One run of a job under faults, on a cluster of NODES and PLANNERS whose nodes joined.

    Args:
        folder: Of this run.
        cluster: Where it runs; at the end all of it lives and is healed.
        store: The planners'; None: theirs can't be made to fail.
        job: File.
        faults: In order.
        rng: Draws meshes and places of attempts.
        steps: Of the whole run.
    """

    folder: Path
    cluster: HostCluster
    store: EtcdCluster | None
    job: Path
    faults: list[Fault]
    rng: random.Random
    steps: int
    stalled_s: float = 60.0
    told: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    attempts: list[HostRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._todo = list(self.faults)
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._reached = -1
        self._lines: dict[Path, int] = {}

    # -- the launcher ------------------------------------------------------------------------------

    def run(self) -> None:
        """Have all steps done, whatever happens; leave all healed and at rest."""
        try:
            calm = 0
            while not self._attempt():
                calm += not self._ends
                assert calm < 4 + 3 * len(self.faults), self.story()
                until = time.monotonic() + PAUSE_S
                while time.monotonic() < until:
                    self._tend()
                    time.sleep(POLL_S)
            self._end_all()
            for node in self.cluster.nodes.values():
                wait_until(node.is_at_rest, lambda n=node: f"{n.holdings()}\n{self.story()}", 60)
            wait_until(self._planner_is_at_rest, self.story, 60)
        finally:
            self._end_all()
            for run in self.attempts:
                run.kill()

    def _planner_is_at_rest(self) -> bool:
        status = self.cluster.status("n0")
        return status["term"] > 0 and not status["jobs"] and len(status["nodes"]) == len(NODES)

    def _attempt(self) -> bool:
        """Start all ranks; True once they did all steps."""
        living = sorted(self.cluster.nodes)
        if not living:
            return False
        dp = self.rng.choice((1, 2, 4))
        places = [self.rng.choice(living) for _ in range(dp)]
        run = self.cluster.run(
            self.folder / "ranks", self.job, {"dp": dp}, places, self.steps,
            attempt=len(self.attempts) + 1, step_s=0.01, states=str(self.folder / "states"),
            save_every=SAVE_EVERY,
        )  # fmt: skip
        self.attempts.append(run)
        moved = time.monotonic()
        while True:
            codes = [process.poll() for process in run.processes.values()]
            if all(code == 0 for code in codes):
                return True
            if any(code not in (None, 0) for code in codes):
                break
            if self._look(run) or self._ends:
                moved = time.monotonic()
            assert time.monotonic() - moved < self.stalled_s, "no step: " + self.story()
            self._tend()
            time.sleep(POLL_S)
        run.kill()  # as launchers do: one gone, all are started anew
        for host, code in zip(run.processes, codes, strict=True):
            is_expected = code in (None, 0, TOLD, KILLED, -signal.SIGKILL)
            assert is_expected, f"ranks on {host}: {code}\n{self.story()}"
        self.told.append(f"{dp} on {','.join(places)}: {codes} at {self._reached}")
        return False

    def _look(self, run: HostRun) -> bool:
        """Return True where a rank did a step since the last look."""
        found = False
        for rank in range(len(run.places)):
            path = run.folder / f"{run.attempt}-{rank}.jsonl"
            size = path.stat().st_size if path.exists() else 0
            if size == self._lines.get(path, 0):
                continue
            self._lines[path] = size
            found = True
        if found:
            self._reached = max(self._reached, run.reached)
        return found

    # -- faults ------------------------------------------------------------------------------------

    def _tend(self) -> None:
        now = time.monotonic()
        while self._todo and self._todo[0].behind_step <= self._reached:
            fault = self._todo.pop(0)
            end = self._begin(fault)
            self.done.append(f"{fault}{'' if end else ': nobody there'} (at {self._reached})")
            if end is not None:
                self._ends.append((now + fault.seconds, end))
        for at, end in list(self._ends):
            if at <= now:
                self._ends.remove((at, end))
                end()

    def _end_all(self) -> None:
        ends, self._ends = self._ends, []
        for _, end in ends:
            end()

    def _begin(self, fault: Fault) -> Callable[[], None] | None:
        """Begin a fault; return what ends it, None where it meets nobody."""
        what, _, whom = fault.kind.partition(" ")
        match what:
            case "cut" | "lossy" | "slow" | "deaf":
                return self._trouble(fault, what, whom)
            case "die":
                return self._die(fault)
            case "kill" if whom == "daemon":
                return self._kill_daemon(fault)
            case _ if whom in ("planner", "leader"):
                return self._hit_planner(fault, what, whom)
            case _ if whom == "store":
                return self._hit_store(what)
            case _:
                return self._signal(fault, what, whom)

    def _trouble(self, fault: Fault, what: str, whom: str) -> Callable[[], None] | None:
        names = PLANNERS if whom == "planner" else NODES
        host: Host = self.cluster.host(fault.of([n for n in names if what != "slow" or n in SLOW]))
        match what:
            case "cut":
                host.cut()
            case "lossy":
                host.lose(25)
            case "slow":
                host.slow_down(0.3, 0.05)
                return lambda: host.slow_down(0, 0)
            case _:  # deaf to planners, to nodes, or, a planner, to a node
                others = NODES if whom in ("nodes", "planner") else PLANNERS
                host.block(*(self.cluster.host(n) for n in others if n != host.name))
        return host.heal

    def _die(self, fault: Fault) -> Callable[[], None] | None:
        name = self._living(fault)
        if name is None:
            return None
        self.cluster.nodes.pop(name)
        host = self.cluster.host(name)
        host.die()

        def back() -> None:
            host.heal()
            self.cluster.join(name)

        return back

    def _kill_daemon(self, fault: Fault) -> Callable[[], None] | None:
        name = self._living(fault)
        if name is None:
            return None
        self.cluster.kill(name)
        return lambda: self._join(name)

    def _join(self, name: str) -> None:
        self.cluster.join(name)

    def _living(self, fault: Fault) -> str | None:
        names = sorted(self.cluster.nodes)
        return fault.of(names) if len(names) > 1 else None

    def _hit_planner(self, fault: Fault, what: str, whom: str) -> Callable[[], None] | None:
        running = [it for it in self.cluster.planners if it.process is not None]
        if whom == "leader":
            running = [it for it in running if it.says_that_it_leads]
        if not running:
            return None
        planner = fault.of(running)
        if what == "kill":
            planner.kill()
            return planner.start
        assert planner.process is not None
        pid = planner.process.pid
        os.kill(pid, signal.SIGSTOP)
        return lambda: _go_on(pid)

    def _hit_store(self, what: str) -> Callable[[], None] | None:
        store = self.store
        if store is None or not store.is_running:
            return None
        if what == "kill":
            store.kill()
            return store.start
        store.pause(0)
        return lambda: store.go_on(0)

    def _signal(self, fault: Fault, what: str, whom: str) -> Callable[[], None] | None:
        number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
        pids = self._pids(fault, whom)
        if not pids:
            return None
        pid = fault.of(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return lambda: _go_on(pid)

    def _pids(self, fault: Fault, whom: str) -> list[int]:
        found: list[int] = []
        if whom == "rank":
            for process in self.attempts[-1].processes.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [child.pid for child in psutil.Process(process.pid).children()]
            return found
        name = self._living(fault)
        if name is None:
            return []
        node = self.cluster.nodes[name]
        if whom == "daemon":
            return [node.process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in node.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name() == f"msd-{whom}" and not is_over(child):
                        found.append(child.pid)
        return found

    def story(self) -> str:
        """Return what was drawn and done, where ranks are, and the ends of all logs."""
        lines = [
            *(f"drawn: {fault}" for fault in self.faults), *(f"done: {it}" for it in self.done),
            *(f"told: {text}" for text in self.told), f"step {self._reached}",
        ]  # fmt: skip
        for name, node in self.cluster.nodes.items():
            lines.append(f"{name}: {self.cluster.status(name)}")
            with contextlib.suppress(MsdError):
                lines.append(f"{name}: {node.request('status')}")
        last = self.attempts[-1].told() if self.attempts else self.cluster.story()
        return "\n".join(lines) + "\n" + last

    # -- accounts ----------------------------------------------------------------------------------

    def check(self, wanted: dict[int, list[str]]) -> None:
        """Compare each attempt's steps with the oracle's rows; every step was done by all ranks once."""
        states: dict[int, str] = {}
        whole: set[int] = set()
        for run in self.attempts:
            found: dict[int, list[list[str]]] = {}
            for rank in range(len(run.places)):
                for line in run.lines(rank):
                    found.setdefault(line["step"], []).append(line["rows"])
                    known = states.setdefault(line["step"], line["state"])
                    assert known == line["state"], f"state behind {line['step']}\n{self.story()}"
            for step, parts in found.items():
                rows = sorted(row for part in parts for row in part)
                if len(parts) == len(run.places):
                    whole.add(step)
                    assert rows == wanted[step], f"step {step}, {run.attempt}\n{self.story()}"
                else:
                    assert set(rows) <= set(wanted[step]), f"step {step}\n{self.story()}"
        assert whole == set(range(self.steps)), self.story()


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
