"""Deals a step's rows to ranks and microbatches so that none waits; never changes what a row holds.

Equal row counts everywhere (federation.planning.deals). What is evened is an objective:

- `step`: the slowest rank's sum over the step.
- `microbatch`: the sum over microbatches of the slowest rank, where ranks meet in each (expert
  parallelism). Rows of like cost share a microbatch; within it they go to the ranks so that sums are
  even too.
- `pipeline`: the slowest rank's time under one forward, one backward over pp stages: its sum, fill and
  drain, and what stages wait for each other where microbatches differ. Simulated exactly.

A rank takes its rows in falling cost, alike on all ranks; for `pipeline` another order where that
ends earlier. Ties by row and bucket number, so a plan is a function of the costs alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from federation.planning.deals import Method, deal, deal_in_groups
from federation.planning.kernel import deal_rounds, makespans

Int64Array = npt.NDArray[np.int64]
Objective = Literal["step", "microbatch", "pipeline"]

METHODS: tuple[str, ...] = ("none", *get_args(Method))
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
PPM = 1_000_000
_SUM_BITS = 61


@dataclass(frozen=True)
class BalanceRule:
    """How rows are evened out."""

    method: Method = "greedy"
    objective: Objective = "step"
    group_size: int = 0
    """Ranks that share a first, coarse deal; it divides their number. 0: no groups."""
    min_gain_ppm: int = 0
    """Rows stay in turn where the objective gains less, in millionths of what it is in turn."""
    tolerance_ppm: int = 1000
    """What the objective may lose, in millionths, so that fewer bytes cross nodes."""
    stages: int = 1
    """Pipeline stages, for `pipeline`."""


class Placement(NamedTuple):
    """Where each canonical row goes. Shape (R,) each."""

    dp: Int64Array
    microbatch: Int64Array
    slot: Int64Array

    @property
    def microbatches(self) -> int:
        """Microbatches of each group."""
        return int(self.microbatch.max(initial=0)) + 1


def place_in_turn(row_count: int, dp_count: int, microbatch_rows: int) -> Placement:
    """Return rows dealt as they are numbered: microbatch by microbatch, group by group."""
    row = np.arange(row_count)
    cell = row // microbatch_rows
    return Placement(cell % dp_count, cell // dp_count, row % microbatch_rows)


def shuffled(placement: Placement, key: int) -> Placement:
    """Return a placement whose rows changed places by a permutation that a key sets."""
    order = shuffle_order(len(placement.dp), key)
    return Placement(placement.dp[order], placement.microbatch[order], placement.slot[order])


def shuffle_order(count: int, key: int) -> Int64Array:
    """Return a permutation of so many that a key sets. Shape (count,).

    They go by rising splitmix64 of (key, number): integers, so alike on every machine (Steele, Lea
    and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014).
    """
    golden = 0x9E3779B97F4A7C15
    with np.errstate(over="ignore"):
        value = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(golden)
        value += np.uint64((key * golden) & (1 << 64) - 1)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value ^= value >> np.uint64(31)
    return np.argsort(value, kind="stable")


def place_balanced(
    costs: Int64Array, dp_count: int, microbatch_rows: int, rule: BalanceRule
) -> Placement:
    """Return rows dealt evenly, or in turn where that gains less than the rule's `min_gain_ppm`.

    Args:
        costs: Cost of each row, at least 0, their sum below 2**62. Shape (R,), R a multiple of
            dp_count * microbatch_rows.
        dp_count: Data-parallel groups.
        microbatch_rows: Rows of a microbatch.
        rule: What is evened and how.
    """
    if not len(costs):
        return place_in_turn(0, dp_count, microbatch_rows)
    costs = within_bits(costs, rule.stages)
    group_size = rule.group_size or dp_count
    if group_size >= dp_count:
        found = place_group(costs, dp_count, microbatch_rows, rule)
    else:
        found = _place_hierarchical(costs, dp_count, microbatch_rows, rule)
    turn = place_in_turn(len(costs), dp_count, microbatch_rows)
    before = objective_of(costs, turn, dp_count, rule.objective, rule.stages)
    after = objective_of(costs, found, dp_count, rule.objective, rule.stages)
    gains = (before - after) * PPM >= rule.min_gain_ppm * before
    return found if gains and after <= before else turn


def place_group(
    costs: Int64Array, dp_count: int, microbatch_rows: int, rule: BalanceRule
) -> Placement:
    """Return rows of one group of ranks dealt evenly among them; pure, so processes can share groups.

    Args:
        costs: As in `place_balanced`, with room for their sum times the rule's stages. Shape (R,).
        dp_count: Ranks of the group.
        microbatch_rows: Rows of a microbatch.
        rule: Its method, objective and stages.
    """
    order = np.argsort(-costs, kind="stable")
    falling = np.ascontiguousarray(costs[order])
    if rule.objective == "microbatch":
        found = _even_microbatches(falling, dp_count, microbatch_rows, rule.method)
    elif rule.objective == "pipeline" and rule.stages > 1:
        found = _even_pipelines(falling, dp_count, microbatch_rows, rule)
    else:
        found = _in_falling_order(deal(falling, dp_count, rule.method), dp_count, microbatch_rows)
    placement = Placement(*(np.empty(len(costs), np.int64) for _ in range(3)))
    for column, values in zip(placement, found, strict=True):
        column[order] = values
    return placement


def rows_of_groups(
    costs: Int64Array, dp_count: int, microbatch_rows: int, rule: BalanceRule
) -> list[Int64Array]:
    """Return the rows of each group of `rule.group_size` ranks, each dealt by `place_group` alone."""
    order = np.argsort(-costs, kind="stable")
    cell_rows = dp_count * microbatch_rows
    span = cell_rows if rule.objective == "microbatch" else len(costs)
    group_count = dp_count // rule.group_size
    parts: list[list[Int64Array]] = [[] for _ in range(group_count)]
    for start in range(0, len(costs), span):
        rows = order[start : start + span]
        groups = deal_in_groups(costs[rows], group_count, rule.method)
        for part, members in zip(parts, groups, strict=True):
            part.append(rows[members])
    return [np.concatenate(part) for part in parts]


def objective_of(
    costs: Int64Array, placement: Placement, dp_count: int, objective: str, stages: int = 1
) -> int:
    """Return what an objective is at a placement.

    The time of a pipeline counts forward and backward passes, so it is three times a sum at least.

    Args:
        costs: Of each row. Shape (R,).
        placement: Where rows go.
        dp_count: Data-parallel groups.
        objective: One of OBJECTIVES.
        stages: Pipeline stages.
    """
    return objective_of_loads(cell_costs(costs, placement, dp_count), objective, stages)


def objective_of_loads(cells: Int64Array, objective: str, stages: int = 1) -> int:
    """Return what an objective is where microbatches cost so much; see `objective_of`.

    Args:
        cells: Cost of each rank's microbatches, in order. Shape (dp, M).
        objective: One of OBJECTIVES.
        stages: Pipeline stages.
    """
    if objective == "microbatch":
        return int(cells.max(axis=0).sum())
    if objective == "pipeline":
        return int(pipeline_ends(np.repeat(cells[:, None], stages, axis=1)).max())
    return int(cells.sum(axis=1).max())


def pipeline_ends(costs: Int64Array) -> Int64Array:
    """Return when each pipeline ends under one forward, one backward (see pipeline_twin). Shape (dp,).

    Args:
        costs: Forward cost of each microbatch in each stage, in order. Shape (dp, stages, M).
    """
    found = np.zeros(len(costs), np.int64)
    makespans(np.ascontiguousarray(costs), costs.shape[1], found)
    return found


def cell_costs(costs: Int64Array, placement: Placement, dp_count: int) -> Int64Array:
    """Return the cost of each rank's microbatches. Shape (dp, M)."""
    count = placement.microbatches
    cells = np.zeros(dp_count * count, np.int64)
    np.add.at(cells, placement.dp * count + placement.microbatch, costs)
    return cells.reshape(dp_count, count)


