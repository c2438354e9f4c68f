"""kill -9 of each process at moments nobody chose: the stream is the uninterrupted run's, to the byte.

Three kills each in `make test`, twenty in `make soak`. A seed is printed; MSD_TEST_SEED repeats it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from msd_client.contract.errors import AvailabilityError, DeadlineError
from msd_client.joined_job import Data
from tests.support.node import (
    Node,
    RankRecord,
    is_over,
    own_segments,
    read_steps,
    run_ranks,
    running_node,
    segments_of,
    text_job,
    wait_until,
    write_job,
)
from tests.support.sources import ROOT

pytestmark = pytest.mark.processes

STEPS = 60
TOLD_WITHIN_S = 15.0
"""A rank must not find out by a deadline that something died."""
SEED = int(os.environ.get("MSD_TEST_SEED", random.SystemRandom().randrange(1 << 30)))


@pytest.fixture(params=[3, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def kills(request: pytest.FixtureRequest) -> int:
    print(f"MSD_TEST_SEED={SEED}")
    return int(request.param)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return text_job(tmp_path_factory.mktemp("data"), texts={"sources": 4})


@dataclass
class Uninterrupted:
    """The oracle: one run on one rank."""

    record: RankRecord
    seconds: float

    def check(self, records: list[RankRecord], groups: list[int]) -> None:
        """Check rows and states of every rank that read a step against the oracle's."""
        for step in range(STEPS):
            rows: dict[int, list[bytes]] = {}
            for record, group in zip(records, groups, strict=True):
                if step not in record.rows:
                    continue
                assert rows.setdefault(group, record.rows[step]) == record.rows[step]
                assert record.states[step + 1] == self.record.states[step + 1]
                assert record.valid_tokens[step] == self.record.valid_tokens[step]
            if len(rows) == len(set(groups)):
                found = sorted(row for part in rows.values() for row in part)
                assert found == sorted(self.record.rows[step])


@pytest.fixture(scope="module")
def oracle(
    job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Uninterrupted]:
    with running_node(tmp_path_factory.mktemp("o")) as node:
        run_ranks(node, job, {"dp": 1}, 2)
        began = time.monotonic()
        (record,) = run_ranks(node, job, {"dp": 1}, STEPS, keep_states=True)
        yield Uninterrupted(record, time.monotonic() - began)


# ---- children and the daemon ---------------------------------------------------------------------


@dataclass
class Attempt:
    """Ranks of dp 2 that read until the end, or until they are told that something is gone."""

    node: Node
    job: Any
    records: list[RankRecord]
    errors: dict[int, BaseException] = field(default_factory=dict)
    left: int = 0
    """Ranks that are done."""

    def run(self, act: Callable[[], None]) -> None:
        """Read on all ranks while `act` does its deed."""
        threads = [threading.Thread(target=self._read, args=(rank,)) for rank in range(2)]
        threads.append(threading.Thread(target=act))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), self.node.log

    def check_told(self, died_s: float) -> int:
        """Return how many ranks were told, after checking that it was in time and with a fitting error."""
        for error in self.errors.values():
            assert isinstance(error, AvailabilityError), (self.errors, self.node.log[-5000:])
            assert not isinstance(error, DeadlineError), (self.errors, self.node.log[-5000:])
            assert time.monotonic() - died_s < TOLD_WITHIN_S, repr(error)
        return len(self.errors)

    def _read(self, rank: int) -> None:
        done = min(len(record.states) for record in self.records)
        try:
            with self.node.connect(self.job, {"dp": 2}, rank) as data:
                if done:
                    data.train.load_state_dict(self.records[0].states[done])
                record = self.records[rank]
                for _ in range(done, STEPS):
                    read_steps(data, record, None, keep_states=True, on_step=_stop_at(STEPS))
                    break
        except _Enough:
            pass
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.errors[rank] = error
        finally:
            self.left += 1


