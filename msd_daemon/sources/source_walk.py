"""The walk of a source by its format: what a source loader goes through, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

from federation.model.job import FieldRule, Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_client.contract.position import EPOCH_MAX
from msd_daemon.sources.formats import SeekableFormat, format_of
from msd_daemon.sources.grouped import without_where
from msd_daemon.sources.guarded_blocks import GuardedBlocks
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.jsonl import JsonlFormat
from msd_daemon.sources.lane import StreamReader
from msd_daemon.sources.megatron import count_documents
from msd_daemon.sources.order import SourceOrder
from msd_daemon.sources.parquet import ParquetFormat
from msd_daemon.sources.parquet_columns import text_values
from msd_daemon.sources.parquet_file import arrow_modules
from msd_daemon.sources.record import Extractor, RawRecord, ReadMeter
from msd_daemon.sources.record_encoder import RecordEncoder
from msd_daemon.sources.record_guard import SourceGuard
from msd_daemon.sources.sample_encoder import SampleEncoder
from msd_daemon.sources.seekable import (
    SeekableRecords,
    SeekableRows,
    SeekableTokens,
    encoder_of,
)
from msd_daemon.sources.seekable_fields import SeekableFields
from msd_daemon.sources.shard_door import ShardDoor
from msd_daemon.sources.text import TextFormat
from msd_daemon.sources.walk import LaneWalk, SeekableWalk
from msd_daemon.sources.wanted_fields import wanted_fields
from msd_daemon.transforms.tokenizer import Tokenizer

_KEY_ROWS = 2048


def field_walk(
    spec: SourceSpec,
    order: SourceOrder,
    store: IndexStore,
    meter: ReadMeter,
    encoder: SampleEncoder,
    own: tuple[int, int],
    door: ShardDoor,
) -> SeekableWalk | LaneWalk:
    """Return the walk of a source whose records have fields.

    Args:
        spec: The source.
        order: Its order.
        store: Of its indexes.
        meter: Counts what is read.
        encoder: Encodes its records, or names them.
        own: Part and parts: which of the source's loaders this is.
        door: Of its shards.
    """
    epochs_max = _epochs_max(spec)
    if spec.order_class == "streaming":
        columns = wanted_fields(spec, encoder.fields)
        reader = StreamReader(spec, store, meter, columns=columns, door=door)
        return LaneWalk(order, reader, spec.shards, encoder, *own, epochs_max)
    blocks: SeekableFields | SeekableRecords
    if spec.format == "text":
        blocks = SeekableRecords(spec, order, TextFormat(spec, meter), encoder)
        count = _one_record if spec.text_document == "file" else _unknown
        guarded = GuardedBlocks(spec, blocks, door, store, meter, count)
        return SeekableWalk(order, guarded.count_blocks, guarded.open, *own, epochs_max)
    entry = format_of(spec.format)
    # A record that `where` refuses belongs to a group too: its key is needed.
    shown = without_where(spec) if spec.group_field else spec
    shards = cast("SeekableFormat", entry.open(shown, wanted_fields(spec, encoder.fields), meter))
    if getattr(shards, "is_where_judged", False) and shown is spec:
        encoder = encoder.without_where()
    blocks = SeekableFields(spec, order, store, shards, encoder, entry.place_name)
    count = getattr(shards, "count_lost", _unknown)
    guarded = GuardedBlocks(spec, blocks, door, store, meter, count)
    return SeekableWalk(order, guarded.count_blocks, guarded.open, *own, epochs_max)


def _unknown(_shard: Shard) -> None:
    return None


def _one_record(_shard: Shard) -> int:
    return 1


def _epochs_max(spec: SourceSpec) -> int:
    return min(spec.max_epochs or EPOCH_MAX, EPOCH_MAX)


def plain_walk(
    spec: SourceSpec,
    order: SourceOrder,
    store: IndexStore,
    meter: ReadMeter,
    tokenizer: Tokenizer,
    fields: tuple[FieldRule, ...],
    own: tuple[int, int],
    guard: SourceGuard,
    door: ShardDoor,
    *,
    is_naming: bool = False,
    has_tokens: bool = True,
) -> SeekableWalk | LaneWalk:
    """Return the walk of a source that is read for texts or ids alone.

    Args:
        spec: The source.
        order: Its order.
        store: Of its indexes.
        meter: Counts what is read.
        tokenizer: Of the job.
        fields: The job's, where the format has them.
        own: Part and parts: which of the source's loaders this is.
        guard: Of the source in this process.
        door: Of its shards.
        is_naming: Records are named, not encoded.
        has_tokens: False: token ids that lie ready are not read.
    """
    epochs_max = _epochs_max(spec)
    if spec.order_class == "streaming":
        count = tokenizer.spec.vocabulary_count
        reader = StreamReader(spec, store, meter, fields=fields, vocabulary_count=count, door=door)
        encoder = _encoder(spec, reader.format.extract, tokenizer, fields, guard, is_naming)
        return LaneWalk(order, reader, spec.shards, encoder, *own, epochs_max)
    blocks: SeekableTokens | SeekableRows | SeekableRecords
    if spec.format == "megatron":
        blocks = SeekableTokens(
            spec, order, store, meter, tokenizer.dtype, is_naming=is_naming, has_tokens=has_tokens
        )
    else:
        blocks = _seekable_blocks(spec, order, store, meter, tokenizer, fields, guard, is_naming)
    known: Callable[[Shard], int | None] = _unknown
    if spec.format == "megatron":
        known = count_documents
    elif spec.format == "text" and spec.text_document == "file":
        known = _one_record
    guarded = GuardedBlocks(spec, blocks, door, store, meter, known)
    return SeekableWalk(order, guarded.count_blocks, guarded.open, *own, epochs_max)


def _seekable_blocks(
    spec: SourceSpec,
    order: SourceOrder,
    store: IndexStore,
    meter: ReadMeter,
    tokenizer: Tokenizer,
    fields: tuple[FieldRule, ...],
    guard: SourceGuard,
    is_naming: bool,
) -> SeekableRows | SeekableRecords:
    if spec.format == "parquet":
        keyed: _KeyedParquet | None = None
        shards = _parquet(spec, store, meter, fields)
        if is_naming and spec.key_field:
            # The key's column is read where records are held out; it counts in no window.
            with_keys = replace(spec, hold_out=spec.hold_out or 0.5)
            keyed = shards = _KeyedParquet(
                shards, _parquet(with_keys, store, meter, fields), spec.key_field
            )
        encoder = _encoder(spec, shards.extract, tokenizer, fields, guard, is_naming)
        keys_of = None if keyed is None else keyed.keys
        return SeekableRows(
            spec, order, store, shards, encoder, is_naming=is_naming, keys_of=keys_of
        )
    records: JsonlFormat | TextFormat = TextFormat(spec, meter)
    if spec.format == "jsonl":
        count = tokenizer.spec.vocabulary_count
        records = JsonlFormat(spec, meter, fields=fields, vocabulary_count=count)
    encoder = _encoder(spec, records.extract, tokenizer, fields, guard, is_naming)
    return SeekableRecords(spec, order, records, encoder)


def _encoder(
    spec: SourceSpec,
    extract: Extractor,
    tokenizer: Tokenizer,
    fields: tuple[FieldRule, ...],
    guard: SourceGuard,
    is_naming: bool,
) -> RecordEncoder:
    if not is_naming:
        return encoder_of(spec, extract, tokenizer, fields, guard)
    from msd_daemon.sources.naming_encoder import NamingRecordEncoder

    key_field = spec.key_field if spec.format == "jsonl" else ""
    return NamingRecordEncoder(extract, tokenizer, fields=fields, key_field=key_field)


def _parquet(
    spec: SourceSpec, store: IndexStore, meter: ReadMeter, fields: tuple[FieldRule, ...]
) -> ParquetFormat:
    return ParquetFormat(spec, meter, fields=fields, records_of_lost=store.records_of_lost)


class _KeyedParquet(ParquetFormat):
    """Rows of parquet with their keys, of the shards that have the key's column.

    Args:
        plain: As a run reads them.
        keyed: With the key's column.
        column: Its name.
    """

    def __init__(self, plain: ParquetFormat, keyed: ParquetFormat, column: str) -> None:
        self.__dict__.update(plain.__dict__)
        self._keyed = keyed
        self._column = column

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Return the rows of a row group; damage ends it with one unreadable record."""
        is_keyed = self._has_keys(shard)
        return self._keyed.records(shard, block) if is_keyed else super().records(shard, block)

    def keys(self, shard: Shard, block: int) -> list[bytes | None]:
        """Return the keys of a row group's rows, as far as they can be read."""
        found: list[bytes | None] = []
        if not self._has_keys(shard):
            return found
        arrow, _ = arrow_modules()
        try:
            with self._keyed.open(shard) as opened:
                _, batch_rows = self._keyed.batch_rows(opened, block, _KEY_ROWS)
                for keys in opened.batches(
                    block,
                    batch_rows,
                    0,
                    lambda batch: text_values(arrow, batch.column(self._column)),
                    [self._column],
                ):
                    found += keys
        except (CorruptRecordError, OSError):
            return found
        return found

    def _has_keys(self, shard: Shard) -> bool:
        try:
            with self.open(shard) as opened:
                return self._keyed.fault_of(opened) == self.fault_of(opened)
        except (CorruptRecordError, OSError):
            return False
