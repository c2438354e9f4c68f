"""Packs a step's fragments end to end, GPT style: documents are cut where a row or the step ends.

Parts of a document that touch inside a row are one segment, also where the first of them was
carried from the step before. Samples of one record are documents of their own. Jobs with masks have
no such packing: what is trained of a fragment is known of it as a whole alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule
from federation.planning.step_pool import (
    BLOCK_KEY,
    DRAWN_STEP,
    INDEX,
    LENGTH,
    OFFSET,
    SOURCE,
    Packed,
    Pool,
    runs,
    step_tokens,
)

Int64Array = npt.NDArray[np.int64]


def pack_end_to_end(step_pool: Pool, rule: BatchRule) -> Packed:
    """Fill a step's rows without a gap, the carried rest first."""
    pool, carried_count, tokens_left = step_pool[:3]
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
            left[DRAWN_STEP + 1 :, 0] = 0  # no sample begins here
    stay = int(np.count_nonzero(through[:carried_count] > end))
    first_left = pool.shape[1] - left.shape[1]
    if first_left < carried_count and is_placed[first_left]:
        stay = 0  # a carried fragment was cut: its rest, and all behind it, join anew in order
    return Packed(
        pieces.segments,
        row,
        column,
        *runs(row),
        np.arange(carried_count - stay),
        left[:, stay:],
        is_placed,
        pieces.extras,
    )


class _Pieces(NamedTuple):
    segments: Int64Array
    starts: Int64Array
    """First token of each in the concatenation. Shape (n,)."""
    extras: Int64Array
    """Whether each begins a sample, where the job has such a row. Shape (extra rows, n)."""


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
    extras = pool[DRAWN_STEP + 1 :, fragment]
    lengths = np.diff(np.append(starts, end))
    skipped = starts - (through[fragment] - pool[LENGTH, fragment])
    segments[OFFSET] += skipped
    segments[LENGTH] = lengths
    extras[:, skipped > 0] = 0
    if not row_tokens or len(starts) < 2:
        return _Pieces(segments, starts, extras)
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
    if len(extras):
        is_joined &= extras[0, 1:] == 0  # another sample of the record is another segment
    if not is_joined.any():
        return _Pieces(segments, starts, extras)
    firsts = np.flatnonzero(np.append(True, ~is_joined))
    segments = segments[:, firsts]
    segments[LENGTH] = np.add.reduceat(lengths, firsts)
    return _Pieces(segments, starts[firsts], extras[:, firsts])


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
