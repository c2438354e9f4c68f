"""Parquet: a block is a row group, read as a stream of small batches of the needed columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from federation.model.chunk import RecordStatus
from federation.model.job import FieldRule, Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.json_text import plain_extractor
from msd_daemon.sources.parquet_columns import (
    ColumnKind,
    NumberRows,
    column_fault,
    field_rows,
    text_values,
    wanted_columns,
)
from msd_daemon.sources.parquet_file import OpenParquet, arrow_modules
from msd_daemon.sources.record import FieldValue, RawRecord, ReadMeter, lost_shard, unreadable
from msd_daemon.sources.row_stream import RowStream

_TOO_LARGE = int(RecordStatus.TOO_LARGE)
_FIELD_MISSING = int(RecordStatus.FIELD_MISSING)
_BATCH_BYTES = 256 * 1024
_BATCH_ROWS_MIN = 8
_BATCH_ROWS_MAX = 256
_ROW_GROUP_ROWS_MAX = 1 << 31


class ParquetFormat:
    """Records of parquet shards.

    Args:
        spec: The source.
        meter: Counts what is read.
        fields: The job's, whose columns are read beside the text.
        records_of_lost: Tells how many records a shard had that cannot be opened.
    """

    def __init__(
        self,
        spec: SourceSpec,
        meter: ReadMeter,
        *,
        fields: tuple[FieldRule, ...] = (),
        records_of_lost: Callable[[Shard], int | None] = lambda _: None,
    ) -> None:
        self.extract = plain_extractor(keeps_carriage_returns=True)
        self.fields = fields
        self._wanted = wanted_columns(spec, fields)
        self._texts = [column.name for column in self._wanted if column.kind is ColumnKind.TEXT]
        keys = [column.name for column in self._wanted if column.kind is ColumnKind.KEY]
        self._key = keys[0] if keys else ""
        self._record_bytes_max = spec.record_bytes_max
        self._meter = meter
        self._records_of_lost = records_of_lost

    def open(self, shard: Shard) -> OpenParquet:
        """Open a shard for the needed columns; the caller closes it.

        Raises:
            CorruptRecordError: The file is no parquet file, or its footer is damaged.
            OSError: It cannot be read.
        """
        names = dict.fromkeys(column.name for column in self._wanted)
        return OpenParquet(shard, list(names), self._meter)

    def measure(self, shard: Shard) -> tuple[int, int]:
        """Return the row groups of a shard, 1 where it has none, and its rows.

        Raises:
            CorruptRecordError: The file is no parquet file, or its footer is damaged.
            OSError: It cannot be read.
        """
        with self.open(shard) as opened:
            return max(1, int(opened.metadata.num_row_groups)), int(opened.metadata.num_rows)

    def block_count(self, shard: Shard) -> int:
        """Return the row groups of a shard, 1 where it has none.

        Raises:
            CorruptRecordError: The file is no parquet file, or its footer is damaged.
            OSError: It cannot be read.
        """
        return self.measure(shard)[0]

    def check(self, shard: Shard) -> None:
        """Refuse a shard whose footer is damaged or which lacks a column.

        Raises:
            CorruptRecordError: What is wrong with it.
            OSError: It cannot be read.
        """
        with self.open(shard) as opened:
            fault = self.fault_of(opened)
        if fault:
            raise CorruptRecordError(f"{shard.path}: {fault}", shard=shard.path)

    def fault_of(self, opened: OpenParquet) -> str:
        """Return which column is not there as the job needs it, else nothing."""
        return column_fault(arrow_modules()[0], opened.schema, self._wanted)

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Return the rows of a row group; damage ends it with one unreadable record."""
        return RowStream(lambda first, end: self._records_from(shard, block, first, end))

    def lost(self, shard: Shard, error: CorruptRecordError | OSError) -> RawRecord:
        """Return the record that stands for a shard that cannot be opened."""
        return lost_shard(error, self._records_of_lost(shard))

    def batch_rows(self, opened: OpenParquet, block: int, rows_max: int) -> tuple[int, int]:
        """Return the rows of a row group, and of a batch of bounded bytes.

        Raises:
            CorruptRecordError: The row group's size is beyond belief.
        """
        rows, group_bytes = opened.measure(block)
        if not 0 <= rows < _ROW_GROUP_ROWS_MAX:
            raise opened.damage(block, f"claims {rows} rows")
        columns = max(len(opened.schema), 1)
        if group_bytes > (self._record_bytes_max + 64) * max(rows, 1) * columns:
            raise opened.damage(
                block, f"has {group_bytes} bytes in {rows} rows, over record_bytes_max a value"
            )
        fitting = _BATCH_BYTES * max(rows, 1) // max(group_bytes, 1)
        return rows, min(max(fitting, _BATCH_ROWS_MIN), rows_max)

    def _records_from(
        self, shard: Shard, block: int, first: int, end: Callable[[], None]
    ) -> Iterator[RawRecord | int]:
        """Yield the bytes of the row group, then its rows from row `first` on."""
        row = first
        try:
            opened = self.open(shard)
        except (CorruptRecordError, OSError) as error:
            end()
            yield self.lost(shard, error)
            return
        try:
            with opened:
                if opened.metadata.num_row_groups == 0:
                    return
                yield opened.measure(block)[1]
                for record in self._rows(opened, block, first):
                    yield record
                    row += 1
        except (CorruptRecordError, OSError) as error:
            end()
            yield unreadable(row, error)

    def _rows(self, opened: OpenParquet, block: int, first: int) -> Iterator[RawRecord]:
        fault = self.fault_of(opened)
        if fault:
            for row in range(first, opened.measure(block)[0]):
                yield RawRecord(row, b"", _FIELD_MISSING, fault)
            return
        rows, batch_rows = self.batch_rows(opened, block, _BATCH_ROWS_MAX)
        row = first
        for records in opened.batches(block, batch_rows, first, self._decode):
            for record in records:
                record.place = row
                yield record
                row += 1
        if row != rows:
            raise opened.damage(block, f"gave {row} of {rows} rows")

    def _decode(self, batch: Any) -> list[RawRecord]:
        arrow, _ = arrow_modules()
        columns = [text_values(arrow, batch.column(name)) for name in self._texts]
        if len(columns) == 1:
            limit = self._record_bytes_max
            records = [
                RawRecord(0, raw) if raw is not None and len(raw) <= limit else self._record((raw,))
                for raw in columns[0]
            ]
        else:
            records = [self._record(parts) for parts in zip(*columns, strict=True)]
        if self._key:
            for record, key in zip(
                records, text_values(arrow, batch.column(self._key)), strict=True
            ):
                self._add_key(record, key)
        if self.fields:
            listed = [field_rows(arrow, batch.column(f.from_field), f) for f in self.fields]
            self._add_values(records, listed)
        return records

    def _record(self, parts: tuple[bytes | None, ...]) -> RawRecord:
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            name = self._texts[parts.index(None)]
            return RawRecord(0, b"", _FIELD_MISSING, f"column {name!r} is null")
        raw = present[0] if len(present) == 1 else b"\n".join(present)
        if len(raw) > self._record_bytes_max:
            limit = self._record_bytes_max
            return RawRecord(0, b"", _TOO_LARGE, f"{len(raw)} bytes, record_bytes_max = {limit}")
        return RawRecord(0, raw)

    def _add_key(self, record: RawRecord, key: bytes | None) -> None:
        record.key = key
        if key is None and not record.status:
            record.status = _FIELD_MISSING
            record.fault = f"column {self._key!r} is null, it is the record's key"

    def _add_values(self, records: list[RawRecord], listed: list[NumberRows]) -> None:
        for rows in listed:
            for number, fault in rows.faults.items():
                if not records[number].status:
                    records[number].status, records[number].fault = _FIELD_MISSING, fault
        columns: list[list[FieldValue]] = [
            _split(rows) if rule.per == "token" else rows.values.tolist()
            for rule, rows in zip(self.fields, listed, strict=True)
        ]
        for record, values in zip(records, zip(*columns, strict=True), strict=True):
            record.values = values


def _split(rows: NumberRows) -> list[FieldValue]:
    pairs = itertools.pairwise(rows.offsets().tolist())
    return [rows.values[begin:end] for begin, end in pairs]
