"""Planners of a cluster in processes of their own, each with a service that plans one made-up job.

The service reads its own plans, as ranks would, and says each step with its digest once it is
durable; where a planner takes over it goes on at the step that ranks wait for.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from federation.model.job import BatchRule
from federation.planner_config import PlannerConfig
from federation.planner_life import Standing
from federation.planner_main import run_planner
from federation.store.plan_store import PlanStore
from msd_daemon import planner_app
from tests.support.metadata import initial_state, make_job, make_spec, random_corpus
from tests.support.plan_stores import KnownPlace
from tests.support.planned_job import PlannedJob

_MAIN = """
import sys
from tests.support.planners import main
main(*sys.argv[1:])
"""
STEP_MS = 5


def made_up_job(folder: Path, place: KnownPlace | None = None) -> PlannedJob:
    """Return the job that every planner plans."""
    specs = [make_spec("a", 3), make_spec("b", 2)]
    corpora = [random_corpus(spec, 5, lambda rng: rng.randint(1, 20), 3, 12) for spec in specs]
    return PlannedJob(folder, make_job(specs, BatchRule(2, 16)), corpora, place)


def digests_of(folder: Path, steps: int) -> list[str]:
    """Return the digests of the first steps of an undisturbed run."""
    planned = made_up_job(folder)
    planned.begin(initial_state(planned.job))
    digests = [planned.read().stream_digest for _ in range(steps)]
    planned.close()
    return digests


def say(what: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"what": what, "at_ns": time.monotonic_ns(), **facts}) + "\n")
    sys.stdout.flush()


class NobodysRouter:
    """A wire without nodes."""

    endpoint = "tcp://127.0.0.1:9"

    def poll(self, timeout_ms: int | None, also: Sequence[int] = ()) -> list[Any]:
        poller = select.poll()
        for fd in also:
            poller.register(fd, select.POLLIN)
        poller.poll(timeout_ms)
        return []

    def close(self) -> None:
        pass


class OneJob:
    """Plans the job for one term."""

    def __init__(self, store: PlanStore, folder: Path, term: int) -> None:
        self._store = store
        place = KnownPlace(store.journal("job"), folder / "jobs" / "job" / "journal.db")
        self._planned = made_up_job(folder, place)
        waiting = store.records("jobs").get("job")
        if waiting is None:
            self._planned.begin(initial_state(self._planned.job))
            store.put("jobs", "job", b"0")
        else:
            self._planned.go_on(int(waiting), term)

    def handle(self, events: list[Any]) -> int | None:
        assert not events
        plan = self._planned.read()
        say("step", step=plan.step, digest=plan.stream_digest, term=self._store.term)
        self._store.put("jobs", "job", str(plan.step + 1).encode())
        return STEP_MS

    def close(self) -> None:
        self._planned.close()


def main(skew_s: str, *arguments: str) -> None:
    """Run a planner whose wall clock is wrong by so many seconds; its flags follow."""
    real = time.time
    time.time = lambda: real() + float(skew_s)  # type: ignore[assignment]

    def announce(_: NobodysRouter, standing: Standing) -> None:
        say("standing", leads=standing.leads, term=standing.term, leader=standing.leader)

    def live(config: PlannerConfig) -> None:
        run_planner(
            config,
            lambda _: NobodysRouter(),
            announce,
            lambda _router, store, term: OneJob(store, config.state_dir, term),
        )

    sys.exit(planner_app.run(list(arguments), live))


class Planner:
    """One planner's process, and what it said."""

    def __init__(
        self, name: str, url: str, folder: Path, *, skew_s: float = 0.0, lease_s: float = 2.0
    ) -> None:
        self.said: list[dict[str, Any]] = []
        self.log = folder / f"{name}.log"
        folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-c", _MAIN, str(skew_s), "--name", name, "--store", url,
                    "--state-dir", str(folder), "--lease-s", str(lease_s),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[2],
            )  # fmt: skip

    def hear(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Take what it says up to something."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(json.loads(line))
            if is_it(self.said[-1]):
                return self.said[-1]
        raise AssertionError(f"it ended: {self.said[-3:]} {self.log.read_text()}")

    def hear_steps(self, count: int) -> dict[str, Any]:
        """Take what it says up to the last of some more steps."""
        for _ in range(count):
            found = self.hear(lambda it: it["what"] == "step")
        return found

    def hear_standing(self, *, leads: bool) -> dict[str, Any]:
        return self.hear(lambda it: it["what"] == "standing" and it["leads"] is leads)

    def hear_trouble(self) -> None:
        """Wait until its log tells that the store does not answer."""
        while "plan store" not in self.log.read_text():
            assert self._process.poll() is None, self.log.read_text()

    def steps(self) -> dict[int, str]:
        return {it["step"]: it["digest"] for it in self.said if it["what"] == "step"}

    def signal(self, number: signal.Signals) -> int:
        """Send a signal; return when, of the monotonic clock."""
        at_ns = time.monotonic_ns()
        self._process.send_signal(number)
        return at_ns

    def end(self) -> int:
        """Take all that it says until it ends; return its exit status."""
        assert self._process.stdout is not None
        self.said += [json.loads(line) for line in self._process.stdout if line.endswith(b"\n")]
        return self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
