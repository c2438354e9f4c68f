"""A standby planner takes over: how long nobody leads, and what ranks notice of it.

Two planners share a store, two daemons with a rank each read under them, defaults everywhere; ranks
take a step every 0.5 s. The leader is killed (SIGKILL), or stands still (SIGSTOP). `takeover_s`:
from then until the other one leads. `stall_s`: the longest wait of a rank for a step around it, beyond
the period.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.processes import ROOT, Daemon

PERIOD_S = 0.5
RANKS = 2
WARM_STEPS = 6
AFTER_STEPS = 14
"""Steps behind a fault in which it is felt."""
WAYS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
RECORDS = 4_000
Say = Callable[..., None]


def run_takeover(*, is_quick: bool, say: Say) -> dict[str, float]:
    """Return the seconds of takeovers, medians of runs."""
    figures: dict[str, float] = {}
    runs = 1 if is_quick else 3
    for way, number in WAYS.items():
        found = sorted(measure(number) for _ in range(runs))
        takeover_s, stall_s, steps = found[len(found) // 2]
        say(
            f"  {way}: another planner leads after {takeover_s:.2f} s, meanwhile {steps} steps a rank, "
            f"longest stall {stall_s:.2f} s"
        )
        figures[f"takeover_{way}_s"] = takeover_s
        figures[f"takeover_{way}_stall_s"] = stall_s
        figures[f"takeover_{way}_steps_meanwhile"] = steps
    return figures


def measure(number: int) -> tuple[float, float, int]:
    """Return (seconds without a leader, longest stall in seconds, steps a rank took meanwhile)."""
    with (
        tempfile.TemporaryDirectory(prefix="msd-bench-takeover-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        job = write_job(folder)
        planners = [stack.enter_context(planner(folder, f"p{count}")) for count in range(2)]
        endpoints = ", ".join(f'"{it.endpoint}"' for it in planners)
        daemons = [Daemon(
            MSD__FEDERATION__NODE=f"n{rank}", MSD__FEDERATION__PLANNERS=f"[{endpoints}]"
        ) for rank in range(RANKS)]  # fmt: skip
        for daemon in daemons:
            stack.callback(daemon.end)
        leader = until(lambda: next((it for it in planners if it.led_since()), None))
        other = next(it for it in planners if it is not leader)
        ranks = [
            stack.enter_context(rank_process(job, rank, daemons[rank])) for rank in range(RANKS)
        ]
        steps: list[list[float]] = [[] for _ in ranks]
        read(ranks, steps, WARM_STEPS)
        began, wall = time.monotonic(), time.time()
        os.kill(leader.process.pid, number)
        read(ranks, steps, len(steps[0]) + AFTER_STEPS)
        led = until(other.led_since)
    takeover_s = led - wall
    own = steps[0]
    meanwhile = sum(began <= came < began + takeover_s for came in own)
    gaps = [
        later - earlier
        for came in steps
        for earlier, later in itertools.pairwise(came)
        if later >= began
    ]
    return takeover_s, max(max(gaps) - PERIOD_S, 0.0), meanwhile


class Planner:
    """A planner process with its log."""

    def __init__(
        self, name: str, endpoint: str, log: Path, process: subprocess.Popen[bytes]
    ) -> None:
        self.name, self.endpoint, self.process = name, endpoint, process
        self._log = log

    def led_since(self) -> float | None:
        """Return the wall clock at which it began to lead; None before."""
        found = re.search(r"^(\S+ \S+) INFO \S+: leads, term", self._log.read_text(), re.MULTILINE)
        return None if found is None else datetime.fromisoformat(found[1]).timestamp()


@contextlib.contextmanager
def planner(folder: Path, name: str) -> Iterator[Planner]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "msd_daemon.planner_app", "--name", name, "--listen", endpoint,
             "--store", f"sqlite://{folder}/plan.db", "--state-dir", str(folder / name)],
            cwd=ROOT, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        yield Planner(name, endpoint, log, process)
    finally:
        process.kill()
        process.wait(20)


@contextlib.contextmanager
def rank_process(job: Path, rank: int, daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.recover_rank", "--rank", str(rank), "--ranks", str(RANKS),
         "--job", str(job), "--socket", str(daemon.socket), "--period-s", str(PERIOD_S)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def read(ranks: list[subprocess.Popen[str]], steps: list[list[float]], count: int) -> None:
    """Read until every rank said that it took so many steps."""
    for rank, came in zip(ranks, steps, strict=True):
        assert rank.stdout is not None
        while len(came) < count:
            line = rank.stdout.readline()
            if not line:
                raise RuntimeError(f"a rank ended: status {rank.wait()}")
            came.append(json.loads(line)["came"])


def until(find: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Return what is found in the end."""
    deadline = time.monotonic() + timeout_s
    while (found := find()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError("it did not happen")
        time.sleep(0.02)
    return found


def write_job(folder: Path) -> Path:
    """Write two sources and the job that reads them."""
    for name in ("web", "code"):
        lines = (
            json.dumps({"text": f"{name} {number} " + "words " * 40}) for number in range(RECORDS)
        )
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    job = folder / "job.yaml"
    job.write_text(json.dumps({
        "schema": 1, "name": "takeover", "seed": 3, "tokenizer": {"bytes": True},
        "batch": {"rows": 16, "row_tokens": 1024, "microbatch_rows": 2},
        "sources": {name: str(folder / f"{name}.jsonl") for name in ("web", "code")},
        "mixture": {"unit": "tokens", 0: {"web": 3, "code": 1}},
    }))  # fmt: skip
    return job
