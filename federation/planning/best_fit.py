"""Best fit: each fragment goes into the row with the least free space that holds it.

Where rows have a cap on units of media too, a row holds a fragment if tokens and units of every
modality fit. The free space that decides is that of tokens for a fragment without units; a fragment
with units takes the row with the least free units of the modality of which it takes the largest
part of a row (the first such one). So rows fill up in what is scarce for the fragment, and a text
never has to look past the first row. Ties go to the lowest row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.planning.kernel import fill_tokens, fill_units

Int64Array = npt.NDArray[np.int64]

_PART_BITS = 32
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
    segments: Int64Array | None = None,
) -> Int64Array:
    """Return the row of each size, taken in turn, or -1 where no row holds it. Shape (n,).

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
        segments: How many segments each is of, where some are of several. Shape (n,).
    """
    taken, caps = taken_and_caps(sizes, row_tokens, units, units_max, segments, segments_max)
    rows = Rows(taken, caps, row_count, has_segments=segments is not None)
    found = np.empty(len(sizes), np.int64)
    everything = np.full(row_count, segments_max)
    if not carried_count:
        found[:] = rows.fill(np.arange(len(sizes)), everything)
        return found
    full_count = rows.full_count(carried_count, own_count)
    needed = max(rows.five_quarters(carried_count), carried_count // segments_max) + 1
    usable = max(row_count - full_count, min(needed, row_count))
    part = max(1, segments_max // _CARRIED_ROOM_DIVISOR, 5 * carried_count // (4 * usable))
    part = min(part, segments_max)
    room = np.where(np.arange(row_count) < usable, part, 0)
    found[:carried_count] = rows.fill(np.arange(carried_count), room)
    room[:usable] += segments_max - part
    room[usable:] = segments_max
    missed = np.flatnonzero(found[:carried_count] < 0)
    if len(missed):
        found[missed] = rows.fill(missed, room)
    found[carried_count:] = rows.fill(np.arange(carried_count, len(sizes)), room)
    return found


def taken_and_caps(
    sizes: Int64Array,
    row_tokens: int,
    units: Int64Array | None,
    units_max: tuple[int, ...],
    segments: Int64Array | None = None,
    segments_max: int = 0,
) -> tuple[Int64Array, Int64Array]:
    """Return what each fragment takes, and a row's caps: tokens, and units where there are any.

    Where `segments` are given they come last. Shapes (1 + modalities, n) and (1 + modalities, 1),
    or (1, n) and (1, 1), one more row each with segments.
    """
    kinds, caps = [sizes], [row_tokens]
    if units is not None and units.any():
        kinds += list(units)
        caps += units_max
    if segments is not None:
        kinds.append(segments)
        caps.append(segments_max)
    return np.stack(kinds), np.array(caps)[:, None]


class Rows:
    """Rows with a cap on tokens, and on units of media where there are any."""

    def __init__(
        self, taken: Int64Array, caps: Int64Array, row_count: int, *, has_segments: bool = False
    ) -> None:
        """Make empty rows.

        Args:
            taken: Tokens of each fragment, then units of each modality. Shape (1 + modalities, n).
            caps: Of a row. Shape (1 + modalities, 1).
            row_count: Rows.
            has_segments: True where the last row of both is segments, by which no row is chosen.
        """
        self._scarce = len(caps) - has_segments
        self._caps = caps
        self._taken = taken
        self._space = np.repeat(caps, row_count, axis=1)

    def full_count(self, begin: int, end: int | None) -> int:
        """Return how many of these fragments fill a row with tokens or units."""
        return int((self._taken[:, begin:end] == self._caps).any(axis=0).sum())

    def five_quarters(self, count: int) -> int:
        """Return the rows that the first fragments fill with what is scarcest, and a quarter more."""
        held = self._taken[:, :count].sum(axis=1, keepdims=True)
        return int((5 * held // (4 * self._caps)).max())

    def take(self, places: Int64Array, rows: Int64Array) -> None:
        """Take from rows what the fragments at these places need."""
        for space, taken in zip(self._space, self._taken, strict=True):
            np.subtract.at(space, rows, taken[places])

    def fill(self, places: Int64Array, room: Int64Array) -> Int64Array:
        """Place the fragments at these places in turn; return the row of each, or -1. Shape (n,).

        Args:
            places: Which fragments.
            room: Segments that each row may still take; what they use is taken from it. Shape (R,).
        """
        found = np.empty(len(places), np.int64)
        if len(self._taken) == 1:
            fill_tokens(self._taken[0, places], self._space[0], room, found)
            return found
        taken = self._taken[:, places]
        # The part of a row as an integer, so that it is the same everywhere.
        parts = (taken[1 : self._scarce] << _PART_BITS) // self._caps[1 : self._scarce]
        leads = np.zeros(len(places), np.int64)
        if len(parts):
            leads = np.where(parts.any(axis=0), parts.argmax(axis=0) + 1, 0)
        fill_units(np.ascontiguousarray(taken.T), leads, self._space, room, found)
        return found
