"""Marks of the records of a run: checked, and as sums that answer for any stretch of tokens at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

from federation.model.chunk import (
    MARK_BEGIN,
    MARK_GROUP,
    MARK_KIND,
    MARK_SAMPLE,
    MARK_TOKENS,
    MARK_UNITS,
    ChunkMeta,
    Marks,
)
from federation.planning.extra_rows import ExtraRows
from msd_client.contract.errors import ProtocolError

Int64Array = npt.NDArray[np.int64]


def check_marks(
    meta: ChunkMeta,
    extras: ExtraRows,
    row_tokens: int,
    source: str,
    *,
    is_grouped: bool = False,
) -> None:
    """Refuse marks that a loader of this job cannot have sent.

    Args:
        meta: A chunk with marks.
        extras: Those of the job: kinds that it has no row for are refused too.
        row_tokens: Places of the smallest row: no item is longer.
        source: Name of the source, for the message.
        is_grouped: True where its neighbouring records may be one group.

    Raises:
        ProtocolError: Marks contradict each other or their records, or an item fits into no row.
    """
    assert meta.marks is not None
    counts, table = meta.marks.counts, meta.marks.table.astype(np.int64)
    where = f"source {source}: marks of the chunk at block {meta.block_key}, {meta.first_index}"
    is_whole = (
        counts.shape == meta.lengths.shape == meta.status.shape
        and table.shape == (int(counts.sum(dtype=np.int64)), 4)
        and not (len(counts) and int(counts.min()) < 0)
    )
    if not is_whole:
        raise ProtocolError(
            f"{where}: {len(counts)} counts and a table of shape {table.shape} do not belong to "
            f"{len(meta.lengths)} records"
        )
    kind, begin, tokens, units = table.T
    record = np.repeat(np.arange(len(counts)), counts)
    length = np.where(meta.status == 0, meta.lengths, 0)[record]
    is_sample, is_item, is_group = kind == MARK_SAMPLE, kind >= 0, kind == MARK_GROUP
    most = np.array([*extras.units_max, 0])[np.clip(kind, 0, len(extras.units_max))]
    is_bad = (
        (kind < (MARK_GROUP if is_grouped else MARK_SAMPLE))
        | (is_sample & (not extras.has_begins))
        | (is_group & ((begin != 0) | (tokens != 0) | (record + meta.first_index == 0)))
        | (kind >= (len(extras.units_max) if extras.has_trained else MARK_SAMPLE + 1))
        | (begin < is_sample)
        | (begin + tokens + is_sample > length)
        | (tokens < is_item)
        | (is_sample & (tokens != 0))
        | (is_item & ((units < 1) | (units > most) | (tokens > row_tokens)))
    )
    is_next = record[1:] == record[:-1]
    ends = begin[:-1] + tokens[:-1] + (is_sample[:-1] & is_sample[1:])
    is_bad[1:] |= is_next & ((begin[1:] < ends) | is_group[1:])
    if is_bad.any():
        place = int(is_bad.argmax())
        raise ProtocolError(
            f"{where}: mark {place} of kind {kind[place]} at token {begin[place]}, of "
            f"{tokens[place]} tokens and {units[place]} units, fits neither its record of "
            f"{length[place]} tokens and the mark before it nor rows of {row_tokens} tokens and "
            f"{extras.units_max} units"
        )


def continued_records(marks: Marks | None, skip: int, count: int) -> npt.NDArray[np.bool_]:
    """Return which records of a chunk continue the group of the one before them. Shape (count,).

    Args:
        marks: Of the chunk, None where it has none.
        skip: Records of the chunk before these.
        count: How many these are.
    """
    found = np.zeros(count, np.bool_)
    if marks is not None and len(marks.table):
        has_marks = np.flatnonzero(marks.counts)
        firsts = np.cumsum(marks.counts, dtype=np.int64)[has_marks] - marks.counts[has_marks]
        records = has_marks[marks.table[firsts, MARK_KIND] == MARK_GROUP] - skip
        found[records[(records >= 0) & (records < count)]] = True
    return found


class RunMarks:
    """Marks in places of the whole run, that is of all its tokens, one record after the other."""

    def __init__(self, starts: Int64Array, marks: Marks, skip: int, extras: ExtraRows) -> None:
        """Take the marks of some records of a chunk.

        Args:
            starts: First place of each record. Shape (records,).
            marks: Of the chunk.
            skip: Records of the chunk before these.
            extras: Those of the job.
        """
        counts = marks.counts[skip : skip + len(starts)]
        first = int(marks.counts[:skip].sum(dtype=np.int64))
        table = marks.table[first : first + int(counts.sum(dtype=np.int64))].astype(np.int64)
        begin = np.repeat(starts, counts) + table[:, MARK_BEGIN]
        is_span = table[:, MARK_KIND] > MARK_SAMPLE
        is_item = table[:, MARK_KIND] >= 0
        self.samples: Int64Array = begin[table[:, MARK_KIND] == MARK_SAMPLE]
        """First places of samples but for those that begin with their record. Shape (s,)."""
        tokens = table[is_span, MARK_TOKENS]
        self._span_begins = begin[is_span]
        self._span_ends = self._span_begins + tokens
        self._untrained = np.concatenate(([0], np.cumsum(tokens)))
        self._item_begins = begin[is_item]
        self._item_ends = self._item_begins + table[is_item, MARK_TOKENS]
        self._units_max = extras.units_max
        kinds = table[is_item, MARK_KIND]
        of_kind = kinds == np.arange(len(extras.units_max))[:, None]
        self._units: Int64Array = np.zeros((len(of_kind), len(kinds) + 1), np.int64)
        """Units of each modality before each item. Shape (modalities, items + 1)."""
        np.cumsum(np.where(of_kind, table[is_item, MARK_UNITS], 0), axis=1, out=self._units[:, 1:])
        self._lists: tuple[list[int], list[int], list[list[int]]] | None = None

    def trained(self, begins: Int64Array, ends: Int64Array) -> Int64Array:
        """Return 2 * trained tokens + 1 if the first is trained, of stretches. Shape (n,)."""
        count = ends - begins - (self._untrained_before(ends) - self._untrained_before(begins))
        trained: Int64Array = 2 * count + self._is_trained(begins)
        return trained

    def units(self, begins: Int64Array, ends: Int64Array) -> Int64Array:
        """Return the units of each modality in stretches that cut no item. Shape (modalities, n)."""
        first = self._item_begins.searchsorted(begins)
        last = self._item_begins.searchsorted(ends)
        units: Int64Array = self._units[:, last] - self._units[:, first]
        return units

    def is_inside_item(self, place: int) -> bool:
        """Return True where a cut at a place would cut an item."""
        before = int(self._item_begins.searchsorted(place)) - 1
        return before >= 0 and int(self._item_ends[before]) > place

    def reach(self, begin: int, end: int, row_tokens: int) -> int:
        """Return how far a fragment goes that begins at a place: to `end`, or as far as a row holds.

        It ends before an item that it would cut, or whose units are too many for it. What
        `check_marks` let pass fits alone, so the fragment has a token at least.
        """
        begins, ends, units = self._as_lists()
        stop = min(end, begin + row_tokens)
        first = bisect_left(begins, begin)
        last = bisect_left(begins, stop, first)
        if last > first and ends[last - 1] > stop:
            stop = begins[last - 1]
        for most, through in zip(self._units_max, units, strict=True):
            over = bisect_right(through, through[first] + most, first)
            if over < len(through):
                stop = min(stop, begins[over - 1])
        assert stop > begin
        return stop

    def _untrained_before(self, places: Int64Array) -> Int64Array:
        count = self._span_begins.searchsorted(places)
        before: Int64Array = self._untrained[count]
        inside = np.flatnonzero(count)
        rest = self._span_ends[count[inside] - 1] - places[inside]
        before[inside] -= np.maximum(rest, 0)
        return before

    def _is_trained(self, places: Int64Array) -> npt.NDArray[np.bool_]:
        count = self._span_begins.searchsorted(places, side="right")
        is_trained = np.ones(len(places), bool)
        inside = np.flatnonzero(count)
        is_trained[inside] = self._span_ends[count[inside] - 1] <= places[inside]
        return is_trained

    def _as_lists(self) -> tuple[list[int], list[int], list[list[int]]]:
        if self._lists is None:
            lists = self._item_begins.tolist(), self._item_ends.tolist(), self._units.tolist()
            self._lists = lists
        return self._lists
