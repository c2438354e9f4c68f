"""Varlen steps: the draw of a step as it is, dealt segment by segment to ranks and microbatches (E9).

A step is the draw up to `step_tokens`, the fragment that reaches them included. It has no rows and
carries nothing, so what it holds knows of no mesh. Only placing it makes rows: each microbatch of
each data-parallel group is one, of at most `row_tokens` places, `row_segments_max` segments and the
caps of media and activations (federation.planning.varlen_measures).

All groups have equally many microbatches M, the fewest at which the deal finds room: it begins with
the sums of sizes and of segments over what the microbatches hold, and goes up by one
(federation.planning.varlen_deal). It ends: filled one after the other in draw order, two neighbouring
microbatches hold more than one's cap of something together, or the first holds all its segments, so
`Measures.enough` of them are always enough; where no deal found room before, they are filled so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule
from federation.planning.balance import (
    PPM,
    BalanceRule,
    Placement,
    place_in_turn,
    shuffle_order,
)
from federation.planning.step_pool import (
    DRAWN_STEP,
    LENGTH,
    Packed,
    Pool,
    group_starts,
    places_of,
    runs,
)
from federation.planning.varlen_deal import deal_evenly, objective_of_cells
from federation.planning.varlen_measures import Measures

Int64Array = npt.NDArray[np.int64]


class Varlen(NamedTuple):
    """A placed step."""

    packed: Packed
    """Its rows: microbatch by microbatch, in each group by group."""
    placement: Placement


def whole_step(pool: Pool, rule: BatchRule) -> Packed:
    """Return all fragments of a step in draw order, as if in one row; `place_segments` cuts it."""
    fragments = pool.fragments
    count = fragments.shape[1]
    sizes = places_of(fragments[LENGTH], rule.segment_multiple)
    row = np.zeros(count, np.int64)
    return Packed(
        fragments[:DRAWN_STEP],
        row,
        np.cumsum(sizes) - sizes,
        *runs(row),
        np.arange(pool.carried_count),
        fragments[:, :0],
        np.ones(count, bool),
        fragments[DRAWN_STEP + 1 :],
    )


def place_segments(
    packed: Packed,
    costs: Int64Array,
    rule: BatchRule,
    dp_count: int,
    measures: Measures,
    balance: BalanceRule | None,
    shuffle_key: int | None = None,
    follow: Int64Array | None = None,
) -> Varlen:
    """Deal a step's segments to microbatches; inside one they stand in draw order.

    Args:
        packed: The step, from `whole_step`.
        costs: Cost of each segment. Shape (n,).
        rule: Batch of the step.
        dp_count: Data-parallel groups.
        measures: What segments take of a microbatch.
        balance: What is evened and how; None fills microbatches in draw order, group after group in
            turn. The method is LPT under caps whatever it names: counts need not be equal.
        shuffle_key: Where nothing is balanced: in an order of this key in place of the draw's.
        follow: How many segments of its group stand behind each, None where there are no groups: a
            group is dealt like one segment. Shape (n,).
    """
    counts: Int64Array | None = None
    if follow is not None and len(costs):
        starts = group_starts(follow)
        counts = np.diff(np.append(starts, len(costs)))
        costs, measures = np.add.reduceat(costs, starts), measures.of_groups(starts)
    cell = None
    if balance is not None:
        cell = deal_evenly(costs, measures, dp_count, balance)
    if cell is None or (balance is not None and balance.min_gain_ppm):
        turn = _in_turn(measures, shuffle_key)
        if cell is None or (
            balance is not None and not _gains(costs, cell, turn, dp_count, balance)
        ):
            cell = turn
    if counts is not None:
        cell = np.repeat(cell, counts)
    microbatches = _microbatches(cell, dp_count)
    return Varlen(_in_rows(packed, cell, rule), place_in_turn(microbatches * dp_count, dp_count, 1))


def _microbatches(cell: Int64Array, dp_count: int) -> int:
    return max(1, -(-(int(cell.max(initial=0)) + 1) // dp_count))


def _gains(
    costs: Int64Array, cell: Int64Array, turn: Int64Array, dp_count: int, balance: BalanceRule
) -> bool:
    """Return whether a deal gains the rule's share of the objective that filling in turn has."""
    after, before = (
        objective_of_cells(costs, place, dp_count, _microbatches(place, dp_count), balance)
        for place in (cell, turn)
    )
    return (before - after) * PPM >= balance.min_gain_ppm * before


def _in_turn(measures: Measures, shuffle_key: int | None) -> Int64Array:
    """Return the cell of each segment where one is filled after the other in an order."""
    count = measures.taken.shape[1]
    order = np.arange(count) if shuffle_key is None else shuffle_order(count, shuffle_key)
    sums = np.zeros((len(measures.caps), count + 1), np.int64)
    np.cumsum(measures.taken[:, order], axis=1, out=sums[:, 1:])
    found = np.empty(count, np.int64)
    cell = start = 0
    while start < count:
        end = start + measures.count_max
        for held, most in zip(sums, measures.caps.tolist(), strict=True):
            end = min(end, int(np.searchsorted(held, held[start] + most, side="right")) - 1)
        found[order[start:end]] = cell
        cell, start = cell + 1, end
    return found


def _in_rows(packed: Packed, cell: Int64Array, rule: BatchRule) -> Packed:
    """Return the step with each cell's segments as a row."""
    order = np.argsort(cell, kind="stable")
    row = cell[order]
    segments = packed.segments[:, order]
    sizes = places_of(segments[LENGTH], rule.segment_multiple)
    before = np.cumsum(sizes) - sizes
    starts, counts = runs(row)
    return packed._replace(
        segments=segments,
        row=row,
        column=before - np.repeat(before[starts], counts),
        row_starts=starts,
        row_sizes=counts,
        extras=packed.extras[:, order],
    )
