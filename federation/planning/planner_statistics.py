"""What a planner says of a stream to people and benches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from federation.planning.step_pool import LENGTH
from msd_client.contract.state import (
    DELIVERED_SAMPLES,
    DELIVERED_TOKENS,
    DRAWN_SAMPLES,
    DRAWN_TOKENS,
    DROPPED_COLUMNS,
    DROPPED_TOKENS,
    VALID_TOKENS,
    StreamState,
)


@dataclass(frozen=True)
class PlannerStatistics:
    """Frozen snapshot; tuples have one entry per source."""

    step: int
    sources: tuple[str, ...]
    wanted_shares: tuple[float, ...]
    drawn_tokens: tuple[int, ...]
    drawn_samples: tuple[int, ...]
    delivered_tokens: tuple[int, ...]
    delivered_samples: tuple[int, ...]
    valid_tokens: tuple[int, ...]
    dropped_records: dict[str, tuple[int, ...]]
    """By reason."""
    dropped_tokens: tuple[int, ...]
    epochs: tuple[int, ...]
    known_fragments: tuple[int, ...]
    """Fragments known and not drawn by a whole step."""
    carried_fragments: int
    carried_tokens: int


def statistics_of(
    state: StreamState, shares: Sequence[float], known_fragments: Sequence[int]
) -> PlannerStatistics:
    """Return the snapshot of a state.

    Args:
        state: After the last planned step.
        shares: Wanted share of each source at the next step.
        known_fragments: Of each source, known and not drawn by a whole step.
    """
    progress, dropped = state.progress.tolist(), state.dropped.tolist()
    return PlannerStatistics(
        step=state.step,
        sources=state.source_names,
        wanted_shares=tuple(shares),
        drawn_tokens=tuple(progress[DRAWN_TOKENS]),
        drawn_samples=tuple(progress[DRAWN_SAMPLES]),
        delivered_tokens=tuple(progress[DELIVERED_TOKENS]),
        delivered_samples=tuple(progress[DELIVERED_SAMPLES]),
        valid_tokens=tuple(progress[VALID_TOKENS]),
        dropped_records={
            reason: tuple(dropped[place])
            for place, reason in enumerate(DROPPED_COLUMNS[:DROPPED_TOKENS])
        },
        dropped_tokens=tuple(dropped[DROPPED_TOKENS]),
        epochs=tuple(state.epoch.tolist()),
        known_fragments=tuple(known_fragments),
        carried_fragments=int(state.carried.shape[1]),
        carried_tokens=int(state.carried[LENGTH].sum()),
    )
