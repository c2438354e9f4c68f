"""Blocks of seekable shards whose records have fields, of any format of the registry."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.formats import SeekableFormat
from msd_daemon.sources.grouped import GroupedBlocks
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.order import SourceOrder
from msd_daemon.sources.record import RawRecord, lost_shard
from msd_daemon.sources.seekable import Opened, SeekableRecords
from msd_daemon.sources.text_cursor import Encoder
from msd_daemon.sources.walk import BlockPlaceInShard


class SeekableFields:
    """Blocks of the shards of a source.

    Args:
        spec: The source.
        order: Its order.
        store: Keeps the counts of blocks, so that a start opens no shard it need not.
        shards: Opens them.
        encoder: For their records.
        place_name: What the place of a record counts.
    """

    def __init__(
        self,
        spec: SourceSpec,
        order: SourceOrder,
        store: IndexStore,
        shards: SeekableFormat,
        encoder: Encoder,
        place_name: str,
    ) -> None:
        self._spec = spec
        self._store = store
        self._shards = shards
        records = GroupedBlocks(self, spec.group_field) if spec.group_field else self
        self._records = SeekableRecords(spec, order, records, encoder, place_name=place_name)

    def count_blocks(self, shard_number: int) -> int:
        """Return the blocks of a shard; one that cannot be opened is one block of one fault."""
        return self.block_count(self._spec.shards[shard_number])

    def open(self, place: BlockPlaceInShard) -> Opened:
        """Open a block; its file is opened at the first record."""
        return self._records.open(place)

    def lost(self, place: BlockPlaceInShard, records: list[RawRecord]) -> Opened:
        """Return a block that cannot be read; these stand for its records."""
        return self._records.lost(place, records)

    def block_count(self, shard: Shard) -> int:
        """Return the blocks of a shard, at least 1."""
        index = self._store.load(shard)
        if index is not None:
            return max(1, len(index.starts))
        try:
            count, records = self._shards.measure(shard)
        except (CorruptRecordError, OSError):
            return 1
        self._store.save(shard, records, np.zeros(count, dtype=np.int64), [])
        return max(1, count)

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records of a block; a shard that cannot be opened is one record."""
        try:
            yield from self._shards.records(shard, block)
        except (CorruptRecordError, OSError) as error:
            yield lost_shard(error, self._store.records_of_lost(shard))
