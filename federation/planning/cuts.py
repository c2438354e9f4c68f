"""Cuts the records of a run into fragments: where samples begin, and where a row would be too short.

A record is one sample, unless marks say where in it others begin. A sample that is longer than a
row, or that has more units of a modality than a row may hold, is a long one: `split` cuts it as a
row fills up, `truncate` keeps what a row holds, `skip` passes it over. No cut falls inside an item
of media: the fragment ends before it.

Where a fragment ends depends on where it begins and no more, so a record that was begun goes on
behind its drawn tokens as if it had never been left (`split`), or with its next sample (`truncate`,
`skip`: of the one that was begun nothing more is ever drawn).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.chunk import Marks
from federation.model.job import LongPolicy
from federation.planning.extra_rows import ExtraRows
from federation.planning.passed_over import (
    LONG_SKIPPED,
    LONG_TRUNCATED,
    ORDER,
    PLACE,
    REASON,
    TOKENS,
    merged_notes,
    note,
    note_records,
)
from federation.planning.run_marks import RunMarks
from msd_client.contract.errors import DataError

Int64Array = npt.NDArray[np.int64]

SOURCE, BLOCK_KEY, INDEX, OFFSET, LENGTH, RECORD_ORDER, CUMULATIVE = range(7)
"""First rows of a matrix of known fragments; the job's extra rows follow. CUMULATIVE counts in the
mixture's unit up to and with a fragment."""
FRAGMENT_COLUMNS = 7

_NO_LIMIT = 1 << 62


class RunRecords(NamedTuple):
    """Records of a run."""

    matrix: Int64Array
    """A column for each, as of a fragment that holds it whole; CUMULATIVE and the extra rows are
    not set yet. Shape (FRAGMENT_COLUMNS + extra rows, n)."""
    status: npt.NDArray[np.uint8]
    is_dropped: npt.NDArray[np.bool_]
    drawn_tokens: int
    """Drawn before of the first one, which is then a good one; 0 where nothing was."""


class _Spans(NamedTuple):
    """Stretches of a run's tokens that follow each other, from one on without a gap."""

    begins: Int64Array
    ends: Int64Array
    is_first: Int64Array
    """1 where a sample begins, else 0."""


