"""Mixture changes, skips, rewinds and resumes from any earlier state, in any order.

The model: content is a list of steps, a function of the mixture changes that hold; skips cut steps
out of it; a trainer's stream is what is left, from where its state stands.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.job import BatchRule, ResolvedJob
from federation.model.plan import StepPlan
from federation.replay import restore_state
from msd_client.contract.errors import ConfigError, NotFoundError, StateMismatchError
from msd_client.contract.state import StreamState
from tests.support.metadata import (
    Feed,
    initial_state,
    make_job,
    make_spec,
    random_corpus,
    start,
)
from tests.support.plan_stores import KnownPlace, Places, tables_of
from tests.support.planned_job import PlannedJob

CONTENT = 200
NAMES = ("a", "b")


def content_of(plan: StepPlan) -> tuple[bytes, ...]:
    columns = (plan.source, plan.block_key, plan.index, plan.offset, plan.length, plan.row)
    return tuple(column.tobytes() for column in columns)


@dataclass
class Events:
    """What holds on the content's axis."""

    changes: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    skips: list[tuple[int, int]] = field(default_factory=list)

    def is_left_out(self, step: int) -> bool:
        return any(first <= step < end for first, end in self.skips)

    def forget(self, after: int) -> None:
        self.changes = [it for it in self.changes if it[0] <= after]
        self.skips = [it for it in self.skips if it[0] <= after]


@dataclass
class Saved:
    """A state that a trainer saved, and the rewinds that it knows."""

    state: StreamState
    line: int


class Run:
    """A job and its model, and what may happen to them."""

    def __init__(self, folder: Path, seed: int, place: KnownPlace) -> None:
        self.rng = random.Random(seed)
        specs = [make_spec("a", 3), make_spec("b", 4, "streaming", interleave=2)]
        self.corpora = [
            random_corpus(spec, seed + n, lambda r: r.randint(1, 30), 3, 12)
            for n, spec in enumerate(specs)
        ]
        self.job: ResolvedJob = make_job(specs, BatchRule(2, 16))
        self.planned = PlannedJob(folder, self.job, self.corpora, place)
        self.events = Events()
        self.saved: list[Saved] = []
        self.rewinds: list[tuple[int, int]] = []
        """(line that it began, step)"""
        self.planned.begin(initial_state(self.job))
        self.plan_step = 0
        """Content that comes next."""
        self._content: list[tuple[bytes, ...]] | None = None

    def content(self, step: int) -> tuple[bytes, ...]:
        if self._content is None:
            planner = start(self.job)
            for at, weights in self.events.changes:
                planner.change_mixture(weights, at)
            feed = Feed(planner, self.corpora)
            self._content = [content_of(plan) for plan in feed.steps(CONTENT)]
        return self._content[step]

    def read(self) -> None:
        while self.events.is_left_out(self.plan_step):
            self.plan_step += 1
        state = self.planned.state
        plan = self.planned.read()
        assert (plan.step, plan.plan_step) == (state.step, self.plan_step)
        assert content_of(plan) == self.content(self.plan_step)
        self.plan_step += 1
        self.saved.append(Saved(self.planned.state, len(self.rewinds)))

    def change(self) -> None:
        weights = dict(zip(NAMES, self.rng.sample([1.0, 2.0, 5.0, 9.0], 2), strict=True))
        try:
            at = self.planned.change_mixture(weights, self.planned.state.step + 6)
        except ConfigError as error:
            assert "too late" in error.message
            return
        self.events.changes.append((at, weights))
        self.accepted(at)

    def skip(self) -> None:
        first = self.plan_step + self.rng.randint(6, 12)
        end = first + self.rng.randint(1, 9)
        try:
            self.planned.skip(first, end)
        except ConfigError as error:
            assert "too late" in error.message
            return
        self.events.skips.append((first, end))
        self.accepted(first)

    def accepted(self, step: int) -> None:
        """An event holds from a plan step on: states behind it that lack it are another line's."""
        self.saved = [saved for saved in self.saved if saved.state.plan_step <= step]
        self._content = None

    def take_over(self) -> None:
        self.planned.take_over()

    def rewind(self) -> None:
        step = self.rng.randint(0, self.planned.state.step)
        try:
            known = restore_state_at(self.planned, step)
        except NotFoundError:
            return  # many generations ago
        skip = None
        if self.rng.random() < 0.5:
            first = known.plan_step + self.rng.randint(0, 4)
            skip = (first, first + self.rng.randint(1, 3))
        forget = known.plan_step if self.rng.random() < 0.4 else None
        self.planned.rewind(step, skip, forget)
        self.rewinds.append((len(self.rewinds) + 1, step))
        if forget is not None:
            self.forget(forget)
        if skip is not None:
            self.events.skips.append(skip)
        self._content = None
        self.planned.close()
        self.go_on(known, 0)

    def resume(self) -> None:
        """Go on from any state that was ever saved, or find it refused by a rewind."""
        if not self.saved:
            return
        saved = self.rng.choice(self.saved)
        self.planned.close()
        cut = [step for line, step in self.rewinds if line > saved.line and saved.state.step > step]
        if cut:
            try:
                self.planned.begin(saved.state)
            except StateMismatchError as error:
                assert f"rewound to step {cut[0]}" in error.message
            else:
                raise AssertionError("a state that a rewind cut off was gone on from")
            newest = [it for it in self.saved if it.line == len(self.rewinds)]
            saved = (
                newest[-1]
                if newest
                else Saved(restore_state_at(self.planned, min(it[1] for it in self.rewinds)), 0)
            )
        self.go_on(saved.state, self.rng.choice([0, 0, 1]))

    def forget(self, after: int) -> None:
        """Events behind a plan step are dropped; states that had them in force are another line's."""
        self.events.forget(after)
        self.saved = [saved for saved in self.saved if saved.state.plan_step <= after]
        self._content = None

    def go_on(self, state: StreamState, forget: int) -> None:
        after = state.plan_step if forget else None
        if not (state.plan_step or state.event_number):
            after = None
        self.planned.begin(state, self.rng.choice([1, 2]), after)
        if after is not None:
            self.forget(after)
        self.plan_step = state.plan_step
        if not (state.plan_step or state.event_number or self.rewinds):
            self.events = Events()  # a stream begins anew
            self._content = None


def restore_state_at(planned: PlannedJob, step: int) -> StreamState:
    from federation.journal import read_journal

    journal = read_journal(planned.path)
    try:
        return restore_state(journal, step)
    finally:
        journal.close()


@pytest.mark.parametrize(
    "places", ["file", pytest.param("etcd", marks=pytest.mark.soak)], indirect=True
)
@pytest.mark.parametrize("part", range(2))  # 26 examples; in one test a slow machine takes 70 s
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(deadline=None, max_examples=13)
def test_any_sequence_of_events_gives_content_with_cuts(
    places: Places, part: int, seed: int, data: st.DataObject
) -> None:
    happenings = ["read", "read", "read", "change", "skip", "rewind", "resume", "take_over"]
    with tempfile.TemporaryDirectory() as folder:
        known = places.make(Path(folder))
        run = Run(Path(folder), 2 * seed + part, known)
        for _ in range(data.draw(st.integers(10, 40))):
            if run.plan_step > CONTENT - 60:
                break
            happening = data.draw(st.sampled_from(happenings))
            getattr(run, happening)()
            if happening == "read":
                for _ in range(run.rng.randint(0, 6)):
                    run.read()
        for _ in range(8):
            run.read()
        run.planned.close()
        left = tables_of(known.path)
        known.place.open(100_000).close()
        assert tables_of(known.path) == left  # a successor finds all of it
