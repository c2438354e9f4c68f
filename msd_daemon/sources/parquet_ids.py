"""Pre-tokenized parquet: columns of id lists, checked and cut whole batches at a time.

No Python runs per id, and per row only where one is bad or windows are permuted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from federation.model.job import FieldRule, Shard, ShuffleRule, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.shm.field_layout import value_dtype
from msd_daemon.sources.bad_record import BadRecord, Numbered
from msd_daemon.sources.chunk_draft import TokenDtype
from msd_daemon.sources.encoded import EncodedRecords, FieldColumn, join_records
from msd_daemon.sources.hold_out import HoldOut
from msd_daemon.sources.order import window_bounds
from msd_daemon.sources.parquet import ParquetFormat
from msd_daemon.sources.parquet_columns import NumberRows, field_rows, id_rows, text_values
from msd_daemon.sources.parquet_file import OpenParquet, arrow_modules
from msd_daemon.sources.record import RawRecord, unreadable
from msd_daemon.sources.record_encoder import unequal_counts
from msd_daemon.sources.row_stream import RowStream

_BATCH_ROWS_MAX = 2048
_ID_BYTES = 4
"""Of an id as record windows, limits and hashes count it, whatever the column's type."""

Sizes = npt.NDArray[np.int64]


@dataclass
class IdBatch:
    """Consecutive rows of a row group, checked."""

    sizes: Sizes
    """Raw bytes of each row, which record windows count. Shape (rows,)."""
    records: EncodedRecords


@dataclass(frozen=True, slots=True)
class IdWindow:
    """A record window of encoded records."""

    records: EncodedRecords
    is_block_end: bool
    is_lane_end: bool = False
    first_row: int = 0
    """Its first record, counted in the block."""

    @property
    def count(self) -> int:
        """Records of the window."""
        return len(self.records)


class ParquetIds:
    """Row groups of pre-tokenized records.

    Args:
        spec: The source.
        shards: Opens them.
        vocabulary_count: Ids are below it.
        dtype: Of the tokens in chunks; holds every id.
        hold_out: Tells which records are samples; None: all are.
    """

    def __init__(
        self,
        spec: SourceSpec,
        shards: ParquetFormat,
        vocabulary_count: int,
        dtype: TokenDtype,
        hold_out: HoldOut | None,
    ) -> None:
        self._spec = spec
        self._shards = shards
        self._vocabulary_count = vocabulary_count
        self._dtype = dtype
        self._hold_out = hold_out

    def batches(self, shard: Shard, block: int) -> RowStream[IdBatch]:
        """Return the rows of a row group; damage ends it with one unreadable record."""
        return RowStream(
            lambda first, end: self._batches_from(shard, block, first, end),
            lambda batch: len(batch.sizes),
        )

    def _batches_from(
        self, shard: Shard, block: int, first: int, end: Callable[[], None]
    ) -> Iterator[IdBatch | int]:
        try:
            opened = self._shards.open(shard)
        except (CorruptRecordError, OSError) as error:
            end()
            yield self._damage(shard, self._shards.lost(shard, error))
            return
        row = first
        try:
            with opened:
                if opened.metadata.num_row_groups == 0:
                    return
                yield opened.measure(block)[1]
                for batch in self._rows(opened, shard, block, first):
                    yield batch
                    row += len(batch.sizes)
        except (CorruptRecordError, OSError) as error:
            end()
            yield self._damage(shard, unreadable(row, error))

    def _rows(self, opened: OpenParquet, shard: Shard, block: int, first: int) -> Iterator[IdBatch]:
        fault = self._shards.fault_of(opened)
        rows, batch_rows = self._shards.batch_rows(opened, block, _BATCH_ROWS_MAX)
        row = first
        if fault:
            for begin in range(first, rows, _BATCH_ROWS_MAX):
                yield self._all_missing(shard, begin, min(_BATCH_ROWS_MAX, rows - begin), fault)
            return
        for decoded in opened.batches(block, batch_rows, first, self._decode):
            batch = self._encode(decoded, shard, row)
            yield batch
            row += len(batch.sizes)
        if row != rows:
            raise opened.damage(block, f"gave {row} of {rows} rows")

    def _damage(self, shard: Shard, record: RawRecord) -> IdBatch:
        fault = record.fault
        if not fault.startswith(shard.path):
            fault = f"{shard.path}: record at row {record.place}: {fault}"
        bad = BadRecord(fault, shard.path, "row", record.place)
        records = _tokenless([record.status], [(0, bad)], self._dtype, self._shards.fields)
        return IdBatch(np.zeros(1, dtype=np.int64), records)

    def _all_missing(self, shard: Shard, begin: int, count: int, fault: str) -> IdBatch:
        places = range(count)
        faults = [(at, _bad_row(shard, begin + at, fault)) for at in places]
        status = [int(RecordStatus.FIELD_MISSING)] * count
        records = _tokenless(status, faults, self._dtype, self._shards.fields)
        return IdBatch(np.zeros(count, dtype=np.int64), records)

    def _decode(self, batch: Any) -> _Decoded:
        arrow, _ = arrow_modules()
        name = self._spec.tokens_field
        ids = id_rows(arrow, batch.column(name), name, self._vocabulary_count)
        keys = None
        if self._hold_out is not None and self._hold_out.has_key:
            keys = text_values(arrow, batch.column(self._spec.key_field))
        fields = self._shards.fields
        listed = [field_rows(arrow, batch.column(rule.from_field), rule) for rule in fields]
        return _Decoded(ids, keys, listed)

    def _encode(self, decoded: _Decoded, shard: Shard, first_row: int) -> IdBatch:
        ids = decoded.ids
        sizes = ids.counts * _ID_BYTES
        rows = _Rows(len(sizes))
        self._judge(decoded, sizes, rows)
        is_kept = rows.status == 0
        lengths = np.where(is_kept, ids.counts, 0).astype(np.int32)
        rows.status[is_kept & (lengths == 0)] = RecordStatus.EMPTY
        tokens: Any = _kept(ids, is_kept).astype(self._dtype)
        faults = [(row, _bad_row(shard, first_row + row, text)) for row, text in rows.listed()]
        columns = tuple(
            FieldColumn(True, _kept(values, is_kept))
            if rule.per == "token"
            else FieldColumn(False, values.values)
            for rule, values in zip(self._shards.fields, decoded.fields, strict=True)
        )
        return IdBatch(sizes, EncodedRecords(lengths, rows.status, tokens, faults, columns))

    def _judge(self, decoded: _Decoded, sizes: Sizes, rows: _Rows) -> None:
        """Note the status of every row; the first reason counts, but no fault of the other part."""
        ids, keys = decoded.ids, decoded.keys
        limit = self._spec.record_bytes_max
        is_large = sizes > limit
        if keys is not None and self._hold_out is not None:
            known = [row for row, key in enumerate(keys) if key is not None]
            is_sample = self._hold_out.are_samples(key for key in keys if key is not None)
            rows.hold_out(np.array(known, dtype=np.int64)[~is_sample])
            for row in set(range(len(keys))).difference(known):
                rows.add(row, f"column {self._spec.key_field!r} is null, it is the record's key")
        elif self._hold_out is not None:
            known_rows = np.flatnonzero(~is_large & ~ids.is_null)
            rows.hold_out(known_rows[~self._hold_out.are_samples(_contents(ids, known_rows))])
        for row in np.flatnonzero(is_large).tolist():
            fault = f"{int(sizes[row])} bytes of ids, record_bytes_max = {limit}"
            rows.add(row, fault, int(RecordStatus.TOO_LARGE))
        for faulty in (ids, *decoded.fields):
            for row, fault in faulty.faults.items():
                rows.add(row, fault)
        for rule, values in zip(self._shards.fields, decoded.fields, strict=True):
            if rule.per == "token":
                for row in np.flatnonzero(values.counts != ids.counts).tolist():
                    seen, expected = int(values.counts[row]), int(ids.counts[row])
                    rows.add(row, unequal_counts(rule, seen, expected))


