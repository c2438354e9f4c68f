"""Everything that can die, stop, fill up or be cut while a job runs, from a seed; then the accounts.

`Chaos` is a trainer's launcher: it starts ranks, and all anew, from their last whole state and often
with another dp, whenever one is gone. A `Schedule` of faults is drawn before and printed. What ranks
wrote down of every attempt is compared with the oracle.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.bad_disk import BadDisk
from tests.support.chaos_rank import TOLD
from tests.support.node import Node, is_over, running_node, segments_of, wait_until
from tests.support.shm_names import expect_no_names_left, shm_names
from tests.support.sources import ROOT

PROCESSES = ("loader", "constructor", "planner", "daemon", "rank")
KINDS = (
    *(f"kill {name}" for name in PROCESSES),
    *(f"stop {name}" for name in PROCESSES),
    "kill fork_server",
    "kill all",
    "full disk",
    "slow disk",
    "cut state",
    "cut save",
)
POLL_S = 0.004
LAUNCHER_PAUSE_S = 0.3


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    behind_step: int
    seconds: float
    """How long it lasts, where it lasts; and how long after the step it comes."""
    delay_s: float
    lot: float
    """Which of several, where in a file: 0 <= lot < 1."""

    def __str__(self) -> str:
        lasting = f" {self.seconds:.1f} s" if self.kind.startswith(("stop", "full", "slow")) else ""
        return f"{self.kind}{lasting} behind {self.behind_step}+{self.delay_s:.2f} s"


def draw_schedule(
    rng: random.Random, steps: int, stop_s: tuple[float, float], faults: tuple[int, int] = (2, 5)
) -> list[Fault]:
    """Return faults in the order of their steps; some come one upon the other."""
    count = rng.randint(*faults)
    at = sorted(rng.randrange(0, steps * 4 // 5) for _ in range(count))
    for place in range(1, count):
        if rng.random() < 0.3:
            at[place] = at[place - 1]
    return [
        Fault(rng.choice(KINDS), step, rng.uniform(*stop_s), rng.uniform(0, 0.2), rng.random())
        for step in at
    ]


@dataclass
class Chaos:
    """One run of a job under a schedule."""

    folder: Path
    job: Path
    schedule: list[Fault]
    rng: random.Random
    steps: int
    stalled_s: float = 60.0
    """Without a step for so long, stops left out: a deadlock."""
    step_s: float = 0.004
    told: list[str] = field(default_factory=list)
    attempts: int = 0
    done: list[str] = field(default_factory=list)
    """Faults that were done."""

    def __post_init__(self) -> None:
        for name in ("ledger", "states"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._node_folder = self.folder / "n"
        self.disk = BadDisk(self._node_folder / "state", self.folder / "orders")
        self._todo = list(self.schedule)
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._lines: dict[Path, int] = {}
        self._reached = -1
        self._due: list[tuple[float, Fault]] = []
        self._stack = contextlib.ExitStack()
        self.node: Node

    # -- the launcher ------------------------------------------------------------------------------

    def run(self) -> None:
        """Have all steps done, whatever happens; leave nothing behind."""
        before = shm_names()
        try:
            self._start_daemon()
            calm = 0
            while not self._attempt():
                calm += not self._ends  # attempts while something is stopped or full may all fail
                assert calm < 4 + 3 * len(self.schedule), self._story()
                pause_ends = time.monotonic() + LAUNCHER_PAUSE_S
                while time.monotonic() < pause_ends:
                    self._tend()
                    time.sleep(POLL_S)
            self._end_all()
            wait_until(self.node.is_at_rest, lambda: self._story() + self.node.holdings(), 40)
            count = len(os.listdir(f"/proc/{self.node.process.pid}/fd"))
            assert count < 64, f"{count} descriptors are open\n{self._story()}"
        finally:
            self._end_all()
            for rank in self._ranks:
                rank.kill()
                rank.wait(10)
            self._stack.close()
        expect_no_names_left(before)

    def _start_daemon(self) -> None:
        self._stack.close()
        self._stack = contextlib.ExitStack()
        self.node = self._stack.enter_context(
            running_node(
                self._node_folder, "--loader-workers", "2",
                environ={**self.disk.environ, "MSD__PLANNER__HORIZON_STEPS": "4"},
            )
        )  # fmt: skip

    def _attempt(self) -> bool:
        """Start all ranks; True once they did all steps."""
        if self.node.process.poll() is not None:
            self._start_daemon()
        self.attempts += 1
        dp = self.rng.choice((1, 2, 4))
        facts = {
            "job": str(self.job), "dp": dp, "attempt": str(self.attempts), "steps": self.steps,
            "socket": str(self.node.socket), "states": str(self.folder / "states"),
            "ledger": str(self.folder / "ledger"), "save_every": 7, "step_s": self.step_s,
            "deadlines": {"first_batch_s": 100.0, "next_batch_s": 100.0, "join_s": 100.0},
        }  # fmt: skip
        path = self.folder / f"facts-{self.attempts}.json"
        path.write_text(json.dumps(facts))
        outputs = [self.folder / f"rank-{self.attempts}-{rank}.log" for rank in range(dp)]
        self._ranks = []
        for rank in range(dp):
            with outputs[rank].open("wb") as out:
                self._ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.support.chaos_rank", str(path), str(rank)],
                        cwd=ROOT, stdout=out, stderr=out,
                    )
                )  # fmt: skip
        moved = time.monotonic()
        while True:
            codes = [rank.poll() for rank in self._ranks]
            if any(code not in (None, 0) for code in codes):
                break
            if all(code == 0 for code in codes):
                self._tend()
                return True
            if self._look() or self._ends:
                moved = time.monotonic()
            assert time.monotonic() - moved < self.stalled_s, "no step: " + self._story()
            self._tend()
            time.sleep(POLL_S)
        for rank in self._ranks:  # as launchers do: one gone, all are started anew
            rank.kill()
            rank.wait(10)
        for number, code in enumerate(codes):
            text = outputs[number].read_text(errors="replace")
            if code == TOLD:
                self.told.append(text.strip()[:160])
            else:
                assert code in (None, 0, -signal.SIGKILL), f"rank {number}: {code}\n{text}\n{self._story()}"  # fmt: skip
        return False

    def _look(self) -> bool:
        """Return True where a rank did a step since the last look."""
        found = False
        for path in (self.folder / "ledger").glob(f"{self.attempts}-*.jsonl"):
            size = path.stat().st_size
            if size == self._lines.get(path):
                continue
            self._lines[path] = size
            found = True
            lines = path.read_bytes()[-4096:].splitlines()
            for line in lines[-2:]:
                with contextlib.suppress(ValueError, TypeError):
                    self._reached = max(self._reached, json.loads(line)["step"])
        return found

    # -- faults ------------------------------------------------------------------------------------

    def _tend(self) -> None:
        now = time.monotonic()
        while self._todo and self._todo[0].behind_step <= self._reached:
            fault = self._todo.pop(0)
            self._due.append((now + fault.delay_s, fault))
        for at, fault in list(self._due):
            if at <= now:
                self._due.remove((at, fault))
                self._do(fault)
        for at, end in list(self._ends):
            if at <= now:
                self._ends.remove((at, end))
                end()

    def _end_all(self) -> None:
        ends, self._ends = self._ends, []
        for _, end in ends:
            end()

    def _do(self, fault: Fault) -> None:
        what, _, whom = fault.kind.partition(" ")
        did = False
        match what:
            case "kill" if whom == "all":
                for rank in self._ranks:
                    rank.kill()
                self.node.process.kill()
                did = True
            case "kill":
                did = self._signal(whom, signal.SIGKILL, fault) is not None
            case "stop":
                pid = self._signal(whom, signal.SIGSTOP, fault)
                did = pid is not None
                if pid is not None:
                    self._later(fault, lambda: _continue(pid))
            case "full" | "slow":
                self.disk.begin(what)
                self._later(fault, lambda: self.disk.end(what))
                did = True
            case "cut" if whom == "state":
                did = self._cut_state(fault)
            case "cut":
                did = self._cut_save(fault)
        self.done.append(f"{fault}{'' if did else ': nobody there'} (at {self._reached})")

    def _later(self, fault: Fault, end: Callable[[], None]) -> None:
        self._ends.append((time.monotonic() + fault.seconds, end))

    def _signal(self, whom: str, number: signal.Signals, fault: Fault) -> int | None:
        pids: list[int] = []
        if whom == "daemon":
            pids = [self.node.process.pid]
        elif whom == "rank":
            pids = [rank.pid for rank in self._ranks if rank.poll() is None]
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in self.node.children():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if child.name() == f"msd-{whom}" and not is_over(child):
                            pids.append(child.pid)
        if not pids:
            return None
        pid = sorted(pids)[int(fault.lot * len(pids))]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return pid
        return None

    def _cut_state(self, fault: Fault) -> bool:
        """Kill the daemon and damage a file of its state."""
        for rank in self._ranks:
            rank.kill()
        children = self.node.children()
        held = segments_of([self.node.process.pid])
        self.node.process.kill()
        self.node.process.wait(10)
        wait_until(lambda: all(map(is_over, children)), f"{children} to end")
        assert not set(held) & set(segments_of(psutil.pids()))
        state = self._node_folder / "state"
        files = sorted(path for path in state.rglob("*") if path.is_file() and path.stat().st_size)
        return bool(files) and damage(files[int(fault.lot * len(files))], self.rng)

    def _cut_save(self, fault: Fault) -> bool:
        """Kill all ranks and damage one of their saves."""
        for rank in self._ranks:
            rank.kill()
            rank.wait(10)
        files = sorted((self.folder / "states").glob("step-*"))[-4:]
        return bool(files) and damage(files[int(fault.lot * len(files))], self.rng)

    def _story(self) -> str:
        lines = [
            "", *(f"drawn: {fault}" for fault in self.schedule), *(f"done: {it}" for it in self.done),
            *(f"told: {text}" for text in self.told), f"attempt {self.attempts}, step {self._reached}",
        ]  # fmt: skip
        return "\n".join(lines) + "\n" + self.node.log[-6000:]

    # -- accounts ----------------------------------------------------------------------------------

    def check(self, wanted: dict[int, list[str]]) -> None:
        """Compare each attempt's steps with the oracle's rows; every step was done by all ranks once."""
        states: dict[int, str] = {}
        whole: set[int] = set()
        for attempt in range(1, self.attempts + 1):
            dp = json.loads((self.folder / f"facts-{attempt}.json").read_text())["dp"]
            found: dict[int, list[list[str]]] = {}
            for rank in range(dp):
                path = self.folder / "ledger" / f"{attempt}-{rank}.jsonl"
                for line in _lines(path):
                    found.setdefault(line["step"], []).append(line["rows"])
                    known = states.setdefault(line["step"], line["state"])
                    assert known == line["state"], f"state behind {line['step']}\n{self._story()}"
            for step, parts in found.items():
                rows = sorted(row for part in parts for row in part)
                if len(parts) == dp:
                    whole.add(step)
                    assert rows == wanted[step], f"step {step}, attempt {attempt}\n{self._story()}"
                else:
                    assert set(rows) <= set(wanted[step]), f"step {step}\n{self._story()}"
        assert whole == set(range(self.steps)), self._story()


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a rank that may have been killed as it wrote."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def damage(path: Path, rng: random.Random) -> bool:
    """Cut a file short, or flip a bit of it."""
    data = bytearray(path.read_bytes())
    if not data:
        return False
    if rng.random() < 0.6:
        del data[rng.randrange(len(data)) :]
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return True
