"""kill -9 of several processes, one while the other is replaced: the stream is the uninterrupted one.

Which ones, when, and how far apart is drawn from a seed that is printed; MSD_TEST_SEED repeats it. A
few runs of each job in `make test`, many in `make soak`. Half of them in a pool without room to read
ahead, where chunks are dropped and read again all the time; some go on from a state, so that records
that it carried are fetched when the first process dies.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from msd_client.contract.errors import AvailabilityError, DeadlineError
from tests.integration.test_digest import least_pool_bytes
from tests.support.media_corpus import corpus_job
from tests.support.media_ledger import read_media
from tests.support.media_writers import write_corpus
from tests.support.node import Node, global_rows, run_ranks, running_node, text_job

pytestmark = pytest.mark.processes

STEPS = {"text": 200, "media": 32, "hybrid": 32}
"""Of a whole run: about a second."""
SEED = int(os.environ.get("MSD_TEST_SEED") or random.SystemRandom().randrange(1 << 30))
VICTIMS = {"loader": "msd-loader", "planner": "msd-planner", "constructor": "msd-constructor"}
PAIRS = (
    ("loader", "planner"),
    ("planner", "loader"),
    ("planner", "planner"),
    ("loader", "loader"),
    ("loader", "constructor"),
    ("planner", "constructor"),
    ("planner", "loader", "planner"),
    ("loader", "planner", "loader", "planner"),
)
GAP_S = 0.25
"""A replacement takes about so long: the next kill comes before, during or behind it."""


@dataclass
class Found:
    """What the ranks of a run were given."""

    rows: dict[int, list[bytes]] = field(default_factory=dict)
    """By step, sorted."""
    states: dict[int, bytes] = field(default_factory=dict)
    """By number of completed steps."""

    def check(self, whole: Found) -> None:
        for step, rows in self.rows.items():
            assert rows == whole.rows[step], f"step {step} holds other rows (MSD_TEST_SEED={SEED})"
        for step, state in self.states.items():
            assert state == whole.states[step], f"state after {step} (MSD_TEST_SEED={SEED})"


OnStep = Callable[[Any, int], None]
Read = Callable[[Node, dict[str, Any], int, dict[str, bytes] | None, OnStep], Found]


def read_rows(
    node: Node, job: dict[str, Any], steps: int, state: dict[str, bytes] | None, on_step: OnStep
) -> Found:
    """Read tokens and states."""
    records = run_ranks(
        node, job, {"dp": 2}, steps, state=state, keep_states=True,
        on_step=lambda data, step, _: on_step(data, step.number),
    )  # fmt: skip
    states = {step: own["msd"] for step, own in records[0].states.items()}
    return Found(global_rows(records, [0, 1]), states)


def read_all(
    node: Node, job: dict[str, Any], steps: int, state: dict[str, bytes] | None, on_step: OnStep
) -> Found:
    """Read tokens, labels, media with their places, and states; checks each batch by itself."""
    found = read_media(
        node, job, {"dp": 2}, steps, state=state,
        on_step=lambda data, step: on_step(data, step.number),
    )  # fmt: skip
    return Found(found.rows(), found.states)


@dataclass
class Case:
    """A job, how its ranks read, and the uninterrupted run."""

    kind: str
    job: dict[str, Any]
    read: Read
    whole: Found

    @property
    def steps(self) -> int:
        return STEPS[self.kind]


def make_job(kind: str, folder: Path) -> tuple[dict[str, Any], Read]:
    if kind == "text":
        return text_job(folder, texts={"sources": 4}), read_rows
    sources, _ = write_corpus(folder, SEED)
    if kind == "hybrid":
        return corpus_job(folder, sources, strategy="vlm_hybrid"), read_rows
    return corpus_job(folder, sources, strategy="balanced"), read_all


@pytest.fixture(scope="module", params=["text", "media", "hybrid"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    print(f"MSD_TEST_SEED={SEED}")
    folder = tmp_path_factory.mktemp(request.param)
    job, read = make_job(request.param, folder)
    with running_node(folder / "n", "--loader-workers", "2") as node:
        whole = read(node, job, STEPS[request.param], None, lambda _data, _step: None)
    return Case(request.param, job, read, whole)


@pytest.fixture(params=[3, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def runs(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@dataclass
class Kills:
    """Kills one process after the other, the first behind a step or as the ranks begin."""

    node: Node
    victims: tuple[str, ...]
    behind_step: int | None
    gaps_s: list[float]
    rng: random.Random
    killed: list[str] = field(default_factory=list)
    thread: threading.Thread | None = None

    def begin(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def on_step(self, data: Any, step: int) -> None:
        if data.rank == 0 and self.thread is None and step == self.behind_step:
            self.begin()

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join(30)
            assert not self.thread.is_alive()

    def _run(self) -> None:
        for victim, gap_s in zip(self.victims, self.gaps_s, strict=True):
            time.sleep(gap_s)  # a moment of no meaning is the subject
            found = [child for child in self.node.children() if _is(child, VICTIMS[victim])]
            if found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.rng.choice(found).kill()
                    self.killed.append(victim)


def _is(child: psutil.Process, name: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return child.name() == name and child.status() != psutil.STATUS_ZOMBIE
    return False


def scarce(job: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a daemon whose pool has no room to read ahead."""
    return {
        "MSD__MEMORY__POOL_BYTES": str(least_pool_bytes(job, 2)),
        "MSD__PLANNER__HORIZON_STEPS": "2",
    }


def run_once(case: Case, node: Node, rng: random.Random) -> None:
    """Let ranks read while processes die; where they are told so they go on from the last state."""
    victims = rng.choice(PAIRS)
    done = rng.randrange(2, case.steps // 2) if rng.random() < 0.5 else 0
    behind = None if done and rng.random() < 0.5 else rng.randrange(done, case.steps * 3 // 4)
    gaps = [rng.uniform(0, GAP_S) for _ in victims]
    kills = Kills(node, victims, behind, gaps, rng)
    if behind is None:
        kills.begin()
    told: list[str] = []
    while done < case.steps:
        reached = [done, done]

        def on_step(data: Any, step: int, reached: list[int] = reached) -> None:
            reached[data.rank] = step + 1
            kills.on_step(data, step)

        state = {"msd": case.whole.states[done]} if done else None
        try:
            found = case.read(node, case.job, case.steps - done, state, on_step)
        except AvailabilityError as error:
            # Told at once, as of a death before the generation began: they go on from a state.
            assert not isinstance(error, DeadlineError), (victims, behind, gaps, SEED)
            told.append(str(error)[:100])
            assert len(told) <= len(victims)
            done = min(reached)
            continue
        found.check(case.whole)
        assert len(found.rows) == case.steps - done
        done = case.steps
    kills.join()
    where = "as they begin" if behind is None else f"behind step {behind}"
    print(f"{kills.killed} {where}, {[round(gap, 3) for gap in gaps]} s apart; told: {told}")


@pytest.mark.parametrize("has_room", [True, False], ids=["room", "scarce"])
def test_kills_one_upon_the_other_change_nothing(
    case: Case, tmp_path: Path, runs: int, has_room: bool
) -> None:
    rng = random.Random(f"{SEED}{case.kind}{has_room}")
    environ = {} if has_room else scarce(case.job)
    for first in range(0, runs, 20):  # a daemon counts the deaths of planners, of all jobs
        folder = tmp_path / f"n{first}"
        with running_node(folder, "--loader-workers", "2", environ=environ) as node:
            for _ in range(first, min(runs, first + 20)):
                run_once(case, node, rng)
