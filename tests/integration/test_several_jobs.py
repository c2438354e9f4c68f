"""Jobs beside each other on one daemon: one's start, refusal, failure and end hold no other up."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import BudgetError, MsdError
from tests.support.node import (
    Node,
    RankRecord,
    read_steps,
    run_ranks,
    running_node,
    text_job,
    wait_until,
)

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]
LONGEST_GAP_S = 5.0
"""Between two steps of a running job; on a busy machine tens of milliseconds are usual."""


class Steady:
    """A job that runs on and on, and notes when it got its steps."""

    def __init__(self, node: Node, job: dict[str, Any]) -> None:
        self.record = RankRecord()
        self.times: list[float] = []
        self.errors: list[BaseException] = []
        self._is_enough = threading.Event()
        self._node, self._job = node, job
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self.advance()

    def _read(self) -> None:
        def on_step(_data: Any, _step: Any, _record: RankRecord) -> None:
            self.times.append(time.monotonic())
            if self._is_enough.is_set():
                raise StopIteration

        try:
            with (
                self._node.connect(self._job, {"dp": 1}, 0) as data,
                contextlib.suppress(StopIteration),
            ):
                read_steps(data, self.record, None, keep_states=True, on_step=on_step)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.errors.append(error)

    def advance(self, steps: int = 3) -> None:
        """Wait for some more steps."""
        aim = len(self.times) + steps
        wait_until(lambda: len(self.times) >= aim or bool(self.errors), "the steady job", 30)
        assert not self.errors, self._node.log

    def stop(self) -> None:
        self._is_enough.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), self._node.log
        assert not self.errors, (self.errors, self._node.log[-4000:])

    def longest_gap_s(self) -> float:
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))


def beside(steady: Steady, act: Callable[[], None]) -> None:
    """Do something in a thread; the steady job has to move on while it is done."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    before = len(steady.times)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    assert len(steady.times) > before, "the steady job stood still"


def test_jobs_that_come_and_go_hold_nobody_up(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node("--loader-workers", "1", environ={"MSD__MEMORY__MEMORY_BYTES": "100Mi"})
    job = text_job(tmp_path, texts={"sources": 4})
    others = tmp_path / "others"
    others.mkdir()
    other = text_job(others, texts={"sources": 2}, name="other", seed=9)
    broken = others / "tokenizer.json"
    broken.write_text(json.dumps({"version": "1.0", "model": {"type": "BPE"}}))

    def comes_and_goes() -> None:
        run_ranks(node, other, {"dp": 2}, 3)

    def is_refused() -> None:
        batch = {"rows": 1 << 16, "row_tokens": 256, "microbatch_rows": 2}
        with pytest.raises(BudgetError):
            node.connect({**other, "name": "huge", "batch": batch}, {"dp": 1}, 0)

    def fails() -> None:
        bad = {**other, "name": "bad", "tokenizer": {"file": str(broken)}}
        with pytest.raises(MsdError), node.connect(bad, {"dp": 1}, 0) as data:
            next(iter(data.train))

    def is_stopped() -> None:
        with node.connect({**other, "name": "stopped"}, {"dp": 1}, 0) as data:
            steps = iter(data.train)
            next(steps)
            node.request("stop", job="stopped")
            with pytest.raises(MsdError):
                for _ in steps:
                    pass

    steady = Steady(node, job)
    for act in (comes_and_goes, is_refused, fails, comes_and_goes, is_stopped, comes_and_goes):
        beside(steady, act)
        wait_until(lambda: len(node.request("jobs")["jobs"]) == 1, "the others to be gone")
        steady.advance()
    steady.stop()
    assert steady.longest_gap_s() < LONGEST_GAP_S

    with running_node(tmp_path / "alone", "--loader-workers", "1") as alone:
        (wanted,) = run_ranks(alone, job, {"dp": 1}, len(steady.record.steps), keep_states=True)
    assert steady.record.steps == list(range(len(steady.record.steps)))
    assert steady.record.rows == wanted.rows
    assert steady.record.states == wanted.states
    wait_until(node.is_at_rest, node.holdings)


def test_two_jobs_of_one_budget_serve_what_each_serves_alone(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = start_node("--loader-workers", "1")
    jobs = []
    for number in range(2):
        folder = tmp_path / f"j{number}"
        folder.mkdir()
        jobs.append(text_job(folder, texts={"sources": 3}, name=f"job{number}", seed=number))
    runs = [Steady(node, job) for job in jobs]
    for run in runs:
        run.advance(20)
    for run in runs:
        run.stop()
    for job, run in zip(jobs, runs, strict=True):
        (wanted,) = run_ranks(node, job, {"dp": 1}, len(run.record.steps), keep_states=True)
        assert (run.record.rows, run.record.states) == (wanted.rows, wanted.states)
