"""What nodes of a cluster give each other for steps: whose samples are whose, what is owed. Pure.

One parcel per producer, consumer and step. A producer keeps what it gives pinned until the consumer
has it, or is gone.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.owners import Owners
from federation.model.plan import StepPlan
from msd_daemon.core.chunk import Chunk
from msd_daemon.core.drawn_line import Placed, PlacedExport
from msd_daemon.core.pool import PoolState


class Offer(NamedTuple):
    """Effect: give these fragments to a consumer; they are pinned."""

    step: int
    consumer: int
    export: PlacedExport


class Want(NamedTuple):
    """Effect: ask a producer for the parcel of a step."""

    step: int
    producer: int


class SharedSteps:
    """This node among the others of a generation.

    Args:
        pool: Where samples lie.
        owners: Who loads what.
        node: This node's number.
    """

    def __init__(self, pool: PoolState, owners: Owners, node: int) -> None:
        self._pool = pool
        self.owners = owners
        self.node = node
        self.offers: deque[Offer] = deque()
        """To be told to the exchange."""
        self.wants: deque[Want] = deque()
        """To be told to the exchange."""
        self._given: dict[tuple[int, int], list[Chunk]] = {}
        """By step and consumer: what is pinned for it."""
        self._placed_upto = -1
        self._gone: set[int] = set()

    def is_own(self, source: int, block_key: int) -> bool:
        """Return True where this node loads a record."""
        return self.owners.node_of(source, block_key) == self.node

    def divide(self, plan: StepPlan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the plan's segments that this node loads, and the others; those are wanted."""
        owner = self.owners.of(plan.source, plan.block_key)
        far = np.flatnonzero(owner != self.node)
        self.wants.extend(Want(plan.step, producer) for producer in np.unique(owner[far]).tolist())
        return np.flatnonzero(owner == self.node), far

    def segments_from(self, plan: StepPlan, producer: int) -> npt.NDArray[np.int64]:
        """Return the plan's segments that a producer gives, in its order."""
        owner = self.owners.of(plan.source, plan.block_key)
        found: npt.NDArray[Any] = np.flatnonzero(owner == producer)
        return found

    def offer(self, placed: Placed) -> None:
        """Take what a plan that is through has for others."""
        self._placed_upto = max(self._placed_upto, placed.step)
        for exported in placed.exports:
            consumer = exported.export.consumer
            chunks = list(dict.fromkeys(exported.places.chunks))
            if consumer in self._gone:
                for chunk in chunks:
                    self._pool.unpin_step(chunk)
                continue
            self._given[placed.step, consumer] = chunks
            self.offers.append(Offer(placed.step, consumer, exported))

    def acked(self, step: int, consumer: int) -> bool:
        """A consumer has its parcel; return False where that is no news."""
        chunks = self._given.pop((step, consumer), None)
        if chunks is None:
            return False
        for chunk in chunks:
            self._pool.unpin_step(chunk)
        return True

    def node_gone(self, node: int) -> None:
        """A node takes part no more: nothing is owed to it."""
        self._gone.add(node)
        for step, consumer in [key for key in self._given if key[1] == node]:
            self.acked(step, consumer)

    def owes(self, step: int) -> bool:
        """Return True while a consumer lacks its parcel of a step."""
        return any(given == step for given, _ in self._given)
