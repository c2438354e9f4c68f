"""The draw rule: in which order the fragments of all sources are drawn.

Sources are leaves of a tree over the mixture's shares. Each branch has a virtual time, an integer
that grows by twice the drawn amount times the inverse of its share among its siblings; a fragment
is due at the middle of the stretch it takes. A node takes its branches' fragments in the order of
those due times. Flat, the rule is Webster's: with many small sources that fall due together it can
be as many fragments off. So branches are grouped as a Huffman code groups them and levels are then
joined again as long as the exact bound, computed for the very shares, stays within two of the
largest fragment. The binary tree's own bound is 1.68 of it (a leaf's ancestors grow at least as
the Fibonacci numbers do, each level adds at most half a fragment times the leaf's part of it).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ConfigError

Int64Array = npt.NDArray[np.int64]

INVERSE_UNIT = 1 << 20
"""Virtual time of half a token in a branch that has its whole node: shares are exact to 5e-7."""
VIRTUAL_TIME_MAX = 1 << 59
OFF_BOUND_FRAGMENTS = 2.0
_RESIDUAL_BITS = 16
NO_SOURCE = -1


@dataclass
class _Branch:
    share: int
    first_source: int
    children: list[_Branch]

    @property
    def is_leaf(self) -> bool:
        return not self.children


@dataclass(frozen=True, eq=False)
class Level:
    """The branches at one depth, sorted by parent; inside a node inner branches, then sources."""

    start: int
    """Number of the first branch."""
    source: Int64Array
    """Source of a leaf, NO_SOURCE of an inner branch. Shape (branches,)."""
    parent: Int64Array
    """Place of the parent among the inner branches of the level above, 0 for the root's."""
    group_starts: Int64Array
    """First branch of each node. Shape (nodes,)."""
    leaves: Int64Array
    """Places of the leaves. Shape (leaves,)."""
    inner: Int64Array
    """Places of the inner branches; place k is node k of the level below. Shape (inner,)."""