class _Enough(Exception):  # noqa: N818 - no error
    """All steps are read."""


def _stop_at(steps: int) -> Any:
    def on_step(_data: Data, step: Any, _record: RankRecord) -> None:
        if step.number == steps - 1:
            raise _Enough

    return on_step


def kill_victim(node: Node, victim: str, is_over: Callable[[], bool]) -> bool:
    """Kill it as soon as it is there; False where the ranks were done first."""
    if victim == "daemon":
        node.process.kill()
        return True
    while not is_over():
        for child in node.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == victim and child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
                    return True
        time.sleep(0.001)
    return False


@pytest.mark.parametrize("victim", ["msd-loader", "msd-constructor", "msd-planner", "daemon"])
def test_a_kill_at_any_moment_changes_nothing_and_leaves_nothing(
    start_node: Any,
    tmp_path: Path,
    job: dict[str, Any],
    oracle: Uninterrupted,
    victim: str,
    kills: int,
) -> None:
    rng = random.Random(f"{SEED}{victim}")
    node = start_node("--loader-workers", "2", folder=tmp_path / "n")
    run_ranks(node, job, {"dp": 2}, 3)
    wait_until(node.is_at_rest, "the first job to end")
    descriptors, files = node.descriptors(), node.open_files()
    own, threads = own_segments(), threading.active_count()
    told = killed = 0
    while killed < kills:
        records = [RankRecord() for _ in range(2)]
        is_first = True
        while min(len(record.states) for record in records) < STEPS:
            attempt = Attempt(node, job, records)
            held: dict[tuple[int, int], str] = {}
            children: list[psutil.Process] = []
            moment_s = rng.uniform(0, oracle.seconds) if is_first else None
            died = time.monotonic()

            def kill(
                node: Node = node,
                held: dict[tuple[int, int], str] = held,
                children: list[psutil.Process] = children,
                moment_s: float | None = moment_s,
                attempt: Attempt = attempt,
            ) -> None:
                nonlocal died, killed
                if moment_s is None:
                    return
                time.sleep(moment_s)  # a moment of no meaning is the subject
                children += node.children()
                held |= segments_of([node.process.pid])
                killed += kill_victim(node, victim, lambda: attempt.left == 2)
                died = time.monotonic()

            attempt.run(kill)
            is_first = False
            print(
                victim,
                moment_s,
                round(time.monotonic() - died, 2),
                {r: repr(e)[:200] for r, e in attempt.errors.items()},
            )
            told += attempt.check_told(died)
            attempt.errors.clear()  # their tracebacks may hold views, and these a client's link
            if victim == "daemon" and moment_s is not None:
                assert node.process.wait(10) == -signal.SIGKILL
                wait_until(lambda c=children: all(map(is_over, c)), "the daemon's children to end")
                gc.collect()
                assert not set(held) & set(segments_of(psutil.pids()))
                node = start_node("--loader-workers", "2", folder=tmp_path / "n")
        oracle.check(records, [0, 1])
        gc.collect()
        wait_until(node.is_at_rest, node.holdings, 30)
        wait_until(
            lambda node=node: node.descriptors() <= descriptors,
            lambda node=node: f"descriptors to close: {files}, then {node.holdings()}",
        )
        assert not own_segments() - own
    print(f"{victim}: {told} ranks were told in {kills} kills")
    if victim != "daemon":
        assert node.request("ping")["pid"] == node.process.pid
    assert threading.active_count() == threads


# ---- ranks ---------------------------------------------------------------------------------------

VICTIM = """
import sys
import msd_client
job, daemon, rank, does_start = sys.argv[1:]
data = msd_client.connect(job, mesh={"dp": 2, "tp": 2}, rank=int(rank), daemon=daemon, as_="numpy")
print("joined", flush=True)
if does_start == "no":
    sys.stdin.read()
for step in data.train:
    for batch in step:
        pass
"""
MESH = {"dp": 2, "tp": 2}
GROUPS = [0, 0, 1, 1]
LATER = 20


