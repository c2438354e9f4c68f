"""Best fit: each fragment goes into the row with the least free space that holds it.

Where rows have a cap on units of media too, a row holds a fragment if tokens and units of every
modality fit. The free space that decides is that of tokens for a fragment without units; a fragment
with units takes the row with the least free units of the modality of which it takes the largest
part of a row (the first such one). So rows fill up in what is scarce for the fragment, and a text
never has to look past the first row. Ties go to the lowest row.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_CARRIED_ROOM_DIVISOR = 4


def best_fit_rows(
    sizes: Int64Array,
    carried_count: int,
    row_count: int,
    row_tokens: int,
    segments_max: int,
    own_count: int | None = None,
    units: Int64Array | None = None,
    units_max: tuple[int, ...] = (),
) -> list[int]:
    """Return the row of each size, taken in turn, or -1 where no row holds it.

    A row with `segments_max` segments is closed. The carried ones come first and are often tiny, so
    they are kept from spoiling rows: they fill a quarter of a row's segments, or they would close
    rows that are all but empty, and they keep off the rows that drawn fragments of full size need,
    as far as they fit into the others. Those that find no row so get a second try without limits,
    still before the drawn ones. Sizes behind the first `own_count` are fillers, which change
    nothing for those before them.

    Args:
        sizes: Places of each fragment. Shape (n,).
        carried_count: How many of the first are carried ones.
        row_count: Rows.
        row_tokens: Places of a row.
        segments_max: Most segments of a row.
        own_count: How many are no fillers; None: all.
        units: Units of media of each fragment. Shape (modalities, n).
        units_max: Most units of a row, of each modality.
    """
    rows: _TokenRows | _UnitRows
    if units is None or not units.any():
        rows = _TokenRows(sizes, row_count, row_tokens)
    else:
        caps = np.array([row_tokens, *units_max])[:, None]
        rows = _UnitRows(np.concatenate((sizes[None], units)), row_count, caps)
    everything = [segments_max] * row_count
    if not carried_count:
        return rows.fill(range(len(sizes)), everything)
    full_count = rows.full_count(carried_count, own_count)
    needed = max(rows.five_quarters(carried_count), carried_count // segments_max) + 1
    usable = max(row_count - full_count, min(needed, row_count))
    part = max(1, segments_max // _CARRIED_ROOM_DIVISOR, 5 * carried_count // (4 * usable))
    part = min(part, segments_max)
    room = [part] * usable + [0] * (row_count - usable)
    found = rows.fill(range(carried_count), room)
    room = [left + segments_max - part for left in room[:usable]] + everything[usable:]
    missed = [place for place, row in enumerate(found) if row < 0]
    if missed:
        for place, row in zip(missed, rows.fill(missed, room), strict=True):
            found[place] = row
    return found + rows.fill(range(carried_count, len(sizes)), room)


class _TokenRows:
    """Rows with a cap on tokens alone.

    A fragment's key is its size << 32 and a row's key is free space << 32 | row, so the first row
    key at or above a fragment's is the best fit.
    """

    def __init__(self, sizes: Int64Array, row_count: int, row_tokens: int) -> None:
        self._row_tokens = row_tokens
        self._all = sizes
        self._sizes: list[int] = (sizes << _ROW_BITS).tolist()
        self._free = [row_tokens] * row_count

    def full_count(self, begin: int, end: int | None) -> int:
        """Return how many of these fragments fill a row."""
        return int(np.count_nonzero(self._all[begin:end] == self._row_tokens))

    def five_quarters(self, count: int) -> int:
        """Return the rows that the first fragments fill, and a quarter more."""
        return 5 * int(self._all[:count].sum()) // (4 * self._row_tokens)

    def fill(self, places: range | list[int], room: list[int]) -> list[int]:
        """Place the fragments at these places in turn; return the row of each, or -1.

        Args:
            places: Which fragments.
            room: Segments that each row may still take; what they use is taken from it.
        """
        if isinstance(places, range):
            sizes = self._sizes[places.start : places.stop]
        else:
            sizes = [self._sizes[place] for place in places]
        keys = sorted(
            [space << _ROW_BITS | row for row, space in enumerate(self._free) if room[row]]
        )
        open_count = len(keys)
        found: list[int] = []
        append, pop = found.append, keys.pop
        for size in sizes:
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
                self._free[row] = (key - size) >> _ROW_BITS
                open_count -= 1
        for key in keys:
            self._free[key & _ROW_MASK] = key >> _ROW_BITS
        return found


class _UnitRows:
    """Rows with caps on tokens and on units of media."""

    def __init__(self, taken: Int64Array, row_count: int, caps: Int64Array) -> None:
        """Hold what fragments take.

        Args:
            taken: Tokens of each, then units of each modality. Shape (1 + modalities, n).
            row_count: Rows.
            caps: Of a row. Shape (1 + modalities, 1).
        """
        self._caps = caps
        self._all = taken
        self._taken: list[list[int]] = taken.T.tolist()
        # The part of a row as an integer, so that it is the same everywhere.
        parts = (taken[1:] << _ROW_BITS) // caps[1:]
        self._leads: list[int] = np.where(parts.any(axis=0), parts.argmax(axis=0) + 1, 0).tolist()
        self._free: list[list[int]] = [[cap] * row_count for cap in caps[:, 0].tolist()]

    def full_count(self, begin: int, end: int | None) -> int:
        """Return how many of these fragments fill a row with tokens or units."""
        return int((self._all[:, begin:end] == self._caps).any(axis=0).sum())

    def five_quarters(self, count: int) -> int:
        """Return the rows that the first fragments fill with what is scarcest, and a quarter more."""
        held = self._all[:, :count].sum(axis=1, keepdims=True)
        return int((5 * held // (4 * self._caps)).max())

    def fill(self, places: range | list[int], room: list[int]) -> list[int]:
        """Place fragments, see `_TokenRows`."""
        keys = [
            sorted([space << _ROW_BITS | row for row, space in enumerate(spaces) if room[row]])
            for spaces in self._free
        ]
        found: list[int] = []
        for number in places:
            row = self._first_that_holds(keys[self._leads[number]], number)
            found.append(row)
            if row >= 0:
                room[row] -= 1
                self._take(keys, row, self._taken[number], is_closed=not room[row])
        return found

    def _first_that_holds(self, keys: list[int], number: int) -> int:
        taken, lead = self._taken[number], self._leads[number]
        first = bisect_left(keys, taken[lead] << _ROW_BITS)
        if not lead:  # no units: every row with so many tokens holds it
            return keys[first] & _ROW_MASK if first < len(keys) else -1
        tokens, free_tokens = taken[0], self._free[0]
        others = [
            (spaces, size)
            for spaces, size in zip(self._free[1:], taken[1:], strict=True)
            if size and spaces is not self._free[lead]
        ]
        for key in keys[first:]:
            row = key & _ROW_MASK
            if free_tokens[row] >= tokens and not (
                others and any(spaces[row] < size for spaces, size in others)
            ):
                return row
        return -1

    def _take(self, keys: list[list[int]], row: int, taken: list[int], *, is_closed: bool) -> None:
        for spaces, ordered, size in zip(self._free, keys, taken, strict=True):
            if size or is_closed:
                del ordered[bisect_left(ordered, spaces[row] << _ROW_BITS | row)]
                spaces[row] -= size
                if not is_closed:
                    insort(ordered, spaces[row] << _ROW_BITS | row)
