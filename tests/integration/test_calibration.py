"""Reported step times change who gets which row, from a journalled step on, and nothing else."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.journal import EventRecord, Journal
from federation.model.plan import StepPlan
from federation.planning.calibrator import EVENT_KIND
from msd_client.contract.codec import unpack_map
from msd_client.contract.errors import UsageError
from msd_client.contract.state import StreamState
from msd_client.joined_job import Data
from msd_client.msdctl.status_text import job_text
from msd_client.step import Step
from tests.support.inline_planner import InlineSources, InlineStream, inline_job
from tests.support.node import Node, is_over, run_ranks, text_job, wait_until

pytestmark = pytest.mark.processes

STEPS = 90
MESH = {"dp": 4}
ATTENTION = 30.0
"""How many times as much attention takes as the model's numbers say."""
BACKBONE = {"hidden_size": 64, "num_hidden_layers": 2}
LINEAR, QUADRATIC = 1024, 1
"""Of BACKBONE, without their common divisor."""

Placement = dict[tuple[int, int], list[list[int]]]
"""By step and DP group: lengths of the segments of each microbatch."""


def job_of(folder: Path, **changes: Any) -> dict[str, Any]:
    return text_job(
        folder,
        texts={"documents": 900},
        model={"backbone": BACKBONE},
        batch={"rows": 32},
        steps=STEPS,
        **changes,
    )


@dataclass
class Trainers:
    """Ranks that take as long as their segments say, and remember what they were given."""

    given: Placement = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    sent: int = 0
    status: dict[str, Any] = field(default_factory=dict)
    at: dict[int, Any] = field(default_factory=dict)
    """By step: what rank 0 does before it reads it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, data: Data, step: Step) -> None:
        if data.rank == 0 and step.number in self.at:
            self.at[step.number]()
        microbatches = []
        for batch in step:
            lengths = np.diff(np.asarray(batch.cu_seqlens))
            held = np.asarray(batch.segment_source) >= 0
            microbatches.append(lengths[held].tolist())
            del batch
        every = np.concatenate([np.array(lengths) for lengths in microbatches])
        cost = LINEAR * every.sum() + ATTENTION * QUADRATIC * (every * every).sum()
        noise = 1 + 0.001 * np.sin(step.number * 7 + data.rank * 3)
        is_sent = step.report(compute_s=1e-8 * float(cost) * noise)
        with self.lock:
            self.sent += is_sent
            self.given[step.number, data.rank] = microbatches


def run(node: Node, job: dict[str, Any], trainers: Trainers) -> StreamState:
    states = []

    def at_end(data: Data) -> None:
        if data.rank == 0:
            states.append(StreamState.decode(data.train.state_dict()["msd"]))
            (trainers.status,) = node.request("status")["jobs"]

    run_ranks(node, job, MESH, STEPS, read_step=trainers.read, at_end=at_end)
    return states[0]


def events_of(node: Node) -> list[EventRecord]:
    (path,) = node.folder.glob("state/jobs/*/journal.db")
    journal = Journal(path)
    try:
        return journal.events(journal.last_generation())
    finally:
        journal.close()


def inline_planned(job: dict[str, Any], events: list[EventRecord]) -> tuple[Placement, bytes]:
    """Return who gets what, and the stream's digest, by a planner that is told of the same events."""
    resolved = inline_job(job)
    sources = InlineSources(resolved)
    stream = InlineStream(resolved, sources, MESH)
    for event in events:
        if event.kind == EVENT_KIND:
            stream.planner.weigh_cost(unpack_map(event.body)["weights"], event.step)
    changes = {event.step: unpack_map(event.body) for event in events if event.kind == "mixture"}
    found: Placement = {}
    for step in range(STEPS):
        if step in changes:
            stream.planner.change_mixture(changes[step], step)
        (plan,) = stream.plan_steps(1)
        found |= placement_of(plan)
    sources.close()
    return found, stream.planner.state().stream_digest


def placement_of(plan: StepPlan) -> Placement:
    found: Placement = {}
    bounds = np.searchsorted(plan.row, np.arange(plan.rows + 1))
    for group in range(plan.dp_count):
        microbatches = []
        for microbatch in range(plan.microbatch_count):
            rows = np.flatnonzero((plan.row_dp == group) & (plan.row_microbatch == microbatch))
            rows = rows[np.argsort(plan.row_slot[rows])]
            parts = [plan.length[bounds[row] : bounds[row + 1]] for row in rows]
            microbatches.append(np.concatenate(parts).tolist())
        found[plan.step, group] = microbatches
    return found


