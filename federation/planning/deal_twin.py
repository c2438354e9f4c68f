"""Deals of items to buckets, in Python: the twin of the C kernel's `deal_*` and `exchange`.

Items stand by falling cost. All ties go to the lower number, so both give the same buckets.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def deal_rounds(
    costs: Int64Array, loads: Int64Array, head_rounds: int, head_weight: int, found: Int64Array
) -> None:
    """Deal in rounds (LPT, Graham 1969): each gives one item to every bucket, the dearest to the lightest.

    Args:
        costs: Falling, n a multiple of b. Shape (n,).
        loads: What buckets hold already; what they get is added. Shape (b,).
        head_rounds: So many rounds weigh `head_weight` times.
        head_weight: See there.
        found: Receives the bucket of each item. Shape (n,).
    """
    count = len(loads)
    for start in range(0, len(costs), count):
        weight = head_weight if start // count < head_rounds else 1
        lightest = np.argsort(loads, kind="stable")
        found[start : start + count] = lightest
        loads[lightest] += weight * costs[start : start + count]


def deal_lightest(
    costs: Int64Array,
    sizes: Int64Array,
    caps: Int64Array,
    count_max: int,
    bucket_of: Int64Array,
    loads: Int64Array,
) -> bool:
    """Deal each item to the lightest bucket with room; return False where some find none.

    Args:
        costs: Falling. Shape (n,).
        sizes: What each takes, of each kind. Shape (kinds, n).
        caps: Most of each kind in a bucket. Shape (kinds,).
        count_max: Most items of a bucket.
        bucket_of: Receives the bucket of each item, -1 where none has room. Shape (n,).
        loads: 0 before; receives what buckets hold. Shape (b,).
    """
    held = [[0] * len(caps) for _ in loads]
    counts = [0] * len(loads)
    limits = caps.tolist()
    heap = [(0, bucket) for bucket in range(len(loads))]
    columns = zip(costs.tolist(), sizes.reshape(len(caps), len(costs)).T.tolist(), strict=True)
    bucket_of[:] = -1
    for item, (cost, mine) in enumerate(columns):
        passed = []
        while heap:
            load, bucket = heap[0]
            has_room = counts[bucket] < count_max
            if has_room and all(
                here + size <= cap
                for here, size, cap in zip(held[bucket], mine, limits, strict=True)
            ):
                break
            passed.append(heapq.heappop(heap))
        if heap:
            heapq.heapreplace(heap, (load + cost, bucket))
            held[bucket] = [here + size for here, size in zip(held[bucket], mine, strict=True)]
            counts[bucket] += 1
            bucket_of[item] = bucket
            loads[bucket] += cost
        for entry in passed:
            heapq.heappush(heap, entry)
    return bool((bucket_of >= 0).all())


def deal_differences(costs: Int64Array, buckets: int, found: Int64Array) -> None:
    """Deal by largest differencing (Karmarkar and Karp 1982), equally many to each bucket.

    With equal counts as Michiels, Korst and Aarts 2003 have it: each run of `buckets` items is a
    partial deal of one item a slot; the two deals whose slots differ most are laid over each other, the
    heaviest slot of the one on the lightest of the other, until one is left.

    Args:
        costs: Falling, n a multiple of `buckets`, n > 0. Shape (n,).
        buckets: Buckets.
        found: Receives the bucket of each item: its place among the falling sums. Shape (n,).
    """
    states: dict[int, tuple[Int64Array, list[list[int]]]] = {}
    heap: list[tuple[int, int]] = []
    for number, start in enumerate(range(0, len(costs), buckets)):
        sums = costs[start : start + buckets]
        states[number] = (sums, [[item] for item in range(start, start + buckets)])
        heap.append((int(sums[-1] - sums[0]), number))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        sums, slots = states.pop(heapq.heappop(heap)[1])
        other_sums, other_slots = states.pop(heap[0][1])
        sums = sums + other_sums[::-1]
        order = np.argsort(-sums, kind="stable")
        slots = [slots[k] + other_slots[buckets - 1 - k] for k in order.tolist()]
        states[number] = (sums[order], slots)
        heapq.heapreplace(heap, (int(sums[order[-1]] - sums[order[0]]), number))
        number += 1
    for bucket, items in enumerate(states[heap[0][1]][1]):
        found[items] = bucket


class _Swap(NamedTuple):
    mine: int
    theirs: int
    """-1: the item is given away for nothing."""
    off: int


class _Exchange:
    """Buckets between which items are exchanged."""

    def __init__(
        self,
        costs: Int64Array,
        sizes: Int64Array,
        caps: Int64Array,
        bucket_of: Int64Array,
        loads: Int64Array,
    ) -> None:
        self.costs: list[int] = costs.tolist()
        self.sizes: list[list[int]] = sizes.reshape(len(caps), len(costs)).T.tolist()
        self.caps: list[int] = caps.tolist()
        self.bucket_of: list[int] = bucket_of.tolist()
        self.loads: list[int] = loads.tolist()
        self.held = [[0] * len(caps) for _ in self.loads]
        for bucket, mine in zip(self.bucket_of, self.sizes, strict=True):
            self.held[bucket] = [a + b for a, b in zip(self.held[bucket], mine, strict=True)]
        self.members: list[list[int]] = []

    def list_members(self, pinned: int) -> None:
        self.members = [[] for _ in self.loads]
        for item in range(pinned, len(self.bucket_of)):
            self.members[self.bucket_of[item]].append(item)

    def fits(self, heavy: int, light: int, mine: int, theirs: int) -> bool:
        for kind, cap in enumerate(self.caps):
            change = self.sizes[mine][kind] - (self.sizes[theirs][kind] if theirs >= 0 else 0)
            grows = (
                self.held[light][kind] + change if change > 0 else self.held[heavy][kind] - change
            )
            if grows > cap:
                return False
        return True

    def candidates(self, heavy: int, light: int, window: int, *, may_move: bool) -> list[_Swap]:
        """Return what may be exchanged, in the order in which the kernel looks at it."""
        gap = self.loads[heavy] - self.loads[light]
        theirs = self.members[light]
        found: list[_Swap] = []
        for mine in self.members[heavy]:
            cost = self.costs[mine]
            if may_move:
                found.append(_Swap(mine, -1, abs(gap - 2 * cost)))
            wanted = cost - gap // 2
            low, high = 0, len(theirs)
            while low < high:
                middle = (low + high) // 2
                if self.costs[theirs[middle]] > wanted:
                    low = middle + 1
                else:
                    high = middle
            for off in range(window):
                for place in (low - 1 - off, low + off):
                    if 0 <= place < len(theirs):
                        moved = cost - self.costs[theirs[place]]
                        found.append(_Swap(mine, theirs[place], abs(gap - 2 * moved)))
        return found

    def exchange_pair(self, heavy: int, light: int, window: int, *, may_move: bool) -> bool:
        best = _Swap(-1, -1, self.loads[heavy] - self.loads[light])
        for swap in self.candidates(heavy, light, window, may_move=may_move):
            if swap.off < best.off and self.fits(heavy, light, swap.mine, swap.theirs):
                best = swap
        if best.mine < 0:
            return False
        moves = [(best.mine, heavy, light)]
        if best.theirs >= 0:
            moves.append((best.theirs, light, heavy))
        for item, old, new in moves:
            self.bucket_of[item] = new
            self.loads[old] -= self.costs[item]
            self.loads[new] += self.costs[item]
            for kind, size in enumerate(self.sizes[item]):
                self.held[old][kind] -= size
                self.held[new][kind] += size
        return True


def exchange(
    costs: Int64Array,
    sizes: Int64Array,
    caps: Int64Array,
    bucket_of: Int64Array,
    loads: Int64Array,
    count_max: int,
    pinned: int,
    may_move: int,
    target: int,
    rounds_max: int,
    stuck_max: int,
    window: int,
) -> None:
    """Lower the heaviest buckets by exchanging items with light ones.

    In a round the buckets above the target, heaviest first, each meet a light one, lightest first, and
    exchange the two items (or give one away) that bring the pair closest to each other. Where a round
    leaves the heaviest bucket as heavy as before, the next one pairs them otherwise.

    Args:
        costs: Falling. Shape (n,).
        sizes: What each item takes, of each kind. Shape (kinds, n); kinds may be 0.
        caps: Most of each kind in a bucket. Shape (kinds,).
        bucket_of: Bucket of each item; changed. Shape (n,).
        loads: Of each bucket; changed. Shape (b,).
        count_max: Most items of a bucket, where items are given away.
        pinned: So many of the first items stay where they are.
        may_move: 1 where buckets need not keep their number of items.
        target: Buckets up to this load are light enough.
        rounds_max: Most rounds.
        stuck_max: Most rounds that lower the heaviest bucket by nothing, in a row.
        window: Partners looked at on either side of the best one, for caps that keep it away.
    """
    deal = _Exchange(costs, sizes, caps, bucket_of, loads)
    count = len(loads)
    best, stuck = None, 0
    for _ in range(rounds_max):
        heavy_count = sum(load > target for load in deal.loads)
        if not heavy_count:
            break
        order = sorted(range(count), key=deal.loads.__getitem__)
        worst = deal.loads[order[-1]]
        stuck = 0 if best is None or worst < best else stuck + 1
        best = worst if best is None else min(best, worst)
        if stuck > stuck_max:
            break
        heavy_count = min(heavy_count, count // 2)
        deal.list_members(pinned)
        has_changed = False
        for k in range(heavy_count):
            heavy, light = order[count - 1 - k], order[(k + stuck) % (count - heavy_count)]
            is_open = bool(may_move) and len(deal.members[light]) < count_max
            has_changed |= deal.exchange_pair(heavy, light, window, may_move=is_open)
        if not has_changed and stuck >= count - heavy_count:
            break
    bucket_of[:], loads[:] = deal.bucket_of, deal.loads