@dataclass
class _Decoded:
    """Columns of one batch."""

    ids: NumberRows
    keys: list[bytes | None] | None
    fields: list[NumberRows]


class _Rows:
    """Status and fault of each row of a batch; the first that is noted stays."""

    def __init__(self, count: int) -> None:
        self.status = np.zeros(count, dtype=np.uint8)
        self._faults: dict[int, str] = {}

    def hold_out(self, rows: Sizes) -> None:
        self.status[rows] = RecordStatus.HELD_OUT

    def add(self, row: int, fault: str, code: int = int(RecordStatus.FIELD_MISSING)) -> None:
        if not self.status[row]:
            self.status[row] = code
            self._faults[row] = fault

    def listed(self) -> list[tuple[int, str]]:
        return sorted(self._faults.items())


def _bad_row(shard: Shard, row: int, fault: str) -> BadRecord:
    return BadRecord(f"{shard.path}: record at row {row}: {fault}", shard.path, "row", row)


def _contents(ids: NumberRows, rows: Sizes) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the ids of rows as little-endian int32, whatever the column's type is."""
    values = ids.values.astype("<i4")
    offsets = ids.offsets()
    for begin, end in zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True):
        yield values[begin:end]


def _kept(rows: NumberRows, is_kept: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Return the values of the rows that are kept."""
    if is_kept.all():
        return rows.values
    kept: npt.NDArray[Any] = rows.values[np.repeat(is_kept, rows.counts)]
    return kept


def _tokenless(
    status: list[int],
    faults: Numbered,
    dtype: TokenDtype,
    fields: tuple[FieldRule, ...],
) -> EncodedRecords:
    columns = tuple(
        FieldColumn(
            rule.per == "token",
            np.full(0 if rule.per == "token" else len(status), rule.fill, value_dtype(rule)),
        )
        for rule in fields
    )
    return EncodedRecords(
        np.zeros(len(status), dtype=np.int32),
        np.array(status, dtype=np.uint8),
        np.zeros(0, dtype=dtype),
        faults,
        columns,
    )


def id_windows(
    batches: Iterator[IdBatch], rule: ShuffleRule, empty: EncodedRecords
) -> Iterator[IdWindow]:
    """Cut the rows of a block into record windows, as `order.record_windows` does.

    Args:
        batches: Of the block, in order.
        rule: The limits of a window.
        empty: What a block without rows gives.
    """
    waiting: list[IdBatch] = []
    rows = size_bytes = first = 0
    for batch in batches:
        waiting.append(batch)
        rows += len(batch.sizes)
        size_bytes += int(batch.sizes.sum())
        if rows <= rule.window_records and size_bytes <= rule.window_bytes:
            continue
        sizes = np.concatenate([part.sizes for part in waiting])
        records = join_records([part.records for part in waiting])
        bounds = window_bounds(sizes, rule)
        for begin, end in itertools.pairwise(bounds[:-1]):
            yield IdWindow(records.part(begin, end), False, first_row=first + begin)
        last = bounds[-2]
        first += last
        waiting = [IdBatch(sizes[last:], records.part(last, len(sizes)))]
        rows, size_bytes = len(sizes) - last, int(sizes[last:].sum())
    left = join_records([part.records for part in waiting]) if waiting else empty
    yield IdWindow(left, True, first_row=first)
