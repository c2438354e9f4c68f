"""Parquet rows as fields: row groups streamed by column in small batches, `where` asked first.

Blocks are row groups and places are rows in them, as in `parquet`. Of the columns of `where` every
batch is read; the others are opened at the first batch that keeps a record and read up to the last
one, so a row group without any costs its filter columns alone, or not even them where its
statistics tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.arrow_rows import RowMaker
from msd_daemon.sources.formats import Columns
from msd_daemon.sources.parquet_batches import BatchRule, PullRows
from msd_daemon.sources.parquet_file import OpenParquet, arrow_modules
from msd_daemon.sources.parquet_footer import Bounds, group_bounds
from msd_daemon.sources.record import RawRecord, ReadMeter, lost_shard, unreadable
from msd_daemon.sources.row_stream import RowStream
from msd_daemon.sources.seekable_shards import Tables
from msd_daemon.sources.shard_file import open_shard
from msd_daemon.sources.where import Where, compile_where
from msd_daemon.sources.where_arrow import Bound, ColumnFilter, column_filter
from msd_daemon.sources.where_bounds import excludes

_FILTERED = int(RecordStatus.FILTERED)


def open_parquet(spec: SourceSpec, columns: Columns, meter: ReadMeter) -> ParquetFields:
    """Return the reader of a source of parquet shards."""
    return ParquetFields(spec, columns, meter)


class ParquetFields:
    """Rows of parquet shards as fields.

    Args:
        spec: The source; its recipe's `where` is judged here.
        columns: Those that are wanted, None for all; one that a file lacks is lacking in its
            records.
        meter: Counts what is read.
    """

    is_where_judged = True
    """Records that `where` refuses come with status FILTERED: nobody needs to ask again."""

    def __init__(self, spec: SourceSpec, columns: Columns, meter: ReadMeter) -> None:
        self._columns = columns
        self._meter = meter
        self._record_bytes_max = spec.record_bytes_max
        where = spec.recipe.where if spec.recipe is not None else ""
        self._where: Where | None = compile_where(where) if where else None
        self._bounds: Tables[list[Bounds]] = Tables(2 * spec.shuffle.window_shards)

    def measure(self, shard: Shard) -> tuple[int, int]:
        """Return the row groups of a shard, 1 where it has none, and its rows.

        Raises:
            CorruptRecordError: The file is no parquet file, or its footer is damaged.
            OSError: It cannot be read.
        """
        with OpenParquet(shard, [], self._meter) as opened:
            return max(1, int(opened.metadata.num_row_groups)), int(opened.metadata.num_rows)

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Return the rows of a row group; damage ends it with one unreadable record."""
        return RowStream(lambda first, end: self._records_from(shard, block, first, end))

    def _records_from(
        self, shard: Shard, block: int, first: int, end: Callable[[], None]
    ) -> Iterator[RawRecord | int]:
        """Yield the bytes of the row group, then its rows from row `first` on."""
        row = first
        try:
            opened = OpenParquet(shard, [], self._meter)
        except (CorruptRecordError, OSError) as error:
            end()
            yield lost_shard(error)
            return
        try:
            with opened:
                if opened.metadata.num_row_groups == 0:
                    return
                yield opened.measure(block)[1]
                for record in self._rows(opened, shard, block, first):
                    yield record
                    row += 1
        except (CorruptRecordError, OSError) as error:
            end()
            yield unreadable(row, error)

    def _rows(
        self, opened: OpenParquet, shard: Shard, block: int, first: int
    ) -> Iterator[RawRecord]:
        rule = BatchRule.of(opened, block, self._record_bytes_max)
        maker = RowMaker(arrow_modules()[0], self._record_bytes_max)
        names = opened.schema.names
        wanted = [n for n in names if self._columns is None or n in self._columns]
        row = first
        batches = (
            self._plain(opened, block, rule, first, wanted, maker)
            if self._where is None
            else self._filtered(opened, shard, block, rule, first, wanted, maker)
        )
        for records in batches:
            for record in records:
                yield record
                row += 1
        if row != rule.rows:
            raise opened.damage(block, f"gave {row} of {rule.rows} rows")

    def _plain(
        self,
        opened: OpenParquet,
        block: int,
        rule: BatchRule,
        first: int,
        wanted: list[str],
        maker: RowMaker,
    ) -> Iterator[Iterator[RawRecord]]:
        if not wanted:
            yield (RawRecord(row, b"", fields={}) for row in range(first, rule.rows))
            return
        for batch in opened.batches(block, rule.batch_rows, first, _as_it_is, wanted):
            yield maker.records(batch, first)
            first += batch.num_rows

    def _filtered(
        self,
        opened: OpenParquet,
        shard: Shard,
        block: int,
        rule: BatchRule,
        first: int,
        wanted: list[str],
        maker: RowMaker,
    ) -> Iterator[Iterator[RawRecord]]:
        assert self._where is not None
        condition = column_filter(self._where, arrow_modules()[0], opened.schema)
        asked = _asked_columns(self._where, opened.schema.names)
        if self._is_excluded(shard, block, condition, opened):
            yield (RawRecord(row, b"", _FILTERED) for row in range(first, rule.rows))
            return
        if not asked:
            yield from self._unasked(opened, block, rule, first, wanted, maker, condition)
            return
        if set(wanted) <= set(asked):
            for batch in opened.batches(block, rule.batch_rows, first, _as_it_is, asked):
                judged = maker.judge(batch, first, condition)
                yield maker.records(batch.select(wanted), first, judged)
                first += batch.num_rows
            return
        heavy = PullRows(lambda at: opened.batches(block, rule.batch_rows, at, _as_it_is, wanted))
        for batch in opened.batches(block, rule.batch_rows, first, _as_it_is, asked):
            judged = maker.judge(batch, first, condition)
            if all(record is not None for record in judged):
                yield iter([record for record in judged if record is not None])
            else:
                yield _joined(heavy.rows(first, batch.num_rows), maker, first, judged)
            first += batch.num_rows

    def _unasked(
        self,
        opened: OpenParquet,
        block: int,
        rule: BatchRule,
        first: int,
        wanted: list[str],
        maker: RowMaker,
        condition: ColumnFilter,
    ) -> Iterator[Iterator[RawRecord]]:
        """Yield the rows of a file that has none of the filter's columns: all are alike."""
        if condition.whole({}):
            yield from self._plain(opened, block, rule, first, wanted, maker)
        else:
            yield (RawRecord(row, b"", _FILTERED) for row in range(first, rule.rows))

    def _is_excluded(
        self, shard: Shard, block: int, condition: ColumnFilter, opened: OpenParquet
    ) -> bool:
        """Tell whether the row group's statistics say that no record of it is kept."""
        bounds: tuple[Bound, ...] = condition.bounds
        if not bounds:
            return False

        def find() -> list[Bounds]:
            file = open_shard(shard, self._meter)
            try:
                return group_bounds(file, [bound.column for bound in bounds])
            finally:
                file.close()

        groups = self._bounds.get(shard.path, find)
        return block < len(groups) and excludes(
            arrow_modules()[0], opened.schema, groups[block], bounds
        )


def _asked_columns(where: Where, names: list[str]) -> list[str]:
    """Return the columns that an expression asks for, whole names before their first part."""
    asked = {".".join(path) for path in where.paths} | set(where.columns)
    return [name for name in names if name in asked]


def _joined(
    batches: Iterator[Any], maker: RowMaker, first: int, judged: list[RawRecord | None]
) -> Iterator[RawRecord]:
    row = 0
    for batch in batches:
        yield from maker.records(batch, first + row, judged[row : row + batch.num_rows])
        row += batch.num_rows
    for record in itertools.islice(judged, row, None):
        assert record is not None, "the other columns ended before the filter's"
        yield record


def _as_it_is(batch: Any) -> Any:
    return batch
