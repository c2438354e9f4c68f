"""Arrow IPC files and streams, Feather V2, and Hugging Face `save_to_disk` folders: rows as fields.

A block is a run of rows capped in rows and bytes (see `arrow_blocks`), a place is a row of the
shard. A file that is cut gives the rows of every batch before the cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from federation.model.job import Shard, ShuffleRule, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.arrow_blocks import Blocks, cut_batches
from msd_daemon.sources.arrow_file import OpenArrow
from msd_daemon.sources.arrow_folder import dataset_shards
from msd_daemon.sources.arrow_messages import Messages
from msd_daemon.sources.arrow_rows import RowMaker
from msd_daemon.sources.formats import Columns
from msd_daemon.sources.parquet_file import arrow_modules
from msd_daemon.sources.record import RawRecord, ReadMeter, lost_shard, unreadable
from msd_daemon.sources.seekable_shards import Tables

_STEP_BYTES = 256 * 1024
_STEP_ROWS_MAX = 256


def open_arrow(spec: SourceSpec, columns: Columns, meter: ReadMeter) -> ArrowFields:
    """Return the reader of a source of Arrow shards."""
    return ArrowFields(spec, columns, meter)


class ArrowFields:
    """Rows of Arrow shards as fields.

    Args:
        spec: The source.
        columns: Those that are wanted, None for all.
        meter: Counts what is read.
    """

    def __init__(self, spec: SourceSpec, columns: Columns, meter: ReadMeter) -> None:
        self._columns = columns
        self._meter = meter
        self._rule = spec.shuffle
        self._record_bytes_max = spec.record_bytes_max
        self._tables: Tables[tuple[Messages, Blocks]] = Tables(2 * spec.shuffle.window_shards)

    def measure(self, shard: Shard) -> tuple[int, int]:
        """Return the blocks of a shard and its rows, those before a cut where it is cut.

        Raises:
            CorruptRecordError: It is no Arrow file or stream, or its schema cannot be read.
            OSError: It cannot be read.
        """
        with self._open(shard) as opened:
            return len(self._blocks(shard, opened)), opened.messages.rows

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the rows of a block; damage ends it with one unreadable record."""
        try:
            opened = self._open(shard)
        except (CorruptRecordError, OSError) as error:
            yield lost_shard(error)
            return
        with opened:
            blocks = self._blocks(shard, opened)
            limit = self._record_bytes_max
            yield from block_rows(opened, blocks, block, self._columns, limit, self._meter)

    def _open(self, shard: Shard) -> OpenArrow:
        known = self._tables.peek(shard.path)
        return OpenArrow(shard, self._meter, messages=known[0] if known is not None else None)

    def _blocks(self, shard: Shard, opened: OpenArrow) -> Blocks:
        def find() -> tuple[Messages, Blocks]:
            return opened.messages, blocks_of(opened, self._rule)

        return self._tables.get(shard.path, find)[1]


def blocks_of(opened: OpenArrow, rule: ShuffleRule) -> Blocks:
    """Return the blocks of an open shard, as `cut_batches` has them."""
    batches = opened.messages.batches
    return cut_batches(batches[:, 3], batches[:, 2], rule, can_split=opened.can_split)


def block_rows(
    opened: OpenArrow,
    blocks: Blocks,
    block: int,
    columns: Columns,
    record_bytes_max: int,
    meter: ReadMeter,
) -> Iterator[RawRecord]:
    """Yield the rows of a block of an open shard.

    Args:
        opened: The shard.
        blocks: Its blocks.
        block: Number of one.
        columns: Those that are wanted, None for all.
        record_bytes_max: Limit of a row's raw bytes.
        meter: Counts what is read.
    """
    if block >= len(blocks):
        yield unreadable(0, opened.fault(f"has {len(blocks)} blocks now, it was changed"))
        return
    begin, end, skipped, rows = blocks[block].tolist()
    row = int(opened.messages.batches[:begin, 3].sum()) + skipped
    maker = RowMaker(arrow_modules()[0], record_bytes_max)
    names = [n for n in opened.schema.names if columns is None or n in columns]
    twice = next((name for name in names if opened.schema.names.count(name) > 1), None)
    try:
        if twice is not None:
            raise opened.fault(f"has column {twice!r} {names.count(twice)} times: rename one")
        for batch in opened.batches(begin, end, names):
            part = batch.slice(skipped, rows) if skipped or rows < batch.num_rows else batch
            if opened.can_split:
                meter.read_bytes += part.nbytes
            for record in _batch_rows(maker, part, row):
                yield record
                row += 1
    except (CorruptRecordError, OSError) as error:
        yield unreadable(row, error)
        return
    if block == len(blocks) - 1 and opened.messages.damage:
        yield unreadable(row, opened.fault(f"{opened.messages.damage}: what follows is lost"))


def _batch_rows(maker: RowMaker, batch: Any, first_row: int) -> Iterator[RawRecord]:
    """Yield the rows of a batch, some at a time; contents are validated before they are read."""
    step = _STEP_BYTES * batch.num_rows // max(batch.nbytes, 1)
    step = min(max(step, 1), _STEP_ROWS_MAX)
    for begin in range(0, batch.num_rows, step):
        yield from maker.checked(batch.slice(begin, step), first_row + begin)


__all__ = ["ArrowFields", "dataset_shards", "open_arrow"]
