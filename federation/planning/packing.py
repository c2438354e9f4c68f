"""Packs a step's fragments into rows: `best_fit`, `concat` or `padded`.

Packing sees the carried and the drawn fragments and the job's batch rule; no mesh, so rows are the
same on any. Rows are numbered as they are filled; inside a row segments stand in draw order.

`best_fit` takes the carried fragments first, those of older steps before younger ones, then the
drawn ones by falling length, ties in draw order; each goes into the row with the least free space
that holds it. Any-fit packing leaves at most one row half empty while something does not fit, so a
step places at least about half of what its rows hold, oldest first: no fragment is carried for
more than `CARRIED_STEPS_MAX` steps in a row, and the pool stays below one step's tokens.

Where rows became shorter, carried fragments of older steps may be longer than a row: they are cut
into pieces of a row's length first (`cut_carried`), in the order of their tokens.
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
    """How much a step draws: until so many places, fragments or tokens, whichever comes first."""

    places: int
    """Places of rows: tokens, each fragment's rounded up to `segment_multiple`."""
    fragments: int
    tokens: int | None = None
    """None where places bound tokens too."""

    @property
    def is_met(self) -> bool:
        """True where nothing has to be drawn."""
        return min(self.places, self.fragments, 1 if self.tokens is None else self.tokens) <= 0

    def after(self, drawn: Int64Array, multiple: int) -> Need:
        """Return what is needed beyond these fragments, of which row LENGTH holds the lengths."""
        lengths = drawn[LENGTH]
        tokens = None if self.tokens is None else self.tokens - int(lengths.sum())
        return Need(
            self.places - int(places_of(lengths, multiple).sum()),
            self.fragments - len(lengths),
            tokens,
        )


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


class Pool(NamedTuple):
    """What a step can be packed from."""

    fragments: Int64Array
    """Carried ones, then drawn ones, then fillers, each in draw order. Shape (6, f),
    CARRIED_COLUMNS."""
    carried_count: int
    tokens_left: int | None = None
    """Tokens the stream may still place, None for no end: fragments behind those that reach it stay
    carried."""
    origins: Int64Array | None = None
    """Where carried fragments were cut for shorter rows: place of each among the former carried
    ones. Shape (carried_count,)."""
    filler_count: int = 0
    """Last fragments, of the epoch behind the stream's end: they fill what the others leave."""
    is_last: bool = False
    """True where nothing is drawn any more, so rows may stay empty."""


def step_tokens(rule: BatchRule) -> int:
    """Return the tokens that a step's rows hold."""
    return rule.rows * rule.row_tokens


def places_of(lengths: Int64Array, multiple: int) -> Int64Array:
    """Return the places of a row that fragments of these lengths take. Shape (n,)."""
    if multiple == 1:
        return lengths
    rounded: Int64Array = -(-lengths // multiple) * multiple
    return rounded


def draw_need(rule: BatchRule, carried: Int64Array, tokens_left: int | None) -> Need:
    """Return what a step has to draw beside its carried fragments.

    Args:
        rule: The step's batch.
        carried: Cut for the step's rows. Shape (6, c).
        tokens_left: Tokens that the stream may still place, None for no end.
    """
    if rule.packing == "padded":
        return Need(step_tokens(rule), rule.rows - carried.shape[1])
    places = step_tokens(rule)
    if rule.packing == "best_fit":
        places += places // SLACK_DIVISOR
    if tokens_left is not None and rule.segment_multiple == 1:
        places, tokens_left = min(places, tokens_left), None
    need = Need(places, rule.rows * rule.row_segments_max, tokens_left)
    return need.after(carried, rule.segment_multiple)


def cut_carried(carried: Int64Array, rule: BatchRule) -> tuple[Int64Array, Int64Array | None]:
    """Cut carried fragments that are longer than a row; `concat` cuts as it goes.

    Returns:
        The fragments in order, shape (6, n), and the place in `carried` of each, None where none
        was cut.
    """
    lengths = carried[LENGTH]
    if rule.packing == "concat" or not (lengths > rule.row_tokens).any():
        return carried, None
    parts = -(-lengths // rule.row_tokens)
    origins = np.repeat(np.arange(len(parts)), parts)
    pieces = carried[:, origins]
    skipped = (np.arange(len(origins)) - np.repeat(np.cumsum(parts) - parts, parts)) * (
        rule.row_tokens
    )
    pieces[OFFSET] += skipped
    pieces[LENGTH] = np.minimum(pieces[LENGTH] - skipped, rule.row_tokens)
    return pieces, origins


def pack(pool: Pool, rule: BatchRule) -> Packed:
    """Fill a step's rows by the step's rule."""
    if rule.packing == "concat":
        return _concat(pool.fragments, pool.carried_count, rule, pool.tokens_left)
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


def run_starts(values: Int64Array) -> Int64Array:
    """Return where each run of equal values begins. Shape (runs,)."""
    if not len(values):
        return np.zeros(0, np.int64)
    changes = np.flatnonzero(values[1:] != values[:-1])
    starts = np.zeros(len(changes) + 1, np.int64)
    starts[1:] = changes + 1
    return starts


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
    starts, counts = _runs(row)
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
    # Two carried parts may lie in pieces of memory of their own. A drawn part lies in its record's
    # chunk together with all that was drawn of the record before.
    is_joined = (
        (segments[INDEX, 1:] == segments[INDEX, :-1])
        & (segments[BLOCK_KEY, 1:] == segments[BLOCK_KEY, :-1])
        & (segments[SOURCE, 1:] == segments[SOURCE, :-1])
        & (segments[OFFSET, 1:] == segments[OFFSET, :-1] + lengths[:-1])
        & (starts[1:] % row_tokens != 0)
        & (fragment[1:] >= carried_count)
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
