"""Blocks of seekable shards, opened: records that are tokenized, or token ids that lie ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from federation.model.job import FieldRule, Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.bad_record import BadRecord, shown_key
from msd_daemon.sources.block_cursor import BlockCursor, Places, RawWindow, WindowCursor
from msd_daemon.sources.encoded import EncodedRecords, named, no_records
from msd_daemon.sources.hold_out import hold_out_of
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.megatron import MegatronShard, TokenBlock, count_documents
from msd_daemon.sources.order import SourceOrder, group_windows, record_windows, window_bounds
from msd_daemon.sources.parquet import ParquetFormat
from msd_daemon.sources.parquet_ids import IdWindow, ParquetIds, id_windows
from msd_daemon.sources.record import Extractor, RawRecord, ReadMeter, lost_records
from msd_daemon.sources.record_encoder import RecordEncoder
from msd_daemon.sources.record_guard import NO_GUARD, SourceGuard
from msd_daemon.sources.text_cursor import Encoder, text_cursor
from msd_daemon.sources.token_cursor import TokenCursor
from msd_daemon.sources.walk import BlockPlaceInShard
from msd_daemon.transforms.tokenizer import Tokenizer

Opened = tuple[BlockCursor, Callable[[], None]]


class RecordFormat(Protocol):
    """A format whose blocks are raw records."""

    def block_count(self, shard: Shard) -> int:
        """Return the blocks of a shard, at least 1."""
        ...

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records of a block; damage is a record too."""
        ...


def encoder_of(
    spec: SourceSpec,
    extract: Extractor,
    tokenizer: Tokenizer,
    fields: tuple[FieldRule, ...],
    guard: SourceGuard = NO_GUARD.source,
) -> RecordEncoder:
    """Return the encoder of a source's records; `at` gives that of a shard.

    Args:
        spec: The source.
        extract: Of its format.
        tokenizer: Shared by the loaders of a worker.
        fields: Those that the format carries.
        guard: Of the source in this process.
    """
    return RecordEncoder(
        extract,
        tokenizer,
        is_tokenized=spec.is_tokenized,
        hold_out=hold_out_of(spec),
        fields=fields,
        source_guard=guard,
    )


class SeekableRecords:
    """Blocks of JSONL and text shards: byte ranges, found without any index."""

    def __init__(
        self,
        spec: SourceSpec,
        order: SourceOrder,
        records: RecordFormat,
        encoder: Encoder,
        *,
        place_name: str = "byte offset",
    ) -> None:
        self._spec = spec
        self._order = order
        self._records = records
        self._encoder = encoder
        self._place_name = place_name

    def count_blocks(self, shard_number: int) -> int:
        """Return the blocks of a shard; one that cannot be opened is one block of one fault."""
        return self._records.block_count(self._spec.shards[shard_number])

    def open(self, place: BlockPlaceInShard) -> Opened:
        """Open a block; its file is opened at the first record."""
        shard = self._spec.shards[place.shard_number]
        records = self._records.records(shard, place.block)
        key = self._order.sample_key(place.epoch, place.position, place.block)
        encoder = self._encoder.at(shard.path, self._place_name, key, place.epoch)
        order = window_order(self._order, place)
        return text_cursor(self._windows(records), order, encoder), closer(records)

    def lost(self, place: BlockPlaceInShard, records: list[RawRecord]) -> Opened:
        """Return a block that cannot be read; these stand for its records."""
        path = self._spec.shards[place.shard_number].path
        encoder = self._encoder.at(path, self._place_name, 0, place.epoch)
        order = window_order(self._order, place)
        return text_cursor(self._windows(iter(records)), order, encoder), _nothing

    def _windows(self, records: Iterator[RawRecord]) -> Iterator[RawWindow]:
        cut = group_windows if self._spec.group_field else record_windows
        for window, is_last in cut(records, self._order.rule):
            yield RawWindow(window, is_last, False)


