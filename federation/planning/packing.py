"""Packs a step's fragments into rows: `best_fit`, `padded`, or `concat` (see there).

Packing sees the carried and the drawn fragments and the step's batch rule; no mesh, so rows are the
same on any. Rows are numbered as they are filled; inside a row segments stand in draw order.

`best_fit` takes the carried fragments first, those of older steps before younger ones, then the
drawn ones by falling length, ties in draw order; each goes into the row with the least free space
that holds it. Any-fit packing leaves at most one row half empty while something does not fit, so a
step places at least about half of what its rows hold, oldest first: no fragment is carried for
more than `CARRIED_STEPS_MAX` steps in a row, and the pool stays below one step's tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule
from federation.planning.concat import pack_end_to_end
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

Int64Array = npt.NDArray[np.int64]

CARRIED_STEPS_MAX = 4
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_CARRIED_ROOM_DIVISOR = 4


def pack(pool: Pool, rule: BatchRule) -> Packed:
    """Fill a step's rows by the step's rule."""
    if rule.packing == "concat":
        return pack_end_to_end(pool, rule)
    fragments = pool.fragments
    usable = fragments.shape[1]
    if pool.tokens_left is not None:
        through = np.cumsum(fragments[LENGTH])
        usable = min(usable, int(np.searchsorted(through, pool.tokens_left)) + 1)
    row_of = np.full(fragments.shape[1], -1, np.int64)
    if rule.packing == "padded":
        used = min(usable, rule.rows)
        row_of[:used] = np.arange(used)
    else:
        row_of[:usable] = _best_fit(pool, usable, rule)
        _keep_parts_in_order(pool, row_of, rule.row_tokens)
    return _settled(pool, row_of, rule.segment_multiple)


def _best_fit(pool: Pool, usable: int, rule: BatchRule) -> Int64Array:
    fragments = pool.fragments[:, :usable]
    ranks = fragments[LENGTH]
    carried_count = min(pool.carried_count, usable)
    if (fragments[OFFSET, :carried_count] % rule.row_tokens).any():
        ranks = ranks.copy()
        ranks[:carried_count] = _falling_ranks(fragments[:, :carried_count])
    order = np.argsort((fragments[DRAWN_STEP] << _ROW_BITS) - ranks, kind="stable")
    sizes = places_of(fragments[LENGTH, order], rule.segment_multiple)
    found = best_fit_rows(
        sizes,
        carried_count,
        rule.rows,
        rule.row_tokens,
        rule.row_segments_max,
        min(len(sizes), pool.fragments.shape[1] - pool.filler_count),
    )
    row_of = np.empty(len(order), np.int64)
    row_of[order] = found
    return row_of


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


def best_fit_rows(
    sizes: Int64Array,
    carried_count: int,
    row_count: int,
    row_tokens: int,
    segments_max: int,
    own_count: int | None = None,
) -> list[int]:
    """Return the row of each size, taken in turn, or -1 where no row holds it.

    Each goes into the row with the least free space that holds it, the lowest row of those; a row
    with `segments_max` segments is closed. The carried ones come first and are often tiny, so they
    are kept from spoiling rows: they fill a quarter of a row's segments, or they would close rows
    that are all but empty, and they keep off the rows that drawn fragments of full length need, as
    far as they fit into the others. Those that find no row so get a second try without limits,
    still before the drawn ones. Sizes behind the first `own_count` are fillers, which change
    nothing for those before them.
    """
    keyed = (sizes << _ROW_BITS).tolist()
    free = [row_tokens] * row_count
    if not carried_count:
        return _fill(keyed, free, [segments_max] * row_count)
    tokens = int(sizes[:carried_count].sum())
    full_count = int(np.count_nonzero(sizes[carried_count:own_count] == row_tokens))
    needed = max(5 * tokens // (4 * row_tokens), carried_count // segments_max) + 1
    usable = max(row_count - full_count, min(needed, row_count))
    part = max(1, segments_max // _CARRIED_ROOM_DIVISOR, 5 * carried_count // (4 * usable))
    part = min(part, segments_max)
    room = [part] * usable + [0] * (row_count - usable)
    found = _fill(keyed[:carried_count], free, room)
    room = [left + segments_max - part for left in room[:usable]]
    room += [segments_max] * (row_count - usable)
    missed = [place for place, row in enumerate(found) if row < 0]
    if missed:
        again = _fill([keyed[place] for place in missed], free, room)
        for place, row in zip(missed, again, strict=True):
            found[place] = row
    return found + _fill(keyed[carried_count:], free, room)


def _fill(keyed: list[int], free: list[int], room: list[int]) -> list[int]:
    """Place sizes by best fit; takes what they use from `free` tokens and `room` of each row.

    Args:
        keyed: Sizes << 32: a row's key is free space << 32 | row, so the first key at or above
            that is the best fit.
        free: Free tokens of each row.
        room: Segments that each row may still take.
    """
    keys = sorted([space << _ROW_BITS | row for row, space in enumerate(free) if room[row]])
    open_count = len(keys)
    found: list[int] = []
    append, pop = found.append, keys.pop
    for size in keyed:
        place = bisect_left(keys, size)
        if place == open_count:
            append(-1)
            continue
        key = pop(place)
        row = key & _ROW_MASK
        append(row)
        if room[row] > 1:
            room[row] -= 1
            insort(keys, key - size)
        else:
            room[row] = 0
            free[row] = (key - size) >> _ROW_BITS
            open_count -= 1
    for key in keys:
        free[key & _ROW_MASK] = key >> _ROW_BITS
    return found


def _keep_parts_in_order(pool: Pool, row_of: Int64Array, row_tokens: int) -> None:
    """Take back later parts of a document whose earlier part found no row.

    Only a part as long as a row has later ones; of carried ones also a shorter part, where rows
    were shorter when it was cut.
    """
    fragments = pool.fragments
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
    return Packed(segments, row, column, starts, counts, carried_out, carried_in, is_placed)


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
