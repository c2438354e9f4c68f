"""Plans kept steps of a run again: the journal's state before one, its events, the job's sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import NamedTuple, Self

from federation.journal_reader import Generation, JournalledStep, JournalReader, KeptSteps
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, StepPlanner
from federation.user_strategy import load_strategy
from msd_client.contract.codec import unpack_map
from msd_client.contract.errors import DataError, ResourceError
from msd_client.contract.state import StateDelta
from msd_daemon.history.runs import RunFolder
from msd_daemon.history.shard_check import check_shards
from msd_daemon.inline_feed import InlineFeed
from msd_daemon.services.quarantine import guards_of
from msd_daemon.sources.chunk_draft import ChunkDraft


class ReplayedStep(NamedTuple):
    """A step that was planned again, beside what the journal holds of it."""

    plan: StepPlan
    journalled: JournalledStep

    @property
    def is_equal(self) -> bool:
        """True where membership, counts, cursors and drops are what was journalled."""
        return not self.differing

    @property
    def differing(self) -> tuple[str, ...]:
        """What differs: `digest`, or parts of the difference of the state."""
        told, made = self.journalled.delta, self.plan.delta
        found = []
        if self.journalled.digest != self.plan.stream_digest:
            found.append("digest")
        # An event that was accepted just before the step is told with it, and changes later ones.
        alike = replace(
            made,
            event_number=told.event_number,
            pending_steps=told.pending_steps,
            pending_shares=told.pending_shares,
        )
        if alike.encode() != told.encode():
            found += [name for name in _PARTS if _part(alike, name) != _part(told, name)]
        return tuple(found)


_PARTS = tuple(field.name for field in fields(StateDelta))


def _part(delta: StateDelta, name: str) -> object:
    value = getattr(delta, name)
    return value.tolist() if hasattr(value, "tolist") else value


class StepReplay:
    """Plans the steps of one generation from a kept one on; use it in a `with`.

    Args:
        run: Whose files are read.
        reader: Its journal.
        kept: The generation.
        step: The first step.
        keep: Sees every chunk that is read; None where plans are enough.

    Raises:
        NotFoundError: The journal keeps no way to the step.
        SegmentCorruptError: A row of the journal on that way is damaged.
        ConfigError: The tokenizer, or the user's code, is not what the job was resolved with.
    """

    def __init__(
        self,
        run: RunFolder,
        reader: JournalReader,
        kept: KeptSteps,
        step: int,
        keep: Callable[[ChunkDraft], None] | None = None,
    ) -> None:
        self._reader = reader
        self._kept = kept
        self.generation: Generation = reader.generation(kept.generation)
        self.job = self.generation.job
        self._strategy = load_strategy(self.job)
        try:
            guards = guards_of(run.quarantine, self.job)
        except OSError as error:
            raise ResourceError(
                f"{run.quarantine} can't be read: {error.strerror}; it names the records that killed "
                "a worker: mend its rights",
                path=str(run.quarantine),
            ) from error
        self.planner = self._planner_at(step)
        self.feed = InlineFeed(self.job, keep, run.index_dir, guards)
        self.feed.seek(self.planner.cursors())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.feed.close()

    def steps(self, end: int) -> Iterator[ReplayedStep]:
        """Plan the steps up to `end`, which is not planned, one after the other.

        Raises:
            CorruptRecordError: A shard was changed since, so that a step can't be planned.
            DataError: A step can't be planned for another reason.
            SegmentCorruptError: A row of the journal is damaged.
        """
        first = self.planner.state().step
        for told in self._reader.steps(first, end, self._kept.generation):
            yield ReplayedStep(self._plan(), told)
            if told.delta.event_number != self.planner.state().event_number:
                # What was accepted stands in the journal's state behind the step.
                self.planner = self._planner_at(told.step + 1)
                self.feed.seek(self.planner.cursors())

    def check_sources(self) -> None:
        """Compare every shard of the job with the manifest.

        Raises:
            CorruptRecordError: One was changed; it is named.
        """
        for spec in self.job.sources:
            check_shards(spec, spec.shards)

    def _plan(self) -> StepPlan:
        try:
            planned = self.feed.next_step(self.planner)
        except DataError:
            self.check_sources()
            raise
        if isinstance(planned, Ended):
            self.check_sources()
            raise DataError(
                f"step {self.planner.state().step} can't be planned again: {planned.reason}, though "
                "the journal holds it",
                step=self.planner.state().step,
            )
        return planned

    def _planner_at(self, step: int) -> StepPlanner:
        state = self._reader.state_before(step, self._kept.generation)
        planner = StepPlanner(self.job, self.generation.tree, state, self._strategy)
        for event in self.generation.calibrations:
            planner.weigh_cost(unpack_map(event.body)["weights"], event.step)
        return planner
