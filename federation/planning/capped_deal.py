"""Deals items of two or more measures to buckets: costs are evened out, sizes stay below caps.

LPT (Graham 1969) under caps: items by falling cost, ties by place, each to the lightest bucket, ties
by number, that still has room for it; then an exchange pass, in which heavy buckets give items to light
ones or trade them, within the caps. For segments of a varlen step (cost; tokens, activation bytes) and
for media that may be encoded anywhere (cost; units), where buckets need not hold equally many items.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.planning.deals import EVEN_DIVISOR
from federation.planning.kernel import deal_lightest, exchange

Int64Array = npt.NDArray[np.int64]

_ROUNDS_MAX = 64
_STUCK_MAX = 8
_WINDOW = 8


def deal_capped(
    costs: Int64Array,
    sizes: Int64Array,
    bucket_count: int,
    size_max: int,
    count_max: int | None = None,
    *,
    more_sizes: Int64Array | None = None,
    more_max: tuple[int, ...] = (),
) -> Int64Array | None:
    """Return the bucket of each item, None where this order of dealing finds no room for one.

    Args:
        costs: Cost of each item, at least 0, their sum below 2**62. Shape (n,).
        sizes: What each takes of a bucket, at least 0. Shape (n,).
        bucket_count: Buckets.
        size_max: Most that a bucket holds.
        count_max: Most items of a bucket; None: any number.
        more_sizes: What each takes of further measures, such as activation bytes. Shape (m, n).
        more_max: Most that a bucket holds of each of these. m values.
    """
    order = np.argsort(-costs, kind="stable")
    falling = np.ascontiguousarray(costs[order], np.int64)
    columns = sizes[None] if more_sizes is None else np.concatenate((sizes[None], more_sizes))
    taken = np.ascontiguousarray(columns[:, order], np.int64)
    caps = np.array([size_max, *more_max], np.int64)
    most = len(costs) if count_max is None else count_max
    dealt = np.zeros(len(costs), np.int64)
    loads = np.zeros(bucket_count, np.int64)
    if not deal_lightest(falling, taken, caps, most, dealt, loads):
        return None
    if len(costs):
        least = max(-(-int(loads.sum()) // bucket_count), int(falling[0]))
        target = least + least // EVEN_DIVISOR
        exchange(
            falling, taken, caps, dealt, loads, most, 0, 1, target, _ROUNDS_MAX, _STUCK_MAX, _WINDOW
        )
    found = np.empty(len(costs), np.int64)
    found[order] = dealt
    return found
