"""Draws fragments from the known ones of all sources in the order that the share tree sets.

The order is one endless sequence that knows nothing of steps, chunks or loaders; `MixDraw` works it
out well ahead, several steps at a time and in whole columns, as far as the known fragments decide
it. A fragment is in the order once no unknown one could come before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import Unit
from federation.planning.cuts import CUMULATIVE, FRAGMENT_COLUMNS, LENGTH, SOURCE
from federation.planning.extra_rows import NO_EXTRA_ROWS, ExtraRows
from federation.planning.fragments import FragmentQueue
from federation.planning.share_tree import NO_SOURCE, Level, ShareTree
from federation.planning.step_pool import Need, group_starts, places_of

Int64Array = npt.NDArray[np.int64]


class DrawPoint(NamedTuple):
    """How far everything was drawn; what a draw that came to nothing goes back to."""

    tree: ShareTree
    times: Int64Array
    """Virtual time of each branch. Shape (branches,)."""
    taken: Int64Array
    """Fragments drawn of each source, absolute. Shape (S,)."""
    amounts: Int64Array
    """What they count for in the mixture's unit. Shape (S,)."""


class _Candidates(NamedTuple):
    """Known fragments behind what was ordered, leaf by leaf, the deepest level first."""

    fragments: Int64Array
    amounts: Int64Array
    """What each counts for. Shape (n,)."""
    through: Int64Array
    """Amounts of its source up to and with each fragment. Shape (n,)."""
    counts: dict[int, int]
    """Fragments of each source."""
    totals: Int64Array
    """Amounts of each source. Shape (S,)."""
    nexts: Int64Array
    """Least that the fragment after these can count for. Shape (S,)."""


