"""Packs a step's fragments into rows: `best_fit`, `concat` or `padded`.

Packing sees the carried and the drawn fragments and the job's batch rule; no mesh, so rows are the
same on any. Rows are numbered as they are filled; inside a row segments stand in draw order.

`best_fit` takes the carried fragments first, those of older steps before younger ones, then the
drawn ones by falling length, ties in draw order; each goes into the row with the least free space
that holds it. Any-fit packing leaves at most one row half empty while something does not fit, so a
step places at least about half of what its rows hold, oldest first: no fragment is carried for
more than `CARRIED_STEPS_MAX` steps in a row, and the pool stays below one step's tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule

Int64Array = npt.NDArray[np.int64]

SLACK_DIVISOR = 32
"""best_fit draws 1/32 more tokens than rows hold: real text then packs to more than 99 %."""
CARRIED_STEPS_MAX = 4
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_CARRIED_ROOM_DIVISOR = 4

SOURCE, BLOCK_KEY, INDEX, OFFSET, LENGTH, DRAWN_STEP = range(6)


class Need(NamedTuple):
    """How much a step draws: until so many tokens or fragments, whichever comes first."""

    tokens: int
    fragments: int


class Packed(NamedTuple):
    """Rows of a step and what is left over."""

    segments: Int64Array
    """(source, block_key, index, offset, length), sorted by (row, column). Shape (5, n)."""
    row: Int64Array
    """Shape (n,)."""
    column: Int64Array
    row_starts: Int64Array
    """First segment of each row that has one. Shape (r,)."""
    row_sizes: Int64Array
    """Segments of those rows. Shape (r,)."""
    carried_out: Int64Array
    """Places in the former carried columns that left. Shape (o,)."""
    carried_in: Int64Array
    """Fragments that join the carried ones behind those that stay. Shape (6, i)."""
    placed: npt.NDArray[np.bool_]
    """Fragments of the pool that stand in rows with at least one token. Shape (f,)."""


def step_tokens(rule: BatchRule) -> int:
    """Return the tokens that a step's rows hold."""
    return rule.rows * rule.row_tokens


def draw_need(rule: BatchRule, carried: Int64Array, tokens_left: int | None) -> Need:
    """Return what a step has to draw beside its carried fragments.

    Args:
        rule: The job's batch.
        carried: Shape (6, c).
        tokens_left: Tokens that the stream may still place, None for no end.
    """
    count = carried.shape[1]
    carried_tokens = int(carried[LENGTH].sum())
    if rule.packing == "padded":
        return Need(rule.rows * rule.row_tokens, rule.rows - count)
    target = step_tokens(rule)
    if rule.packing == "best_fit":
        target += target // SLACK_DIVISOR
    if tokens_left is not None:
        target = min(target, tokens_left)
    return Need(target - carried_tokens, rule.rows * rule.row_segments_max - count)


def pack(
    pool: Int64Array, carried_count: int, rule: BatchRule, tokens_left: int | None = None
) -> Packed:
    """Fill a step's rows.

    Args:
        pool: Carried fragments, then drawn ones, in draw order. Shape (6, f).
        carried_count: How many are carried.
        rule: The job's batch.
        tokens_left: Tokens that the stream may still place: fragments behind those that reach it
            stay carried. None for no end.
    """
    if rule.packing == "concat":
        return _concat(pool, carried_count, rule, tokens_left)
    usable = pool.shape[1]
    if tokens_left is not None:
        through = np.cumsum(pool[LENGTH])
        usable = min(usable, int(np.searchsorted(through, tokens_left)) + 1)
    row_of = np.full(pool.shape[1], -1, np.int64)
    if rule.packing == "padded":
        used = min(usable, rule.rows)
        row_of[:used] = np.arange(used)
    else:
        row_of[:usable] = _best_fit(pool[:, :usable], carried_count, rule)
        _keep_parts_in_order(pool, row_of, rule.row_tokens)
    return _settled(pool, carried_count, row_of, rule.segment_multiple)