def step_contents(placement: Placement) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for (step, _), microbatches in sorted(placement.items()):
        found.setdefault(step, []).extend(n for lengths in microbatches for n in lengths)
    return {step: sorted(lengths) for step, lengths in found.items()}


def test_times_that_are_reported_move_rows_and_no_sample(start_node: Any, tmp_path: Path) -> None:
    calibrated = job_of(tmp_path, calibration={"every": 10, "window": 50})
    plain = {key: value for key, value in calibrated.items() if key != "calibration"}
    node: Node = start_node()
    trainers, others = Trainers(), Trainers()
    state = run(node, calibrated, trainers)
    events = events_of(node)
    assert events
    assert {event.kind for event in events} == {EVENT_KIND}
    assert trainers.sent == STEPS * 4
    # What the daemon placed is what the journalled events alone make of the job.
    analytical, _ = inline_planned(calibrated, [])
    assert trainers.given == inline_planned(calibrated, events)[0] != analytical
    first = events[0].step
    before = {place: held for place, held in trainers.given.items() if place[0] < first}
    assert before == {place: held for place, held in analytical.items() if place[0] < first}

    fitted = trainers.status["calibration"]
    assert fitted["parts"] == ["linear", "attention"]
    assert fitted["since_step"] == events[-1].step
    assert 0.5 * ATTENTION < fitted["relative"][1] < 2 * ATTENTION
    assert STEPS * 2 < fitted["reports_received"] <= STEPS * 4  # other ranks may be at it yet
    text = job_text(trainers.status)
    print(text)
    assert (
        f"cost fitted, from step {events[-1].step} on; {fitted['reports_received']} reports" in text
    )
    assert "analytical" in text

    wait_until(node.is_at_rest, node.holdings)
    other: Node = start_node()
    unchanged = run(other, plain, others)
    assert others.sent == 0
    assert "calibration" not in others.status
    assert step_contents(others.given) == step_contents(trainers.given)
    assert unchanged.stream_digest == state.stream_digest
    assert unchanged.event_number == state.event_number == 0


def test_a_planner_that_is_killed_places_on_by_what_it_journalled(
    start_node: Any, tmp_path: Path
) -> None:
    job = job_of(tmp_path, calibration={"every": 10, "window": 50})
    node: Node = start_node()

    def kill() -> None:
        planner = node.child("msd-planner")
        planner.kill()
        wait_until(lambda: is_over(planner), "the planner's end")

    def change() -> None:
        node.request("mixture", job=None, weights={"s0": 1.0, "s1": 1.0, "s2": 1.0})

    trainers = Trainers(at={25: change, 50: kill, 75: kill})
    state = run(node, job, trainers)
    events = events_of(node)
    calibrations = [event for event in events if event.kind == EVENT_KIND]
    (mixture,) = [event for event in events if event.kind == "mixture"]
    assert calibrations[0].step < 50  # in force before the first death, and after it
    assert state.event_number == 1  # a calibration is none of the state's events

    found, stream_digest = inline_planned(job, [*calibrations, mixture])
    assert trainers.given == found
    assert stream_digest == state.stream_digest


def test_a_report_is_a_number_of_seconds_of_a_step(start_node: Any, tmp_path: Path) -> None:
    node: Node = start_node()
    job = job_of(tmp_path, calibration=True)
    with node.connect(job, {"dp": 1}, 0) as data:
        step = next(iter(data.train))
        for seconds in (0, -1.0, float("nan"), float("inf"), True, "1", None):
            with pytest.raises(UsageError, match="report_step: seconds"):
                step.report(compute_s=seconds)
        for number in (-1, 1.5, True, None):
            with pytest.raises(UsageError, match=r"pass step\.number"):
                data.train.report_step(number, 1.0)
        assert data.train.report_step(np.int64(step.number), np.float32(0.5))
        assert data.train.report_step(10**9, 0.5)  # of no step: passed over
        # Not even one that lies about its numbers does harm to others.
        assert node.request("ping")
    with node.connect(job, {"dp": 1}, 0) as data:
        next(iter(data.train))
        data.train._session.notify("report", generation=1, step="x", nanoseconds=1)
        wait_until(lambda: "a malformed report" in node.log, "the refusal")
    assert node.request("ping")
