"""The blocks that one loader of a source reads, in order, epoch after epoch.

Two order classes (DESIGN.md section 4): seekable blocks are listed and permuted inside a window of
shards, streamed ones come from lanes. Loader k of n has the ordinals, or the lanes, that are k
modulo n, so the order is what it is whoever loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import Shard
from msd_client.contract.position import KEY_MAX, pack_block_key, unpack_block_key
from msd_daemon.sources.block_cursor import BlockCursor
from msd_daemon.sources.fetch_ahead import BlockExtent, FetchAhead
from msd_daemon.sources.lane import Lane, StreamReader
from msd_daemon.sources.order import SourceOrder
from msd_daemon.sources.text_cursor import Encoder, text_cursor


class OpenBlock(NamedTuple):
    """A block that is about to be read."""

    block_key: int
    window_blocks: int
    cursor: BlockCursor
    close: Callable[[], None]
    """Closes what was opened for this block alone."""


class BlockPlaceInShard(NamedTuple):
    """Which block of which shard stands at a place of the order."""

    epoch: int
    position: int
    shard_number: int
    block: int


OpenSeekable = Callable[[BlockPlaceInShard], tuple[BlockCursor, Callable[[], None]]]


class SeekableWalk:
    """The blocks of a seekable source.

    Args:
        order: The source's order.
        count_blocks: Blocks of a shard by its number, at least 1.
        open_block: Opens a block.
        part: Which of the source's loaders this is.
        parts: How many there are.
        epochs_max: Where reading ahead stops.
    """

    def __init__(
        self,
        order: SourceOrder,
        count_blocks: Callable[[int], int],
        open_block: OpenSeekable,
        part: int,
        parts: int,
        epochs_max: int,
    ) -> None:
        self._order = order
        self._count_blocks = count_blocks
        self._open_block = open_block
        self._part, self._parts = part, parts
        self._epochs_max = epochs_max
        self._epoch = self._window = 0
        self._ordinal = part
        self._sought = 0
        """Block of the window that was sought and not looked for yet."""
        self._listing: tuple[tuple[int, int], _Listing] | None = None
        self.ahead: FetchAhead | None = None
        """Fetches blocks that come next, where it is worth it."""

    def seek(self, block_key: int) -> None:
        """Go to the first own block at or after a key."""
        self._epoch, self._window, block = unpack_block_key(block_key)
        self._ordinal = block + (self._part - block) % self._parts
        self._sought = block

    def next_block(self, until: int = KEY_MAX) -> OpenBlock | None:
        """Return the next own block, None where a whole epoch has none.

        Args:
            until: Key that it must lie before, else the walk stays where it is and None is returned.

        Raises:
            IndexError: The window has fewer blocks than when the place sought was told.
        """
        if not self._order.shard_count:
            return None
        passed = 0
        # From anywhere inside an epoch, a whole one lies within its windows and the next one's.
        windows = sum(self._order.window_count(self._epoch + more) for more in (0, 1))
        while passed <= windows:
            if self._epoch >= self._epochs_max:
                return None
            if self._window >= self._order.window_count(self._epoch):
                self._epoch, self._window, self._ordinal = self._epoch + 1, 0, self._part
                continue
            listing = self._list(self._epoch, self._window)
            self._check_sought(listing.count)
            if self._ordinal < listing.count:
                key = pack_block_key(self._epoch, self._window, self._ordinal)
                if key >= until:
                    return None
                place = listing.place(self._ordinal)
                self._ordinal += self._parts
                if self.ahead is not None:
                    self.ahead.wish(listing.coming(self._ordinal, self._parts, self.ahead.blocks))
                return OpenBlock(key, listing.count, *self._open_block(place))
            self._window, self._ordinal = self._window + 1, self._part
            passed += 1
        return None

    def _check_sought(self, count: int) -> None:
        sought, self._sought = self._sought, 0
        if sought and sought >= count:
            raise IndexError(
                f"epoch {self._epoch}, window {self._window}: {count} blocks, block {sought} is to be "
                "gone on with"
            )

    def open(self, block_key: int) -> OpenBlock | None:
        """Return any block by its key, None where there is none; the walk does not move."""
        epoch, window, ordinal = unpack_block_key(block_key)
        if window >= self._order.window_count(epoch):
            return None
        listing = self._list(epoch, window)
        if ordinal >= listing.count:
            return None
        return OpenBlock(block_key, listing.count, *self._open_block(listing.place(ordinal)))

    def shard_block(self, block_key: int) -> int:
        """Return which block of its shard stands at a key of the order."""
        epoch, window, ordinal = unpack_block_key(block_key)
        return self._list(epoch, window).place(ordinal).block

    def keys_of_shard(self, epoch: int, shard_number: int) -> list[int]:
        """Return the keys of a shard's blocks in an epoch, ascending."""
        position = _position(self._order, epoch, shard_number)
        if position is None:
            return []
        window = position // self._order.rule.window_shards
        ordinals = self._list(epoch, window).ordinals(shard_number)
        return [pack_block_key(epoch, window, ordinal) for ordinal in ordinals]

    def close(self) -> None:
        """Forget the listing."""
        self._listing = None

    def _list(self, epoch: int, window: int) -> _Listing:
        if self._listing is None or self._listing[0] != (epoch, window):
            listing = _Listing(self._order, self._count_blocks, epoch, window)
            self._listing = ((epoch, window), listing)
        return self._listing[1]