def _best_fit(pool: Int64Array, carried_count: int, rule: BatchRule) -> Int64Array:
    lengths = pool[LENGTH]
    order = np.argsort((pool[DRAWN_STEP] << _ROW_BITS) - lengths, kind="stable")
    sizes = lengths[order]
    if rule.segment_multiple > 1:
        sizes = -(-sizes // rule.segment_multiple) * rule.segment_multiple
    found = best_fit_rows(
        sizes,
        min(carried_count, len(sizes)),
        rule.rows,
        rule.row_tokens,
        rule.row_segments_max,
    )
    row_of = np.empty(len(order), np.int64)
    row_of[order] = found
    return row_of


def best_fit_rows(
    sizes: Int64Array, carried_count: int, row_count: int, row_tokens: int, segments_max: int
) -> list[int]:
    """Return the row of each size, taken in turn, or -1 where no row holds it.

    Each goes into the row with the least free space that holds it, the lowest row of those; a row
    with `segments_max` segments is closed. The carried ones come first and are often tiny, so they
    are kept from spoiling rows: they fill a quarter of a row's segments, or they would close rows
    that are all but empty, and they keep off the rows that drawn fragments of full length need, as
    far as they fit into the others. Those that find no row so get a second try without limits,
    still before the drawn ones.
    """
    keyed = (sizes << _ROW_BITS).tolist()
    free = [row_tokens] * row_count
    if not carried_count:
        return _fill(keyed, free, [segments_max] * row_count)
    tokens = int(sizes[:carried_count].sum())
    full_count = int(np.count_nonzero(sizes[carried_count:] == row_tokens))
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


def run_starts(values: Int64Array) -> Int64Array:
    """Return where each run of equal values begins. Shape (runs,)."""
    if not len(values):
        return np.zeros(0, np.int64)
    changes = np.flatnonzero(values[1:] != values[:-1])
    starts = np.zeros(len(changes) + 1, np.int64)
    starts[1:] = changes + 1
    return starts


def _keep_parts_in_order(pool: Int64Array, row_of: Int64Array, row_tokens: int) -> None:
    """Take back later parts of a document whose earlier part found no row."""
    left = np.flatnonzero((row_of < 0) & (pool[LENGTH] == row_tokens))
    for place in left.tolist():
        fragment = pool[:, place]
        is_later = (
            (pool[INDEX] == fragment[INDEX])
            & (pool[BLOCK_KEY] == fragment[BLOCK_KEY])
            & (pool[SOURCE] == fragment[SOURCE])
            & (pool[OFFSET] > fragment[OFFSET])
        )
        row_of[is_later] = -1


def _settled(pool: Int64Array, carried_count: int, row_of: Int64Array, multiple: int) -> Packed:
    is_placed = row_of >= 0
    order = np.argsort(row_of, kind="stable")[int(len(row_of) - np.count_nonzero(is_placed)) :]
    row = row_of[order]
    segments = pool[:DRAWN_STEP, order]
    sizes = segments[LENGTH]
    if multiple > 1:
        sizes = -(-sizes // multiple) * multiple
    before = np.cumsum(sizes) - sizes
    starts, counts = _runs(row)
    column = before - np.repeat(before[starts], counts)
    carried_in = pool[:, carried_count:][:, ~is_placed[carried_count:]]
    carried_out = np.flatnonzero(is_placed[:carried_count])
    return Packed(segments, row, column, starts, counts, carried_out, carried_in, is_placed)


def _runs(row: Int64Array) -> tuple[Int64Array, Int64Array]:
    starts = run_starts(row)
    counts = np.empty_like(starts)
    counts[:-1] = starts[1:] - starts[:-1]
    if len(starts):
        counts[-1] = len(row) - starts[-1]
    return starts, counts


def _concat(
    pool: Int64Array, carried_count: int, rule: BatchRule, tokens_left: int | None
) -> Packed:
    row_tokens = rule.row_tokens
    through = np.cumsum(pool[LENGTH])
    total = int(through[-1]) if len(through) else 0
    end = min(total, step_tokens(rule))
    if tokens_left is not None:
        end = min(end, tokens_left)
    starts = np.union1d(
        (through - pool[LENGTH])[through - pool[LENGTH] < end], np.arange(0, end, row_tokens)
    )
    pieces = _pieces(pool, through, starts, end, carried_count, row_tokens)
    row, column = pieces.starts // row_tokens, pieces.starts % row_tokens
    if len(row) and int(np.bincount(row).max()) > rule.row_segments_max:
        pieces, row, column, end = _closed_early(pool, through, end, rule, carried_count)
    is_placed = through - pool[LENGTH] < end
    left = pool[:, through > end].copy()
    if left.shape[1]:
        cut = end - int((through - pool[LENGTH])[through > end][0])
        if cut > 0:
            left[OFFSET, 0] += cut
            left[LENGTH, 0] -= cut
    stay = int(np.count_nonzero(through[:carried_count] > end))
    first_left = pool.shape[1] - left.shape[1]
    if first_left < carried_count and is_placed[first_left]:
        stay = 0  # a carried fragment was cut: its rest, and all behind it, join anew in order
    return Packed(
        pieces.segments,
        row,
        column,
        *_runs(row),
        np.arange(carried_count - stay),
        left[:, stay:],
        is_placed,
    )


class _Pieces(NamedTuple):
    segments: Int64Array
    starts: Int64Array
    """First token of each in the concatenation. Shape (n,)."""


def _pieces(
    pool: Int64Array,
    through: Int64Array,
    starts: Int64Array,
    end: int,
    carried_count: int,
    row_tokens: int,
) -> _Pieces:
    """Cut the concatenation at `starts`; parts of one document that touch inside a row are one.

    `row_tokens` of 0 joins nothing.
    """
    fragment = np.searchsorted(through, starts, side="right")
    segments = pool[:DRAWN_STEP, fragment]
    lengths = np.diff(np.append(starts, end))
    segments[OFFSET] += starts - (through[fragment] - pool[LENGTH, fragment])
    segments[LENGTH] = lengths
    if not row_tokens or len(starts) < 2:
        return _Pieces(segments, starts)
    # A carried part lies in memory of its own, so it is never joined with a drawn one.
    is_joined = (
        (segments[INDEX, 1:] == segments[INDEX, :-1])
        & (segments[BLOCK_KEY, 1:] == segments[BLOCK_KEY, :-1])
        & (segments[SOURCE, 1:] == segments[SOURCE, :-1])
        & (segments[OFFSET, 1:] == segments[OFFSET, :-1] + lengths[:-1])
        & (starts[1:] % row_tokens != 0)
        & (fragment[:-1] >= carried_count)
    )
    if not is_joined.any():
        return _Pieces(segments, starts)
    firsts = np.flatnonzero(np.append(True, ~is_joined))
    segments = segments[:, firsts]
    segments[LENGTH] = np.add.reduceat(lengths, firsts)
    return _Pieces(segments, starts[firsts])


def _closed_early(
    pool: Int64Array, through: Int64Array, end: int, rule: BatchRule, carried_count: int
) -> tuple[_Pieces, Int64Array, Int64Array, int]:
    """Fill row by row, closing a row that has all the segments it may have."""
    begins = through - pool[LENGTH]
    starts: list[int] = []
    rows: list[int] = []
    row_starts: list[int] = []
    start = 0
    for row in range(rule.rows):
        if start >= end:
            break
        row_starts.append(start)
        first = int(np.searchsorted(through, start, side="right"))
        stop = min(start + rule.row_tokens, end)
        cuts = begins[first + 1 : first + rule.row_segments_max + 1].tolist()
        inside = [start, *(cut for cut in cuts if cut < stop)]
        if len(inside) > rule.row_segments_max:
            stop = inside.pop()
        starts += inside
        rows += [row] * len(inside)
        start = stop
    row_array = np.array(rows, np.int64)
    start_array = np.array(starts, np.int64)
    pieces = _pieces(pool, through, start_array, start, carried_count, 0)
    column = start_array - np.array(row_starts, np.int64)[row_array]
    return pieces, row_array, column, start
