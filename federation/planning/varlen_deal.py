"""Deals segments of a varlen step evenly to groups and microbatches, under caps.

By objective, each deal under the caps of `Measures`:

- `step`: the cost of the groups is evened, each holding at most what its microbatches do, then that of
  the microbatches of each group, which go in falling cost.
- `pipeline`: the same, in the order of microbatches whose slowest pipeline ends first
  (federation.planning.balance.microbatch_orders).
- `microbatch`: that, or where the sum over microbatches of the slowest group is less then, a deal that
  fills the first microbatch of all groups with the dearest segments, then the second, and so on (up
  to 2**21 segments times groups; lots are counted by themselves).

With `group_size` ranks share a first, coarse deal, and each lot of them is dealt on its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.planning.balance import (
    BalanceRule,
    microbatch_orders,
    objective_of_loads,
    within_bits,
)
from federation.planning.step_pool import runs
from federation.planning.varlen_measures import Measures

Int64Array = npt.NDArray[np.int64]

_FULL = np.iinfo(np.int64).max
"""Load of a microbatch that has no room: that of no other is as large."""

_NUMBERS_FIRST_MAX = 1 << 21
"""Segments times groups up to which a deal by microbatch numbers is tried: it looks at all groups for
every segment that finds no room."""


def deal_evenly(
    costs: Int64Array, measures: Measures, dp_count: int, balance: BalanceRule
) -> Int64Array | None:
    """Return the cell (microbatch * dp_count + group) of each segment; None where no deal fits.

    Args:
        costs: Of each segment. Shape (n,).
        measures: Their sizes and the caps of a microbatch.
        dp_count: Data-parallel groups.
        balance: Its objective, stages and group size.
    """
    for microbatches in range(measures.least(dp_count), -(-measures.enough() // dp_count) + 1):
        cell = _cells_in_lots(costs, measures, dp_count, microbatches, balance)
        if cell is not None:
            return cell
    return None


def objective_of_cells(
    costs: Int64Array, cell: Int64Array, dp_count: int, microbatches: int, balance: BalanceRule
) -> int:
    """Return what the rule's objective is where segments lie in cells.

    Args:
        costs: Of each segment. Shape (n,).
        cell: microbatch * dp_count + group of each. Shape (n,).
        dp_count: Groups.
        microbatches: Of each group.
        balance: Its objective and stages.
    """
    loads = np.zeros(microbatches * dp_count, np.int64)
    np.add.at(loads, cell, within_bits(costs, balance.stages))
    return objective_of_loads(loads.reshape(-1, dp_count).T, balance.objective, balance.stages)


def _cells_in_lots(
    costs: Int64Array, measures: Measures, dp_count: int, microbatches: int, balance: BalanceRule
) -> Int64Array | None:
    """Return the cells of segments dealt to lots of `group_size` groups, or to all groups as one."""
    size = balance.group_size or dp_count
    if size >= dp_count:
        return _cells(costs, measures, dp_count, microbatches, balance)
    lot = measures.deal(costs, dp_count // size, size * microbatches)
    if lot is None:
        return None
    found = np.empty_like(lot)
    for number in range(dp_count // size):
        mine = np.flatnonzero(lot == number)
        own = _cells(costs[mine], measures.only(mine), size, microbatches, balance)
        if own is None:
            return None
        microbatch, group = np.divmod(own, size)
        found[mine] = microbatch * dp_count + number * size + group
    return found


def _cells(
    costs: Int64Array, measures: Measures, dp_count: int, microbatches: int, balance: BalanceRule
) -> Int64Array | None:
    """Return the cells of the deal that is best by the objective, the plainest of equal ones."""
    plain = _groups_first(costs, measures, dp_count, microbatches)
    if plain is None or balance.objective == "step" or microbatches == 1:
        return plain
    candidates = [plain]
    if balance.objective == "pipeline":
        microbatch, group = np.divmod(plain, dp_count)
        orders = microbatch_orders(microbatch, microbatches - 1)
        candidates = [one * dp_count + group for one in orders]
    elif len(costs) * dp_count <= _NUMBERS_FIRST_MAX:
        cell = _numbers_first(costs, measures, dp_count, microbatches)
        if cell is not None:
            candidates.append(cell)
    return min(
        candidates,
        key=lambda cell: objective_of_cells(costs, cell, dp_count, microbatches, balance),
    )


def _groups_first(
    costs: Int64Array, measures: Measures, dp_count: int, microbatches: int
) -> Int64Array | None:
    """Return the cells of groups that are evened, then the microbatches of each, in falling cost."""
    group = measures.deal(costs, dp_count, microbatches)
    own = None
    if group is not None:
        deal = _side_by_side if len(costs) <= dp_count * dp_count else _one_by_one
        own = deal(costs, measures, group, microbatches, dp_count)
        if own is None:  # evened by size they lie closer
            own = deal(measures.parts(), measures, group, microbatches, dp_count)
    if group is None or own is None:
        return None
    loads = np.zeros(dp_count * microbatches, np.int64)
    np.add.at(loads, group * microbatches + own, costs)
    falling = np.argsort(-loads.reshape(dp_count, microbatches), axis=1, kind="stable")
    rank = np.empty_like(falling)
    np.put_along_axis(rank, falling, np.arange(microbatches)[None], axis=1)
    cell: Int64Array = rank[group, own] * dp_count + group
    return cell


def _numbers_first(
    costs: Int64Array, measures: Measures, dp_count: int, microbatches: int
) -> Int64Array | None:
    """Return the cells of a deal that fills one microbatch number of all groups after the other.

    By falling cost, so the dearest stand beside each other; what finds no room waits for the next
    number. A number's shares then go to the groups so that their sums are even too, the dearest to
    the group with the least so far.
    """
    cell = np.empty(len(costs), np.int64)
    left = np.argsort(-costs, kind="stable")
    sums = np.zeros(dp_count, np.int64)
    for number in range(microbatches):
        share = measures.only(left).fill(costs[left], dp_count)
        is_in = share >= 0
        loads = np.zeros(dp_count, np.int64)
        np.add.at(loads, share[is_in], costs[left[is_in]])
        name_of = np.empty(dp_count, np.int64)
        name_of[np.argsort(-loads, kind="stable")] = np.argsort(sums, kind="stable")
        sums[name_of] += loads
        cell[left[is_in]] = number * dp_count + name_of[share[is_in]]
        left = left[~is_in]
    return None if len(left) else cell


def _one_by_one(
    costs: Int64Array,
    measures: Measures,
    group: Int64Array,
    microbatches: int,
    dp_count: int,
) -> Int64Array | None:
    """Return the microbatch of each segment in its group, for few groups of many segments."""
    found = np.zeros(len(costs), np.int64)
    by_group = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[by_group], np.arange(dp_count), side="right")
    for mine in np.split(by_group, ends[:-1]):
        own = measures.only(mine).deal(costs[mine], microbatches, 1)
        if own is None:
            return None
        found[mine] = own
    return found


def _side_by_side(
    costs: Int64Array,
    measures: Measures,
    group: Int64Array,
    microbatches: int,
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
    loads, taken = np.zeros((2, dp_count, microbatches), np.int64)
    held = np.zeros((len(measures.caps), dp_count, microbatches), np.int64)
    caps = measures.caps[:, None, None]
    for mine in np.split(by_turn, np.cumsum(np.bincount(turn))[:-1]):
        groups, sizes = group[mine], measures.taken[:, mine]
        has_room = (held[:, groups] + sizes[:, :, None] <= caps).all(axis=0)
        has_room &= taken[groups] < measures.count_max
        if not has_room.any(axis=1).all():
            return None
        lightest = np.where(has_room, loads[groups], _FULL).argmin(axis=1)
        found[mine] = lightest
        loads[groups, lightest] += costs[mine]
        held[:, groups, lightest] += sizes
        taken[groups, lightest] += 1
    return found
