"""Blocks of seekable shards, opened: records that are tokenized, or token ids that lie ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.block_cursor import (
    BlockCursor,
    RawWindow,
    RecordEncoder,
    TextCursor,
    TokenCursor,
)
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.jsonl import JsonlFormat
from msd_daemon.sources.megatron import MegatronShard, TokenBlock
from msd_daemon.sources.order import SourceOrder, record_windows, window_bounds
from msd_daemon.sources.parquet import ParquetFormat
from msd_daemon.sources.record import Extractor, RawRecord, ReadMeter
from msd_daemon.sources.text import TextFormat
from msd_daemon.sources.walk import BlockPlaceInShard
from msd_daemon.transforms.tokenizer import Tokenizer

Opened = tuple[BlockCursor, Callable[[], None]]


class RecordFormat(Protocol):
    """A format whose blocks are raw records."""

    extract: Extractor

    def block_count(self, shard: Shard) -> int:
        """Return the blocks of a shard, at least 1."""
        ...

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records of a block; damage is a record too."""
        ...


def record_format(spec: SourceSpec, meter: ReadMeter) -> RecordFormat:
    """Return the reader of a source's format."""
    if spec.format == "jsonl":
        return JsonlFormat(spec, meter)
    if spec.format == "text":
        return TextFormat(spec, meter)
    assert spec.format == "parquet"
    return ParquetFormat(spec, meter)


class SeekableRecords:
    """Blocks of JSONL, text and parquet shards."""

    def __init__(
        self,
        spec: SourceSpec,
        order: SourceOrder,
        store: IndexStore,
        tokenizer: Tokenizer,
        meter: ReadMeter,
    ) -> None:
        self._spec = spec
        self._order = order
        self._store = store
        self._tokenizer = tokenizer
        self._format = record_format(spec, meter)

    def count_blocks(self, shard_number: int) -> int:
        """Return the blocks of a shard; one that cannot be opened is one block of one fault."""
        shard = self._spec.shards[shard_number]
        if self._spec.format != "parquet":
            return self._format.block_count(shard)
        # Footers are kept in the index: opening thousands of files takes longer than a first batch.
        index = self._store.load(shard)
        if index is not None:
            return max(1, len(index.starts))
        try:
            count = self._format.block_count(shard)
        except (CorruptRecordError, OSError):
            return 1
        self._store.save(shard, -1, np.zeros(count, dtype=np.int64), [])
        return count

    def open(self, place: BlockPlaceInShard) -> Opened:
        """Open a block; its file is opened at the first record."""
        shard = self._spec.shards[place.shard_number]
        records = self._format.records(shard, place.block)
        key = self._order.record_key(place.epoch, place.position, place.block)
        place_name = "row" if self._spec.format == "parquet" else "byte offset"
        encoder = RecordEncoder(self._format.extract, self._tokenizer, shard.path, place_name)

        def windows() -> Iterator[RawWindow]:
            for window, is_last in record_windows(records, self._order.rule):
                yield RawWindow(window, is_last, False)

        def window_order(number: int, count: int) -> npt.NDArray[np.int64]:
            return self._order.records(key, number, count)

        def close() -> None:
            closer = getattr(records, "close", None)
            if closer is not None:
                closer()

        return TextCursor(windows(), window_order, encoder), close


class SeekableTokens:
    """Blocks of Megatron shards."""

    def __init__(
        self,
        spec: SourceSpec,
        order: SourceOrder,
        store: IndexStore,
        meter: ReadMeter,
        fallback: np.dtype[np.uint16] | np.dtype[np.int32],
    ) -> None:
        self._spec = spec
        self._order = order
        self._store = store
        self._meter = meter
        self._fallback = fallback
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
            return self._unreadable(error.message), _nothing
        except OSError as error:
            return self._unreadable(f"{shard.path} cannot be read: {error.strerror}"), _nothing
        first, last = int(starts[place.block]), int(starts[place.block + 1])
        block = opened.open_block(first, last, self._spec.record_bytes_max)
        order = self._order_of(place, block)
        cursor = TokenCursor(
            block.begins[order],
            block.lengths[order],
            block.status[order],
            opened,
            opened.dtype,
            block.fault,
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
            starts = self._find_starts(shard)
        self._starts[shard_number] = starts
        return starts

    def _find_starts(self, shard: Shard) -> npt.NDArray[np.int64]:
        try:
            opened = MegatronShard(shard, self._meter)
        except (CorruptRecordError, OSError):
            return np.zeros(2, dtype=np.int64)  # one block, of the fault
        try:
            starts = opened.block_starts(self._order.rule)
            self._store.save(shard, opened.document_count, starts, [])
        finally:
            opened.close()
        return starts

    def _unreadable(self, fault: str) -> TokenCursor:
        zero = np.zeros(1, dtype=np.int64)
        status = np.array([RecordStatus.UNREADABLE], dtype=np.uint8)
        return TokenCursor(zero, zero, status, _NoTokens(), self._fallback, fault)


class _NoTokens:
    def read_tokens(self, begin: int, count: int) -> npt.NDArray[np.int32]:
        raise AssertionError(f"{count} tokens at {begin} of a shard that cannot be read")


def _nothing() -> None:
    return None
