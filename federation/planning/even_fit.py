"""`best_fit_even`: rows filled as by best fit, and even in cost before they are placed.

Best fit puts long fragments together, so rows of long documents stand beside rows of short ones. Here
the long ones are dealt first, by falling cost, each to the row that costs least so far and has room
(LPT under caps); short ones then fill what is left by best fit. Long are fragments of more than 1/32
of a row's tokens - where encoders cost something, or of its cost - as long as an eighth of the step's
tokens is left to fill up with. Which fragments a step takes is bounded as by best fit: where a carried fragment that best fit would place finds no row, a
row stays empty, or the rows hold less than 63/64 of what best fit's hold, the step's rows are those of
best fit.

The costs are the job's own, encoders' included; no calibration and no mesh has a part in it, so rows
stay a function of the job. A document as long as a row costs what it costs: rows are made even where documents are
shorter, say half a row or less.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.planning.best_fit import Rows
from federation.planning.kernel import deal_lightest

Int64Array = npt.NDArray[np.int64]

_LONG_DIVISOR = 32
_FILL_DIVISOR = 8
_LOSS_DIVISOR = 64


def even_rows(
    costs: Int64Array,
    taken: Int64Array,
    caps: Int64Array,
    shape: tuple[int, int],
    own_count: int,
    *,
    is_media_weighed: bool = False,
    has_segments: bool = False,
) -> Int64Array:
    """Return the row of each fragment, or -1, in the order in which best fit takes them. Shape (n,).

    Args:
        costs: Of each fragment, at least 0. Shape (n,).
        taken: Tokens and units of each. Shape (kinds, n).
        caps: Of a row. Shape (kinds, 1).
        shape: (rows, most segments of a row).
        own_count: How many are no fillers, which come last and change nothing for the others.
        is_media_weighed: The costs are of media too, so a fragment may be long by its cost.
        has_segments: True where the last of the kinds is segments.
    """
    row_count, segments_max = shape
    long = _long_ones(
        taken[0, :own_count],
        costs[:own_count],
        int(caps[0, 0]),
        row_count,
        is_media_weighed=is_media_weighed,
    )
    dealt = np.empty(len(long), np.int64)
    loads = np.zeros(row_count, np.int64)
    columns = np.ascontiguousarray(taken[:, long])
    deal_lightest(costs[long], columns, caps[:, 0].copy(), segments_max, dealt, loads)
    found = np.empty(len(costs), np.int64)
    found[long] = dealt
    is_dealt = dealt >= 0
    rows = Rows(taken, caps, row_count, has_segments=has_segments)
    rows.take(long[is_dealt], dealt[is_dealt])
    room = segments_max - np.bincount(dealt[is_dealt], minlength=row_count)
    is_short = np.ones(len(costs), bool)
    is_short[long] = False
    short = np.flatnonzero(is_short)
    found[short] = rows.fill(short, room)
    return found


def is_as_good(
    even: Int64Array,
    best: Int64Array,
    tokens: Int64Array,
    carried_count: int,
    own_count: int,
    *,
    is_last: bool,
) -> bool:
    """Return whether even rows may stand for those of best fit, see above.

    Args:
        even: The row of each fragment of the pool, or -1. Shape (n,).
        best: The same by best fit. Shape (n,).
        tokens: Of each fragment. Shape (n,).
        carried_count: How many of the first are carried ones.
        own_count: How many are no fillers.
        is_last: Every fragment that best fit places has to find a row.
    """
    even, best, tokens = even[:own_count], best[:own_count], tokens[:own_count]
    missed = (best >= 0) & (even < 0)
    if missed[:carried_count].any() or (is_last and missed.any()):
        return False
    held = int(tokens[best >= 0].sum())
    lost = held - int(tokens[even >= 0].sum())
    return lost * _LOSS_DIVISOR <= held and _rows_used(even) >= _rows_used(best)


def _rows_used(row_of: Int64Array) -> int:
    return int(np.count_nonzero(np.bincount(row_of[row_of >= 0])))


def _long_ones(
    tokens: Int64Array,
    costs: Int64Array,
    row_tokens: int,
    row_count: int,
    *,
    is_media_weighed: bool,
) -> Int64Array:
    """Return the places of the fragments that are dealt by cost, by falling cost. Shape (k,)."""
    is_long = tokens * _LONG_DIVISOR > row_tokens
    if is_media_weighed:
        is_long |= costs > int(costs.sum()) // (row_count * _LONG_DIVISOR)
    order = np.argsort(-costs, kind="stable")
    order = order[is_long[order]]
    left = int(tokens.sum()) - np.cumsum(tokens[order])
    return order[left * _FILL_DIVISOR >= row_tokens * row_count]