class SeekableRows:
    """Blocks of parquet shards: row groups, of texts or of token ids.

    Args:
        spec: The source.
        order: Its order.
        store: Keeps the footers' counts: opening thousands of files takes longer than a first batch.
        shards: Opens them.
        encoder: For rows of text.
        is_naming: Rows of ids are named, not cut; those of text are what the encoder makes of them.
        keys_of: Gives the keys of the rows of ids of a row group, where they have some.
    """

    def __init__(
        self,
        spec: SourceSpec,
        order: SourceOrder,
        store: IndexStore,
        shards: ParquetFormat,
        encoder: RecordEncoder,
        *,
        is_naming: bool = False,
        keys_of: Callable[[Shard, int], list[bytes | None]] | None = None,
    ) -> None:
        self._is_naming = is_naming
        self._keys_of = keys_of
        self._spec = spec
        self._order = order
        self._store = store
        self._shards = shards
        self._encoder = encoder
        self._texts = SeekableRecords(spec, order, shards, encoder, place_name="row")
        count = encoder.tokenizer.spec.vocabulary_count
        self._ids = ParquetIds(spec, shards, count, encoder.dtype, encoder.hold_out)

    def count_blocks(self, shard_number: int) -> int:
        """Return the blocks of a shard; one that cannot be opened is one block of one fault."""
        shard = self._spec.shards[shard_number]
        index = self._store.load(shard)
        if index is not None:
            return max(1, len(index.starts))
        try:
            count, rows = self._shards.measure(shard)
        except (CorruptRecordError, OSError):
            return 1
        self._store.save(shard, rows, np.zeros(count, dtype=np.int64), [])
        return count

    def lost(self, place: BlockPlaceInShard, records: list[RawRecord]) -> Opened:
        """Return a block that cannot be read; these stand for its records."""
        return self._texts.lost(place, records)

    def open(self, place: BlockPlaceInShard) -> Opened:
        """Open a block; its file is opened at the first record."""
        if not self._spec.tokens_field:
            return self._texts.open(place)
        shard = self._spec.shards[place.shard_number]
        batches = self._ids.batches(shard, place.block)
        order = window_order(self._order, place)

        keys = self._keys_of(shard, place.block) if self._keys_of is not None else []

        def names_of_window(window: IdWindow, places: Places) -> EncodedRecords:
            rows = (places + window.first_row).tolist()
            known = [keys[row] if row < len(keys) else None for row in rows]
            names = [
                BadRecord("", shard.path, "row", row, shown_key(key))
                for row, key in zip(rows, known, strict=True)
            ]
            return named(names, self._encoder.dtype)

        cursor = WindowCursor(
            id_windows(batches, self._order.rule, no_records(self._encoder.dtype)),
            lambda number, window: order(number, window.count),
            names_of_window if self._is_naming else _rows_of_window,
            self._encoder.dtype,
            self._encoder.fields,
        )
        return cursor, batches.close


def _rows_of_window(window: IdWindow, places: Places) -> EncodedRecords:
    return window.records.rows(places)


def window_order(order: SourceOrder, place: BlockPlaceInShard) -> Callable[[int, int], Places]:
    """Return what gives the order of a window of a block: (window number, records)."""
    key = order.record_key(place.epoch, place.position, place.block)
    return lambda number, count: order.records(key, number, count)


def closer(records: Iterator[RawRecord]) -> Callable[[], None]:
    """Return what closes the reader behind records, where there is one."""
    close: Callable[[], None] = getattr(records, "close", _nothing)
    return close