@dataclass
class Survivors:
    """Ranks as threads: they read `STEPS - LATER` steps, meet, go on from that state."""

    node: Node
    job: Path
    records: list[RankRecord]
    victim: int
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(4)
        self.threads: list[threading.Thread] = []

    def start(self, rank: int, *, is_late: bool = False) -> None:
        """Start a rank; one that is late comes when the others are to go on from their state."""
        self.threads.append(threading.Thread(target=self._run, args=(rank, is_late)))
        self.threads[-1].start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(90)
            assert not thread.is_alive(), self.node.log
        if self.errors:
            raise self.errors[0]

    def waiting_for(self) -> list[int] | None:
        """Return the ranks that have yet to join or start, none once one reads."""
        if any(record.steps for record in self.records):
            return []
        jobs = self.node.request("status")["jobs"]
        if not jobs or jobs[0]["state"] not in ("starting", "running"):
            return None
        return list(jobs[0]["waiting_for_ranks"])

    def _run(self, rank: int, is_late: bool) -> None:
        try:
            with self.node.connect(self.job, MESH, rank) as data:
                if not is_late:
                    self._read(data, STEPS - LATER)
                self.barrier.wait(60)
                survivor = (self.victim + 1) % 4
                data.train.load_state_dict(self.records[survivor].states[STEPS - LATER])
                self._read(data, LATER)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.errors.append(error)
            self.barrier.abort()

    def _read(self, data: Data, steps: int) -> None:
        record = RankRecord()
        shared = self.records[data.rank]
        read_steps(
            data,
            record,
            steps,
            keep_states=True,
            on_step=lambda _d, s, _r: shared.steps.append(s.number),
        )
        shared.rows |= record.rows
        shared.states |= record.states
        shared.valid_tokens |= record.valid_tokens


def test_a_killed_rank_holds_up_nobody_and_all_go_on_from_the_last_state(
    start_node: Any, tmp_path: Path, job: dict[str, Any], oracle: Uninterrupted, kills: int
) -> None:
    rng = random.Random(f"{SEED}rank")
    node = start_node()
    path = write_job(tmp_path / "small.yaml", job)
    run_ranks(node, path, {"dp": 2}, 3)
    wait_until(node.is_at_rest, "the first job to end")
    descriptors, files = node.descriptors(), node.open_files()
    own = own_segments()
    for _ in range(kills):
        number = rng.randrange(4)
        does_start = rng.random() < 0.75
        survivors = Survivors(node, path, [RankRecord() for _ in range(4)], number)
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(path), str(node.socket), str(number),
             "yes" if does_start else "no"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert victim.stdout is not None
        assert victim.stdin is not None
        try:
            for rank in range(4):
                if rank != number:
                    survivors.start(rank)
            assert victim.stdout.readline() == b"joined\n", node.log
            # All have asked to start, or all but the victim; what comes now has no meaning.
            missing = [] if does_start else [number]
            wait_until(lambda s=survivors, m=missing: s.waiting_for() == m, "ranks to start")
            time.sleep(rng.uniform(0, oracle.seconds / 2))
        finally:
            victim.kill()
            victim.wait(10)
            victim.stdin.close()
            victim.stdout.close()
        # Dead before it asked to start: the others wait for a rank of its number, and get one.
        survivors.start(number, is_late=does_start)
        survivors.join()
        oracle.check(survivors.records, GROUPS)
        for rank, record in enumerate(survivors.records):
            wanted = LATER if rank == number and does_start else STEPS
            assert len(record.rows) == wanted
        del survivors
        gc.collect()
        wait_until(node.is_at_rest, "nothing to be left", 30)
        wait_until(
            lambda: node.descriptors() <= descriptors,
            lambda: f"descriptors to close: {files}, then {node.holdings()}",
        )
    assert not own_segments() - own
