"""Record batches as raw records with fields: too large ones left out, faults kept to their row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from msd_daemon.sources.arrow_sizes import row_bytes
from msd_daemon.sources.arrow_values import plain_values
from msd_daemon.sources.field_numbers import UnfitValueError
from msd_daemon.sources.parquet_file import first_line
from msd_daemon.sources.record import RawRecord
from msd_daemon.sources.where_arrow import ColumnFilter
from msd_daemon.sources.where_values import Test

_BAD_ENCODING = int(RecordStatus.BAD_ENCODING)
_FIELD_MISSING = int(RecordStatus.FIELD_MISSING)
_FILTERED = int(RecordStatus.FILTERED)
_TOO_LARGE = int(RecordStatus.TOO_LARGE)
_UNREADABLE = int(RecordStatus.UNREADABLE)

_NOT_UTF8 = "UTF8"
"""In what pyarrow says of a text that is not."""
_PIECE_BYTES = 1 << 20
"""Raw bytes that are made into Python objects at once, or one record."""
_RUNS_MAX = 4
"""Beyond, rows are gathered by pyarrow before they are converted."""

Judged = Sequence[RawRecord | None]
"""By row, the record that stands for one that is left out; None: it is wanted."""


class RowMaker:
    """Makes records of the rows of batches.

    Args:
        arrow: The module pyarrow.
        record_bytes_max: Limit of a record's raw bytes.
    """

    def __init__(self, arrow: Any, record_bytes_max: int) -> None:
        self._arrow = arrow
        self._record_bytes_max = record_bytes_max
        self._unfit = (arrow.ArrowException, ValueError, OverflowError, NotImplementedError)

    def records(
        self,
        batch: Any,
        first_row: int,
        judged: Judged | None = None,
        sizes: npt.NDArray[np.int64] | None = None,
    ) -> Iterator[RawRecord]:
        """Yield a record for each row of a batch, made a bounded piece at a time.

        Args:
            batch: With just the wanted columns, validated but for UTF-8.
            first_row: Place of its first row.
            judged: Rows that were left out already.
            sizes: Bytes of each row, where they are known.
        """
        sizes = self._sizes(batch) if sizes is None else sizes
        found: list[RawRecord | None] = list(judged) if judged else [None] * batch.num_rows
        limit = self._record_bytes_max
        for row in np.flatnonzero(sizes > limit).tolist():
            fault = f"{int(sizes[row])} bytes, record_bytes_max = {limit}"
            found[row] = found[row] or RawRecord(first_row + row, b"", _TOO_LARGE, fault)
        wanted = np.array([row for row, one in enumerate(found) if one is None], dtype=np.int64)
        row = 0
        for rows in _pieces(wanted, sizes):
            for record, place in zip(self._gather(batch, rows, first_row), rows, strict=True):
                while row < place:
                    left_out = found[row]
                    assert left_out is not None
                    yield left_out
                    row += 1
                record.fields_bytes = 0 if record.status else int(sizes[place])
                yield record
                row += 1
        for left_out in found[row:]:
            assert left_out is not None
            yield left_out

    def _sizes(self, batch: Any) -> npt.NDArray[np.int64]:
        sizes = np.zeros(batch.num_rows, dtype=np.int64)
        for column in batch.columns:
            sizes += row_bytes(self._arrow, column)
        return sizes

    def checked(self, batch: Any, first_row: int) -> Iterator[RawRecord]:
        """Yield a record for each row of a batch whose contents nobody validated yet.

        Args:
            batch: With just the wanted columns, a slice of one that was validated in form.
            first_row: Place of its first row.
        """
        try:
            batch.validate(full=True)
            sizes = self._sizes(
                batch
            )  # finds what validation does not: indices inside of dictionaries
        except (self._arrow.ArrowInvalid, ValueError, IndexError) as error:
            if batch.num_rows > 1:
                for row in range(batch.num_rows):
                    yield from self.checked(batch.slice(row, 1), first_row + row)
                return
            what = first_line(error)
            status = _BAD_ENCODING if _NOT_UTF8 in what else _UNREADABLE
            yield RawRecord(first_row, b"", status, f"is damaged: {what}")
            return
        yield from self.records(batch, first_row, sizes=sizes)

    def judge(self, batch: Any, first_row: int, condition: ColumnFilter) -> list[RawRecord | None]:
        """Return, for each row that `where` does not keep, the record that stands for it.

        Args:
            batch: With the columns that the condition asks for.
            first_row: Place of its first row.
            condition: Made for batches of this schema.
        """
        rest: Test | None = condition.rest
        try:
            batch.validate(full=True)
            kept = condition.mask(batch)
        except self._arrow.ArrowException:  # not UTF-8, say: row by row tells which rows
            kept, rest = np.ones(batch.num_rows, dtype=np.bool_), condition.whole
        found: list[RawRecord | None] = [
            None if is_kept else RawRecord(first_row + row, b"", _FILTERED)
            for row, is_kept in enumerate(kept.tolist())
        ]
        if rest is None or not kept.any():
            return found
        for row, record in enumerate(self.records(batch, first_row, found)):
            found[row] = record if record.status else _judged(record, rest)
        return found

    def _gather(self, batch: Any, rows: npt.NDArray[np.int64], first_row: int) -> list[RawRecord]:
        runs = _runs(rows)
        if len(runs) > _RUNS_MAX:
            try:
                taken = batch.take(self._arrow.array(rows))
            except (self._arrow.ArrowNotImplementedError, self._arrow.ArrowInvalid):
                pass  # a type that is not gathered: run by run then
            else:
                return self._convert(taken, (first_row + rows).tolist())
        parts = [
            self._convert(
                batch.slice(begin, end - begin), range(first_row + begin, first_row + end)
            )
            for begin, end in runs
        ]
        return [record for part in parts for record in part]

    def _convert(self, batch: Any, places: Sequence[int]) -> list[RawRecord]:
        names = batch.schema.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            fault = f"column {twice!r} is there {names.count(twice)} times"
            return [RawRecord(place, b"", _FIELD_MISSING, fault) for place in places]
        try:
            columns = [plain_values(self._arrow, column) for column in batch.columns]
        except self._unfit:
            if batch.num_rows > 1:
                singles = [
                    self._convert(batch.slice(row, 1), [at]) for row, at in enumerate(places)
                ]
                return [record for single in singles for record in single]
            return [self._unreadable(batch, places[0])]
        rows = zip(*columns, strict=True) if columns else itertools.repeat((), batch.num_rows)
        return [
            RawRecord(place, b"", fields=dict(zip(names, values, strict=True)))
            for place, values in zip(places, rows, strict=True)
        ]

    def _unreadable(self, row: Any, place: int) -> RawRecord:
        for name, column in zip(row.schema.names, row.columns, strict=True):
            try:
                plain_values(self._arrow, column)
            except UnicodeDecodeError as error:
                fault = f"column {name!r} is not UTF-8 at byte {error.start} of a text"
                return RawRecord(place, b"", _BAD_ENCODING, fault)
            except self._unfit as error:
                reason = first_line(error)
                fault = f"column {name!r} of {column.type} cannot be read: {reason}"
                return RawRecord(place, b"", _UNREADABLE, fault)
        raise AssertionError("a row whose columns can be read one by one")


def _judged(record: RawRecord, test: Test) -> RawRecord | None:
    assert record.fields is not None
    try:
        return None if test(record.fields) else RawRecord(record.place, b"", _FILTERED)
    except UnfitValueError as error:
        return RawRecord(record.place, b"", _FIELD_MISSING, f"where: {error}")


def _pieces(
    rows: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[np.int64]]:
    """Cut rows into pieces of bounded bytes, each at least one row."""
    ends = np.cumsum(sizes[rows])
    begin = before = 0
    while begin < len(rows):
        end = max(int(np.searchsorted(ends, before + _PIECE_BYTES, side="right")), begin + 1)
        yield rows[begin:end]
        begin, before = end, int(ends[end - 1])


def _runs(rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers: (first, behind the last)."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    parts = np.split(rows, cuts)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