class ShareTree:
    """Branches of one set of integer shares; a pure function of them."""

    def __init__(self, shares: Int64Array, amount_max: int) -> None:
        """Build the tree.

        Args:
            shares: Integer share of each source, 0 for those that are not drawn. Shape (S,).
            amount_max: Most that one fragment counts for.

        Raises:
            ConfigError: A share is too small for fragments of this size.
        """
        self.shares = shares
        root = _grouped(_huffman(shares))
        self.levels: list[Level] = []
        inverses: list[int] = []
        self._shares_of: list[int] = []
        parents: list[int] = []
        members: list[list[int]] = []
        nodes = [(root, -1)]
        start = 0
        while nodes:
            level, below = self._level(nodes, start, inverses, parents, members)
            self.levels.append(level)
            start += len(level.source)
            nodes = below
        self.branch_count = start
        self.inverses = np.array(inverses, np.int64)
        self.parents = parents
        self.members = np.zeros((start, len(shares)), np.int64)
        for branch, sources in enumerate(members):
            self.members[branch, sources] = 1
        self._group_starts = np.concatenate(
            [level.start + level.group_starts for level in self.levels]
        )
        self._group_sizes = np.diff(np.append(self._group_starts, start))
        if int(self.inverses.max()) * amount_max > VIRTUAL_TIME_MAX:
            source = int(np.where(shares > 0, shares, shares.max()).argmin())
            raise ConfigError(
                f"source number {source} has a share of {shares[source] / shares.sum():.3g}, too "
                f"small beside fragments of {amount_max} tokens; raise its weight or set it to 0",
                source=source,
            )

    def _level(
        self,
        nodes: list[tuple[_Branch, int]],
        start: int,
        inverses: list[int],
        parents: list[int],
        members: list[list[int]],
    ) -> tuple[Level, list[tuple[_Branch, int]]]:
        sources: list[int] = []
        places: list[int] = []
        group_starts: list[int] = []
        below: list[tuple[_Branch, int]] = []
        for place, (node, branch) in enumerate(nodes):
            group_starts.append(len(sources))
            for child in sorted(node.children, key=lambda c: (c.is_leaf, c.first_source)):
                number = start + len(sources)
                if not child.is_leaf:
                    below.append((child, number))
                sources.append(child.first_source if child.is_leaf else NO_SOURCE)
                places.append(place)
                inverses.append(round(INVERSE_UNIT * node.share / child.share))
                self._shares_of.append(child.share)
                parents.append(branch)
                members.append(_sources(child))
        source = np.array(sources, np.int64)
        level = Level(
            start,
            source,
            np.array(places, np.int64),
            np.array(group_starts, np.int64),
            np.flatnonzero(source != NO_SOURCE),
            np.flatnonzero(source == NO_SOURCE),
        )
        return level, below

    def advance(self, times: Int64Array, amounts: Int64Array) -> Int64Array:
        """Return the virtual times after drawing `amounts` per source, least of each node 0.

        Args:
            times: Shape (branches,).
            amounts: Tokens or samples drawn of each source. Shape (S,).
        """
        moved = times + 2 * self.inverses * (self.members @ amounts)
        return self._rebased(moved)

    def _rebased(self, times: Int64Array) -> Int64Array:
        least = np.minimum.reduceat(times, self._group_starts)
        rebased: Int64Array = times - np.repeat(least, self._group_sizes)
        return rebased

    def residuals(self, times: Int64Array) -> list[int]:
        """Return how far each source is ahead of its share, in 2^-16 tokens (or samples)."""
        amounts = [
            (int(time) << _RESIDUAL_BITS) // (2 * int(inverse))
            for time, inverse in zip(times, self.inverses, strict=True)
        ]
        totals: dict[int, int] = {}
        shares: dict[int, int] = {}
        for branch, parent in enumerate(self.parents):
            totals[parent] = totals.get(parent, 0) + amounts[branch]
            shares[parent] = shares.get(parent, 0) + self._shares_of[branch]
        ahead: dict[int, int] = {-1: 0}
        for branch, parent in enumerate(self.parents):
            fair = (ahead[parent] - totals[parent]) * self._shares_of[branch] // shares[parent]
            ahead[branch] = amounts[branch] + fair
        found = [0] * len(self.shares)
        for level in self.levels:
            for place in level.leaves.tolist():
                found[int(level.source[place])] = ahead[level.start + place]
        return found

    def times_of(self, residuals: list[int]) -> Int64Array:
        """Return the virtual times at which each source is ahead by `residuals`.

        This is how a mixture change starts: the fraction of a fragment that a source is ahead or
        behind stays, nothing of the past is caught up.
        """
        times = []
        for branch in range(self.branch_count):
            sources = np.flatnonzero(self.members[branch]).tolist()
            amount = sum(residuals[source] for source in sources)
            times.append((2 * int(self.inverses[branch]) * amount) >> _RESIDUAL_BITS)
        return self._rebased(np.array(times, np.int64))


def _sources(branch: _Branch) -> list[int]:
    if branch.is_leaf:
        return [branch.first_source]
    return [source for child in branch.children for source in _sources(child)]


def _huffman(shares: Int64Array) -> _Branch:
    leaves = [
        _Branch(int(shares[source]), source, []) for source in np.flatnonzero(shares).tolist()
    ]
    if len(leaves) == 1:
        return _Branch(leaves[0].share, leaves[0].first_source, leaves)
    heap = [(leaf.share, leaf.first_source, leaf) for leaf in leaves]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        joined = _Branch(a.share + b.share, min(a.first_source, b.first_source), [a, b])
        heapq.heappush(heap, (joined.share, joined.first_source, joined))
    return heap[0][2]


def _grouped(root: _Branch) -> _Branch:
    """Join as many levels of a binary tree as the bound allows."""
    for group in range(_depth(root), 1, -1):
        joined = _joined(root, group)
        if _off_bound(joined, 0.0) <= OFF_BOUND_FRAGMENTS:
            return joined
    return root


def _depth(branch: _Branch) -> int:
    return 1 + max(map(_depth, branch.children)) if branch.children else 0


def _joined(branch: _Branch, group: int) -> _Branch:
    frontier = branch.children
    for _ in range(group - 1):
        frontier = [below for child in frontier for below in (child.children or [child])]
    children = [child if child.is_leaf else _joined(child, group) for child in frontier]
    return _Branch(branch.share, branch.first_source, children)


def _off_bound(node: _Branch, off: float) -> float:
    """Return the most fragments that a leaf below `node`, itself `off` fragments off, can be off."""
    count = len(node.children)
    worst = 0.0
    for child in node.children:
        part = child.share / node.share
        child_off = 0.5 * (1 - part + part * (count - 1)) + part * off
        worst = max(worst, child_off if child.is_leaf else _off_bound(child, child_off))
    return worst
