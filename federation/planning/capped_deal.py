"""Deals items of two measures to buckets: costs are evened out, sizes stay below a cap.

LPT (Graham 1969) under a cap: items by falling cost, ties by place, each to the lightest bucket, ties
by number, that still has room for it. For segments of a varlen step (cost, tokens) and for media that
may be encoded anywhere (cost, units), where buckets need not hold equally many items.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def deal_capped(
    costs: Int64Array,
    sizes: Int64Array,
    bucket_count: int,
    size_max: int,
    count_max: int | None = None,
) -> Int64Array | None:
    """Return the bucket of each item, None where this order of dealing finds no room for one.

    Args:
        costs: Cost of each item, at least 0. Shape (n,).
        sizes: What each takes of a bucket. Shape (n,).
        bucket_count: Buckets.
        size_max: Most that a bucket holds.
        count_max: Most items of a bucket; None: any number.
    """
    found = np.zeros(len(costs), np.int64)
    held = [0] * bucket_count
    counts = [0] * bucket_count
    heap = [(0, bucket) for bucket in range(bucket_count)]
    order = np.argsort(-costs, kind="stable")
    columns = zip(order.tolist(), costs[order].tolist(), sizes[order].tolist(), strict=True)
    for item, cost, size in columns:
        passed = []
        while heap:
            load, bucket = heap[0]
            has_room = held[bucket] + size <= size_max
            if has_room and (count_max is None or counts[bucket] < count_max):
                break
            passed.append(heapq.heappop(heap))
        else:
            return None
        heapq.heapreplace(heap, (load + cost, bucket))
        held[bucket] += size
        counts[bucket] += 1
        found[item] = bucket
        for entry in passed:
            heapq.heappush(heap, entry)
    return found