class RecordCutter:
    """Cuts the records of one source for one row length."""

    def __init__(
        self,
        source: str,
        row_tokens: int,
        long: LongPolicy,
        extras: ExtraRows,
        *,
        is_grouped: bool = False,
    ) -> None:
        """Cut for rows of so many places.

        Args:
            source: Name of the source, for messages.
            row_tokens: Longest fragment.
            long: What becomes of longer samples.
            extras: Those of the job.
            is_grouped: Samples stay whole, however long: their groups are judged as a whole
                (federation.planning.groups).
        """
        self._source = source
        self._row_tokens = _NO_LIMIT if is_grouped else row_tokens
        self._long: LongPolicy = "skip" if is_grouped else long
        self._is_grouped = is_grouped
        self._extras = extras

    def cut_plain(self, records: RunRecords) -> tuple[Int64Array, Int64Array]:
        """Cut records without marks.

        Returns:
            Fragments, all but CUMULATIVE, and notes of what is passed over.
        """
        matrix, status, is_dropped, drawn_tokens = records
        if drawn_tokens:
            first = self._go_on(matrix, drawn_tokens)
            matrix, status, is_dropped = matrix[:, first:], status[first:], is_dropped[first:]
        is_long = matrix[LENGTH] > self._row_tokens
        notes: Int64Array | None = None
        if is_dropped.any() or is_long.any():
            matrix, notes = self._cut(matrix, status, is_dropped, is_long & ~is_dropped)
        if self._extras.count:
            begins = matrix[OFFSET] == 0
            units = np.zeros((len(self._extras.units_max), 1), np.int64)
            self._fill_extras(matrix, begins, 2 * matrix[LENGTH] + 1, units)
        return matrix, np.zeros((4, 0), np.int64) if notes is None else notes

    def cut_marked(
        self, records: RunRecords, marks: Marks, skip: int
    ) -> tuple[Int64Array, Int64Array]:
        """Cut records with marks.

        Args:
            records: The records.
            marks: Those of their chunk, checked.
            skip: Records of the chunk before them.

        Returns:
            Fragments, all but CUMULATIVE, and notes of what is passed over.

        Raises:
            DataError: What was drawn of the first record ends inside an item of it.
        """
        matrix, status, is_dropped, drawn_tokens = records
        lengths = np.where(is_dropped, 0, matrix[LENGTH])
        starts = np.cumsum(lengths) - lengths
        found = RunMarks(starts, marks, skip, self._extras)
        begins = np.unique(np.concatenate((starts[lengths > 0], found.samples)))
        ends = np.append(begins[1:], lengths.sum())[: len(begins)]
        spans = _Spans(begins, ends, np.ones(len(begins), np.int64))
        if drawn_tokens:
            spans = self._rest(spans, found, drawn_tokens)
        notes = note_records(matrix[RECORD_ORDER, is_dropped], status[is_dropped])
        is_long = self._is_long(spans, found)
        if is_long.any() and self._long == "split":
            spans = self._split(spans, found, is_long)
        elif is_long.any():
            spans, lost = self._shorten(spans, found, is_long, matrix[RECORD_ORDER], starts)
            notes = merged_notes(notes, lost)
        record = starts.searchsorted(spans.begins, side="right") - 1
        matrix = matrix[:, record]
        matrix[OFFSET] = spans.begins - starts[record]
        matrix[LENGTH] = spans.ends - spans.begins
        trained = found.trained(spans.begins, spans.ends)
        units = found.units(spans.begins, spans.ends)
        self._fill_extras(matrix, spans.is_first, trained, units)
        return matrix, notes

    def _go_on(self, matrix: Int64Array, drawn_tokens: int) -> int:
        """Cut what was drawn off the first record; return 1 where nothing of it is left, else 0."""
        if self._long != "split" or int(matrix[LENGTH, 0]) == drawn_tokens:
            return 1  # of a long one no more is drawn, also where rows were shorter then
        matrix[OFFSET, 0] = drawn_tokens
        matrix[LENGTH, 0] -= drawn_tokens
        return 0

    def _cut(
        self,
        matrix: Int64Array,
        status: npt.NDArray[np.uint8],
        is_dropped: npt.NDArray[np.bool_],
        is_long: npt.NDArray[np.bool_],
    ) -> tuple[Int64Array, Int64Array]:
        row_tokens = self._row_tokens
        notes = note_records(matrix[RECORD_ORDER], status)
        is_noted = is_dropped
        if self._long == "skip":
            notes[REASON, is_long] = LONG_SKIPPED
            notes[TOKENS, is_long] = matrix[LENGTH, is_long]
            is_noted = is_dropped = is_dropped | is_long
        elif self._long == "truncate":
            notes[REASON, is_long] = LONG_TRUNCATED
            notes[TOKENS, is_long] = matrix[LENGTH, is_long] - row_tokens
            notes[ORDER, is_long] -= 1  # counted with what is drawn of it
            notes[PLACE, is_long] = row_tokens
            matrix[LENGTH, is_long] = row_tokens
            is_noted = is_dropped | is_long
        if is_dropped.any():
            matrix = matrix[:, ~is_dropped]
        if self._long == "split" and is_long.any():
            parts = -(-matrix[LENGTH] // row_tokens)
            starts = np.repeat(np.cumsum(parts) - parts, parts)
            matrix = np.repeat(matrix, parts, axis=1)
            skipped = (np.arange(matrix.shape[1]) - starts) * row_tokens
            matrix[OFFSET] += skipped
            matrix[LENGTH] = np.minimum(matrix[LENGTH] - skipped, row_tokens)
        return matrix, notes[:, is_noted]

    def _rest(self, spans: _Spans, found: RunMarks, drawn_tokens: int) -> _Spans:
        """Return what is left behind the first tokens of the first record."""
        if found.is_inside_item(drawn_tokens):
            raise DataError(
                f"source {self._source}: {drawn_tokens} tokens of the record at the state's cursor "
                "were drawn, which ends inside an item of media as it is read now: it was changed "
                "since; restore the shard and the files it names",
                source=self._source,
            )
        first = int(spans.begins.searchsorted(drawn_tokens))
        is_begun = first > 0 and int(spans.ends[first - 1]) > drawn_tokens
        if is_begun and self._long == "split":
            first -= 1
            spans.begins[first], spans.is_first[first] = drawn_tokens, 0
        return _Spans(*(column[first:] for column in spans))

    def _is_long(self, spans: _Spans, found: RunMarks) -> npt.NDArray[np.bool_]:
        is_long: npt.NDArray[np.bool_] = spans.ends - spans.begins > self._row_tokens
        if self._is_grouped:
            return is_long
        units = found.units(spans.begins, spans.ends)
        for most, count in zip(self._extras.units_max, units, strict=True):
            is_long |= count > most
        return is_long

    def _split(self, spans: _Spans, found: RunMarks, is_long: npt.NDArray[np.bool_]) -> _Spans:
        cuts: list[int] = []
        whole = zip(spans.begins[is_long].tolist(), spans.ends[is_long].tolist(), strict=True)
        for begin, end in whole:
            place = found.reach(begin, end, self._row_tokens)
            while place < end:
                cuts.append(place)
                place = found.reach(place, end, self._row_tokens)
        begins = np.append(spans.begins, cuts)
        order = np.argsort(begins)
        return _Spans(
            begins[order],
            np.sort(np.append(spans.ends, cuts)),
            np.append(spans.is_first, np.zeros(len(cuts), np.int64))[order],
        )

    def _shorten(
        self,
        spans: _Spans,
        found: RunMarks,
        is_long: npt.NDArray[np.bool_],
        orders: Int64Array,
        starts: Int64Array,
    ) -> tuple[_Spans, Int64Array]:
        """Truncate or skip long samples; return what is left, and notes of what is not."""
        begins, ends = spans.begins[is_long], spans.ends[is_long]
        record = starts.searchsorted(begins, side="right") - 1
        order = orders[record]
        if self._long == "skip":
            places = ends - starts[record] + 1  # passed by what is drawn behind it
            notes = note(order, places, LONG_SKIPPED, ends - begins)
            return _Spans(*(column[~is_long] for column in spans)), notes
        row_tokens = self._row_tokens
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        kept = np.array([found.reach(begin, end, row_tokens) for begin, end in pairs], np.int64)
        spans.ends[is_long] = kept
        return spans, note(order, kept - starts[record], LONG_TRUNCATED, ends - kept)

    def _fill_extras(
        self,
        matrix: Int64Array,
        begins: npt.NDArray[np.generic],
        trained: Int64Array,
        units: Int64Array,
    ) -> None:
        """Set the extra rows of fragments, those that the job has."""
        extras = self._extras
        if extras.has_begins:
            extras.begins(matrix)[:] = begins
        if extras.has_groups:
            extras.follow(matrix)[:] = 0
        if extras.has_trained:
            extras.trained(matrix)[:] = trained
            extras.units(matrix)[:] = units
