"""Varlen steps: the draw of a step as it is, dealt segment by segment to ranks and microbatches (E9).

A step is the draw up to `step_tokens`, the fragment that reaches them included. It has no rows and
carries nothing, so what it holds knows of no mesh. Only placing it makes rows: each microbatch of
each data-parallel group is one, of at most `row_tokens` places and `row_segments_max` segments.

All groups have equally many microbatches M, the fewest at which the deal finds room: it begins with
the sum of sizes and of segments over what the microbatches hold, and goes up by one. A deal evens the
cost of the groups, each holding at most what M microbatches do, then that of the M microbatches of
each group (federation.planning.capped_deal). It ends: filled one after the other in draw order, two
neighbouring microbatches hold more than one's places together, or the first holds all its segments,
so `2 * sizes // row_tokens + segments // row_segments_max + 1` of them are always enough; where no
deal found room before, they are filled so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule
from federation.planning.balance import Placement, place_in_turn
from federation.planning.capped_deal import deal_capped
from federation.planning.step_pool import (
    DRAWN_STEP,
    LENGTH,
    Packed,
    Pool,
    group_starts,
    places_of,
    runs,
)

Int64Array = npt.NDArray[np.int64]

_FULL = np.iinfo(np.int64).max
"""Load of a microbatch that has no room: that of no other is as large."""


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
    *,
    is_balanced: bool,
    units_max: tuple[int, ...] = (),
    follow: Int64Array | None = None,
) -> Varlen:
    """Deal a step's segments to microbatches; inside one they stand in draw order.

    Args:
        packed: The step, from `whole_step`.
        costs: Cost of each segment. Shape (n,).
        rule: Batch of the step.
        dp_count: Data-parallel groups.
        is_balanced: False fills microbatches in draw order, group after group in turn.
        units_max: Most units of media of a microbatch, of each modality; the last rows of the
            segments' extra rows hold theirs.
        follow: How many segments of its group stand behind each, None where there are no groups: a
            group is dealt like one segment. Shape (n,).
    """
    sizes = segment_sizes(packed, rule, units_max)
    counts: Int64Array | None = None
    if follow is not None and len(sizes):
        starts = group_starts(follow)
        counts = np.diff(np.append(starts, len(sizes)))
        costs = np.add.reduceat(costs, starts)
        sizes = group_sizes(packed, rule, units_max, starts)
    cell = None
    if is_balanced:
        cell = _evened(costs, sizes, rule.row_tokens, rule.row_segments_max, dp_count)
    if cell is None:
        cell = _in_turn(sizes, rule.row_tokens, rule.row_segments_max)
    if counts is not None:
        cell = np.repeat(cell, counts)
    microbatches = max(1, -(-(int(cell.max(initial=0)) + 1) // dp_count))
    return Varlen(_in_rows(packed, cell, rule), place_in_turn(microbatches * dp_count, dp_count, 1))


def segment_sizes(packed: Packed, rule: BatchRule, units_max: tuple[int, ...]) -> Int64Array:
    """Return what each segment takes of a microbatch's places. Shape (n,).

    With media it is the largest part that it takes of anything: of places, or of the units of one
    modality, rounded up to a place. Where these fit, places and units fit.
    """
    sizes = places_of(packed.segments[LENGTH], rule.segment_multiple)
    first = len(packed.extras) - len(units_max)
    for units, most in zip(packed.extras[first:], units_max, strict=True):
        sizes = np.maximum(sizes, -(-units * rule.row_tokens // most))
    return sizes


def group_sizes(
    packed: Packed, rule: BatchRule, units_max: tuple[int, ...], starts: Int64Array
) -> Int64Array:
    """Return what each group takes of a microbatch's places. Shape (groups,).

    As `segment_sizes` of all that it holds together, and of its segments too: where these fit, no
    microbatch has too many.

    Args:
        packed: The step, groups beside each other.
        rule: Batch of the step.
        units_max: Most units of media of a microbatch, of each modality.
        starts: First segment of each group. Shape (groups,).
    """
    places = places_of(packed.segments[LENGTH], rule.segment_multiple)
    counts = np.diff(np.append(starts, len(places)))
    sizes: Int64Array = np.maximum(
        np.add.reduceat(places, starts), -(-counts * rule.row_tokens // rule.row_segments_max)
    )
    first = len(packed.extras) - len(units_max)
    for units, most in zip(packed.extras[first:], units_max, strict=True):
        held = np.add.reduceat(units, starts)
        sizes = np.maximum(sizes, -(-held * rule.row_tokens // most))
    return sizes


def _evened(
    costs: Int64Array, sizes: Int64Array, size_max: int, count_max: int, dp_count: int
) -> Int64Array | None:
    """Return the cell (microbatch * dp_count + group) of each segment; None where no deal fits."""
    total, count = int(sizes.sum()), len(sizes)
    least = max(-(-total // (size_max * dp_count)), -(-count // (count_max * dp_count)), 1)
    enough = 2 * total // size_max + count // count_max + 1
    for microbatches in range(least, -(-enough // dp_count) + 1):
        group = deal_capped(
            costs, sizes, dp_count, size_max * microbatches, count_max * microbatches
        )
        if group is None:
            continue
        cell = _cells(costs, sizes, group, microbatches, size_max, count_max, dp_count)
        if cell is not None:
            return cell
    return None


def _cells(
    costs: Int64Array,
    sizes: Int64Array,
    group: Int64Array,
    microbatches: int,
    size_max: int,
    count_max: int,
    dp_count: int,
) -> Int64Array | None:
    """Return the cell of each segment of groups that are dealt, None where it has no room.

    Microbatches of a group go in falling cost, ties by number.
    """
    own = None
    for measure in (costs, sizes):  # evened by size they lie closer
        if own is None:
            deal = _side_by_side if len(costs) <= dp_count * dp_count else _one_by_one
            own = deal(measure, sizes, group, microbatches, size_max, count_max, dp_count)
    if own is None:
        return None
    loads = np.zeros(dp_count * microbatches, np.int64)
    np.add.at(loads, group * microbatches + own, costs)
    falling = np.argsort(-loads.reshape(dp_count, microbatches), axis=1, kind="stable")
    rank = np.empty_like(falling)
    np.put_along_axis(rank, falling, np.arange(microbatches)[None], axis=1)
    cell: Int64Array = rank[group, own] * dp_count + group
    return cell


def _one_by_one(
    costs: Int64Array,
    sizes: Int64Array,
    group: Int64Array,
    microbatches: int,
    size_max: int,
    count_max: int,
    dp_count: int,
) -> Int64Array | None:
    """Return the microbatch of each segment in its group, for few groups of many segments."""
    found = np.zeros(len(costs), np.int64)
    by_group = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[by_group], np.arange(dp_count), side="right")
    for mine in np.split(by_group, ends[:-1]):
        own = deal_capped(costs[mine], sizes[mine], microbatches, size_max, count_max)
        if own is None:
            return None
        found[mine] = own
    return found


def _side_by_side(
    costs: Int64Array,
    sizes: Int64Array,
    group: Int64Array,
    microbatches: int,
    size_max: int,
    count_max: int,
    dp_count: int,
) -> Int64Array | None:
    """Return the microbatch of each segment in its group, for many groups of few segments.

    LPT under caps as `deal_capped` begins with, of all groups at once: the dearest segment of each,
    then the second of each, and so on, ties by place.
    """
    found = np.zeros(len(costs), np.int64)
    order = np.lexsort((-costs, group))
    starts, counts = runs(group[order])
    turn = np.arange(len(order)) - np.repeat(starts, counts)
    by_turn = order[np.argsort(turn, kind="stable")]
    loads, held, taken = np.zeros((3, dp_count, microbatches), np.int64)
    for mine in np.split(by_turn, np.cumsum(np.bincount(turn))[:-1]):
        groups, size = group[mine], sizes[mine]
        has_room = (held[groups] + size[:, None] <= size_max) & (taken[groups] < count_max)
        if not has_room.any(axis=1).all():
            return None
        lightest = np.where(has_room, loads[groups], _FULL).argmin(axis=1)
        found[mine] = lightest
        loads[groups, lightest] += costs[mine]
        held[groups, lightest] += size
        taken[groups, lightest] += 1
    return found


def _in_turn(sizes: Int64Array, size_max: int, count_max: int) -> Int64Array:
    """Return the cell of each segment where one is filled after the other in draw order."""
    found: list[int] = []
    cell = held = count = 0
    for size in sizes.tolist():
        if held + size > size_max or count == count_max:
            cell, held, count = cell + 1, 0, 0
        found.append(cell)
        held += size
        count += 1
    return np.array(found, np.int64)


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
