"""Parquet: a block is a row group, read as a stream of small batches of the needed columns.

The only file that imports pyarrow, and late, so that jobs without parquet never load it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from functools import cache
from typing import Any, ClassVar, Self

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.json_text import FIELD_JOIN, plain_extractor
from msd_daemon.sources.record import RawRecord, ReadMeter, unreadable
from msd_daemon.sources.shard_file import open_shard

_TOO_LARGE = int(RecordStatus.TOO_LARGE)
_FIELD_MISSING = int(RecordStatus.FIELD_MISSING)
_BATCH_BYTES = 256 * 1024
_BATCH_ROWS_MIN = 8
_BATCH_ROWS_MAX = 256
_READ_BUFFER_BYTES = 64 * 1024
_ROW_GROUP_ROWS_MAX = 1 << 31
READERS_MAX = 2
"""Readers of small row groups that a process keeps open."""
_PUT_AWAY_BYTES_MAX = 16 << 20


@cache
def _arrow() -> tuple[Any, Any]:
    """Import pyarrow once, with a memory pool that gives back what is freed.

    pyarrow's own pool keeps 3 MiB for each row group that was read. C++ readers take the pool that
    the environment names at the first import, so a process that imports pyarrow earlier must set it
    there too; `set_memory_pool` reaches Python's side alone.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_memory_pool(pa.system_memory_pool())
    pa.set_cpu_count(1)
    return pa, pq


