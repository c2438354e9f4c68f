"""A source loader: reads the blocks of one source that are its own and makes chunks of them.

Hosted by a loader worker. It knows nothing of the pool, of other sources, or of what is drawn: it
goes through the source's order from a position on, epoch after epoch, as fast as it is asked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from federation.model.chunk import ChunkMeta, RecordStatus
from federation.model.job import FieldRule, ResolvedJob, SourceSpec
from federation.model.media import MediaRule
from federation.planning.epochs import read_epochs_max
from msd_client.contract.errors import CorruptRecordError
from msd_client.contract.position import EPOCH_MAX
from msd_daemon.sources.block_cursor import Run
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.sources.formats import SeekableFormat, format_of, is_read_plain
from msd_daemon.sources.grouped import without_where
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.jsonl import JsonlFormat
from msd_daemon.sources.lane import StreamReader
from msd_daemon.sources.order import SourceOrder
from msd_daemon.sources.parquet import ParquetFormat
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.record_guard import NO_GUARD, SourceGuard
from msd_daemon.sources.sample_encoder import SampleEncoder
from msd_daemon.sources.sample_tools import Watch, open_tools
from msd_daemon.sources.seekable import (
    SeekableRecords,
    SeekableRows,
    SeekableTokens,
    encoder_of,
)
from msd_daemon.sources.seekable_fields import SeekableFields
from msd_daemon.sources.text import TextFormat
from msd_daemon.sources.walk import LaneWalk, OpenBlock, SeekableWalk
from msd_daemon.sources.wanted_fields import wanted_fields
from msd_daemon.transforms.tokenizer import Tokenizer

ROW_TOKENS_UNKNOWN = 1 << 31


@dataclass(frozen=True)
class SourceLoaderStatistics:
    """What a source loader did so far."""

    records: int
    """Records handed out, faults included, fetched ones excluded."""
    tokens: int
    read_bytes: int
    """Bytes read from shards, as they lie; of parquet the decoded bytes of the columns read."""
    cpu_s: float
    """CPU time of the calling thread inside the loader."""
    faults: Mapping[str, int]
    """Records handed out by the name of their RecordStatus, OK left out."""


def open_source_loader(
    job: ResolvedJob,
    source_index: int,
    tokenizer: Tokenizer,
    part: int = 0,
    parts: int = 1,
    index_dir: Path | None = None,
    watch: Watch | None = None,
    guard: SourceGuard = NO_GUARD.source,
) -> SourceLoader:
    """Return the loader of a part of a job's source, that stops behind the last pass to be drawn.

    `guard` marks what it works on and knows the records that are not to be touched.

    Raises:
        ConfigError: See SourceLoader.
    """
    return SourceLoader(
        replace(job.sources[source_index], max_epochs=read_epochs_max(job, source_index)),
        source_index,
        tokenizer,
        job.seed,
        part,
        parts,
        index_dir,
        job.fields,
        job.media,
        min(job.batch.row_tokens_values),
        watch,
        guard,
    )


class SourceLoader:
    """Reads one source, or one part of it, in the source's order.

    Args:
        spec: The source, resolved.
        source_index: Its index in the job.
        tokenizer: Shared by the loaders of a worker.
        seed: The job's.
        part: Which of the source's loaders this is.
        parts: How many there are; the order is the same for any number.
        index_dir: Where indexes are kept, None for none.
        fields: The job's; records of formats that have fields carry their values.
        media: The job's rules.
        row_tokens_min: Tokens of the job's shortest row.
        watch: Sees all that the user's code is given.
        guard: Marks what it works on.

    Raises:
        ConfigError: A recipe's list, template or code is not what the job was resolved with.
    """

    def __init__(
        self,
        spec: SourceSpec,
        source_index: int,
        tokenizer: Tokenizer,
        seed: int,
        part: int,
        parts: int,
        index_dir: Path | None,
        fields: tuple[FieldRule, ...] = (),
        media: tuple[MediaRule, ...] = (),
        row_tokens_min: int = ROW_TOKENS_UNKNOWN,
        watch: Watch | None = None,
        guard: SourceGuard = NO_GUARD.source,
    ) -> None:
        assert 0 <= part < parts, f"part {part} of {parts}"
        self._spec = spec
        self._source_index = source_index
        self._meter = ReadMeter()
        self._close_tools: Callable[[], None] = _nothing
        self._open: OpenBlock | None = None
        self._index = 0
        self._skip = 0
        self._skip_key = -1
        self._records = 0
        self._tokens = 0
        self._cpu_ns = 0
        self._faults: Counter[int] = Counter()
        self._walk: SeekableWalk | LaneWalk
        order = SourceOrder(seed, spec.order_name, spec.shards_in(0), spec.shuffle, spec.growth)
        store = IndexStore(index_dir, spec)
        fields = fields if fields and format_of(spec.format).has_fields else ()
        if is_read_plain(spec):
            self._walk = _plain_walk(
                spec, order, store, self._meter, tokenizer, fields, (part, parts), guard
            )
            return
        tools, self._close_tools = open_tools(
            spec, media, tokenizer, self._meter, guard.in_flight, watch
        )
        encoder = SampleEncoder(
            spec, tokenizer, tools, media, row_tokens_min, fields, source_guard=guard
        )
        self._walk = _field_walk(spec, order, store, self._meter, encoder, (part, parts))

    @property
    def name(self) -> str:
        """Of the source."""
        return self._spec.name

    def seek(self, block_key: int, index: int) -> None:
        """Continue from a position: the first own block at or after it, at the record `index`.

        A position behind a block's last record gives an empty chunk that ends the block.
        """
        self._close_block()
        self._walk.seek(block_key)
        self._skip, self._skip_key = index, block_key

    def next_chunk(self, payload_bytes_max: int) -> ChunkDraft | None:
        """Return the next run of records of one block, in order.

        Args:
            payload_bytes_max: Bytes of tokens and field values; one record is given even if it
                has more.

        Returns:
            A chunk, of no records where a block or the rest of a lane has none; None where this
            part has no block in a whole epoch, or the source's last epoch is over.
        """
        begun_ns = time.thread_time_ns()
        try:
            return self._next_chunk(payload_bytes_max)
        finally:
            self._cpu_ns += time.thread_time_ns() - begun_ns

    def fetch(self, block_key: int, indices: Sequence[int]) -> ChunkDraft:
        """Return exactly these records of a block again, in the order given.

        Does not move the position of `next_chunk`; the block may be another part's.

        Raises:
            CorruptRecordError: The source no longer has such a record.
        """
        begun_ns = time.thread_time_ns()
        try:
            return self._fetch(block_key, indices)
        finally:
            self._cpu_ns += time.thread_time_ns() - begun_ns

    def close(self) -> None:
        """Close all readers; the loader may be used again after a seek."""
        self._close_block()
        self._walk.close()
        self._close_tools()

    def statistics(self) -> SourceLoaderStatistics:
        """Return what was read and handed out so far."""
        return SourceLoaderStatistics(
            records=self._records,
            tokens=self._tokens,
            read_bytes=self._meter.read_bytes,
            cpu_s=self._cpu_ns / 1e9,
            faults={RecordStatus(code).name: count for code, count in sorted(self._faults.items())},
        )

    def _next_chunk(self, payload_bytes_max: int) -> ChunkDraft | None:
        if self._open is None:
            self._open = self._walk.next_block()
            if self._open is None:
                return None
            self._index = 0
            if self._open.block_key == self._skip_key and self._skip:
                self._index = self._open.cursor.skip(self._skip)
            self._skip, self._skip_key = 0, -1
        opened = self._open
        run = opened.cursor.take(payload_bytes_max)
        meta = self._meta(opened, self._index, run)
        draft = ChunkDraft(
            meta,
            run.dtype,
            run.payload,
            index=None,
            values=run.values,
            media=run.media,
            bad=run.bad,
        )
        self._index += len(run.lengths)
        self._count(run)
        if run.is_block_end:
            self._close_block()
            if run.is_lane_end and isinstance(self._walk, LaneWalk):
                self._walk.end_lane(opened.block_key)
        return draft

    def _fetch(self, block_key: int, indices: Sequence[int]) -> ChunkDraft:
        opened = self._walk.open(block_key)
        if opened is None:
            raise self._gone(block_key, "no such block")
        try:
            run = opened.cursor.pick(indices)
        except IndexError as error:
            raise self._gone(block_key, str(error)) from error
        finally:
            opened.close()
        return ChunkDraft(
            self._meta(opened, -1, run),
            run.dtype,
            run.payload,
            index=np.asarray(indices, dtype=np.int32),
            values=run.values,
            media=run.media,
        )

    def _gone(self, block_key: int, what: str) -> CorruptRecordError:
        return CorruptRecordError(
            f"source {self._spec.name!r} no longer holds a record that was drawn "
            f"(block {block_key:#x}: {what}): a shard was changed after submit",
            source=self._spec.name,
            block_key=block_key,
        )

    def _meta(self, opened: OpenBlock, first_index: int, run: Run) -> ChunkMeta:
        return ChunkMeta(
            source_index=self._source_index,
            block_key=opened.block_key,
            first_index=first_index,
            lengths=run.lengths,
            status=run.status,
            is_block_end=run.is_block_end,
            window_blocks=opened.window_blocks,
            is_lane_end=run.is_lane_end,
            fault=run.fault,
            marks=run.marks,
        )

    def _count(self, run: Run) -> None:
        self._records += len(run.lengths)
        self._tokens += int(run.lengths.sum(dtype=np.int64))
        if run.status.any():
            counts = np.bincount(run.status)
            for code in np.flatnonzero(counts[1:]).tolist():
                self._faults[code + 1] += int(counts[code + 1])

    def _close_block(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _field_walk(
    spec: SourceSpec,
    order: SourceOrder,
    store: IndexStore,
    meter: ReadMeter,
    encoder: SampleEncoder,
    own: tuple[int, int],
) -> SeekableWalk | LaneWalk:
    epochs_max = _epochs_max(spec)
    if spec.order_class == "streaming":
        columns = wanted_fields(spec, encoder.fields)
        reader = StreamReader(spec, store, meter, columns=columns)
        return LaneWalk(order, reader, spec.shards, encoder, *own, epochs_max)
    blocks: SeekableFields | SeekableRecords
    if spec.format == "text":
        blocks = SeekableRecords(spec, order, TextFormat(spec, meter), encoder)
        return SeekableWalk(order, blocks.count_blocks, blocks.open, *own, epochs_max)
    entry = format_of(spec.format)
    # A record that `where` refuses belongs to a group too: its key is needed.
    shown = without_where(spec) if spec.group_field else spec
    shards = cast("SeekableFormat", entry.open(shown, wanted_fields(spec, encoder.fields), meter))
    if getattr(shards, "is_where_judged", False) and shown is spec:
        encoder = encoder.without_where()
    blocks = SeekableFields(spec, order, store, shards, encoder, entry.place_name)
    return SeekableWalk(order, blocks.count_blocks, blocks.open, *own, epochs_max)


def _epochs_max(spec: SourceSpec) -> int:
    return min(spec.max_epochs or EPOCH_MAX, EPOCH_MAX)


def _nothing() -> None:
    return None


def _plain_walk(
    spec: SourceSpec,
    order: SourceOrder,
    store: IndexStore,
    meter: ReadMeter,
    tokenizer: Tokenizer,
    fields: tuple[FieldRule, ...],
    own: tuple[int, int],
    guard: SourceGuard,
) -> SeekableWalk | LaneWalk:
    epochs_max = _epochs_max(spec)
    if spec.order_class == "streaming":
        count = tokenizer.spec.vocabulary_count
        reader = StreamReader(spec, store, meter, fields=fields, vocabulary_count=count)
        encoder = encoder_of(spec, reader.format.extract, tokenizer, fields, guard)
        return LaneWalk(order, reader, spec.shards, encoder, *own, epochs_max)
    blocks = _seekable_blocks(spec, order, store, meter, tokenizer, fields, guard)
    return SeekableWalk(order, blocks.count_blocks, blocks.open, *own, epochs_max)


def _seekable_blocks(
    spec: SourceSpec,
    order: SourceOrder,
    store: IndexStore,
    meter: ReadMeter,
    tokenizer: Tokenizer,
    fields: tuple[FieldRule, ...],
    guard: SourceGuard,
) -> SeekableTokens | SeekableRows | SeekableRecords:
    if spec.format == "megatron":
        return SeekableTokens(spec, order, store, meter, tokenizer.dtype)
    if spec.format == "parquet":
        shards = ParquetFormat(spec, meter, fields=fields, records_of_lost=store.records_of_lost)
        encoder = encoder_of(spec, shards.extract, tokenizer, fields, guard)
        return SeekableRows(spec, order, store, shards, encoder)
    records: JsonlFormat | TextFormat = TextFormat(spec, meter)
    if spec.format == "jsonl":
        count = tokenizer.spec.vocabulary_count
        records = JsonlFormat(spec, meter, fields=fields, vocabulary_count=count)
    encoder = encoder_of(spec, records.extract, tokenizer, fields, guard)
    return SeekableRecords(spec, order, records, encoder)
