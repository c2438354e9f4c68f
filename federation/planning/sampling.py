"""Draws a step's fragments: mixture in force, ends of sources, end of the stream.

`StepSampler` keeps the draw of the step that is planned next. Where metadata is missing the draw
stands still, with what it has, until it came; nothing of it is in the state before the step is
whole, so a change that takes effect at this very step takes the draw back.

The end of a stream (`end`): `pad` draws what there is and leaves rows empty. `drop` serves full
steps alone: where the draw ends short, or the step would place more tokens than are left, the
stream ends before it, so it is a beginning of the endless one. `wrap` goes on behind the ends of
all sources, with the same mixture, once everything before them stands in the step's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from federation.model.cost import CostSpec
from federation.model.job import ResolvedJob
from federation.model.mixture import MixtureTimeline, group_paths, remaining_shares
from federation.planning.cuts import FRAGMENT_COLUMNS
from federation.planning.delay import Delay
from federation.planning.extra_rows import ExtraRows
from federation.planning.fragments import FragmentQueue
from federation.planning.mix import DrawPoint, MixDraw
from federation.planning.packing import pack
from federation.planning.share_tree import NO_SOURCE, ShareTree
from federation.planning.step_pool import Need, Pool, cut_carried, draw_need, step_tokens
from msd_client.contract.errors import ConfigError, SourceExhaustedError
from msd_client.contract.state import (
    DELIVERED_TOKENS,
    DRAWN_SAMPLES,
    DRAWN_TOKENS,
    IS_EXHAUSTED,
    SKIPPED_TOKENS,
    StreamState,
)

Int64Array = npt.NDArray[np.int64]

AHEAD_STEPS = 8
"""Steps of draw that one pass over the sources works out, where so much is known."""
WRAPPED = "; the last step was filled from the next epoch"
"""End of the `ending` of a state behind a wrapped step: nothing follows."""


class DrawHindered(BaseException):
    """The draw needs the next record of `source`, which is not known yet.

    No Exception, as it passes through strategies, whose authors may write `except Exception`.
    """

    def __init__(self, source: int) -> None:
        super().__init__(source)
        self.source = source


class StepSampler:
    """The draw of one stream, step by step."""

    def __init__(
        self,
        job: ResolvedJob,
        queues: Sequence[FragmentQueue],
        state: StreamState,
        cost: CostSpec,
    ) -> None:
        """Stand at a state.

        Args:
            job: The resolved job.
            queues: Of its sources, from the state on.
            state: After the last whole step.
            cost: The job's own, bounded for its largest step.
        """
        self._job = job
        self._extras = ExtraRows.of(job)
        self._groups = group_paths(job.mixture, [source.name for source in job.sources])
        self._queues = queues
        self._state = state
        self._cost = cost
        self.rule = job.batch.at(state.plan_step, placed_tokens(state))
        """Batch rule of the step that is planned next."""
        self._mix = self._new_mix()
        self.shares = state.shares
        """Integer weights in force, exhausted sources included. Shape (S,)."""
        self.schedule_index = state.schedule_index
        self.exhausted = state.progress[IS_EXHAUSTED].astype(bool)
        self.ending = state.ending
        self.passed_ends: set[int] = set()
        """Sources whose end the draw of this step passed."""
        self.is_full = True
        """Where only full steps are served: True where the draw met the step's whole need."""
        self._drawn: list[Int64Array] = []
        self._delay: Delay | None = None
        """Of the step that is drawn."""
        self._is_begun = False
        self._wrapped_ending = ""
        self._own_count = 0
        """Fragments drawn before those that fill a wrapped step."""
        self._point: DrawPoint | None = None
        """Where the draw stood after the last whole step."""
        if self._active().any():
            self._mix.set_shares(self._active(), state.accumulators)
            self._point = self._mix.point
        self._taken = np.zeros(len(queues), np.int64)

    @property
    def taken(self) -> Int64Array:
        """Fragments of each queue that whole steps drew; those before may be forgotten."""
        return self._taken

    @property
    def times(self) -> Int64Array:
        """Virtual times of the draw rule. Shape (branches,)."""
        return self._mix.point.times if self._mix.is_set else self._state.accumulators

    @property
    def wanted_shares(self) -> npt.NDArray[np.float64]:
        """Shares of the sources that are drawn, summing to 1. Shape (S,)."""
        active = self._active()
        total = int(active.sum())
        return active / total if total else np.zeros(len(active))

    def starved(self, source: int) -> list[int]:
        """Return `source` and all others that are drawn and have no undrawn fragment known."""
        taken = self._mix.point.taken
        others = [
            other
            for other in np.flatnonzero(self._active()).tolist()
            if other != source
            and self._queues[other].count == taken[other]
            and not self._queues[other].is_over
        ]
        return [source, *others]

    def take_back(self) -> None:
        """Forget the draw of the step that is not whole yet."""
        state = self._state
        self.shares, self.schedule_index = state.shares, state.schedule_index
        self.exhausted = state.progress[IS_EXHAUSTED].astype(bool)
        self.ending = state.ending
        self._forget_step()
        self._wrapped_ending = ""
        for queue in self._queues:
            queue.is_open = False
        if self._point is not None:
            self._mix.go_to(self._point)
        else:
            self._mix = self._new_mix()

    def commit(self, state: StreamState) -> None:
        """Note that the step is whole; `state` is the one after it."""
        self._state = state
        self._forget_step()
        if self._mix.is_set:
            self._point = self._mix.point
            self._taken = self._point.taken

    def drawn(self) -> Int64Array:
        """Return the fragments drawn for this step. Shape (FRAGMENT_COLUMNS + extra rows, n)."""
        if len(self._drawn) == 1:
            return self._drawn[0]
        if not self._drawn:
            return np.zeros((FRAGMENT_COLUMNS + self._extras.count, 0), np.int64)
        return np.concatenate(self._drawn, axis=1)

    def draw(self, schedule: MixtureTimeline, delay: Delay | None = None) -> Pool:
        """Draw what the step still needs.

        Args:
            schedule: The mixture.
            delay: Which fragments wait for a later step; more is drawn in their place.

        Raises:
            DrawHindered: Metadata of a source has to come first.
            DataError: The draw reached the fault or the end that stops a source.
        """
        if not self._is_begun:
            self._begin(schedule)
        self._delay = delay
        rule = self.rule
        tokens_left = self.tokens_left if self._job.end == "pad" else None
        carried, origins = cut_carried(self._state.carried, rule)
        is_near_end = tokens_left is not None and tokens_left <= step_tokens(rule)
        if self.ending or is_near_end:
            self._delay = None  # nothing follows that it could wait for
        open_carried = carried[:, ~self._held(carried)]
        need = draw_need(rule, open_carried, tokens_left, self._extras.units_max)
        if not self._wrapped_ending:
            self._draw_until(need, carried)
            if self.ending and self._job.end == "wrap":
                self._begin_wrap(carried)
        if self._wrapped_ending:
            self._draw_until(need, carried)
            self.ending = self._wrapped_ending
        drawn = self.drawn()
        if self._job.end == "drop":
            self.is_full = need.after(self._open_drawn(carried), rule.segment_multiple).is_met
        filler_count = drawn.shape[1] - self._own_count if self._wrapped_ending else 0
        fragments = self._fragments(carried, drawn, filler_count)
        is_held = None if self._delay is None or self.ending else self._held(fragments)
        return Pool(
            fragments,
            carried.shape[1],
            tokens_left,
            origins,
            filler_count,
            bool(self.ending) or is_near_end,
            self._extras.units_max,
            self._extras.has_begins,
            self._cost,
            is_held if is_held is not None and is_held.any() else None,
            self._extras.has_groups,
            self._extras.modalities,
        )

    @property
    def tokens_left(self) -> int | None:
        """Tokens that the stream may still place, None for no end."""
        if self._job.tokens is None:
            return None
        return self._job.tokens - placed_tokens(self._state)

    def shares_of_step(self, schedule: MixtureTimeline) -> tuple[Int64Array, int]:
        """Return the weights in force from the next step on and the points passed by then."""
        state = self._state
        index = schedule.passed(state.schedule_index, state.plan_step, placed_tokens(state))
        shares = state.shares if index == state.schedule_index else schedule.shares(index)
        for place in np.flatnonzero(state.pending_steps <= state.plan_step).tolist():
            shares = state.pending_shares[place]
        return shares, index

    def note_pending(self, state: StreamState) -> None:
        """Take a state that differs in its pending changes alone; redraws the step."""
        self._state = state
        self.take_back()

    def _new_mix(self) -> MixDraw:
        batch = self._job.batch
        return MixDraw(
            self._queues,
            max(batch.row_tokens_values),
            unit=self._job.mixture.unit,
            segment_multiple=batch.segment_multiple,
            samples_max=batch.row_segments_max if self._extras.has_groups else 1,
            extras=self._extras,
        )

    def _forget_step(self) -> None:
        self.passed_ends = set()
        self._drawn = []
        self._is_begun = False

    def _draw_until(self, need: Need, carried: Int64Array) -> None:
        """Draw until the step's need is met, or no source has anything left.

        What is held meets no need, so with a delay more is drawn, part by part: the draw ends behind
        the same fragment however much of it was known when.
        """
        multiple = self.rule.segment_multiple
        left = need.after(self._open_drawn(carried), multiple)
        while not (self.ending or left.is_met):
            part, blocked = self._mix.draw(left, self._horizon())
            if part.shape[1]:
                self._drawn.append(part)
                if self._delay is None:
                    left = left.after(part, multiple)
                else:
                    left = need.after(self._open_drawn(carried), multiple)
            if blocked != NO_SOURCE:
                self._pass_end(blocked)
            elif self._delay is None:
                break

    def _open_drawn(self, carried: Int64Array) -> Int64Array:
        """Return the drawn fragments that are not held. Shape (FRAGMENT_COLUMNS + extra rows, n)."""
        drawn = self.drawn()
        if self._delay is None:
            return drawn
        is_held = self._held(self._fragments(carried, drawn, 0))
        return drawn[:, ~is_held[carried.shape[1] :]]

    def _held(self, fragments: Int64Array) -> npt.NDArray[np.bool_]:
        if self._delay is None:
            return np.zeros(fragments.shape[1], bool)
        return self._delay.held(fragments, self._state.plan_step, self.rule)

    def _begin_wrap(self, carried: Int64Array) -> None:
        """Open what lies behind the ends, where all before them stands in this step's rows."""
        drawn = self.drawn()
        own = Pool(
            self._fragments(carried, drawn, 0),
            carried.shape[1],
            is_last=True,
            units_max=self._extras.units_max,
            has_begins=self._extras.has_begins,
            cost=self._cost,
            has_groups=self._extras.has_groups,
            modalities=self._extras.modalities,
        )
        packed = pack(own, self.rule)
        is_whole = len(packed.carried_out) == own.carried_count and not packed.carried_in.size
        if not own.fragments.size or not is_whole:
            return
        self._own_count = drawn.shape[1]
        self._wrapped_ending = self.ending + WRAPPED
        self.ending = ""
        self.exhausted = np.zeros_like(self.exhausted)
        for queue in self._queues:
            queue.is_open = True
        self._mix.set_shares(self.shares, np.zeros(0, np.int64))

    def _fragments(self, carried: Int64Array, drawn: Int64Array, filler_count: int) -> Int64Array:
        """Return the step's pool; fillers count as drawn one step later, so they come last."""
        count = carried.shape[1]
        pool = np.empty((len(carried), count + drawn.shape[1]), np.int64)
        pool[:, :count] = carried
        pool[:5, count:] = drawn[:5]
        pool[5, count:] = self._state.plan_step
        pool[6:, count:] = drawn[FRAGMENT_COLUMNS:]
        if filler_count:
            pool[5, -filler_count:] += 1
        return pool

    def _begin(self, schedule: MixtureTimeline) -> None:
        self.shares, self.schedule_index = self.shares_of_step(schedule)
        if self.shares is not self._state.shares:
            self._set_shares()
        self._is_begun = True

    def _active(self) -> Int64Array:
        return remaining_shares(self.shares, self.exhausted, self._groups)

    def _set_shares(self) -> None:
        active = self._active()
        if active.any():
            self._mix.set_shares(active)
        else:
            self.ending = "every source of the mixture is exhausted"

    def _horizon(self) -> int:
        step = step_tokens(self.rule) * AHEAD_STEPS
        if self._job.mixture.unit != "samples":
            return step
        samples = int(self._state.progress[DRAWN_SAMPLES].sum())
        tokens = int(self._state.progress[DRAWN_TOKENS].sum())
        return step * samples // tokens + 1 if tokens else self.rule.rows * AHEAD_STEPS

    def _pass_end(self, source: int) -> None:
        """Act on the end of a source that the draw reached."""
        queue = self._queues[source]
        if queue.failure is not None:
            raise queue.failure
        if not queue.is_complete:
            raise DrawHindered(source)
        spec = queue.spec
        self.passed_ends.add(source)
        if spec.at_exhaustion == "stop":
            self.ending = spec.ending
            return
        if spec.at_exhaustion == "repeat" and self._job.epochs is None:
            raise SourceExhaustedError(
                f"source {spec.name} has no sample left after its {spec.max_epochs} epochs and is "
                "set to repeat; raise max_epochs, or set at_exhaustion to drop or stop",
                source=spec.name,
                limit=spec.max_epochs,
            )
        self.exhausted = self.exhausted.copy()
        self.exhausted[source] = True
        self._set_shares()


def check_drawable(job: ResolvedJob, shares: Int64Array) -> None:
    """Refuse shares that cannot be told from never beside fragments of the job's size.

    Raises:
        ConfigError: It names the source and its share.
    """
    try:
        ShareTree(shares, fragment_amount_max(job))
    except ConfigError as error:
        source = job.sources[int(error.attributes["source"] or 0)].name
        raise ConfigError(f"mixture: {source}: {error.message}", source=source) from error


def fragment_amount_max(job: ResolvedJob) -> int:
    """Return the most that one fragment, or one group, counts for in the mixture's unit."""
    if job.mixture.unit == "samples":
        return job.batch.row_segments_max if job.has_groups else 1
    return max(job.batch.row_tokens_values)


def placed_tokens(state: StreamState) -> int:
    """Return the tokens that the steps before a state placed in rows, those left out included."""
    return int(state.progress[DELIVERED_TOKENS].sum() + state.dropped[SKIPPED_TOKENS].sum())