class _Listing:
    """The blocks of one window, permuted."""

    def __init__(
        self, order: SourceOrder, count_blocks: Callable[[int], int], epoch: int, window: int
    ) -> None:
        self._epoch = epoch
        self._positions = order.window_positions(epoch, window)
        self._shards = order.shards(epoch)[self._positions.start : self._positions.stop]
        counts = [count_blocks(int(shard)) for shard in self._shards]
        self._ends: npt.NDArray[np.int64] = np.cumsum(counts, dtype=np.int64)
        self.count = int(self._ends[-1])
        self._permuted = order.blocks(epoch, window, self.count)

    def place(self, ordinal: int) -> BlockPlaceInShard:
        """Return what stands at an ordinal."""
        listed = int(self._permuted[ordinal])
        number = int(np.searchsorted(self._ends, listed, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return BlockPlaceInShard(
            self._epoch, self._positions[number], int(self._shards[number]), listed - before
        )

    def coming(self, ordinal: int, step: int, count: int) -> list[BlockExtent]:
        """Return what stands at the next `count` places of this window, every `step`-th."""
        ordinals = range(ordinal, min(ordinal + step * count, self.count), step)
        found = []
        for place in map(self.place, ordinals):
            at = int(np.flatnonzero(self._shards == place.shard_number)[0])
            blocks = int(self._ends[at]) - (int(self._ends[at - 1]) if at else 0)
            found.append(BlockExtent(place.shard_number, place.block, blocks))
        return found

    def ordinals(self, shard_number: int) -> list[int]:
        """Return where the blocks of a shard of the window stand, ascending."""
        at = int(np.flatnonzero(self._shards == shard_number)[0])
        end = int(self._ends[at])
        begin = int(self._ends[at - 1]) if at else 0
        found: list[int] = np.flatnonzero(
            (self._permuted >= begin) & (self._permuted < end)
        ).tolist()
        return found


class LaneWalk:
    """The blocks of a streaming source.

    Args:
        order: The source's order.
        reader: Format, index store and meter of the source.
        shards: All shards of the source, by number.
        encoder: For the cursors.
        part: Which of the source's loaders this is.
        parts: How many there are.
        epochs_max: Where reading ahead stops.
    """

    def __init__(
        self,
        order: SourceOrder,
        reader: StreamReader,
        shards: Sequence[Shard],
        encoder: Encoder,
        part: int,
        parts: int,
        epochs_max: int,
    ) -> None:
        self._order = order
        self._reader = reader
        self._shards = shards
        self._encoder = encoder
        self._own = [lane for lane in range(order.lane_count) if lane % parts == part]
        self._epochs_max = epochs_max
        self._epoch = 0
        self._lanes: dict[int, Lane] = {}
        self._is_begun = False

    def seek(self, block_key: int) -> None:
        """Go to the first own block at or after a key; each lane skips what lies before."""
        self.close()
        self._epoch, _, block = unpack_block_key(block_key)
        for lane in self._own:
            opened = self._open_lane(self._epoch, lane)
            lane_block = -(-(block - lane) // self._order.lane_count)
            if lane_block > 0:
                opened.seek(lane_block)
            self._lanes[lane] = opened
        self._is_begun = True

    def next_block(self, until: int = KEY_MAX) -> OpenBlock | None:
        """Return the next own block, None where no lane is its own.

        A lane that has no block from the place on gives one empty block that ends it, so that the
        planner need not remember which lanes had ended.

        Args:
            until: Key that it must lie before, else the walk stays where it is and None is returned.
        """
        if not self._own:
            return None
        if not self._lanes:
            epoch = self._epoch + self._is_begun
            if pack_block_key(epoch, 0, self._own[0]) >= until:
                return None
            self._epoch = epoch
            if self._epoch >= self._epochs_max:
                return None
            self._lanes = {lane: self._open_lane(self._epoch, lane) for lane in self._own}
            self._is_begun = True
        lane = min(self._lanes, key=lambda own: (self._lanes[own].lane_block, own))
        if self._key(self._epoch, lane, self._lanes[lane]) >= until:
            return None
        return self._block(self._epoch, lane, self._lanes[lane], lambda: None)

    def end_lane(self, block_key: int) -> None:
        """Take note that the lane of a block has ended."""
        lane = unpack_block_key(block_key).block % self._order.lane_count
        self._lanes.pop(lane).close()

    def open(self, block_key: int) -> OpenBlock | None:
        """Return any block by its key, on a reader of its own; the walk does not move."""
        epoch, _, block = unpack_block_key(block_key)
        lane_block, lane = divmod(block, self._order.lane_count)
        opened = self._open_lane(epoch, lane)
        opened.seek(lane_block)
        if not opened.has_block():
            return None
        return self._block(epoch, lane, opened, opened.close)

    def lane_of_shard(self, epoch: int, shard_number: int) -> int:
        """Return the lane that reads a shard in an epoch."""
        return (_position(self._order, epoch, shard_number) or 0) % self._order.lane_count

    @property
    def lane_count(self) -> int:
        """Lanes of the source."""
        return self._order.lane_count

    def close(self) -> None:
        """Close all readers."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}

    def _open_lane(self, epoch: int, lane: int) -> Lane:
        numbers = self._order.shards(epoch)
        positions = self._order.lane_positions(epoch, lane)
        shards = [(at, self._shards[int(numbers[at])]) for at in positions]
        return Lane(self._reader, shards, epoch)

    def _key(self, epoch: int, lane: int, opened: Lane) -> int:
        return pack_block_key(epoch, 0, opened.lane_block * self._order.lane_count + lane)

    def _block(self, epoch: int, lane: int, opened: Lane, close: Callable[[], None]) -> OpenBlock:
        key = self._key(epoch, lane, opened)
        opened.has_block()  # opens the shard that the block lies in
        record_key = self._order.record_key(epoch, opened.position, opened.shard_block)
        path = "" if opened.shard is None else opened.shard.path
        sample_key = self._order.sample_key(epoch, opened.position, opened.shard_block)
        encoder = self._encoder.at(path, "byte offset", sample_key, epoch)

        def window_order(number: int, count: int) -> npt.NDArray[np.int64]:
            return self._order.records(record_key, number, count)

        cursor = text_cursor(opened.windows(), window_order, encoder)
        return OpenBlock(key, 0, cursor, close)


def _position(order: SourceOrder, epoch: int, shard_number: int) -> int | None:
    """Return where a shard stands in an epoch, None where it takes no part in it."""
    found = np.flatnonzero(order.shards(epoch) == shard_number)
    return int(found[0]) if len(found) else None
