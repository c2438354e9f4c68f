"""The first state, and what a whole step changes in one: cursors, counts, what was passed over."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import ResolvedJob
from federation.planning import cuts, step_pool
from federation.planning.extra_rows import ExtraRows
from federation.planning.fragments import FragmentQueue
from federation.planning.graph_compile import GraphPlan
from federation.planning.sampling import StepSampler
from msd_client.contract.position import BLOCK_BITS, WINDOW_BITS
from msd_client.contract.state import (
    CURSOR_BLOCK_KEY,
    CURSOR_INDEX,
    CURSOR_OFFSET,
    DELIVERED_SAMPLES,
    DELIVERED_TOKENS,
    DRAWN_SAMPLES,
    DRAWN_TOKENS,
    DROPPED_COLUMNS,
    DROPPED_TOKENS,
    IS_EXHAUSTED,
    LANES_ENDED,
    RECORD_ORDER,
    VALID_TOKENS,
    StateDelta,
    StreamState,
)

Int64Array = npt.NDArray[np.int64]

_NO_LABEL = DROPPED_COLUMNS.index("no_label")
_EPOCH_SHIFT = WINDOW_BITS + BLOCK_BITS


class StepChange(NamedTuple):
    """A step's difference, and its counts for the plan."""

    delta: StateDelta
    counts: Int64Array
    """Drawn tokens, drawn samples, placed tokens, placed samples, valid tokens. Shape (5, S)."""
    dropped_records: Int64Array
    """Shape (S,)."""


def first_state(job: ResolvedJob) -> StreamState:
    """Return the state before a job's first step."""
    names = tuple(source.name for source in job.sources)
    return StreamState.initial(
        job.digest(), names, job.stream_version, sample_digest=job.sample_digest()
    )


def change_of_step(
    state: StreamState,
    sampler: StepSampler,
    queues: Sequence[FragmentQueue],
    noted: set[int],
    made: GraphPlan,
    extras: ExtraRows,
    *,
    is_pending_news: bool,
    are_skips_news: bool = False,
) -> StepChange:
    """Settle a whole step.

    Args:
        state: The state before it.
        sampler: Holds what was drawn for it.
        queues: Every source's; those that have notes forget what the draw passed.
        noted: Sources with notes; those that have none any more leave it.
        made: The compiled step.
        extras: Extra rows of the job's fragments.
        is_pending_news: True where `state` has events that no delta told yet.
        are_skips_news: True where its pending skips are not those that the last delta told.
    """
    drawn = sampler.drawn()
    counts = _counts(drawn, made, len(queues), extras)
    progress = state.progress.copy()
    progress[DRAWN_TOKENS : VALID_TOKENS + 1] += counts
    progress[IS_EXHAUSTED] = sampler.exhausted
    ended = sampler.passed_ends
    touched = [*_move_cursors(drawn, progress), *ended]
    dropped = _pass_records(state.dropped, queues, noted.intersection(touched), ended, progress)
    noted -= {source for source in touched if not queues[source].has_notes} if noted else set()
    is_faulty = state.faults.size or dropped is not state.dropped
    changed = np.flatnonzero((progress != state.progress).any(axis=0))
    dropped_changed = np.flatnonzero((dropped != state.dropped).any(axis=0))
    is_due = state.pending_steps <= state.plan_step
    is_pending_told = is_pending_news or bool(is_due.any())
    delta = StateDelta(
        step=state.step + 1,
        event_number=state.event_number,
        changed=changed,
        progress=progress[:, changed],
        dropped_changed=dropped_changed,
        dropped=dropped[:, dropped_changed],
        accumulators=sampler.times,
        carried_out=made.packed.carried_out,
        carried_in=made.packed.carried_in,
        stream_digest=hashlib.sha256(state.stream_digest + made.membership).digest(),
        ending=sampler.ending,
        schedule_index=sampler.schedule_index,
        shares=None if sampler.shares is state.shares else sampler.shares,
        pending_steps=state.pending_steps[~is_due] if is_pending_told else None,
        pending_shares=state.pending_shares[~is_due] if is_pending_told else None,
        faults=_error_windows(state, queues, progress) if is_faulty else None,
        carried_columns=state.carried_columns,
        skipped_steps=state.skipped_steps,
        pending_skips=state.pending_skips if are_skips_news else None,
    )
    return StepChange(delta, counts, (dropped - state.dropped)[:DROPPED_TOKENS].sum(axis=0))


