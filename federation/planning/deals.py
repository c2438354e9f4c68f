"""Deals costs to buckets in equal numbers: LPT in rounds or Karmarkar-Karp, then an exchange pass.

LPT in rounds: by falling cost, each round gives one item to every bucket, the dearest to the
lightest. Karmarkar-Karp (largest differencing) is evener where a bucket gets few items, and dearer:
for up to some hundred buckets. Then buckets that are heavier than need be exchange items with light
ones. Ties by item and bucket number, so a deal is a function of the costs alone.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from federation.planning.kernel import deal_differences, deal_rounds, exchange

Int64Array = npt.NDArray[np.int64]
Method = Literal["greedy", "karmarkar_karp"]

EVEN_DIVISOR = 1024
"""A bucket that is 1/1024 above the least that is possible is light enough."""
_ROUNDS_MAX = 96
_STUCK_MAX = 12
_NO_SIZES = np.zeros((0, 0), np.int64)
_NO_CAPS = np.zeros(0, np.int64)


def deal(
    costs: Int64Array,
    bucket_count: int,
    method: Method = "greedy",
    head_items: int = 0,
    head_weight: int = 1,
) -> Int64Array:
    """Return the bucket of each cost, equally many in each. Shape (n,).

    Args:
        costs: Falling costs of at least 0, n a multiple of bucket_count; their sum times
            head_weight is below 2**62. Shape (n,).
        bucket_count: Buckets.
        method: How they are dealt.
        head_items: The dearest items of a bucket that weigh more, in greedy deals.
        head_weight: How many times they weigh: a pipeline of so many stages waits for the largest
            microbatch in each.
    """
    found = np.zeros(len(costs), np.int64)
    if bucket_count == 1 or not len(costs):
        return found
    costs = np.ascontiguousarray(costs, np.int64)
    loads = np.zeros(bucket_count, np.int64)
    if method == "karmarkar_karp":
        head_items, head_weight = 0, 1
        deal_differences(costs, bucket_count, found)
        np.add.at(loads, found, costs)
    else:
        deal_rounds(costs, loads, head_items, head_weight, found)
    if len(costs) > bucket_count:
        least = least_load(costs, bucket_count, head_items, head_weight, int(loads.sum()))
        exchange(
            costs,
            _NO_SIZES,
            _NO_CAPS,
            found,
            loads,
            0,
            head_items * bucket_count,
            0,
            least + least // EVEN_DIVISOR,
            _ROUNDS_MAX,
            _STUCK_MAX,
            1,
        )
    return found


def least_load(
    costs: Int64Array,
    bucket_count: int,
    head_items: int = 0,
    head_weight: int = 1,
    total: int | None = None,
) -> int:
    """Return what the heaviest bucket holds at least: the mean, or the dearest item and its company.

    Args:
        costs: Falling costs, n a multiple of bucket_count. Shape (n,).
        bucket_count: Buckets.
        head_items: As in `deal`.
        head_weight: As in `deal`.
        total: What all buckets hold, heads by their weight; None: the sum of the costs.
    """
    if not len(costs):
        return 0
    each = len(costs) // bucket_count
    beside = np.ones(each, np.int64)
    beside[:head_items] = head_weight
    alone = int(costs[0]) * int(beside[0]) + int(
        (costs[len(costs) - each + 1 :] * beside[1:]).sum()
    )
    return max(-(-(int(costs.sum()) if total is None else total) // bucket_count), alone)


def deal_in_groups(
    costs: Int64Array, group_count: int, method: Method = "greedy"
) -> list[Int64Array]:
    """Return the items of each group of buckets: a first, coarse deal, each group rising.

    The groups are then dealt on their own, one knows nothing of another (`deal` of its costs), so
    processes can share them.

    Args:
        costs: As in `deal`. Shape (n,).
        group_count: Groups of equally many buckets.
        method: How they are dealt.
    """
    group_of = deal(costs, group_count, method)
    by_group = np.argsort(group_of, kind="stable").reshape(group_count, -1)
    return list(by_group)
