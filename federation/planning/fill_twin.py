"""Best fit of fragments into rows, in Python: the twin of the C kernel's `fill_*`.

Ordered lists hold `free space << 32 | row` of the open rows, so the first key at or above a
fragment's size is the row with the least free space that holds it, the lowest of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


def fill_tokens(sizes: Int64Array, space: Int64Array, room: Int64Array, found: Int64Array) -> None:
    """Place fragments in turn into rows with a cap on tokens alone.

    Args:
        sizes: Places of each fragment. Shape (n,).
        space: Free places of each row; what is placed is taken from it. Shape (R,).
        room: Segments that each row may still take, likewise. Shape (R,).
        found: Receives the row of each fragment, -1 where no row holds it. Shape (n,).
    """
    left = room.tolist()
    free = space.tolist()
    keys = sorted([free[row] << _ROW_BITS | row for row in range(len(free)) if left[row] > 0])
    rows: list[int] = []
    for size in (sizes << _ROW_BITS).tolist():
        place = bisect_left(keys, size)
        if place == len(keys):
            rows.append(-1)
            continue
        key = keys.pop(place)
        row = key & _ROW_MASK
        rows.append(row)
        free[row] = (key - size) >> _ROW_BITS
        left[row] -= 1
        if left[row]:
            insort(keys, key - size)
    space[:], room[:], found[:] = free, left, rows


def fill_units(
    taken: Int64Array,
    leads: Int64Array,
    space: Int64Array,
    room: Int64Array,
    found: Int64Array,
) -> None:
    """Place fragments in turn into rows with caps on tokens and on units of media.

    Args:
        taken: Tokens, then units of each modality, of each fragment. Shape (n, 1 + modalities).
        leads: Which of these each fragment is placed by. Shape (n,).
        space: What is free in each row, of each of these. Shape (1 + modalities, R).
        room: As in `fill_tokens`. Shape (R,).
        found: As in `fill_tokens`. Shape (n,).
    """
    free: list[list[int]] = space.tolist()
    left = room.tolist()
    keys = [
        sorted([kind[row] << _ROW_BITS | row for row in range(len(left)) if left[row] > 0])
        for kind in free
    ]
    rows: list[int] = []
    for mine, lead in zip(taken.tolist(), leads.tolist(), strict=True):
        row = _first_that_holds(keys[lead], free, mine, lead)
        rows.append(row)
        if row >= 0:
            left[row] -= 1
            _take(keys, free, row, mine, is_closed=not left[row])
    space[:], room[:], found[:] = free, left, rows


def _first_that_holds(keys: list[int], free: list[list[int]], mine: list[int], lead: int) -> int:
    for key in keys[bisect_left(keys, mine[lead] << _ROW_BITS) :]:
        row = key & _ROW_MASK
        if all(kind[row] >= size for kind, size in zip(free, mine, strict=True)):
            return row
    return -1


def _take(
    keys: list[list[int]], free: list[list[int]], row: int, mine: list[int], *, is_closed: bool
) -> None:
    for kind, ordered, size in zip(free, keys, mine, strict=True):
        if size or is_closed:
            del ordered[bisect_left(ordered, kind[row] << _ROW_BITS | row)]
            kind[row] -= size
            if not is_closed:
                insort(ordered, kind[row] << _ROW_BITS | row)
