"""A daemon that is updated while a job runs: ranks go on with the next one, and the stream is the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import DaemonUnavailableError, UsageError
from tests.support.node import Node, run_ranks, text_job, wait_until

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]
STEPS = 12


def reader(at: int, stop: threading.Event) -> Callable[..., None]:
    """Return what tells that a rank has read a step."""

    def on_step(_data: Any, step: Any, _record: Any) -> None:
        if step.number == at:
            stop.set()

    return on_step


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}])
def test_ranks_go_on_with_the_next_daemon_as_if_nothing_were(
    start_node: StartNode, tmp_path: Path, mesh: dict[str, int]
) -> None:
    job = text_job(tmp_path)
    want = run_ranks(start_node(), job, mesh, STEPS)
    first = start_node(folder=tmp_path / "n")
    stop = threading.Event()
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(
            run_ranks(first, job, mesh, STEPS, on_step=reader(3, stop), reattach_s=60)
        )
    )
    thread.start()
    try:
        assert stop.wait(60), first.log
        first.process.terminate()
        # It need not wait for its drain's end: ranks leave of their own.
        assert first.process.wait(15) == 0, first.log
        second = start_node(folder=tmp_path / "n")
    finally:
        thread.join(90)
    assert not thread.is_alive(), second.log
    for mine, other in zip(found, want, strict=True):
        assert mine.steps == list(range(STEPS))
        assert mine.rows == other.rows
        assert mine.valid_tokens == other.valid_tokens
    assert "ranks leave behind step" in first.log


def test_without_it_a_rank_reads_on_till_the_drain_ends(
    start_node: StartNode, tmp_path: Path
) -> None:
    """One rank of two that does not go on keeps the other as well: both have their time to save."""
    node = start_node()
    job = text_job(tmp_path)
    numbers: list[int] = []

    def read(rank: int, **options: Any) -> None:
        with node.connect(job, {"dp": 2}, rank, **options) as data:
            for step in data.train:
                for _ in step:
                    pass
                numbers.append(step.number)
                if step.number == 2 and rank == 0:
                    node.process.terminate()
                    wait_until(lambda: node.request("status")["daemon"]["is_draining"], "the drain")
                if step.number == 6:
                    return

    threads = [
        threading.Thread(target=read, args=(0,)),
        threading.Thread(target=read, args=(1,), kwargs={"reattach_s": 30}),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(numbers) == sorted([*range(7), *range(7)])
    assert node.process.wait(20) == 0


def test_no_next_daemon_is_told_with_what_to_do(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node()
    with node.connect(text_job(tmp_path), {"dp": 1}, 0, reattach_s=0.5) as data:
        steps = iter(data.train)
        next(steps).skip_rest()
        node.process.terminate()

        def read_on() -> None:
            for step in steps:
                step.skip_rest()

        with pytest.raises(DaemonUnavailableError, match="none came back"):
            read_on()
        state = data.train.state_dict()
    assert state["msd"]


@pytest.mark.parametrize("given", [-1, "soon", True, float("nan")])
def test_a_wrong_time_is_refused(given: Any) -> None:
    import msd_client

    with pytest.raises(UsageError, match="reattach_s"):
        msd_client.connect({"schema": 1}, mesh={"dp": 1}, rank=0, reattach_s=given)


@pytest.mark.soak
def test_many_updates_in_a_row_leave_no_mark(start_node: StartNode, tmp_path: Path) -> None:
    """Six daemons one after another, ranks at paces of their own."""
    job = text_job(tmp_path)
    want = run_ranks(start_node(), job, {"dp": 4}, 70)
    node = start_node(folder=tmp_path / "n")
    reached = [threading.Event() for _ in range(6)]
    found: list[Any] = []

    def on_step(data: Any, step: Any, _record: Any) -> None:
        if step.number % 10 == 9 and step.number < 60:
            reached[step.number // 10].set()
        threading.Event().wait(0.01 * (1 + data.rank + step.number % 3))

    thread = threading.Thread(
        target=lambda: found.extend(
            run_ranks(node, job, {"dp": 4}, 70, on_step=on_step, reattach_s=60, wait_s=600)
        )
    )
    thread.start()
    last = node
    for event in reached:
        assert event.wait(120), last.log
        last.process.terminate()
        assert last.process.wait(18) == 0, last.log
        last = start_node(folder=tmp_path / "n")
    thread.join(300)
    assert not thread.is_alive(), last.log
    for mine, other in zip(found, want, strict=True):
        assert mine.steps == other.steps
        assert mine.rows == other.rows
