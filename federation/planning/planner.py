"""Plans a stream step by step from metadata columns: the one object a planner process holds a job by.

Pure: chunks of metadata and events come in, plans go out. What a plan holds is a function of the
job, its seed and its events; the mesh decides only where rows go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from federation.model.chunk import ChunkMeta
from federation.model.cost import CostSpec
from federation.model.job import ResolvedJob
from federation.model.mixture import (
    MixtureTimeline,
    check_weights,
    integer_shares,
    remaining_shares,
    untrained_sources,
)
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.model.skipped import SkippedSteps
from federation.planning.costs import (
    bounded_cost,
    part_names,
    reduced_cost,
    weighted_cost,
)
from federation.planning.delay import Delay
from federation.planning.dgraph import DGraph, Sampler
from federation.planning.epochs import epochs_max
from federation.planning.extra_rows import ExtraRows
from federation.planning.fragments import FragmentQueue
from federation.planning.graph_compile import GraphPlan
from federation.planning.group_parts import parts_of_groups
from federation.planning.groups import RowLimits
from federation.planning.kept_chunks import KeptChunks
from federation.planning.packing_check import check_packing
from federation.planning.planner_statistics import PlannerStatistics, statistics_of
from federation.planning.sampling import (
    WRAPPED,
    DrawHindered,
    StepSampler,
    check_drawable,
    placed_tokens,
)
from federation.planning.skipping import SkippedRun, state_without
from federation.planning.step_change import StepChange, change_of_step, state_of_end
from federation.planning.step_pool import BLOCK_KEY, INDEX, LENGTH, OFFSET, SOURCE, Pool
from federation.planning.strategies import Strategy, find_strategy, strategy_error
from msd_client.contract.errors import (
    ConfigError,
    DataError,
    MsdError,
    ProtocolError,
    SourceExhaustedError,
    StateMismatchError,
    StrategyError,
    UsageError,
)
from msd_client.contract.skips import is_skipped, merged_skips, plan_step_of
from msd_client.contract.state import (
    CURSOR_BLOCK_KEY,
    CURSOR_INDEX,
    CURSOR_OFFSET,
    DROPPED_COLUMNS,
    DROPPED_TOKENS,
    IS_EXHAUSTED,
    LANES_ENDED,
    RECORD_ORDER,
    StreamState,
)

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Starved:
    """The next step cannot be planned before these sources' next records are known."""

    sources: tuple[int, ...]
    """The one that hinders the draw first, then others that have nothing known either."""
    positions: tuple[tuple[int, int], ...]
    """(block key, index) of the first record of each that is not known."""

    def without(self, source: int) -> Starved:
        """Return this but for a source of which something became known, or its end."""
        kept = [place for place, other in enumerate(self.sources) if other != source]
        return Starved(
            tuple(self.sources[place] for place in kept),
            tuple(self.positions[place] for place in kept),
        )


@dataclass(frozen=True)
class Ended:
    """The stream is over; no step follows."""

    reason: str
    state: StreamState | None = field(default=None, compare=False)
    """The state behind the end, where it is not the one after the last step."""


