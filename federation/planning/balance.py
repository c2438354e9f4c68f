"""Deals a step's rows to ranks and microbatches so that none waits; never changes what a row holds.

Equal row counts everywhere. LPT in rounds: rows by falling cost, each round gives one row to every
bucket, the dearest to the lightest; then rows of the heaviest bucket are exchanged with those of
light ones while that lowers the heaviest. Ties by row and bucket number, so a plan is a function
of the costs alone.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_EVEN_DIVISOR = 512
"""An excess of less than 1/512 of the mean is even enough; further exchanges cost more."""
_EXCHANGES_MAX = 512
_EXCHANGES_MAX_MANY = 64
"""Exchanges where there are more than `_MANY_BUCKETS`: each looks at all of them."""
_MANY_BUCKETS = 1024
_PARTNERS_MAX = 32
_SMALL_ROWS = 4096


class Placement(NamedTuple):
    """Where each canonical row goes. Shape (R,) each."""

    dp: Int64Array
    microbatch: Int64Array
    slot: Int64Array


def place_in_turn(row_count: int, dp_count: int, microbatch_rows: int) -> Placement:
    """Return rows dealt as they are numbered: microbatch by microbatch, group by group."""
    row = np.arange(row_count)
    cell = row // microbatch_rows
    return Placement(cell % dp_count, cell // dp_count, row % microbatch_rows)


def shuffled(placement: Placement, key: int) -> Placement:
    """Return a placement whose rows changed places by a permutation that a key sets.

    Rows go by falling splitmix64 of (key, row): integers, so alike on every machine (Steele, Lea and
    Flood, Fast splittable pseudorandom number generators, OOPSLA 2014).
    """
    golden = 0x9E3779B97F4A7C15
    with np.errstate(over="ignore"):
        value = np.arange(1, len(placement.dp) + 1, dtype=np.uint64) * np.uint64(golden)
        value += np.uint64((key * golden) & (1 << 64) - 1)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value ^= value >> np.uint64(31)
    order = np.argsort(value, kind="stable")
    return Placement(placement.dp[order], placement.microbatch[order], placement.slot[order])


def place_balanced(
    costs: Int64Array, dp_count: int, microbatch_rows: int, objective: str, group_size: int
) -> Placement:
    """Return rows dealt evenly.

    Args:
        costs: Cost of each row. Shape (R,), R a multiple of dp_count * microbatch_rows.
        dp_count: Data-parallel groups.
        microbatch_rows: Rows of a microbatch.
        objective: `step`: the slowest rank's sum over the step; `microbatch`: the sum over
            microbatches of the slowest rank.
        group_size: Ranks that share a first, coarse deal; dp_count for none.
    """
    order = np.argsort(-costs, kind="stable")
    row_count = len(costs)
    dp = np.empty(row_count, np.int64)
    cell_rows = dp_count * microbatch_rows
    span = cell_rows if objective == "microbatch" else row_count
    for start in range(0, row_count, span):
        rows = order[start : start + span]
        dp[rows] = _deal_grouped(costs[rows], dp_count, group_size)
    # Rows of a rank go in falling cost, alike on all ranks.
    by_rank = order[np.argsort(dp[order], kind="stable")]
    microbatch = np.empty(row_count, np.int64)
    slot = np.empty(row_count, np.int64)
    place = np.arange(row_count) % (row_count // dp_count)
    microbatch[by_rank] = place // microbatch_rows
    slot[by_rank] = place % microbatch_rows
    return Placement(dp, microbatch, slot)


def _deal_grouped(costs: Int64Array, bucket_count: int, group_size: int) -> Int64Array:
    if group_size >= bucket_count or group_size < 1:
        return deal(costs, bucket_count)
    group_of = deal(costs, bucket_count // group_size)
    found = np.empty(len(costs), np.int64)
    for group in range(bucket_count // group_size):
        members = np.flatnonzero(group_of == group)
        found[members] = group * group_size + deal(costs[members], group_size)
    return found


def deal(costs: Int64Array, bucket_count: int) -> Int64Array:
    """Return the bucket of each cost, equally many in each. Shape (n,).

    Args:
        costs: Falling costs, n a multiple of bucket_count. Shape (n,).
        bucket_count: Buckets.
    """
    if bucket_count == 1:
        return np.zeros(len(costs), np.int64)
    small = len(costs) <= _SMALL_ROWS
    found = _rounds_small(costs, bucket_count) if small else _rounds_large(costs, bucket_count)
    if len(costs) > bucket_count:
        _exchange(costs, found, bucket_count)
    return found


def _rounds_small(costs: Int64Array, bucket_count: int) -> Int64Array:
    values = costs.tolist()
    loads = [0] * bucket_count
    found: list[int] = []
    for start in range(0, len(values), bucket_count):
        lightest = sorted(range(bucket_count), key=loads.__getitem__)
        found += lightest
        for bucket, value in zip(lightest, values[start : start + bucket_count], strict=True):
            loads[bucket] += value
    return np.array(found, np.int64)


def _rounds_large(costs: Int64Array, bucket_count: int) -> Int64Array:
    loads = np.zeros(bucket_count, np.int64)
    found = np.empty(len(costs), np.int64)
    for start in range(0, len(costs), bucket_count):
        lightest = np.argsort(loads, kind="stable")
        found[start : start + bucket_count] = lightest
        loads[lightest] += costs[start : start + bucket_count]
    return found


def _exchange(costs: Int64Array, bucket_of: Int64Array, bucket_count: int) -> None:
    by_bucket = np.argsort(bucket_of, kind="stable").reshape(bucket_count, -1)
    loads = costs[by_bucket].sum(axis=1).tolist()
    mean = sum(loads) // bucket_count
    heavy = max(range(bucket_count), key=loads.__getitem__)
    if (loads[heavy] - mean) * _EVEN_DIVISOR <= mean:
        return
    members = by_bucket.tolist()
    values = costs.tolist()
    limit = _EXCHANGES_MAX if bucket_count <= _MANY_BUCKETS else _EXCHANGES_MAX_MANY
    for _ in range(limit):
        lightest = heapq.nsmallest(_PARTNERS_MAX, range(bucket_count), key=loads.__getitem__)
        for light in lightest:
            found = _best_exchange(
                values, members[heavy], members[light], loads[heavy] - loads[light]
            )
            if found is not None:
                break
        else:
            break
        mine, theirs = found
        gain = values[members[heavy][mine]] - values[members[light][theirs]]
        members[heavy][mine], members[light][theirs] = (
            members[light][theirs],
            members[heavy][mine],
        )
        loads[heavy] -= gain
        loads[light] += gain
        members[heavy].sort()
        members[light].sort()
        heavy = max(range(bucket_count), key=loads.__getitem__)
        if (loads[heavy] - mean) * _EVEN_DIVISOR <= mean:
            break
    for bucket, rows in enumerate(members):
        bucket_of[rows] = bucket


def _best_exchange(
    values: list[int], heavy: list[int], light: list[int], gap: int
) -> tuple[int, int] | None:
    """Return which members to exchange so that the heavier of the two buckets is lightest.

    Members stand in order of falling cost, so for each of the heavy bucket the partners around
    "half the gap cheaper" are looked up. None where no exchange lowers the heavier one.
    """
    best: tuple[int, int] | None = None
    best_off = gap
    rising = [-values[row] for row in light]
    for mine, row in enumerate(heavy):
        place = bisect_left(rising, gap // 2 - values[row])
        for theirs in (place - 1, place):
            if 0 <= theirs < len(light):
                off = abs(gap - 2 * (values[row] + rising[theirs]))
                if off < best_off:
                    best, best_off = (mine, theirs), off
    return best
