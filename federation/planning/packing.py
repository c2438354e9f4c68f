"""Packs a step's fragments into rows: `best_fit`, `best_fit_even`, `padded`, or `concat` and `varlen` (see there).

Packing sees the carried and the drawn fragments and the step's batch rule; no mesh, so rows are the
same on any. Rows are numbered as they are filled; inside a row segments stand in draw order.

`best_fit` takes the carried fragments first, those of older steps before younger ones, then the
drawn ones by falling length, ties in draw order; each goes into the row with the least free space
that holds it (federation.planning.best_fit). Any-fit packing leaves at most one row half empty while
something does not fit, so a step places at least about half of what its rows hold, oldest first: no
fragment is carried for more than `CARRIED_STEPS_MAX` steps in a row, and the pool stays below one
step's tokens.

`best_fit_even` takes the same fragments by and large and makes rows even in cost
(federation.planning.even_fit).

With media the length by which fragments fall is the sum of the parts of a row that they take, of
its tokens and of its units of each modality. A row is half full then where these parts make half a
row together, so the bound of steps holds for each of them: `CARRIED_STEPS_MAX` times the number of
modalities and one.

A group is placed like one fragment that takes the places, segments and units of all that it holds;
what rows may hold of segments is then a cap as that on units is, and a part of its length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule
from federation.planning.best_fit import best_fit_rows, taken_and_caps
from federation.planning.concat import pack_end_to_end
from federation.planning.costs import encoder_costs, segment_costs
from federation.planning.even_fit import even_rows, is_as_good
from federation.planning.step_pool import (
    BLOCK_KEY,
    DRAWN_STEP,
    INDEX,
    LENGTH,
    OFFSET,
    SOURCE,
    Packed,
    Pool,
    places_of,
    runs,
)
from federation.planning.varlen import whole_step

Int64Array = npt.NDArray[np.int64]

CARRIED_STEPS_MAX = 4
_STEP_BITS = 32


class _Samples:
    """Which fragments are parts of one sample, in jobs where they may have any length."""

    def __init__(self, fragments: Int64Array, *, has_begins: bool) -> None:
        """Tell them apart.

        Args:
            fragments: Parts of a sample in order. Shape (6 + extra rows, n).
            has_begins: True where the first extra row says which fragments begin a sample; where it
                is not, a record is one.
        """
        order = np.lexsort(fragments[[INDEX, BLOCK_KEY, SOURCE]])
        records = fragments[:OFFSET, order]
        is_new = np.ones(len(order), bool)
        is_new[1:] = (records[:, 1:] != records[:, :-1]).any(axis=0)
        if has_begins:
            is_new |= fragments[DRAWN_STEP + 1, order] > 0
        self._order = order
        self._starts = np.flatnonzero(is_new)
        self._sample = np.cumsum(is_new) - 1

    def falling_ranks(self, ranks: Int64Array) -> Int64Array:
        """Return ranks by which no part of a sample comes after a later, larger part."""
        if len(self._starts) == len(ranks):
            return ranks
        found = ranks.copy()
        # Samples get ranges of their own, rising from the last to the first.
        range_of = (self._sample[-1] - self._sample) * (int(ranks.max()) + 1)
        rising = (ranks[self._order] + range_of)[::-1]
        found[self._order] = np.maximum.accumulate(rising)[::-1] - range_of
        return found

    def keep_parts_in_order(self, row_of: Int64Array) -> None:
        """Take back later parts of a sample whose earlier part found no row."""
        is_left = row_of[self._order] < 0
        if len(self._starts) < len(is_left) and is_left.any():
            left = np.cumsum(is_left)
            before: Int64Array = (left - is_left)[self._starts]
            row_of[self._order[left > before[self._sample]]] = -1


def pack(pool: Pool, rule: BatchRule) -> Packed:
    """Fill a step's rows by the step's rule; a varlen step is whole and gets its rows when placed."""
    if rule.packing == "concat":
        return pack_end_to_end(pool, rule)
    if rule.is_varlen:
        return whole_step(pool, rule)
    if pool.is_held is None:
        return _settled(pool, _rows_of(pool, rule), rule.segment_multiple)
    row_of = np.full(pool.fragments.shape[1], -1, np.int64)
    row_of[~pool.is_held] = _rows_of(pool.without_held(), rule)
    _keep_parts_in_order(pool, row_of, rule.row_tokens)
    return _settled(pool, row_of, rule.segment_multiple)


def _rows_of(pool: Pool, rule: BatchRule) -> Int64Array:
    """Return the row of each fragment, -1 where it found none. Shape (f,)."""
    fragments = pool.fragments
    usable = fragments.shape[1]
    if pool.tokens_left is not None:
        through = np.cumsum(fragments[LENGTH])
        usable = min(usable, int(np.searchsorted(through, pool.tokens_left)) + 1)
        if pool.has_groups:
            ends = np.append(pool.group_starts, fragments.shape[1])
            usable = int(ends[np.searchsorted(ends, usable)])
    row_of = np.full(fragments.shape[1], -1, np.int64)
    if rule.packing == "padded":
        used = min(usable, rule.rows)
        row_of[:used] = np.arange(used)
    elif pool.has_groups and usable:
        row_of[:usable] = _rows_of_groups(pool, usable, rule)
    else:
        samples = None
        if len(fragments) > DRAWN_STEP + 1:
            samples = _Samples(fragments[:, :usable], has_begins=pool.has_begins)
        costs = _backbone_costs(pool, usable, rule)
        row_of[:usable] = _fit(pool, usable, rule, samples, costs)
    return row_of


def _rows_of_groups(pool: Pool, usable: int, rule: BatchRule) -> Int64Array:
    """Return the row of each of the first fragments, which are whole groups. Shape (usable,).

    Each group is placed like one fragment that takes all its places, segments and units.
    """
    pool = pool._replace(fragments=pool.fragments[:, :usable])
    starts = pool.group_starts
    segments = np.diff(np.append(starts, usable))
    items = pool.fragments[:, starts]
    places = places_of(pool.fragments[LENGTH], rule.segment_multiple)
    items[LENGTH] = np.add.reduceat(places, starts)
    for row in range(len(items) - len(pool.units_max), len(items)):
        items[row] = np.add.reduceat(pool.fragments[row], starts)
    costs = _backbone_costs(pool, usable, rule)
    if costs is not None:
        costs = np.add.reduceat(costs, starts)
    own_count = int(np.searchsorted(starts, usable - pool.filler_count))
    joined = pool._replace(
        fragments=items,
        carried_count=int(np.searchsorted(starts, min(pool.carried_count, usable))),
        filler_count=len(starts) - own_count,
        origins=None,
    )
    samples = _Samples(items, has_begins=pool.has_begins)
    found = _fit(joined, len(starts), rule, samples, costs, segments)
    return np.repeat(found, segments)


def _backbone_costs(pool: Pool, usable: int, rule: BatchRule) -> Int64Array | None:
    """Return the costs of the first fragments, None where packing does not look at them."""
    if rule.packing == "best_fit":
        return None
    return segment_costs(pool.cost, pool.fragments[LENGTH, :usable])


def _fit(
    pool: Pool,
    usable: int,
    rule: BatchRule,
    samples: _Samples | None,
    costs: Int64Array | None,
    segments: Int64Array | None = None,
) -> Int64Array:
    """Return the row of each of the first fragments, -1 where it found none. Shape (usable,).

    Args:
        pool: The fragments, or groups that stand for several.
        usable: How many may be placed.
        rule: The step's batch.
        samples: Which of them are parts of one sample.
        costs: Of each, by which rows are made even; None: best fit alone. Shape (usable,).
        segments: How many segments each is of; None: one.
    """
    order, units = _in_fit_order(pool, usable, rule, samples, segments)
    lengths = pool.fragments[LENGTH, order]
    sizes = places_of(lengths, rule.segment_multiple)
    carried_count = min(pool.carried_count, usable)
    own_count = min(usable, pool.fragments.shape[1] - pool.filler_count)
    shape = (rule.rows, rule.row_tokens, rule.row_segments_max)
    best = np.empty(usable, np.int64)
    counts = None if segments is None else segments[order]
    best[order] = best_fit_rows(
        sizes, carried_count, *shape, own_count, units, pool.units_max, counts
    )
    _keep_order(pool, best, rule.row_tokens, samples)
    if costs is None:
        return best
    even = np.empty(usable, np.int64)
    taken, caps = taken_and_caps(
        sizes, rule.row_tokens, units, pool.units_max, counts, rule.row_segments_max
    )
    encoders = _encoder_costs(pool, units)
    even[order] = even_rows(
        costs[order] + encoders,
        taken,
        caps,
        (rule.rows, rule.row_segments_max),
        own_count,
        has_segments=segments is not None,
        is_media_weighed=bool(encoders.any()),
    )
    _keep_order(pool, even, rule.row_tokens, samples)
    is_last = pool.is_last or pool.filler_count > 0
    tokens = pool.fragments[LENGTH, :usable]
    is_taken = is_as_good(even, best, tokens, carried_count, own_count, is_last=is_last)
    return even if is_taken else best


def _encoder_costs(pool: Pool, units: Int64Array | None) -> Int64Array:
    """Return what encoding the media of each fragment costs, by the job's own model.

    Shape (n,), or (1,) where there are none.
    """
    found = np.zeros(1, np.int64)
    if units is None:
        return found
    for encoder in pool.cost.encoders:
        if encoder.modality in pool.modalities:
            held = units[pool.modalities.index(encoder.modality)]
            found = found + encoder_costs(encoder, held)
    return found


def _in_fit_order(
    pool: Pool,
    usable: int,
    rule: BatchRule,
    samples: _Samples | None,
    segments: Int64Array | None,
) -> tuple[Int64Array, Int64Array | None]:
    """Return fragments in the order in which they are placed, and their units of media."""
    fragments = pool.fragments[:, :usable]
    ranks = fragments[LENGTH]
    carried_count = min(pool.carried_count, usable)
    units = fragments[len(fragments) - len(pool.units_max) :] if pool.units_max else None
    if samples is not None:
        caps = np.array(pool.units_max, np.int64)[:, None]
        parts = fragments[len(fragments) - len(caps) :] * rule.row_tokens // np.maximum(caps, 1)
        ranks = ranks + parts.sum(axis=0)
        if segments is not None:
            ranks += segments * rule.row_tokens // rule.row_segments_max
        ranks = samples.falling_ranks(ranks)
    elif (fragments[OFFSET, :carried_count] % rule.row_tokens).any():
        ranks = ranks.copy()
        ranks[:carried_count] = _falling_ranks(fragments[:, :carried_count])
    order = np.argsort((fragments[DRAWN_STEP] << _STEP_BITS) - ranks, kind="stable")
    return order, None if units is None else units[:, order]


def _keep_order(pool: Pool, row_of: Int64Array, row_tokens: int, samples: _Samples | None) -> None:
    if samples is None:
        _keep_parts_in_order(pool, row_of, row_tokens)
    else:
        samples.keep_parts_in_order(row_of)


def _falling_ranks(carried: Int64Array) -> list[int]:
    """Return lengths to sort by, so that no part of a document comes after a later, longer part.

    Parts that were cut for rows of another length need not fall in length.
    """
    longest: dict[tuple[int, ...], int] = {}
    ranks: list[int] = []
    for *record, _, length, drawn_step in reversed(carried.T.tolist()):
        key = (*record, drawn_step)
        longest[key] = max(longest.get(key, 0), length)
        ranks.append(longest[key])
    return ranks[::-1]


def _keep_parts_in_order(pool: Pool, row_of: Int64Array, row_tokens: int) -> None:
    """Take back later parts of a document whose earlier part found no row.

    Only a part as long as a row has later ones; of carried ones also a shorter part, where rows
    were shorter when it was cut.
    """
    fragments = pool.fragments[:, : len(row_of)]
    may_go_on = fragments[LENGTH] == row_tokens
    may_go_on[: pool.carried_count] = True
    for place in np.flatnonzero((row_of < 0) & may_go_on).tolist():
        fragment = fragments[:, place]
        is_later = (
            (fragments[INDEX] == fragment[INDEX])
            & (fragments[BLOCK_KEY] == fragment[BLOCK_KEY])
            & (fragments[SOURCE] == fragment[SOURCE])
            & (fragments[OFFSET] > fragment[OFFSET])
        )
        row_of[is_later] = -1


def _settled(pool: Pool, row_of: Int64Array, multiple: int) -> Packed:
    fragments, carried_count = pool.fragments, pool.carried_count
    is_placed = row_of >= 0
    order = np.argsort(row_of, kind="stable")[int(len(row_of) - np.count_nonzero(is_placed)) :]
    row = row_of[order]
    segments = fragments[:DRAWN_STEP, order]
    sizes = places_of(segments[LENGTH], multiple)
    before = np.cumsum(sizes) - sizes
    starts, counts = runs(row)
    column = before - np.repeat(before[starts], counts)
    carried_in = fragments[:, carried_count:][:, ~is_placed[carried_count:]]
    carried_out = np.flatnonzero(is_placed[:carried_count])
    if pool.origins is not None and len(carried_out):
        carried_out, rests = _carried_changes(pool, pool.origins, is_placed)
        carried_in = np.concatenate((rests, carried_in), axis=1)
    extras = fragments[DRAWN_STEP + 1 :, order]
    return Packed(segments, row, column, starts, counts, carried_out, carried_in, is_placed, extras)


def _carried_changes(
    pool: Pool, origins: Int64Array, is_placed: npt.NDArray[np.bool_]
) -> tuple[Int64Array, Int64Array]:
    """Return the former carried fragments that leave, and what of them joins anew.

    Where one was placed in part, its rest and all behind it join anew, so that the order stays.
    """
    is_carried_placed = is_placed[: pool.carried_count]
    counts = np.bincount(origins)
    placed = np.bincount(origins, weights=is_carried_placed).astype(np.int64)
    in_part = np.flatnonzero((placed > 0) & (placed < counts))
    first = int(in_part[0]) if len(in_part) else len(counts)
    leaves = placed == counts
    leaves[first:] = True
    joins = ~is_carried_placed & (origins >= first)
    return np.flatnonzero(leaves), pool.fragments[:, : pool.carried_count][:, joins]