class StepPlanner:
    """One job's planning from a state on."""

    def __init__(
        self,
        job: ResolvedJob,
        tree: ClientPlaceTree,
        state: StreamState,
        strategy: Strategy | None = None,
    ) -> None:
        """Continue a stream.

        Args:
            job: The resolved job.
            tree: The mesh; it decides placement only.
            state: `step_change.first_state`, or any state of a job of the same samples.
            strategy: The user's own that the job names; None for the built-in one.

        Raises:
            StateMismatchError: The state is of other samples or of another stream version, or
                carries fragments that no row holds and that cannot be cut.
            MeshMismatchError: The mesh does not fit the batch.
            ConfigError: Mixture, strategy, packing or a ramp do not fit.
        """
        state.check_job(job.stream_version, job.sample_digest())
        state = state.adopt(job.digest())
        names = tuple(source.name for source in job.sources)
        if state.source_names != names:
            raise StateMismatchError(
                f"the state is of sources {', '.join(state.source_names)}, the job has "
                f"{', '.join(names)}"
            )
        check_packing(job)
        tree.check_batch(job.batch)
        self._job = job
        self._extras = ExtraRows.of(job)
        self._tree = tree
        self._names = names
        self._strategy = strategy or find_strategy(job.strategy)
        self._untrained = untrained_sources(job)
        self._schedule = MixtureTimeline(job.mixture, names, self._untrained)
        self._source_ids = np.array(
            [
                int.from_bytes(
                    hashlib.sha256(source.order_name.encode()).digest()[:8], "little", signed=True
                )
                for source in job.sources
            ],
            np.int64,
        )
        self._is_trained = np.array([source.loss_weight > 0 for source in job.sources])
        self._token_bytes = np.array([source.token_bytes for source in job.sources], np.int64)
        batch = job.batch
        self._analytical = self._bounded(job.cost)
        self._costs = [(0, self._analytical)]
        """From which step on a cost is in force, ascending."""
        self._last_parts: Int64Array | None = None
        self._kept = KeptChunks(job.sources) if len(set(batch.row_tokens_values)) > 1 else None
        """Chunks to cut anew where rows change their length."""
        rule = batch.at(state.plan_step, placed_tokens(state))
        self._state = self._extras.fit_state(state, rule)
        self._is_pending_news = self._are_skips_news = False
        self._run: SkippedRun | None = None
        """Where steps were left out since the last served one."""
        self._hindered: tuple[Starved, int] | None = None
        self._stand_at_state()

    def add_chunk(self, meta: ChunkMeta) -> None:
        """Take the metadata of a chunk; any order of arrival, copies are ignored.

        Raises:
            ProtocolError: The chunk contradicts itself or names no source of the job.
            DataError: The record at the state's cursor is not what it was.
        """
        source = meta.source_index
        if not 0 <= source < len(self._queues):
            raise ProtocolError(f"a chunk names source {source} of {len(self._queues)}")
        queue = self._queues[source]
        if self._kept is not None:
            self._kept.add(meta, queue.position)
        is_news = queue.add(meta, int(self._sampler.taken[source]))
        if queue.has_notes:
            self._noted.add(source)
        if is_news and self._hindered is not None:
            starved, hindering = self._hindered
            if hindering == source:
                self._hindered = None
            elif source in starved.sources:
                self._hindered = (starved.without(source), hindering)

    def change_mixture(self, weights: Mapping[str, float], at_step: int) -> None:
        """Accept an event: other weights from `at_step` on, until a later point or event.

        Args:
            weights: By source.
            at_step: A plan step.

        Raises:
            ConfigError: A weight does not fit, is too small beside the job's fragments, or the step
                is planned already.
        """
        check_weights(weights, self._names, "mixture change", self._untrained)
        state = self._state
        if at_step < state.plan_step:
            raise ConfigError(
                f"a mixture change at step {at_step} comes too late: step {state.plan_step} is "
                "planned next",
                seen=at_step,
                limit=state.plan_step,
            )
        shares = integer_shares(weights, self._names)
        check_drawable(self._job, shares)
        order = np.argsort(np.append(state.pending_steps, at_step), kind="stable")
        self._state = replace(
            state,
            event_number=state.event_number + 1,
            pending_steps=np.append(state.pending_steps, at_step)[order],
            pending_shares=np.concatenate((state.pending_shares, shares[None]))[order],
        )
        self._events_changed()

    def skip_steps(self, first: int, end: int) -> None:
        """Accept an event: the content of some plan steps is left out, all other stays what it is.

        Args:
            first: First plan step.
            end: The one behind the last.

        Raises:
            ConfigError: It is no run of steps, or begins with one that is planned already.
        """
        state = self._state
        if not first < end:
            raise ConfigError(
                f"a skip of steps {first}:{end} holds none: write the first, and the one behind the "
                "last",
                seen=end,
                limit=first + 1,
            )
        if first < state.plan_step:
            raise ConfigError(
                f"a skip from plan step {first} on comes too late: {state.plan_step} is planned next",
                seen=first,
                limit=state.plan_step,
            )
        self._state = replace(
            state,
            event_number=state.event_number + 1,
            pending_skips=merged_skips(state.pending_skips, first, end),
        )
        self._are_skips_news = True
        self._events_changed()

    def count_events(self, event_number: int) -> None:
        """Note that the state knows of all events up to a number, dropped ones among them."""
        if event_number > self._state.event_number:
            self._state = replace(self._state, event_number=event_number)
            self._events_changed()

    def take_back_events(self, state: StreamState) -> None:
        """Go back to other pending events: a state of the same step, behind which none was planned."""
        assert state.plan_step == self._state.plan_step
        self._are_skips_news = self._are_skips_news or not np.array_equal(
            state.pending_skips, self._state.pending_skips
        )
        self._state = state
        self._events_changed()

    def _events_changed(self) -> None:
        self._is_pending_news = True
        self._hindered = None
        self._sampler.note_pending(self._state)

    def plan_step_of(self, step: int) -> int:
        """Return the plan step that a step to come, the trainer's number, will have."""
        state = self._state
        return plan_step_of(state.pending_skips, state.plan_step, step - state.step)

    def skipped(self) -> SkippedSteps | None:
        """Return what was left out since the last served step, None where nothing was."""
        if self._run is None:
            return None
        delta = self._run.difference(self._state)
        carried_out = self._run.base.carried[:4, delta.carried_out]
        return SkippedSteps(self._state.plan_step, delta, carried_out)

    def weigh_cost(self, weights: Sequence[int], from_step: int) -> None:
        """Weigh the parts of the job's cost from a step on; no event of the state, moves no sample.

        Args:
            weights: One a part (federation.planning.costs.part_names), integers >= 0.
            from_step: First step that is placed by them; an older one at a replay.

        Raises:
            ConfigError: They are not one a part, or all are 0.
        """
        parts = part_names(self._analytical)
        if len(weights) != len(parts) or min(weights) < 0 or not max(weights):
            raise ConfigError(
                f"calibration: weights {list(weights)} do not fit: the cost has the parts "
                f"{', '.join(parts)}; give each an integer, 0 or more, one above 0"
            )
        weighted = self._bounded(reduced_cost(weighted_cost(self._job.cost, weights)))
        kept = [(step, cost) for step, cost in self._costs if step < from_step]
        self._costs = [*kept, (from_step, weighted)]

    def last_parts(self) -> Int64Array:
        """Return the analytical parts of what each DP group has in the last planned step.

        Of a job with a calibration rule, once a step is planned. Shape (parts, dp).
        """
        assert self._last_parts is not None
        return self._last_parts

    def step_graph(self, feed: Callable[[Starved], None]) -> DGraph:
        """Return the next step's graph to try verbs on; the planner stays where it stands.

        Any number of graphs of a step hold the same samples, but for chains that draw otherwise
        (`delay`, another schedule).

        Args:
            feed: Called with what a draw starves for; adds chunks of those sources.
        """
        self._take_rule()
        return self._graph(_TrialSampler(self, self._sampler, feed))

    def plan_step(self, strategy: Strategy | None = None) -> StepPlan | Starved | Ended:
        """Plan the next step, behind those that are left out.

        Args:
            strategy: Of this step; None: the planner's.

        Returns:
            The plan, or what hinders it, or the end of the stream. Only a plan moves the state.

        Raises:
            DataError: The draw reached a fault under `fail`, a spent error budget or the end of a
                source that may not be repeated; raised again by every later call.
        """
        while True:
            outcome = self._next_plan(strategy or self._strategy)
            if isinstance(outcome, Ended) and outcome.state is None and self._run is not None:
                return replace(outcome, state=self._state)
            if outcome is not None:
                return outcome

    def _next_plan(self, strategy: Strategy) -> StepPlan | Starved | Ended | None:
        """Plan the next plan step; None where it is left out."""
        if self._hindered is not None:
            return self._hindered[0]
        state, job = self._state, self._job
        if job.steps is not None and state.step >= job.steps:
            return Ended(f"all {job.steps} steps are planned")
        if job.tokens is not None and placed_tokens(state) >= job.tokens:
            return Ended(f"all {job.tokens} tokens are planned")
        if state.ending.endswith(WRAPPED):
            return Ended(state.ending)
        self._take_rule()
        try:
            made = strategy(self._graph(self._sampler), state.plan_step).plan()
        except DrawHindered as hindered:
            return self.starve(hindered.source)
        except (ConfigError, UsageError) as error:
            raise self._strategy_failed(error) from error
        if job.end == "drop" and (reason := self._cut_short(made)):
            return Ended(reason)
        valid_tokens = int(made.row_valid_tokens.sum())
        if is_skipped(state.pending_skips, state.plan_step) and (valid_tokens or not made.is_last):
            self._leave_out(made)
            return None
        if valid_tokens:
            return self._finish(made, valid_tokens)
        if made.is_last:
            return self._end(made)
        untrained = ", without a trained token" if self._extras.has_trained else ""
        raise DataError(
            f"step {state.step} would hold no valid label: its {made.packed.segments.shape[1]} "
            f"segments are of one token each{untrained} or of sources of loss_weight 0; such samples "
            "cannot be trained on with documents: separate"
        )

    def state(self) -> StreamState:
        """Return the state after the last planned step and accepted event."""
        return self._state

    def shares(self) -> list[float]:
        """Return the wanted share of each source at the next step."""
        shares, _ = self._sampler.shares_of_step(self._schedule)
        is_exhausted = self._state.progress[IS_EXHAUSTED] > 0
        active = remaining_shares(shares, is_exhausted, self._schedule.groups)
        total = max(1, int(active.sum()))
        return [share / total for share in active.tolist()]

    def cursors(self) -> list[list[int]]:
        """Return where loaders have to start, per source: [block key, index]."""
        return self._state.cursor_places()

    def carried(self) -> list[list[int]]:
        """Return the carried fragments: [source, block key, index, offset, length]."""
        carried: list[list[int]] = self._state.carried[:5].T.tolist()
        return carried

    def statistics(self) -> PlannerStatistics:
        """Return a frozen snapshot."""
        taken = self._sampler.taken.tolist()
        known = [queue.count - taken[source] for source, queue in enumerate(self._queues)]
        return statistics_of(self._state, self.shares(), known)

    def _bounded(self, cost: CostSpec) -> CostSpec:
        """Return a cost whose sums fit the largest step of the job."""
        batch = self._job.batch
        rows, row_tokens = max(batch.rows_values), max(batch.row_tokens_values)
        return bounded_cost(cost, rows, row_tokens, self._extras.row_units)

    def _stand_at_state(self) -> None:
        """Make queues and draw anew from the state, and give them the chunks that were kept."""
        state = self._state
        self._row_tokens = self._job.batch.at(state.plan_step, placed_tokens(state)).row_tokens
        self._queues = [self._queue(source) for source in range(len(self._names))]
        self._sampler = StepSampler(self._job, self._queues, state, self._analytical)
        for meta in self._kept.chunks() if self._kept is not None else ():
            self._queues[meta.source_index].add(meta, 0)
        self._noted = {source for source, queue in enumerate(self._queues) if queue.has_notes}

    def _take_rule(self) -> None:
        """Take the batch rule of the next step; the same fragments are cut for other rows."""
        state = self._state
        rule = self._job.batch.at(state.plan_step, placed_tokens(state))
        if rule.row_tokens != self._row_tokens:
            self._stand_at_state()
        self._sampler.rule = rule

    def _graph(self, sampler: Sampler) -> DGraph:
        return DGraph(
            sampler,
            self._tree,
            self._sampler.rule,
            schedule=self._schedule,
            cost_model=next(
                cost for step, cost in reversed(self._costs) if step <= self._state.step
            ),
            objective=self._job.balance_objective,
            source_ids=self._source_ids,
            is_trained=None if self._is_trained.all() else self._is_trained,
            extras=self._extras,
            token_bytes=self._token_bytes,
            unit_bytes=tuple(rule.unit_bytes for rule in self._job.media),
        )

    def _strategy_failed(self, error: ConfigError | UsageError) -> MsdError:
        """Return the error of a user's strategy; of a built-in one the error itself."""
        job = self._job
        if job.strategy_call is None or isinstance(error, StrategyError):
            return error
        return strategy_error(job.strategy, self._state.step, error.message)

    def _cut_short(self, made: GraphPlan) -> str:
        """Return why a step is not full, empty where it is."""
        sampler = self._sampler
        if sampler.ending and not sampler.is_full:
            return sampler.ending
        left = sampler.tokens_left
        if left is not None and int(made.packed.segments[LENGTH].sum()) > left:
            return f"no full step is left of {self._job.tokens} tokens"
        return ""

    def _end(self, made: GraphPlan) -> Ended:
        """End the stream; what it still holds has no label to train and is dropped."""
        reason = self._sampler.ending
        if not reason:
            return Ended(f"all {self._job.tokens} tokens are planned")
        if made.packed.placed.size or self._sampler.passed_ends:
            self._state = state_of_end(
                self._state, self._sampler, self._queues, self._noted, made, self._extras
            )
            self._sampler.commit(self._state)
            self._refuse_empty(reason)
            return Ended(reason, self._state)
        return Ended(reason)

    def _refuse_empty(self, reason: str) -> None:
        """Say why a stream has no step at all, where records were passed over.

        Raises:
            SourceExhaustedError: The end came before a step; what was passed over is in the message.
        """
        dropped = self._state.dropped[:DROPPED_TOKENS].sum(axis=1)
        if self._state.step or not dropped.any():
            return
        names = zip(DROPPED_COLUMNS, dropped.tolist(), strict=False)
        counts = ", ".join(f"{name} {count}" for name, count in names if count)
        raise SourceExhaustedError(
            f"job {self._job.name!r} ends before its first step: {reason}; records were passed over: "
            f"{counts}; mend them, or change what ends the job or holds them out",
            dropped=counts,
        )

    def _queue(self, source: int) -> FragmentQueue:
        state, job = self._state, self._job
        progress = state.progress[:, source].tolist()
        return FragmentQueue(
            job.sources[source],
            source,
            self._row_tokens,
            job.batch.long,
            unit=job.mixture.unit,
            epochs_max=epochs_max(job, source),
            is_wrapped=job.end == "wrap",
            is_ended=bool(progress[IS_EXHAUSTED]) or state.ending == job.sources[source].ending,
            cursor=(progress[CURSOR_BLOCK_KEY], progress[CURSOR_INDEX], progress[CURSOR_OFFSET]),
            record_order=progress[RECORD_ORDER],
            lanes_ended=progress[LANES_ENDED],
            faults=tuple(state.faults[1][state.faults[0] == source].tolist()),
            extras=self._extras,
            limits=RowLimits(
                self._row_tokens, job.batch.row_segments_max, job.batch.segment_multiple
            ),
        )

    def starve(self, source: int) -> Starved:
        """Return what a draw needs that reached the end of what is known of a source."""
        sources = tuple(self._sampler.starved(source))
        positions = tuple(self._queues[place].position for place in sources)
        starved = Starved(sources, positions)
        self._hindered = (starved, source)
        return starved

    def _change_of(self, made: GraphPlan) -> StepChange:
        return change_of_step(
            self._state,
            self._sampler,
            self._queues,
            self._noted,
            made,
            self._extras,
            is_pending_news=self._is_pending_news,
            are_skips_news=self._are_skips_news,
        )

    def _leave_out(self, made: GraphPlan) -> None:
        """Go on behind a step whose content is thrown away."""
        change = self._change_of(made)
        if self._run is None:
            self._run = SkippedRun(self._state)
        self._run.passed(change.delta)
        self._state = state_without(self._state, change)
        self._is_pending_news = self._are_skips_news = False
        self._sampler.commit(self._state)
        if self._kept is not None:
            self._kept.forget(change.delta.cursors())

    def _finish(self, made: GraphPlan, valid_tokens: int) -> StepPlan:
        state, rule, packed = self._state, self._sampler.rule, made.packed
        change = self._change_of(made)
        wanted = self._sampler.wanted_shares
        self._state = state.apply(change.delta)
        self._is_pending_news = self._are_skips_news = False
        self._sampler.commit(self._state)
        base, delta, dropped_records = state, change.delta, change.dropped_records
        if self._run is not None:  # one difference leads over what was left out before
            self._run.passed(delta)
            base, delta = self._run.base, self._run.difference(self._state)
            dropped_records = (self._state.dropped - base.dropped)[:DROPPED_TOKENS].sum(axis=0)
            self._run = None
        if self._job.calibration is not None:
            self._last_parts = parts_of_groups(
                made, self._analytical, self._extras, self._tree.dp_count
            )
        narrow = packed.segments.astype(np.int32)
        plan = StepPlan(
            step=state.step,
            plan_step=state.plan_step,
            dp_count=self._tree.dp_count,
            microbatch_count=len(made.placement.dp) // (self._tree.dp_count * rule.microbatch_rows),
            microbatch_rows=rule.microbatch_rows,
            row_tokens=rule.row_tokens,
            source=narrow[SOURCE],
            block_key=packed.segments[BLOCK_KEY],
            index=narrow[INDEX],
            offset=narrow[OFFSET],
            length=narrow[LENGTH],
            row=packed.row.astype(np.int32),
            column=packed.column.astype(np.int32),
            row_dp=made.placement.dp.astype(np.int32),
            row_microbatch=made.placement.microbatch.astype(np.int32),
            row_slot=made.placement.slot.astype(np.int32),
            row_valid_tokens=made.row_valid_tokens.astype(np.int32),
            valid_tokens=valid_tokens,
            valid_segments=int(np.count_nonzero(made.segment_valid_tokens)),
            drawn_tokens=change.counts[0],
            drawn_samples=change.counts[1],
            placed_tokens=change.counts[2],
            source_valid_tokens=change.counts[4],
            source_valid_segments=np.bincount(
                packed.segments[SOURCE][made.segment_valid_tokens > 0], minlength=len(self._names)
            ),
            dropped_records=dropped_records,
            wanted_shares=wanted,
            unit=self._job.mixture.unit,
            broadcast_axes=",".join(made.broadcast_axes),
            cost_max=int(made.rank_costs.max()),
            cost_mean=float(made.rank_costs.mean()),
            encoder_cost_max=made.encoder_cost[0],
            encoder_cost_mean=made.encoder_cost[1],
            carried_tokens=int(self._state.carried[LENGTH].sum()),
            membership_digest=made.membership.hex()[:32],
            stream_digest=delta.stream_digest.hex(),
            carried_out_columns=base.carried[:4, delta.carried_out],
            delta=delta,
            encode_dp=None if made.encode_dp is None else made.encode_dp.astype(np.int32),
            group_begins=self._extras.group_begins(packed.extras),
        )
        if self._kept is not None:
            self._kept.forget(plan.cursors_after())
        return plan


class _TrialSampler:
    """Draws a step without taking anything: feeds what is missing and puts the draw back."""

    def __init__(
        self, planner: StepPlanner, sampler: StepSampler, feed: Callable[[Starved], None]
    ) -> None:
        self._planner = planner
        self._sampler = sampler
        self._feed = feed
        self._step = planner.state().step

    def draw(self, schedule: MixtureTimeline, delay: Delay | None = None) -> Pool:
        if self._planner.state().step != self._step:
            raise UsageError(
                f"this graph is of step {self._step}, which is planned; take a graph of the next one"
            )
        self._sampler.take_back()
        try:
            while True:
                try:
                    return self._sampler.draw(schedule, delay)
                except DrawHindered as hindered:
                    self._feed(self._planner.starve(hindered.source))
        finally:
            self._sampler.take_back()