class ParquetFormat:
    """Records of parquet shards."""

    def __init__(self, spec: SourceSpec, meter: ReadMeter) -> None:
        self.extract = plain_extractor(keeps_carriage_returns=True)
        self._columns = spec.text_field.split(FIELD_JOIN)
        self._record_bytes_max = spec.record_bytes_max
        self._meter = meter

    def block_count(self, shard: Shard) -> int:
        """Return the row groups of a shard, 1 where it has none.

        Raises:
            CorruptRecordError: The file is no parquet file, or its footer is damaged.
            OSError: It cannot be read.
        """
        with _OpenParquet(shard, self._columns, self._meter) as opened:
            return max(1, int(opened.metadata.num_row_groups))

    def check(self, shard: Shard) -> None:
        """Refuse a shard whose footer is damaged or which lacks a column.

        Raises:
            CorruptRecordError: What is wrong with it.
            OSError: It cannot be read.
        """
        with _OpenParquet(shard, self._columns, self._meter) as opened:
            fault = self._column_fault(opened)
        if fault:
            raise CorruptRecordError(f"{shard.path}: {fault}", shard=shard.path)

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Return the rows of a row group; damage ends it with one unreadable record."""
        return RowStream(lambda first: self._records_from(shard, block, first))

    def _records_from(self, shard: Shard, block: int, first: int) -> Iterator[RawRecord | int]:
        """Yield the bytes of the row group, then its rows from row `first` on."""
        row = first
        try:
            with _OpenParquet(shard, self._columns, self._meter) as opened:
                if opened.metadata.num_row_groups == 0:
                    return
                yield opened.measure(block)[1]
                for record in self._rows(opened, block, first):
                    yield record
                    row += 1
        except (CorruptRecordError, OSError) as error:
            yield unreadable(row, error)

    def _rows(self, opened: _OpenParquet, block: int, first: int) -> Iterator[RawRecord]:
        rows, group_bytes = opened.measure(block)
        if not 0 <= rows < _ROW_GROUP_ROWS_MAX:
            raise opened.damage(block, f"claims {rows} rows")
        fault = self._column_fault(opened)
        if fault:
            for row in range(first, rows):
                yield RawRecord(row, b"", _FIELD_MISSING, fault)
            return
        columns = max(len(opened.schema), 1)
        if group_bytes > (self._record_bytes_max + 64) * max(rows, 1) * columns:
            raise opened.damage(
                block, f"has {group_bytes} bytes in {rows} rows, over record_bytes_max a value"
            )
        fitting_rows = _BATCH_BYTES * max(rows, 1) // max(group_bytes, 1)
        row = first
        for values in opened.batches(
            block, min(max(fitting_rows, _BATCH_ROWS_MIN), _BATCH_ROWS_MAX), first
        ):
            for parts in values:
                yield self._record(row, parts)
                row += 1
        if row != rows:
            raise opened.damage(block, f"gave {row} of {rows} rows")

    def _record(self, row: int, parts: tuple[bytes | None, ...]) -> RawRecord:
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            name = self._columns[parts.index(None)]
            return RawRecord(row, b"", _FIELD_MISSING, f"column {name!r} is null")
        raw = present[0] if len(present) == 1 else b"\n".join(present)
        if len(raw) > self._record_bytes_max:
            limit = self._record_bytes_max
            return RawRecord(row, b"", _TOO_LARGE, f"{len(raw)} bytes, record_bytes_max = {limit}")
        return RawRecord(row, raw)

    def _column_fault(self, opened: _OpenParquet) -> str:
        schema = opened.schema
        for name in self._columns:
            places = schema.get_all_field_indices(name)
            if len(places) != 1:
                have = ", ".join(schema.names[:12])
                return f"column {name!r} is there {len(places)} times; columns: {have}"
            kind = schema.field(places[0]).type
            if not opened.is_text(kind):
                return f"column {name!r} holds {kind}, not text"
        return ""


class RowStream:
    """Rows of one row group, whose reader may be put away between two rows.

    An open pyarrow reader keeps 4 to 7 MiB (a page, its dictionary, a batch), so a worker that hosts
    many sources keeps only the last few readers open. Another row of a stream that was put away
    opens it again and decodes up to there once more; that is cheap beside tokenizing as long as the
    row group is small, and larger ones are not put away. All streams of a process share the limit.
    """

    _open: ClassVar[list[RowStream]] = []
    """Streams with an open reader that may be put away, least recently used first."""

    def __init__(self, open_at: Callable[[int], Iterator[RawRecord | int]]) -> None:
        self._open_at = open_at
        self._given = 0
        self._rows: Iterator[RawRecord | int] | None = None
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RawRecord:
        if self._is_over:
            raise StopIteration
        if self._rows is None:
            self._begin()
        assert self._rows is not None
        record = next(self._rows, None)
        if record is None:
            self.close()
            raise StopIteration
        if isinstance(record, int):
            self._limit_readers(record)
            return next(self)
        self._given += 1
        return record

    def _begin(self) -> None:
        self._rows = self._open_at(self._given)

    def _limit_readers(self, group_bytes: int) -> None:
        if group_bytes > _PUT_AWAY_BYTES_MAX:
            return
        RowStream._open.append(self)
        while len(RowStream._open) > READERS_MAX:
            RowStream._open[0].put_away()

    def put_away(self) -> None:
        """Close the reader; the next row opens it again."""
        if self in RowStream._open:
            RowStream._open.remove(self)
        rows, self._rows = self._rows, None
        if isinstance(rows, Generator):
            rows.close()

    def close(self) -> None:
        """Close the reader for good."""
        self._is_over = True
        self.put_away()


class _OpenParquet:
    """An open parquet file; every pyarrow failure leaves it as CorruptRecordError."""

    def __init__(self, shard: Shard, columns: list[str], meter: ReadMeter) -> None:
        self._shard = shard
        self._meter = meter
        self._columns = columns
        open_shard(shard, ReadMeter()).close()
        arrow, parquet = _arrow()
        self._arrow = arrow
        try:
            self._file = parquet.ParquetFile(
                shard.path,
                memory_map=False,
                pre_buffer=False,
                buffer_size=_READ_BUFFER_BYTES,
                page_checksum_verification=True,
            )
            self.metadata = self._file.metadata
            self.schema = self._file.schema_arrow
        except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self._fault(f"is no readable parquet file ({_first_line(error)})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close(force=True)

    def is_text(self, kind: Any) -> bool:
        """Tell whether a column of this type holds text, a dictionary of texts included."""
        types = self._arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        checks = (
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
        )
        return any(check(kind) for check in checks)

    def batches(
        self, block: int, rows: int, first: int
    ) -> Iterator[list[tuple[bytes | None, ...]]]:
        """Yield the columns' bytes of a row group from row `first` on, some rows at a time."""
        try:
            iterator = self._file.iter_batches(
                batch_size=rows, row_groups=[block], columns=self._columns, use_threads=False
            )
            for batch in iterator:
                if first >= batch.num_rows:
                    first -= batch.num_rows
                    continue
                if first:
                    batch, first = batch.slice(first), 0
                self._meter.read_bytes += batch.nbytes
                yield list(zip(*(self._values(batch, name) for name in self._columns), strict=True))
        except (self._arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self.damage(block, f"is damaged ({_first_line(error)})") from error

    def _values(self, batch: Any, name: str) -> list[bytes | None]:
        column = batch.column(name)
        types = self._arrow.types
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        # As bytes, since pyarrow would stop at the first row that is not UTF-8.
        values: list[bytes | None] = column.cast(self._arrow.large_binary()).to_pylist()
        return values

    def measure(self, block: int) -> tuple[int, int]:
        """Return rows and uncompressed bytes of a row group, all columns together.

        Nothing is asked of single columns: pyarrow aborts the process where a column's metadata is
        damaged (RowGroupMetaData.column lets a C++ exception through, seen with 26.0.1).
        """
        try:
            group = self.metadata.row_group(block)
            return int(group.num_rows), int(group.total_byte_size)
        except (self._arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self.damage(block, f"is damaged ({_first_line(error)})") from error

    def damage(self, block: int, what: str) -> CorruptRecordError:
        """Return the error of a damaged row group."""
        return self._fault(f"row group {block} {what}")

    def _fault(self, what: str) -> CorruptRecordError:
        return CorruptRecordError(f"{self._shard.path} {what}", shard=self._shard.path)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:200]
