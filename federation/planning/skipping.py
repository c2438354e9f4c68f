"""Steps whose content is left out: drawn, packed and thrown away, so that all others stay the same.

What they would have placed is counted as dropped. A skip and the served step behind it are one
difference of the state: states stand behind served steps alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from federation.planning.step_change import StepChange
from msd_client.contract.skips import skips_from
from msd_client.contract.state import (
    DELIVERED_SAMPLES,
    DELIVERED_TOKENS,
    DRAWN_SAMPLES,
    DRAWN_TOKENS,
    DROPPED_TOKENS,
    SKIPPED_SAMPLES,
    SKIPPED_TOKENS,
    VALID_TOKENS,
    StateDelta,
    StreamState,
)

Int64Array = npt.NDArray[np.int64]


def state_without(state: StreamState, change: StepChange) -> StreamState:
    """Return the state behind a step that is left out.

    Args:
        state: The state before it.
        change: What the step would have changed.
    """
    after = state.apply(change.delta)
    _, _, tokens, samples, valid_tokens = change.counts
    progress, dropped = after.progress.copy(), after.dropped.copy()
    progress[[DRAWN_TOKENS, DELIVERED_TOKENS]] -= tokens
    progress[[DRAWN_SAMPLES, DELIVERED_SAMPLES]] -= samples
    progress[VALID_TOKENS] -= valid_tokens
    dropped[SKIPPED_SAMPLES] += samples
    dropped[[DROPPED_TOKENS, SKIPPED_TOKENS]] += tokens
    return replace(
        after,
        step=state.step,
        skipped_steps=state.skipped_steps + 1,
        pending_skips=skips_from(state.pending_skips, state.plan_step + 1),
        progress=progress,
        dropped=dropped,
        stream_digest=state.stream_digest,
    )


class SkippedRun:
    """Follows the state over steps that are left out, from the last served step on.

    Args:
        base: The state behind that step.
    """

    def __init__(self, base: StreamState) -> None:
        self.base = base
        self._places = np.arange(base.carried.shape[1])
        """Of each carried fragment: its index in `base`, -1 where it joined since."""

    def passed(self, delta: StateDelta) -> None:
        """A step was planned, to be served or left out."""
        keep = np.ones(len(self._places), bool)
        keep[delta.carried_out] = False
        joined = np.full(delta.carried_in.shape[1], -1)
        self._places = np.concatenate((self._places[keep], joined))

    def difference(self, after: StreamState) -> StateDelta:
        """Return what leads from `base` to a state behind all that was passed.

        Its step is `after`'s, which is `base`'s own where no served step was passed.
        """
        base = self.base
        changed = np.flatnonzero((after.progress != base.progress).any(axis=0))
        dropped_changed = np.flatnonzero((after.dropped != base.dropped).any(axis=0))
        left = np.ones(base.carried.shape[1], bool)
        left[self._places[self._places >= 0]] = False
        are_faults_new = not np.array_equal(after.faults, base.faults)
        return StateDelta(
            step=after.step,
            event_number=after.event_number,
            changed=changed,
            progress=after.progress[:, changed],
            dropped_changed=dropped_changed,
            dropped=after.dropped[:, dropped_changed],
            accumulators=after.accumulators,
            carried_out=np.flatnonzero(left),
            carried_in=after.carried[:, self._places < 0],
            stream_digest=after.stream_digest,
            ending=after.ending,
            schedule_index=after.schedule_index,
            shares=None if np.array_equal(after.shares, base.shares) else after.shares,
            pending_steps=after.pending_steps,
            pending_shares=after.pending_shares,
            faults=after.faults if are_faults_new else None,
            carried_columns=after.carried_columns,
            skipped_steps=after.skipped_steps,
            pending_skips=after.pending_skips,
        )