def state_of_end(
    state: StreamState,
    sampler: StepSampler,
    queues: Sequence[FragmentQueue],
    noted: set[int],
    made: GraphPlan,
    extras: ExtraRows,
) -> StreamState:
    """Return the state behind the end of a stream.

    Its last fragments have no label to train: no step may hold them alone, so they are dropped, and
    nothing is held any more. What lies behind the last sample is counted. As no step changes the
    state, no delta tells of it.
    """
    change = change_of_step(state, sampler, queues, noted, made, extras, is_pending_news=False)
    after = state.apply(change.delta)
    left, rest = made.packed.segments, after.carried
    source, length = np.concatenate(
        [part[[step_pool.SOURCE, step_pool.LENGTH]] for part in (left, rest)], axis=1
    )
    begins = np.append(extras.begins(left, made.packed.extras), extras.begins(rest))
    count = len(queues)
    fragment_counts = np.bincount(source, minlength=count)
    tokens = np.bincount(source, weights=length, minlength=count).astype(np.int64)
    samples = np.bincount(source, weights=begins, minlength=count).astype(np.int64)
    progress, dropped = after.progress.copy(), after.dropped.copy()
    progress[[DELIVERED_TOKENS, DELIVERED_SAMPLES]] = state.progress[
        [DELIVERED_TOKENS, DELIVERED_SAMPLES]
    ]
    progress[DRAWN_TOKENS] -= tokens
    progress[DRAWN_SAMPLES] -= samples
    dropped[_NO_LABEL] += fragment_counts
    dropped[DROPPED_TOKENS] += tokens
    return replace(
        after,
        step=state.step,
        progress=progress,
        dropped=dropped,
        carried=after.carried[:, :0],
        stream_digest=state.stream_digest,
    )


def _counts(drawn: Int64Array, made: GraphPlan, source_count: int, extras: ExtraRows) -> Int64Array:
    segments = made.packed.segments
    sums = [
        np.bincount(sources, weights=weights, minlength=source_count)
        for sources, weights in (
            (drawn[cuts.SOURCE], drawn[cuts.LENGTH]),
            (drawn[cuts.SOURCE], extras.begins(drawn)),
            (segments[step_pool.SOURCE], segments[step_pool.LENGTH]),
            (segments[step_pool.SOURCE], extras.begins(segments, made.packed.extras)),
            (segments[step_pool.SOURCE], made.segment_valid_tokens),
        )
    ]
    return np.array(sums).astype(np.int64)


def _move_cursors(drawn: Int64Array, progress: Int64Array) -> list[int]:
    """Set the cursors behind what was drawn; return the sources that moved."""
    last = np.full(progress.shape[1], -1, np.int64)
    last[drawn[cuts.SOURCE]] = np.arange(drawn.shape[1])
    touched = np.flatnonzero(last >= 0)
    ends = drawn[:, last[touched]]
    before = progress[CURSOR_BLOCK_KEY, touched] >> _EPOCH_SHIFT
    is_new_epoch = (ends[cuts.BLOCK_KEY] >> _EPOCH_SHIFT) != before
    progress[LANES_ENDED, touched[is_new_epoch]] = 0
    progress[CURSOR_BLOCK_KEY, touched] = ends[cuts.BLOCK_KEY]
    progress[CURSOR_INDEX, touched] = ends[cuts.INDEX]
    progress[CURSOR_OFFSET, touched] = ends[cuts.OFFSET] + ends[cuts.LENGTH]
    progress[RECORD_ORDER, touched] = ends[cuts.RECORD_ORDER]
    moved: list[int] = touched.tolist()
    return moved


def _pass_records(
    dropped: Int64Array,
    queues: Sequence[FragmentQueue],
    noted: set[int],
    ended: set[int],
    progress: Int64Array,
) -> Int64Array:
    """Count what lies before the cursors of sources with notes; `dropped` itself if nothing does.

    Of sources whose end the draw passed also what lies behind their last fragment.
    """
    if noted:
        dropped = dropped.copy()
    for source in sorted(noted):
        reached = int(progress[RECORD_ORDER, source]), int(progress[CURSOR_OFFSET, source])
        if source in ended:
            reached = max(reached, (queues[source].end_order, 0))
        counts, lanes = queues[source].pass_records(
            int(progress[CURSOR_BLOCK_KEY, source]), *reached, int(progress[LANES_ENDED, source])
        )
        dropped[:, source] += counts
        progress[LANES_ENDED, source] = lanes
    return dropped


def _error_windows(
    state: StreamState, queues: Sequence[FragmentQueue], progress: Int64Array
) -> Int64Array | None:
    """Return the faults that still count, None where they are the state's."""
    columns = [
        (source, fault)
        for source, queue in enumerate(queues)
        for fault in queue.faults_in_window(int(progress[RECORD_ORDER, source]))
    ]
    faults = np.ascontiguousarray(np.array(columns, np.int64).reshape(-1, 2).T)
    return None if np.array_equal(faults, state.faults) else faults
