"""What nodes of a cluster give each other for steps: whose samples are whose, what is owed. Pure.

One parcel per producer, consumer and step. A producer keeps what it gives pinned until the consumer
has it, or is gone. Owners may change at a step: those before stay with who had them. What moves then
gets an issue number of its own, and parcels of its own, so that none is ever given twice otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.by_step import ByStep
from federation.model.exports import Export
from federation.model.owners import Owners
from federation.model.plan import StepPlan
from msd_daemon.core.chunk import Chunk
from msd_daemon.core.drawn_line import Placed, PlacedExport
from msd_daemon.core.pool import PoolState

Int64Array = npt.NDArray[np.int64]


class Offer(NamedTuple):
    """Effect: give these fragments to a consumer; they are pinned."""

    step: int
    consumer: int
    issue: int
    export: PlacedExport


class Want(NamedTuple):
    """Effect: ask a producer for the parcel of a step."""

    step: int
    producer: int
    issue: int


class Holding(NamedTuple):
    """Who loads what over some steps."""

    owners: Owners
    issues: Int64Array
    """Of each source: the change that gave it to whom it belongs. Shape (sources,)."""


class Moved(NamedTuple):
    """Sources that change hands, as this node sees it."""

    issue: int
    gained: frozenset[int]
    lost: frozenset[int]


class SharedSteps:
    """This node among the others of a generation.

    Args:
        pool: Where samples lie.
        owners: Who loads what.
        node: This node's number.
    """

    def __init__(self, pool: PoolState, owners: Owners, node: int) -> None:
        self._pool = pool
        self._holding = ByStep(Holding(owners, np.zeros(len(owners.nodes), np.int64)))
        self.node = node
        self.offers: deque[Offer] = deque()
        """To be told to the exchange."""
        self.wants: deque[Want] = deque()
        """To be told to the exchange."""
        self.needless: deque[Want] = deque()
        """To be told to the exchange: parcels that would bring nothing new."""
        self._declined: set[tuple[int, int, int]] = set()
        """By step, consumer and issue: what need not be given, said before it was offered."""
        self._given: dict[tuple[int, int, int], list[Chunk]] = {}
        """By step, consumer and issue: what is pinned for it."""
        self._gone: set[int] = set()

    def change(self, owners: Owners, from_step: int) -> Moved:
        """Take other owners from a step on; return what this node gains and loses."""
        before = self._holding.now
        moved = [
            source
            for source, nodes in enumerate(owners.nodes)
            if nodes != before.owners.nodes[source]
        ]
        issue = int(before.issues.max(initial=0)) + 1
        issues = before.issues.copy()
        issues[moved] = issue
        self._holding.change(Holding(owners, issues), from_step)
        mine = set(before.owners.sources_of(self.node)).intersection(moved)
        now = set(owners.sources_of(self.node)).intersection(moved)
        return Moved(issue, frozenset(now), frozenset(mine))

    def parts(self, source: int) -> tuple[list[int], int]:
        """Return this node's parts of a source, and how many parts it has."""
        owners = self._holding.now.owners
        return owners.parts_of(self.node, source), len(owners.nodes[source])

    def issue_of(self, source: int) -> int:
        """Return the change that gave a source to whom it belongs now."""
        return int(self._holding.now.issues[source])

    def is_own(self, source: int, block_key: int) -> bool:
        """Return True where this node loads a record now."""
        return self._holding.now.owners.node_of(source, block_key) == self.node

    def own_of_issue(self, issue: int) -> Callable[[int, int], bool]:
        """Return what tells the records that this node loads by a change."""
        owners, issues, node = (
            self._holding.now.owners,
            self._holding.now.issues.tolist(),
            self.node,
        )
        return lambda source, block_key: (
            issues[source] == issue and (owners.node_of(source, block_key) == node)
        )

    def own_segments(self, plan: StepPlan) -> dict[int, Int64Array]:
        """Return the plan's segments that this node loads, by issue."""
        holding = self._holding.at(plan.step)
        own = np.flatnonzero(holding.owners.of(plan.source, plan.block_key) == self.node)
        return _by_issue(own, holding.issues[plan.source[own]])

    def exports_by_issue(self, step: int, exports: Iterable[Export]) -> dict[int, list[Export]]:
        """Return what others need of this node, by issue."""
        issues = self._holding.at(step).issues
        found: dict[int, list[Export]] = {}
        for export in exports:
            numbers = np.arange(export.count)
            for issue, places in _by_issue(numbers, issues[export.source]).items():
                found.setdefault(issue, []).append(export.part(places))
        return found

    def want(self, plan: StepPlan, segments: Int64Array | None = None) -> None:
        """Ask other nodes for what a plan needs of them.

        Args:
            plan: This node's part of it.
            segments: Those of it that are not here; None: all that others load.
        """
        self.wants.extend(self._from_others(plan, segments))

    def want_again(self, plan: StepPlan, segments: Int64Array) -> None:
        """Ask others, since others load for a plan that is known, for what of it is not here.

        Who gives for the first time by the last change, and has nothing to bring, is told so: what it
        keeps for this node would be kept for ever.

        Args:
            plan: This node's part of it.
            segments: Those of it that are not here.
        """
        self.want(plan, segments)
        wanted = set(self._from_others(plan, segments))
        last = int(self._holding.at(plan.step).issues.max(initial=0))
        self.needless.extend(
            parcel
            for parcel in self._from_others(plan, None)
            if parcel.issue == last and parcel not in wanted
        )

    def _from_others(self, plan: StepPlan, segments: Int64Array | None) -> list[Want]:
        """Return the parcels that bring these segments of a plan, or all that others load."""
        holding = self._holding.at(plan.step)
        owner = holding.owners.of(plan.source, plan.block_key)
        issue = holding.issues[plan.source]
        if segments is not None:
            owner, issue = owner[segments], issue[segments]
        return [
            Want(plan.step, producer, number)
            for producer, number in dict.fromkeys(zip(owner.tolist(), issue.tolist(), strict=True))
            if producer != self.node and producer not in self._gone
        ]

    def offer(self, placed: Placed, issue: int) -> None:
        """Take what a plan that is through a line has for others."""
        for exported in placed.exports:
            consumer = exported.export.consumer
            chunks = list(dict.fromkeys(exported.places.chunks))
            if consumer in self._gone or (placed.step, consumer, issue) in self._declined:
                self._unpin(chunks)
                continue
            self._given[placed.step, consumer, issue] = chunks
            self.offers.append(Offer(placed.step, consumer, issue, exported))

    def acked(self, step: int, consumer: int, issue: int) -> bool:
        """A consumer has its parcel; return False where that is no news."""
        chunks = self._given.pop((step, consumer, issue), None)
        self._unpin(chunks or ())
        return chunks is not None

    def declined(self, step: int, consumer: int, issue: int) -> None:
        """A consumer has all that a parcel would bring it, which was not offered yet."""
        self._declined.add((step, consumer, issue))

    def released(self, step: int) -> None:
        """Nothing of steps up to this one is given any more."""
        self._declined = {key for key in self._declined if key[0] > step}

    def nodes_gone(self, nodes: Iterable[int]) -> list[int]:
        """Nodes take part no more: nothing is owed to them. Return those that were not known gone."""
        fresh = [node for node in nodes if node not in self._gone]
        self._gone.update(fresh)
        self.offers = deque(offer for offer in self.offers if offer.consumer not in self._gone)
        self.wants = deque(want for want in self.wants if want.producer not in self._gone)
        for key in [key for key in self._given if key[1] in self._gone]:
            self.acked(*key)
        return fresh

    def owes(self, step: int) -> bool:
        """Return True while a consumer lacks its parcel of a step."""
        return any(given == step for given, _, _ in self._given)

    def _unpin(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._pool.unpin_step(chunk)


def _by_issue(places: Int64Array, issues: Int64Array) -> dict[int, Int64Array]:
    """Return places by the issue of each."""
    return {issue: places[issues == issue] for issue in np.unique(issues).tolist()}