class MixDraw:
    """The draw of one stream: how far it came, and the order worked out ahead of that."""

    def __init__(
        self,
        queues: Sequence[FragmentQueue],
        row_tokens: int,
        *,
        unit: Unit,
        segment_multiple: int = 1,
        samples_max: int = 1,
        extras: ExtraRows = NO_EXTRA_ROWS,
    ) -> None:
        """Hold the queues.

        Args:
            queues: One per source.
            row_tokens: Longest fragment, or group, that they ever hold.
            unit: What shares are shares of.
            segment_multiple: What the places of a fragment are a multiple of.
            samples_max: Most samples of a group.
            extras: Extra rows of the job's fragments.
        """
        self._extras = extras
        self._no_fragments = np.zeros((FRAGMENT_COLUMNS + extras.count, 0), np.int64)
        self._segment_multiple = segment_multiple
        self._queues = queues
        self._amount_max = samples_max if unit == "samples" else row_tokens
        self._unit = unit
        self._is_sample_unit = unit == "samples"
        self._may_be_nothing = extras.may_be_nothing(unit)
        self._point: DrawPoint | None = None
        self._ordered: DrawPoint | None = None
        self._ahead: Int64Array = self._no_fragments
        self._ahead_places: Int64Array = np.zeros(0, np.int64)
        """Places of the ordered fragments up to and with each. Shape (n,)."""
        self._head = 0

    @property
    def is_set(self) -> bool:
        """True once there are shares to draw by."""
        return self._point is not None

    @property
    def point(self) -> DrawPoint:
        """How far the draw came."""
        assert self._point is not None
        return self._point

    def set_shares(self, shares: Int64Array, times: Int64Array | None = None) -> None:
        """Draw by other shares from here on.

        Args:
            shares: Integer share of each source, at least one above 0. Shape (S,).
            times: Virtual times of a state of these shares, all 0 where they are those of others;
                None carries over how far each source is ahead, for at most the rest of a fragment.
        """
        tree = ShareTree(shares, self._amount_max)
        taken = amounts = np.zeros(len(self._queues), np.int64)
        if self._point is not None:
            _, _, taken, amounts = self._point
            if times is None:
                times = tree.times_of(self._point.tree.residuals(self._point.times))
        if times is None or len(times) != tree.branch_count:
            times = np.zeros(tree.branch_count, np.int64)
        self.go_to(DrawPoint(tree, times, taken, amounts))

    def go_to(self, point: DrawPoint) -> None:
        """Stand at a point, its fragments must still be known."""
        self._point = self._ordered = point
        self._ahead = self._no_fragments
        self._ahead_places = np.zeros(0, np.int64)
        self._head = 0

    def draw(self, need: Need, horizon: int) -> tuple[Int64Array, int]:
        """Draw the next fragments until they meet a need.

        Args:
            need: Not met yet.
            horizon: How much to order ahead, in the mixture's unit.

        Returns:
            The fragments, shape (FRAGMENT_COLUMNS + extra rows, n), and NO_SOURCE where they are
            enough, else the source whose next fragment must be known first.
        """
        while True:
            head = self._head
            before = int(self._ahead_places[head - 1]) if head else 0
            known = len(self._ahead_places) - head
            enough = int(np.searchsorted(self._ahead_places, before + need.places)) + 1 - head
            if need.tokens is not None:
                through = np.cumsum(self._ahead[LENGTH, head:])
                enough = min(enough, int(np.searchsorted(through, need.tokens)) + 1)
            for row, wanted in enumerate(need.units, -len(need.units)):
                through = np.cumsum(self._ahead[row, head:])
                enough = min(enough, int(np.searchsorted(through, wanted)) + 1)
            enough = min(enough, need.fragments)
            if self._extras.has_groups and 0 < enough <= known:
                enough += int(self._extras.follow(self._ahead)[head + enough - 1])
            if enough <= known:
                return self._take(enough), NO_SOURCE
            blocked = self._order_more(horizon)
            if blocked != NO_SOURCE:
                return self._take(known), blocked

    def _take(self, count: int) -> Int64Array:
        drawn: Int64Array = self._ahead[:, self._head : self._head + count]
        self._head += count
        if count:
            self._point = self._moved(self.point, drawn)
        return drawn

    def _moved(self, point: DrawPoint, fragments: Int64Array) -> DrawPoint:
        source_count = len(self._queues)
        sources = fragments[SOURCE]
        counts = np.bincount(sources, minlength=source_count)
        weights = self._amounts(fragments)
        amounts = np.bincount(sources, weights=weights, minlength=source_count).astype(np.int64)
        times = point.tree.advance(point.times, amounts)
        return DrawPoint(point.tree, times, point.taken + counts, point.amounts + amounts)

    def _amounts(self, fragments: Int64Array) -> Int64Array:
        return self._extras.amounts(fragments, self._unit)

    def _order_more(self, horizon: int) -> int:
        """Order further fragments; return NO_SOURCE, or the source that hinders the next one."""
        assert self._ordered is not None
        candidates = self._candidates(self._ordered, horizon)
        spans = self._spans(candidates)
        merged, blocked = _merge(
            self._ordered, candidates, spans, may_be_nothing=self._may_be_nothing
        )
        if not len(merged):
            return blocked
        fragments = candidates.fragments[:, merged]
        self._ahead = np.concatenate((self._ahead[:, self._head :], fragments), axis=1)
        self._ahead_places = np.cumsum(places_of(self._ahead[LENGTH], self._segment_multiple))
        self._head = 0
        self._ordered = self._moved(self._ordered, fragments)
        return NO_SOURCE

    def _spans(self, candidates: _Candidates) -> Int64Array:
        """Return twice the way from each fragment's due time to its end. Shape (n,)."""
        spans = candidates.amounts
        if self._extras.has_groups and len(spans):
            # All of a group are due with its first.
            follow = self._extras.follow(candidates.fragments)
            starts = group_starts(follow)
            spans = np.repeat(spans[starts], np.diff(np.append(starts, len(spans))))
        if not self._is_sample_unit:
            return spans
        # A sample's later fragments are due with its first: one sample is one unit of draw.
        ones: Int64Array = np.maximum(spans, 1)
        return ones

    def _candidates(self, ordered: DrawPoint, horizon: int) -> _Candidates:
        shares = ordered.tree.shares
        reach = ordered.amounts + (shares / shares.sum() * horizon).astype(np.int64)
        limits = (reach + 2 * self._amount_max).tolist()
        starts = ordered.taken.tolist()
        totals = np.zeros(len(shares), np.int64)
        nexts = np.full(len(shares), 0 if self._may_be_nothing else 1)
        counts: dict[int, int] = {}
        pieces = []
        for level in reversed(ordered.tree.levels):
            for source in level.source[level.leaves].tolist():
                queue = self._queues[source]
                first = starts[source] - queue.base
                through = queue.columns[CUMULATIVE]
                last = int(through.searchsorted(limits[source], side="right"))
                counts[source] = last - first
                if last > first:
                    pieces.append(queue.columns[:, first:last])
                    totals[source] = through[last - 1]
                else:
                    totals[source] = ordered.amounts[source]
                if self._is_sample_unit:
                    # The rest of a sample is due with its beginning, which lies one unit back.
                    nexts[source] = -1 if queue.is_resuming else 1
                elif last < len(through):
                    nexts[source] = through[last] - totals[source]
        fragments = np.concatenate(pieces, axis=1) if pieces else self._no_fragments
        through = fragments[CUMULATIVE] - ordered.amounts[fragments[SOURCE]]
        return _Candidates(
            fragments,
            self._extras.draw_amounts(fragments, self._unit),
            through,
            counts,
            totals - ordered.amounts,
            nexts,
        )