def within_bits(costs: Int64Array, stages: int) -> Int64Array:
    """Return costs whose sum, forward and backward in every stage, fits; all lose the same bits."""
    bits = (int(costs.sum()) * 3 * (stages + 1)).bit_length() - _SUM_BITS
    return costs >> bits if bits > 0 else costs


def _place_hierarchical(
    costs: Int64Array, dp_count: int, microbatch_rows: int, rule: BalanceRule
) -> Placement:
    found = Placement(*(np.empty(len(costs), np.int64) for _ in range(3)))
    for group, rows in enumerate(rows_of_groups(costs, dp_count, microbatch_rows, rule)):
        own = place_group(costs[rows], rule.group_size, microbatch_rows, rule)
        found.dp[rows] = group * rule.group_size + own.dp
        found.microbatch[rows], found.slot[rows] = own.microbatch, own.slot
    return found


def _in_falling_order(dp: Int64Array, dp_count: int, microbatch_rows: int) -> Placement:
    """Return ranks' rows in the order in which they stand, alike on all ranks."""
    by_rank = np.argsort(dp, kind="stable")
    place = np.empty(len(dp), np.int64)
    place[by_rank] = np.arange(len(dp)) % (len(dp) // dp_count)
    return Placement(dp, place // microbatch_rows, place % microbatch_rows)


def _even_microbatches(
    falling: Int64Array, dp_count: int, microbatch_rows: int, method: Method
) -> Placement:
    span = dp_count * microbatch_rows
    count = len(falling) // span
    cell_of = np.empty(len(falling), np.int64)
    for start in range(0, len(falling), span):
        dealt = deal(falling[start : start + span], dp_count, method)
        cell_of[start : start + span] = dealt + start // microbatch_rows
    cells = np.zeros(count * dp_count, np.int64)
    np.add.at(cells, cell_of, falling)
    # Within a microbatch the dearest cell goes to the rank with the least so far.
    shaped = cells.reshape(count, dp_count)
    order = np.argsort(-shaped, axis=1, kind="stable")
    rank_of = np.empty(len(cells), np.int64)
    loads = np.zeros(dp_count, np.int64)
    deal_rounds(np.take_along_axis(shaped, order, axis=1).ravel(), loads, 0, 1, rank_of)
    dp = np.empty((count, dp_count), np.int64)
    np.put_along_axis(dp, order, rank_of.reshape(count, dp_count), axis=1)
    by_cell = np.argsort(cell_of, kind="stable")
    slot = np.empty(len(falling), np.int64)
    slot[by_cell] = np.arange(len(falling)) % microbatch_rows
    return Placement(dp.ravel()[cell_of], cell_of // dp_count, slot)


def _even_pipelines(
    falling: Int64Array, dp_count: int, microbatch_rows: int, rule: BalanceRule
) -> Placement:
    """Return the candidate whose slowest pipeline ends first, the plainest of equal ones.

    Candidates are deals of plain sums and of sums in which a rank's largest microbatch weighs as
    often as there are stages, with microbatches in falling and in rising order and with the largest
    amid smaller ones, so that fill and drain are short; where a microbatch has several rows, also
    with rows dealt there and back, so that microbatches are alike.
    """
    best: Placement | None = None
    least = 0
    heads = (0, microbatch_rows) if len(falling) > dp_count * microbatch_rows else (0,)
    for head_items in heads:
        dealt = deal(falling, dp_count, rule.method, head_items, rule.stages)
        for found in _orders(_in_falling_order(dealt, dp_count, microbatch_rows), microbatch_rows):
            value = objective_of(falling, found, dp_count, "pipeline", rule.stages)
            if best is None or value < least:
                best, least = found, value
    assert best is not None
    return best


def _orders(falling: Placement, microbatch_rows: int) -> list[Placement]:
    last = int(falling.microbatch.max())
    plain = [falling]
    if microbatch_rows > 1 and last:
        turn, off = np.divmod(falling.microbatch * microbatch_rows + falling.slot, last + 1)
        plain.append(Placement(falling.dp, np.where(turn % 2, last - off, off), turn))
    return [
        one._replace(microbatch=order)
        for one in plain
        for order in microbatch_orders(one.microbatch, last)
    ]


def microbatch_orders(falling: Int64Array, last: int) -> list[Int64Array]:
    """Return orders of microbatches to try in pipelines: falling, rising, the largest amid smaller ones.

    Args:
        falling: Number of a microbatch, the largest first. Any shape.
        last: The highest number.
    """
    rising = last - falling
    return [falling, rising, np.where(rising % 2, last - rising // 2, rising // 2)]
