"""Plans kept steps of a run again: the journal's state before one, its events, the job's sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import NamedTuple, Self

from federation.journal_reader import Generation, JournalledStep, JournalReader, KeptSteps
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, StepPlanner
from federation.stream_events import MIXTURE_KINDS, SKIP
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
        if made.encode() != told.encode():
            found += [name for name in _PARTS if _part(made, name) != _part(told, name)]
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
        JournalDamagedError: A row of the journal on that way is damaged.
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
        self._lost: set[tuple[int, str]] = set()
        """(source, path) of shards that could not be opened here, and are nevertheless as they were."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.feed.close()

    def steps(self, end: int) -> Iterator[ReplayedStep]:
        """Plan the steps up to `end`, which is not planned, one after the other.

        Raises:
            CorruptRecordError: A shard was changed since, so that a step can't be planned.
            DataError: A step can't be planned for another reason.
            JournalDamagedError: A row of the journal is damaged.
        """
        first = self.planner.state().step
        for told in self._reader.steps(first, end, self._kept.generation):
            before = self.planner.state().event_number
            self._accept(told, with_dropped=False)
            replayed = ReplayedStep(self._plan(), told)
            if not replayed.is_equal and told.delta.event_number > before:
                replayed = self._with_dropped_events(replayed)
            yield replayed

    def _with_dropped_events(self, replayed: ReplayedStep) -> ReplayedStep:
        """Return the step by all events that may have been in force; the journal forgets when not."""
        told, planner = replayed.journalled, self.planner
        self.planner = self._planner_at(told.step)
        self.feed.seek(self.planner.cursors())
        self._accept(told, with_dropped=True)
        other = ReplayedStep(self._plan(), told)
        if other.is_equal:
            return other
        self.planner = planner
        self.feed.seek(self.planner.cursors())
        return replayed

    def _accept(self, told: JournalledStep, *, with_dropped: bool) -> None:
        """Have the planner accept what was accepted before it planned a step."""
        state, up_to = self.planner.state(), told.delta.event_number
        if up_to <= state.event_number:
            return
        events = self._reader.accepted(
            self._kept.generation, state.event_number, up_to, with_dropped=with_dropped
        )
        for event in events:
            if event.step < state.plan_step:
                continue  # of another line of the stream
            if event.kind == SKIP:
                self.planner.skip_steps(*unpack_map(event.body)["steps"])
            elif event.kind in MIXTURE_KINDS:
                self.planner.change_mixture(unpack_map(event.body), event.step)
        self.planner.count_events(up_to)

    def check_sources(self) -> None:
        """Compare every shard of the job with the manifest.

        Raises:
            CorruptRecordError: One was changed; it is named.
        """
        for spec in self.job.sources:
            check_shards(spec, spec.shards)

    def _check_lost(self) -> None:
        """Refuse to go on without a shard: other records may stand where its own stood."""
        for number, loader in enumerate(self.feed.loaders):
            lost = [path for path in loader.lost_shards if (number, path) not in self._lost]
            if lost:
                spec = self.job.sources[number]
                check_shards(spec, [shard for shard in spec.shards if shard.path in lost])
                self._lost.update((number, path) for path in lost)

    def _plan(self) -> StepPlan:
        try:
            planned = self.feed.next_step(self.planner)
        except DataError:
            self.check_sources()
            raise
        self._check_lost()
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
