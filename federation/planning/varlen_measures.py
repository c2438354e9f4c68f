"""What segments of a varlen step take of a microbatch, and how much of each it holds.

Measures of their own: places, the units of each modality, and the bytes of activations where the job
caps them. A segment that would keep more activation bytes than a microbatch may takes all of one and
stands alone there: it cannot be made smaller, and a step holds what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federation.model.cost import CostSpec
from federation.model.job import BatchRule
from federation.planning.capped_deal import deal_capped
from federation.planning.costs import activation_bytes
from federation.planning.extra_rows import ExtraRows
from federation.planning.kernel import deal_lightest
from federation.planning.step_pool import LENGTH, Packed, places_of

Int64Array = npt.NDArray[np.int64]

_SIZE_BITS = 31
"""Sizes that the kernel deals stay below 2**31."""


@dataclass(frozen=True, eq=False)
class Measures:
    """Sizes of segments and the caps of a microbatch; the first kind is places."""

    taken: Int64Array
    """Shape (kinds, n)."""
    caps: Int64Array
    """At least 1 each. Shape (kinds,)."""
    count_max: int
    """Most segments of a microbatch."""

    def only(self, segments: Int64Array) -> Measures:
        """Return those of some segments, by place."""
        return Measures(self.taken[:, segments], self.caps, self.count_max)

    def of_groups(self, starts: Int64Array) -> Measures:
        """Return those of groups of segments that stand beside each other: their segments count.

        Args:
            starts: First segment of each group. Shape (groups,).
        """
        counts = np.diff(np.append(starts, self.taken.shape[1]))
        caps = np.append(self.caps, self.count_max)
        taken = np.vstack((np.add.reduceat(self.taken, starts, axis=1), counts))
        return Measures(np.minimum(taken, caps[:, None]), caps, self.count_max)

    def parts(self) -> Int64Array:
        """Return the largest part that each segment takes of anything, in places. Shape (n,)."""
        parts: Int64Array = -(-self.taken * self.caps[0] // self.caps[:, None])
        largest: Int64Array = parts.max(axis=0)
        return largest

    def least(self, dp_count: int) -> int:
        """Return how many microbatches of each group the sums need."""
        needs = -(-self.taken.sum(axis=1) // (self.caps * dp_count))
        count: int = self.taken.shape[1]
        return max(1, int(needs.max()), -(-count // (self.count_max * dp_count)))

    def enough(self) -> int:
        """Return how many microbatches are always enough.

        Filled one after the other, two neighbours take more than one's cap of some kind together, or
        the first holds all its segments.
        """
        pairs = 2 * self.taken.sum(axis=1) // self.caps
        count: int = self.taken.shape[1]
        return int(pairs.sum()) + count // self.count_max + 1

    def deal(self, costs: Int64Array, buckets: int, microbatches: int) -> Int64Array | None:
        """Return the bucket of each segment, evened by cost; None where one finds no room.

        Args:
            costs: Of each segment. Shape (n,).
            buckets: How many.
            microbatches: How many each bucket stands for.
        """
        caps = self.caps * microbatches
        return deal_capped(
            costs,
            self.taken[0],
            buckets,
            int(caps[0]),
            self.count_max * microbatches,
            more_sizes=self.taken[1:],
            more_max=tuple(caps[1:].tolist()),
        )

    def fill(self, costs: Int64Array, buckets: int) -> Int64Array:
        """Return the microbatch of each segment, each to the lightest with room, or -1. Shape (n,).

        Args:
            costs: Falling costs of the segments. Shape (n,).
            buckets: Microbatches.
        """
        found = np.zeros(len(costs), np.int64)
        loads = np.zeros(buckets, np.int64)
        taken = np.ascontiguousarray(self.taken)
        deal_lightest(costs, taken, self.caps, self.count_max, found, loads)
        return found


def segment_measures(
    packed: Packed, rule: BatchRule, extras: ExtraRows, cost: CostSpec
) -> Measures:
    """Return the measures of a step's segments.

    Args:
        packed: The step, from `whole_step`.
        rule: Batch of the step.
        extras: Extra rows of the segments; the last ones are units of media.
        cost: The job's cost, for the activation bytes of tokens and units.
    """
    places = places_of(packed.segments[LENGTH], rule.segment_multiple)
    units = extras.units(packed.extras)
    taken, caps = [places, *units], [rule.row_tokens, *extras.units_max]
    if rule.microbatch_activation_bytes:
        by_modality = extras.units_by_modality(packed.extras)
        held, most = activation_bytes(cost, places, by_modality), rule.microbatch_activation_bytes
        bits = max(0, most.bit_length() - _SIZE_BITS)
        # Sizes are rounded up and the cap down, so what fits by these fits by the bytes.
        taken.append(np.minimum(-(-held >> bits), most >> bits))
        caps.append(most >> bits)
    return Measures(np.stack(taken), np.array(caps, np.int64), rule.row_segments_max)
