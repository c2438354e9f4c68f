"""Puts the chunks of one source into its order, whoever loaded them and whenever they came.

`BlockWalk` knows which position comes next (blocks of a window, windows of an epoch, lanes that
take turns); `ChunkMerger` holds back chunks that came early, ignores those that came twice, and
hands on runs of records that follow each other without a gap. Pure; bounded by what loaders were
granted, since a loader sends nothing without a piece of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from federation.model.chunk import ChunkMeta
from federation.model.job import SourceSpec
from msd_client.contract.errors import ConfigError, ProtocolError
from msd_client.contract.position import pack_block_key, unpack_block_key

LANES_MAX = 62
"""Lanes of a streaming source: their ended marks travel in one integer of the state."""


class Run(NamedTuple):
    """Records of a chunk that come next in the order: `meta` from record `skip` on."""

    meta: ChunkMeta
    skip: int


class BlockWalk:
    """The position that comes next in a source's order.

    Seekable sources walk block after block of a window, window after window of an epoch. In a
    streaming source `lanes` lanes take turns; one that ended is passed over.
    """

    def __init__(
        self, spec: SourceSpec, block_key: int = 0, index: int = 0, lanes_ended: int = 0
    ) -> None:
        """Stand at a position.

        Raises:
            ConfigError: The source asks for more lanes than a state can tell apart.
        """
        self.epoch, self.window, self.block = unpack_block_key(block_key)
        self.index = index
        shuffle = spec.shuffle
        self._is_streaming = spec.order_class == "streaming"
        self._spec = spec
        self.lanes = spec.lane_count
        if self._is_streaming and self.lanes > LANES_MAX:
            raise ConfigError(
                f"source {spec.name}: interleave {shuffle.interleave} exceeds {LANES_MAX}; lower "
                "shuffle.interleave",
                source=spec.name,
                seen=shuffle.interleave,
                limit=LANES_MAX,
            )
        self._ended = lanes_ended
        self._skipped = lanes_ended
        self.skips: list[tuple[int, int]] = []
        """(block key, lane) where a lane was first passed over, ascending, since `take_skips`."""

    @property
    def block_key(self) -> int:
        """Key of the block that comes next."""
        return pack_block_key(self.epoch, self.window, self.block)

    @property
    def is_at_window_start(self) -> bool:
        """True where the next record is the first of a window of a seekable source."""
        return not (self._is_streaming or self.block or self.index)

    def jump(self, block_key: int) -> None:
        """Stand at the start of a block."""
        self.epoch, self.window, self.block = unpack_block_key(block_key)
        self.index = 0

    def finish_block(self, meta: ChunkMeta) -> None:
        """Go on to the first record of the next block; `meta` is the one that ended this block.

        A lane that has no block from here on is told by an empty chunk with both end flags.
        Whether a lane's end is told so or on its last block makes no difference to the skips.
        """
        if self._is_streaming:
            if meta.is_lane_end:
                lane = self.block % self.lanes
                self._ended |= 1 << lane
                if not self.index:
                    self._skip(lane)
            self._next_turn()
        elif self.block + 1 < meta.window_blocks:
            self.block += 1
        else:
            self._next_window()
        self.index = 0

    def _next_window(self) -> None:
        self.block = 0
        self.window += 1
        windows = -(-self._spec.shards_in(self.epoch) // self._spec.shuffle.window_shards)
        if self.window >= windows:
            self.window = 0
            self.epoch += 1

    def _next_turn(self) -> None:
        if self._ended == (1 << self.lanes) - 1:
            self._ended = self._skipped = 0
            self.block = 0
            self.epoch += 1
            return
        self.block += 1
        while self._ended >> (lane := self.block % self.lanes) & 1:
            self._skip(lane)
            self.block += 1

    def _skip(self, lane: int) -> None:
        if not self._skipped >> lane & 1:
            self._skipped |= 1 << lane
            self.skips.append((self.block_key, lane))

    def take_skips(self, block_key: int) -> list[tuple[int, int]]:
        """Return and forget the first-time skips before a block key."""
        count = sum(1 for key, _ in self.skips if key < block_key)
        taken, self.skips = self.skips[:count], self.skips[count:]
        return taken


class ChunkMerger:
    """Takes a source's chunks in any order, gives runs of records in the source's order."""

    def __init__(self, walk: BlockWalk, *, is_begun: bool = False) -> None:
        """Stand where a walk stands.

        Args:
            walk: The source's.
            is_begun: True where the record there was drawn from: its window is not empty.
        """
        self.walk = walk
        self._is_begun = is_begun
        self._early: dict[int, dict[int, ChunkMeta]] = {}
        self.short_of: int | None = None
        """Records of the block that comes next, once a chunk ended it before the record to go on at:
        the source holds less than when the position was told. Nothing can follow."""

    @property
    def position(self) -> tuple[int, int]:
        """(block key, index) of the first record that is not known yet."""
        return self.walk.block_key, self.walk.index

    @property
    def early_count(self) -> int:
        """Chunks held back because an earlier one has yet to come."""
        return sum(len(block) for block in self._early.values())

    def add(self, meta: ChunkMeta) -> Iterator[Run]:
        """Yield the runs that a chunk completes; a chunk that is known already yields none.

        Raises:
            ProtocolError: The chunk contradicts itself.
        """
        _check(meta)
        if (meta.block_key, meta.first_index) > self.position:
            block = self._early.setdefault(meta.block_key, {})
            former = block.get(meta.first_index)
            if former is None or _reach(former) < _reach(meta):
                block[meta.first_index] = meta
        else:
            yield from self._take(meta)
        yield from self._take_early()

    def _take_early(self) -> Iterator[Run]:
        while self._early:
            self._pass_empty_windows()
            key = self.walk.block_key
            block = self._early.get(key)
            if not block:
                return
            ready = sorted(first for first in block if first <= self.walk.index)
            if not ready:
                return
            for first in ready:
                yield from self._take(block.pop(first))
                if self.walk.block_key != key:
                    break

    def _pass_empty_windows(self) -> None:
        """Go to the next window that is known, where the one that comes next has no block.

        One loader has the first block of every window and sends its blocks in order: where it sent
        that of a later window and none of this one, this one is empty.
        """
        walk = self.walk
        if self._is_begun or not walk.is_at_window_start or walk.block_key in self._early:
            return
        later = [
            key
            for key, block in self._early.items()
            if key > walk.block_key and 0 in block and not unpack_block_key(key).block
        ]
        if later:
            walk.jump(min(later))

    def _take(self, meta: ChunkMeta) -> Iterator[Run]:
        walk = self.walk
        if meta.block_key != walk.block_key:
            return
        skip = walk.index - meta.first_index
        count = len(meta.lengths)
        if skip > count:
            if meta.is_block_end:
                self.short_of = meta.first_index + count
            return
        if skip < count:
            self._is_begun = False
            walk.index = meta.first_index + count
            yield Run(meta, skip)
        if meta.is_block_end:
            self._early.pop(meta.block_key, None)
            walk.finish_block(meta)


def _check(meta: ChunkMeta) -> None:
    count = len(meta.lengths)
    if len(meta.status) != count or meta.first_index < 0:
        raise ProtocolError(
            f"chunk of source {meta.source_index}, block {meta.block_key}: {count} lengths, "
            f"{len(meta.status)} statuses, first index {meta.first_index}"
        )


def _reach(meta: ChunkMeta) -> tuple[int, bool]:
    """Return how far a chunk takes the walk, to compare chunks with one beginning."""
    return len(meta.lengths), meta.is_block_end
