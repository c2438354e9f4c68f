"""Blocks of a seekable source whose shards may be away: as many bad records stand for a lost block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from federation.model.job import Shard, SourceSpec
from msd_daemon.sources.block_cursor import BlockCursor
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.record import RawRecord, ReadMeter
from msd_daemon.sources.record_guard import Loss
from msd_daemon.sources.shard_door import (
    ShardDoor,
    is_passed,
    loss_text,
    lost_count,
    lost_records_of,
)
from msd_daemon.sources.walk import BlockPlaceInShard

Opened = tuple[BlockCursor, Callable[[], None]]


class Blocks(Protocol):
    """The blocks of a seekable source."""

    def count_blocks(self, shard_number: int) -> int:
        """Return the blocks of a shard, at least 1."""
        ...

    def open(self, place: BlockPlaceInShard) -> Opened:
        """Open a block."""
        ...

    def lost(self, place: BlockPlaceInShard, records: list[RawRecord]) -> Opened:
        """Return a block that cannot be read; these stand for its records."""
        ...


class GuardedBlocks:
    """Blocks of a source, of which those of shards that cannot be opened are lost.

    Args:
        spec: The source.
        blocks: Its blocks.
        door: Of its shards.
        store: Of its indexes.
        meter: Knows the shards that failed to open.
        count_lost: Returns how many records a shard has, from notes beside it, None for unknown.
    """

    def __init__(
        self,
        spec: SourceSpec,
        blocks: Blocks,
        door: ShardDoor,
        store: IndexStore,
        meter: ReadMeter,
        count_lost: Callable[[Shard], int | None],
    ) -> None:
        self._spec = spec
        self._blocks = blocks
        self._door = door
        self._store = store
        self._meter = meter
        self._count_lost = count_lost

    def count_blocks(self, shard_number: int) -> int:
        """Return the blocks of a shard: of one that is lost what its index says, else 1."""
        shard = self._spec.shards[shard_number]
        self._meter.lost.discard(shard.path)
        count = self._blocks.count_blocks(shard_number)
        if shard.path not in self._meter.lost:
            return count
        if self._door.fault(shard, 0) is None:
            return self._blocks.count_blocks(shard_number)
        return self._store.blocks_of_lost(shard) or count

    def open(self, place: BlockPlaceInShard) -> Opened:
        """Open a block."""
        shard = self._spec.shards[place.shard_number]
        noted = self._door.loss(shard, place.block, place.epoch)
        if noted is not None:
            return self._blocks.lost(place, list(lost_records_of(noted)))
        fault = self._door.fault(shard, place.epoch)
        if fault is None:
            return self._blocks.open(place)
        self._meter.lost.add(shard.path)
        known = self._store.records_of_lost(shard)
        total = self._count_lost(shard) if known is None else known
        count = lost_count(self._spec, total)
        if total is not None:
            blocks = self.count_blocks(place.shard_number)
            count = max(total * (place.block + 1) // blocks - total * place.block // blocks, 1)
        loss = Loss(count, loss_text(fault, total, count))
        if is_passed(self._spec, count):
            self._door.lose(shard, place.block, place.epoch, loss)
        return self._blocks.lost(place, list(lost_records_of(loss)))