class SeekableTokens:
    """Blocks of Megatron shards."""

    def __init__(
        self,
        spec: SourceSpec,
        order: SourceOrder,
        store: IndexStore,
        meter: ReadMeter,
        fallback: np.dtype[np.uint16] | np.dtype[np.int32],
        *,
        is_naming: bool = False,
        has_tokens: bool = True,
    ) -> None:
        self._is_naming = is_naming
        self._has_tokens = has_tokens
        self._spec = spec
        self._order = order
        self._store = store
        self._meter = meter
        self._fallback = fallback
        self._hold_out = hold_out_of(spec)
        self._starts: dict[int, npt.NDArray[np.int64]] = {}

    def count_blocks(self, shard_number: int) -> int:
        """Return the blocks of a shard; one that cannot be opened is one block of one fault."""
        return len(self._block_starts(shard_number)) - 1

    def open(self, place: BlockPlaceInShard) -> Opened:
        """Open a block and look up its documents; tokens are read at the first need."""
        shard = self._spec.shards[place.shard_number]
        starts = self._block_starts(place.shard_number)
        try:
            opened = MegatronShard(shard, self._meter)
        except CorruptRecordError as error:
            return self._lost(shard, error.message), _nothing
        except OSError as error:
            return self._lost(shard, f"{shard.path} cannot be read: {error.strerror}"), _nothing
        first, last = int(starts[place.block]), int(starts[place.block + 1])
        block = opened.open_block(first, last, self._spec.record_bytes_max)
        order = self._order_of(place, block)

        def tell(number: int) -> BadRecord:
            at = int(order[number])
            fault = "" if self._is_naming else opened.fault_of(block, at)
            return BadRecord(fault, shard.path, "document", first + at)

        lengths, status = block.lengths[order], block.status[order]
        if self._is_naming:
            lengths, status = np.zeros_like(lengths), np.zeros_like(status)
        cursor = TokenCursor(
            block.begins[order],
            lengths,
            status,
            opened,
            opened.dtype,
            tell,
            None if self._is_naming else self._hold_out,
            is_naming=self._is_naming,
            has_tokens=self._has_tokens,
        )
        return cursor, opened.close

    def _order_of(self, place: BlockPlaceInShard, block: TokenBlock) -> npt.NDArray[np.int64]:
        bounds = window_bounds(block.sizes, self._order.rule)
        key = self._order.record_key(place.epoch, place.position, place.block)
        parts = [
            self._order.records(key, number, bounds[number + 1] - bounds[number]) + bounds[number]
            for number in range(len(bounds) - 1)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _block_starts(self, shard_number: int) -> npt.NDArray[np.int64]:
        known = self._starts.get(shard_number)
        if known is not None:
            return known
        if len(self._starts) >= 2 * self._order.rule.window_shards:
            self._starts.clear()  # those of windows gone by
        shard = self._spec.shards[shard_number]
        index = self._store.load(shard)
        if index is not None and len(index.starts) > 1:
            starts = index.starts
        else:
            try:
                starts = self._find_starts(shard)
            except CorruptRecordError:
                starts = np.zeros(2, dtype=np.int64)  # one block, of the fault
            except OSError:
                return np.zeros(2, dtype=np.int64)  # for now
        self._starts[shard_number] = starts
        return starts

    def _find_starts(self, shard: Shard) -> npt.NDArray[np.int64]:
        opened = MegatronShard(shard, self._meter)
        try:
            starts = opened.block_starts(self._order.rule)
            self._store.save(shard, opened.document_count, starts, [])
        finally:
            opened.close()
        return starts

    def lost(self, place: BlockPlaceInShard, records: list[RawRecord]) -> Opened:
        """Return a block that cannot be read; these stand for its records."""
        shard = self._spec.shards[place.shard_number]
        return self._faults(shard, records[0].fault, len(records)), _nothing

    def _lost(self, shard: Shard, fault: str) -> TokenCursor:
        """Return the one record that stands for a shard that cannot be opened."""
        records = self._store.records_of_lost(shard)
        fault += f"; {lost_records(count_documents(shard) if records is None else records)}"
        return self._faults(shard, fault, 1)

    def _faults(self, shard: Shard, fault: str, count: int) -> TokenCursor:
        zeros = np.zeros(count, dtype=np.int64)
        status = np.full(count, RecordStatus.UNREADABLE, dtype=np.uint8)
        text = fault if fault.startswith(shard.path) else f"{shard.path} {fault}"
        return TokenCursor(
            zeros,
            zeros,
            status,
            _NoTokens(),
            self._fallback,
            lambda number: BadRecord(text, shard.path, "document", number),
        )


class _NoTokens:
    def read_tokens(self, begin: int, count: int) -> npt.NDArray[np.int32]:
        raise AssertionError(f"{count} tokens at {begin} of a shard that cannot be read")


def _nothing() -> None:
    return None
