"""Groups of one source: samples that are drawn as one, packed into one row and never cut.

A group ends where the next record does not continue it, or with its block. Until that record is
known its fragments are held back here, with what is passed over among them, so the draw knows whole
groups alone: the order has no place inside one where a step could end.

A group that no row holds, for its places, its segments or its media, is passed over whole, whatever
`long` says: to cut it would be to tear it. Its samples are counted as long_skipped. A bad record
inside a group is counted by its own reason; the others of the group stay together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import GroupRule
from federation.planning.cuts import FRAGMENT_COLUMNS, LENGTH, OFFSET, RECORD_ORDER
from federation.planning.extra_rows import ExtraRows, group_sums
from federation.planning.passed_over import LONG_SKIPPED, ORDER, PLACE, merged_notes, note

Int64Array = npt.NDArray[np.int64]


class RowLimits(NamedTuple):
    """What a row holds, beside the units of media that the job's extra rows know."""

    places: int
    segments: int
    multiple: int = 1
    """What the places of a segment are a multiple of."""


class GroupGatherer:
    """Puts the fragments of a source together to groups."""

    def __init__(self, rule: GroupRule, limits: RowLimits, extras: ExtraRows) -> None:
        self._by_record = rule.by == "record"
        self._limits = limits
        self._extras = extras
        self._no_fragments = np.zeros((FRAGMENT_COLUMNS + extras.count, 0), np.int64)
        self._held = self._no_fragments
        self._notes: Int64Array = np.zeros((4, 0), np.int64)
        self.block_key = -1
        """Block of the group that is held back, -1 where none is."""

    def add(
        self,
        block_key: int,
        first_order: int,
        is_continued: npt.NDArray[np.bool_],
        matrix: Int64Array,
        notes: Int64Array,
    ) -> tuple[Int64Array, Int64Array]:
        """Take the next records of a block.

        Args:
            block_key: Their block; a group of another one is ended by `end` before.
            first_order: Order of the first.
            is_continued: Records that continue the group of the one before them. Shape (records,).
            matrix: Their fragments, all but CUMULATIVE and the row `follow`.
            notes: What is passed over of them.

        Returns:
            Fragments of the groups that are whole now, and the notes of these.
        """
        starts = np.flatnonzero(~is_continued)
        first_head = first_order + int(starts[0]) if len(starts) else -1
        group = np.cumsum(~is_continued)[matrix[RECORD_ORDER] - first_order]
        matrix = np.concatenate((self._held, matrix), axis=1)
        group = np.concatenate((np.zeros(self._held.shape[1], np.int64), group))
        notes = np.concatenate((self._notes, notes), axis=1)
        if self._by_record:
            return self._whole(matrix, group, notes)
        if first_head < 0:
            self.block_key, self._held, self._notes = block_key, matrix, notes
            return self._no_fragments, notes[:, :0]
        last_head = first_order + int(starts[-1])
        is_held = group == len(starts)
        # A note stands behind its record, or inside it.
        is_later = (notes[ORDER] > last_head) | ((notes[ORDER] == last_head) & (notes[PLACE] > 0))
        self.block_key = block_key
        self._held, self._notes = matrix[:, is_held], notes[:, is_later]
        return self._whole(matrix[:, ~is_held], group[~is_held], notes[:, ~is_later])

    def end(self) -> tuple[Int64Array, Int64Array]:
        """Return the group that was held back and its notes: nothing continues it."""
        held, notes = self._held, self._notes
        self.block_key, self._held, self._notes = -1, self._no_fragments, notes[:, :0]
        return self._whole(held, np.zeros(held.shape[1], np.int64), notes)

    def _whole(
        self, matrix: Int64Array, group: Int64Array, notes: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return whole groups but for those that no row holds, and the notes with theirs."""
        count = matrix.shape[1]
        if not count:
            return matrix, notes
        is_start = np.ones(count, np.bool_)
        is_start[1:] = group[1:] != group[:-1]
        starts = np.flatnonzero(is_start)
        sizes = np.diff(np.append(starts, count))
        follow = np.repeat(starts + sizes, sizes) - np.arange(count) - 1
        self._extras.follow(matrix)[:] = follow
        held = group_sums(self._extras, matrix, self._limits.multiple)
        caps = (self._limits.places, self._limits.segments, *self._extras.units_max)
        is_long = np.repeat((held > np.array(caps)[:, None]).any(axis=0), sizes)
        if is_long.any():
            long = matrix[:, is_long]
            places = long[OFFSET] + long[LENGTH] + 1  # passed by what is drawn behind them
            lost = note(long[RECORD_ORDER], places, LONG_SKIPPED, long[LENGTH])
            notes = merged_notes(notes, lost)
            matrix = matrix[:, ~is_long]
        return matrix, notes
