"""A real run: ranks are killed at random and come back as fewer or more, from their own saves.

What the surviving line of history consumed, step by step, is what the uninterrupted run consumed, and
with a fixed order of additions the losses are the same to the last bit. A seed is printed;
MSD_TEST_SEED repeats it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.node import Node, text_job, wait_until, write_job
from tests.support.sources import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]
SEED = int(os.environ.get("MSD_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
WORLDS = (4, 2, 8)
SAVE_EVERY = 3


class Trainer:
    """The process that forks ranks, and what they told."""

    def __init__(self, node: Node, folder: Path, job: Path, steps: int) -> None:
        folder.mkdir()
        self.steps = steps
        self.segments = itertools.count()
        self.ask = {
            "job": str(job), "daemon": str(node.socket), "states": str(folder / "states"),
            "out": str(folder / "told"), "steps": steps, "save_every": SAVE_EVERY,
            "vocabulary": 257, "row_tokens": 64,
        }  # fmt: skip
        self.folder = folder
        self.node = node
        with (folder / "trainer.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.support.restarted_trainer"],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )  # fmt: skip

    def start(self, world: int) -> tuple[int, list[int]]:
        """Start ranks; return the number of this piece of the run, and their pids."""
        segment = next(self.segments)
        assert self.process.stdin is not None
        print(
            json.dumps({**self.ask, "dp": world, "segment": segment}),
            file=self.process.stdin,
            flush=True,
        )
        return segment, self._hear()["pids"]

    def ended(self) -> list[int]:
        """Wait until all ranks are gone; return their statuses."""
        return list(self._hear()["statuses"])

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "trainer.log").read_text()[-4000:]
        return dict(json.loads(line))

    def told(self, segment: int) -> dict[int, dict[str, Any]]:
        """Return what a piece of the run consumed, of each step that all of its ranks completed."""
        steps: dict[int, list[dict[str, Any]]] = {}
        paths = sorted(self.folder.glob(f"told.{segment}.[0-9]*"))
        for path in paths:
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # else a kill cut it off
                    found = json.loads(line)
                    steps.setdefault(found["step"], []).append(found)
        told = {}
        for step, parts in steps.items():
            if len(parts) < len(paths):
                continue
            assert len({part["loss"] for part in parts}) == 1
            rows = sorted(itertools.chain(*(part["rows"] for part in parts)))
            told[step] = {"rows": rows, "loss": parts[0]["loss"]}
        return told

    def is_past(self, segment: int, step: int) -> bool:
        """True where rank 0 of a piece completed a step, or the piece is over."""
        path = self.folder / f"told.{segment}.0"
        return path.exists() and any(
            json.loads(line)["step"] >= step
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        )

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture
def start_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(node: Node, job: Path, steps: int) -> Trainer:
            trainer = Trainer(node, tmp_path / f"t{next(numbers)}", job, steps)
            stack.callback(trainer.close)
            return trainer

        yield start


@pytest.mark.parametrize(
    ("steps", "kills"),
    [(24, 3), pytest.param(400, 40, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])],
)
def test_a_killed_run_on_4_then_2_then_8_ranks_is_the_uninterrupted_one(
    start_node: StartNode,
    tmp_path: Path,
    start_trainer: Callable[..., Trainer],
    steps: int,
    kills: int,
) -> None:
    print(f"MSD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    node = start_node("--loader-workers", "2", environ={"MSD__DEADLINES__RESTART_GRACE_S": "60"})
    batch = {"rows": 8, "row_tokens": 64, "microbatch_rows": 1}
    job = write_job(tmp_path / "job.yaml", text_job(tmp_path, texts={"sources": 4}, batch=batch))

    whole = start_trainer(node, job, steps)
    segment, _ = whole.start(4)
    assert set(whole.ended()) == {0}, (whole.folder / "trainer.log").read_text()[-4000:]
    wanted = whole.told(segment)
    assert sorted(wanted) == list(range(steps))
    losses = [float.fromhex(wanted[step]["loss"]) for step in range(steps)]
    assert losses[-1] < 0.9 * losses[0], "nothing was learnt, so nothing is shown"

    trainer = start_trainer(node, job, steps)
    consumed: dict[int, dict[str, Any]] = {}
    aims = sorted(rng.sample(range(1, steps - 1), kills))
    for number, aim in enumerate(aims):
        segment, pids = trainer.start(WORLDS[number % len(WORLDS)])
        wait_until(lambda s=segment, a=aim: trainer.is_past(s, a), f"step {aim}", 90)  # type: ignore[misc]
        is_all = rng.random() < 0.5
        for pid in pids if is_all else [rng.choice(pids)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        trainer.ended()
        told = trainer.told(segment)
        # What came before it is what its save had; what a kill undid is consumed again.
        consumed = {
            step: line for step, line in consumed.items() if step < min(told, default=steps)
        }
        consumed |= told
    segment, _ = trainer.start(WORLDS[len(aims) % len(WORLDS)])
    assert set(trainer.ended()) <= {0}, (trainer.folder / "trainer.log").read_text()[-4000:]
    told = trainer.told(segment)
    consumed = {step: line for step, line in consumed.items() if step < min(told)} | told

    assert sorted(consumed) == list(range(steps))
    for step in range(steps):
        assert consumed[step]["rows"] == wanted[step]["rows"], f"step {step}"
    assert [consumed[step]["loss"] for step in range(steps)] == [
        wanted[step]["loss"] for step in range(steps)
    ]