def _merge(
    ordered: DrawPoint, candidates: _Candidates, spans: Int64Array, *, may_be_nothing: bool
) -> tuple[Int64Array, int]:
    """Merge the candidates level by level, from the leaves to the root.

    Args:
        ordered: Where the order stands.
        candidates: What may come next.
        spans: Twice the way from a fragment's due time to its end. Shape (n,).
        may_be_nothing: True where a fragment may count for nothing: it is due where the one before
            it ended, so it may be due with an unknown one, of its own source even. Those due
            together come in the order of their branches, then of their source.

    Returns:
        Candidates in draw order as far as they decide it, and the source that hinders the next.
    """
    tree, times = ordered.tree, ordered.times
    place = node = np.zeros(0, np.int64)
    first = 0
    least: list[Int64Array] = []
    for level in reversed(tree.levels):
        inner = level.inner[node]
        counts = [candidates.counts[source] for source in level.source[level.leaves].tolist()]
        last = first + sum(counts)
        through, totals = _sums_inside(level, inner, candidates.amounts[place])
        is_leaf = level.leaves
        totals[is_leaf] = candidates.totals[level.source[is_leaf]]
        nexts = np.full(len(totals), 0 if may_be_nothing else 1)
        nexts[is_leaf] = candidates.nexts[level.source[is_leaf]]
        branch = np.concatenate((inner, np.repeat(is_leaf, counts)))
        place = np.concatenate((place, np.arange(first, last)))
        through = np.concatenate((through, candidates.through[first:last]))
        first = last
        here = slice(level.start, level.start + len(totals))
        inverses = tree.inverses[here]
        bounds = times[here] + (2 * totals + nexts) * inverses
        least.insert(0, bounds)
        due = times[here][branch] + (2 * through - spans[place]) * inverses[branch]
        node = level.parent[branch]
        earliest = np.minimum.reduceat(bounds, level.group_starts)
        is_sure = due < earliest[node]
        if may_be_nothing:
            branches = np.arange(len(bounds))
            is_earliest = bounds == earliest[level.parent]
            firsts = np.minimum.reduceat(
                np.where(is_earliest, branches, len(bounds)), level.group_starts
            )
            is_sure |= (due == earliest[node]) & (branch <= firsts[node])
        place, node, due = place[is_sure], node[is_sure], due[is_sure]
        order = _order_of(due, node, len(level.group_starts))
        place, node = place[order], node[order]
    return place, _hindrance(tree, least)


def _order_of(due: Int64Array, node: Int64Array, node_count: int) -> npt.NDArray[np.intp]:
    if node_count == 1:
        return np.argsort(due, kind="stable")
    return np.lexsort((due, node))


def _sums_inside(
    level: Level, branch: Int64Array, amounts: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return running sums inside each inner branch, and the sum of every branch."""
    totals = np.zeros(len(level.source), np.int64)
    if not len(branch):
        return np.zeros(0, np.int64), totals
    through = np.cumsum(amounts)
    starts = np.flatnonzero(np.diff(branch, prepend=-1))
    before = through[starts] - amounts[starts]
    through = through - np.repeat(before, np.diff(np.append(starts, len(branch))))
    ends = np.append(starts[1:], len(branch)) - 1
    totals[branch[ends]] = through[ends]
    return through, totals


def _hindrance(tree: ShareTree, bounds: list[Int64Array]) -> int:
    """Return the leaf whose next fragment is the first that is not known, from the root down."""
    node = 0
    for level, times in zip(tree.levels, bounds, strict=True):
        start = int(level.group_starts[node])
        ends = level.group_starts[node + 1 :]
        end = int(ends[0]) if len(ends) else len(times)
        branch = start + int(np.argmin(times[start:end]))
        if level.source[branch] != NO_SOURCE:
            return int(level.source[branch])
        node = int(np.searchsorted(level.inner, branch))
    raise AssertionError("a share tree ends in leaves")
