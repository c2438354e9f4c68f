"""A job planned over its journal, as a planner process does it, fed from made-up sources.

Ranks read at once whatever is planned, so a step's state is known as soon as its plan is told.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TypeVar

from federation.job_planning import JobPlanning
from federation.messages import (
    ChangeMixture,
    JobFailed,
    JobOpened,
    Message,
    MixtureChanged,
    OpenJob,
    PlansMade,
    RewindStream,
    SkipAccepted,
    SkipSteps,
    SourcesStarved,
    StepsSkipped,
    StreamRewound,
)
from federation.model.job import ResolvedJob, encode_job
from federation.model.plan import StepPlan
from federation.replay import restore_state
from msd_client.contract.errors import decode_error
from msd_client.contract.state import StreamState
from tests.support.metadata import FakeLoader, SourceCorpus, initial_state
from tests.support.plan_stores import KnownPlace

HORIZON = 4
T = TypeVar("T")


class PlannedJob:
    """One generation after the other of a job. `states` are ranks' own, by the next step."""

    def __init__(
        self,
        folder: Path,
        job: ResolvedJob,
        corpora: list[SourceCorpus],
        place: KnownPlace | None = None,
    ) -> None:
        self.job = job
        self.path = folder / "journal.db" if place is None else place.path
        """Of the journal, or of a store's working copy of it."""
        self._place = None if place is None else place.place
        self._corpora = corpora
        self.planning: JobPlanning
        self.told: list[Message] = []
        self.plans: list[StepPlan] = []
        """Of this generation, those that nobody read yet first."""
        self._loaders: list[FakeLoader] = []
        self.state = initial_state(job)
        """Behind the last step that was read."""

    def begin(self, state: StreamState, dp: int = 1, forget_after: int | None = None) -> None:
        """Begin a generation from a state that ranks brought."""
        self.state = state
        self.plans = []
        self.told = []
        order = OpenJob(
            encode_job(self.job), [["dp", dp]], state.encode(), HORIZON, str(self.path),
            forget_after=forget_after,
        )  # fmt: skip
        self.planning = JobPlanning.begin(order, 1, self._hear, self._place)

    def take_over(self) -> None:
        """Let another planner go on behind the last plan that was told."""
        self.planning.close()
        step = self.plans[-1].step + 1 if self.plans else self.state.step
        order = OpenJob(
            encode_job(self.job), [["dp", 1]], b"", HORIZON, str(self.path), resume_step=step
        )
        self.planning = JobPlanning.take_over(order, 2, self._hear, self._place)
        self.planning.step_released(self.state.step - 1)

    def go_on(self, step: int, term: int) -> None:
        """Let a planner of another process go on; ranks wait for a step."""
        assert self._place is not None
        with closing(self._place.open(8_000)) as journal:
            self.state = restore_state(journal, step)
        order = OpenJob(
            encode_job(self.job), [["dp", 1]], b"", HORIZON, str(self.path), resume_step=step
        )
        self.planning = JobPlanning.take_over(order, term, self._hear, self._place)
        self.planning.step_released(step - 1)

    def read(self) -> StepPlan:
        """Return the next step's plan, planned where it was not yet."""
        for _ in range(1000):
            if self.plans:
                plan = self.plans.pop(0)
                self.state = self.state.apply(plan.delta)
                self.planning.step_released(plan.step)
                return plan
            self.planning.advance()
        raise AssertionError(f"no plan comes: {self.told[-3:]}")

    def change_mixture(self, weights: dict[str, float], at: int) -> int:
        """Return the plan step from which weights hold."""
        self.planning.change_mixture(ChangeMixture(1, weights, at))
        answer = self.last(MixtureChanged)
        _raise(answer.error)
        return answer.plan_step

    def skip(self, first: int, end: int) -> None:
        self.planning.skip_steps(SkipSteps(1, first, end))
        _raise(self.last(SkipAccepted).error)

    def rewind(
        self, step: int, skip: tuple[int, int] | None = None, forget_after: int | None = None
    ) -> None:
        self.planning.rewind(RewindStream(1, step, skip and list(skip), forget_after))
        _raise(self.last(StreamRewound).error)

    def last(self, kind: type[T]) -> T:
        """Return the last message of a kind."""
        return next(message for message in reversed(self.told) if isinstance(message, kind))

    def close(self) -> None:
        self.planning.close()

    def _hear(self, message: Message, frames: tuple[bytes, ...]) -> None:
        self.told.append(message)
        match message:
            case JobOpened():
                self._loaders = [
                    FakeLoader(corpus, source) for source, corpus in enumerate(self._corpora)
                ]
                for loader, (block_key, index) in zip(self._loaders, message.cursors, strict=True):
                    loader.seek(block_key, index)
            case SourcesStarved():
                for source in message.sources:
                    meta = self._loaders[source].next_chunk()
                    assert meta is not None
                    self.planning.chunk_came(meta)
            case PlansMade():
                at = 0
                for header, count in zip(message.headers, message.counts, strict=True):
                    self.plans.append(StepPlan.decode(header, frames[at : at + count]))
                    at += count
            case JobFailed():
                _raise(message.error)
            case StepsSkipped():
                assert len(frames) == 2


def _raise(error: dict[str, object] | None) -> None:
    if error is not None:
        raise decode_error(**error)  # type: ignore[arg-type]
