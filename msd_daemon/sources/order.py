"""The order of a source: keyed hashes, permutations, windows and lanes. Pure.

Owns every number that decides which record stands where (DESIGN.md section 4); it is frozen as
stream version 1, so it uses no library generator whose streams may change. It knows nothing of
files: shards, blocks and records are counts here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from federation.model.job import GrowthPoint, ShuffleRule

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of splitmix64
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a key is for; part of every key, so that no two permutations share one."""

    SHARDS = 1
    BLOCKS = 2
    RECORDS = 3
    SAMPLES = 4
    """What transforms draw: sub-keys are a record's place."""


def mix64(value: int) -> int:
    """Return the splitmix64 finaliser of a 64-bit value."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_A) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_B) & _MASK
    return value ^ (value >> 31)


def extend_key(key: int, *parts: int) -> int:
    """Return a new key of a key and further 64-bit parts, in their order."""
    for part in parts:
        key = mix64(key ^ mix64(part + _GOLDEN))
    return key


def source_id(name: str) -> int:
    """Return the 64 bits that stand for a source in every key: its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def hashes(key: int, count: int) -> npt.NDArray[np.uint64]:
    """Return `count` hashes of a key. Shape (count,)."""
    value = np.arange(1, count + 1, dtype=np.uint64)
    value *= np.uint64(_GOLDEN)
    value += np.uint64(key)
    value ^= value >> np.uint64(30)
    value *= np.uint64(_MIX_A)
    value ^= value >> np.uint64(27)
    value *= np.uint64(_MIX_B)
    value ^= value >> np.uint64(31)
    return value


def permutation(key: int, count: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(count): element i is what stands at place i."""
    if count < 2:
        return np.arange(count, dtype=np.int64)
    return np.argsort(hashes(key, count), kind="stable").astype(np.int64, copy=False)


@dataclass(frozen=True)
class SourceOrder:
    """Where shards, blocks and records of one source stand, epoch by epoch."""

    seed: int
    source_name: str
    shard_count: int
    """Of the first pass."""
    rule: ShuffleRule
    growth: tuple[GrowthPoint, ...] = ()
    """Passes from which on there are more."""

    def shards_in(self, epoch: int) -> int:
        """Return how many shards a pass has."""
        count = self.shard_count
        for point in self.growth:
            if point.epoch <= epoch:
                count = point.shards
        return count

    def key(self, epoch: int, purpose: Purpose, *parts: int) -> int:
        """Return the key of a permutation."""
        root = mix64(self.seed + _GOLDEN)
        return extend_key(root, source_id(self.source_name), epoch, int(purpose), *parts)

    def window_count(self, epoch: int) -> int:
        """Return the windows of shards of a pass."""
        return -(-self.shards_in(epoch) // self.rule.window_shards)

    @property
    def lane_count(self) -> int:
        """Lanes of a streaming source; 1 where unshuffled."""
        lanes = self.rule.interleave if self.rule.is_shuffled else 1
        return max(1, min(lanes, self.shards_in(0)))

    def shards(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the shard at each position of the epoch. Shape (shards of the epoch,)."""
        count = self.shards_in(epoch)
        if not self.rule.is_shuffled:
            return np.arange(count, dtype=np.int64)
        return permutation(self.key(epoch, Purpose.SHARDS), count)

    def window_positions(self, epoch: int, window: int) -> range:
        """Return the shard positions of a window."""
        first = window * self.rule.window_shards
        return range(first, min(first + self.rule.window_shards, self.shards_in(epoch)))

    def lane_positions(self, epoch: int, lane: int) -> range:
        """Return the shard positions that a lane reads, in its order."""
        return range(lane, self.shards_in(epoch), self.lane_count)

    def blocks(self, epoch: int, window: int, count: int) -> npt.NDArray[np.int64]:
        """Return the listed block at each ordinal of a window. Shape (count,)."""
        if not self.rule.is_shuffled:
            return np.arange(count, dtype=np.int64)
        return permutation(self.key(epoch, Purpose.BLOCKS, window), count)

    def record_key(self, epoch: int, position: int, block: int) -> int:
        """Return the key of the record windows of a block of the shard at a position."""
        return self.key(epoch, Purpose.RECORDS, position, block)

    def sample_key(self, epoch: int, position: int, block: int) -> int:
        """Return the key of what transforms draw for the records of a block."""
        return self.key(epoch, Purpose.SAMPLES, position, block)

    def records(self, record_key: int, window: int, count: int) -> npt.NDArray[np.int64]:
        """Return the record at each place of a record window. Shape (count,)."""
        if not self.rule.is_shuffled:
            return np.arange(count, dtype=np.int64)
        return permutation(extend_key(record_key, window), count)


class Sized(Protocol):
    """A record that knows its raw bytes."""

    @property
    def size_bytes(self) -> int:
        """Raw bytes of the record as it lies in its shard."""
        ...


Record = TypeVar("Record", bound=Sized)


def record_windows(
    records: Iterator[Record], rule: ShuffleRule
) -> Iterator[tuple[list[Record], bool]]:
    """Cut the records of a block into windows; yields (window, whether it is the last one).

    A window closes when it is full or before the record that would take it over the byte limit, so
    a larger record stands alone. A block without records gives one empty window.
    """
    window: list[Record] = []
    window_bytes = 0
    for record in records:
        size_bytes = record.size_bytes
        if window and (
            len(window) >= rule.window_records or window_bytes + size_bytes > rule.window_bytes
        ):
            yield window, False
            window = []
            window_bytes = 0
        window.append(record)
        window_bytes += size_bytes
    yield window, True


class Grouped(Sized, Protocol):
    """A record that knows whether it stands in a group with the one before it."""

    @property
    def is_continuing(self) -> bool:
        """True where it belongs to the group of the record before it."""
        ...


GroupedRecord = TypeVar("GroupedRecord", bound=Grouped)


def group_windows(
    records: Iterator[GroupedRecord], rule: ShuffleRule
) -> Iterator[tuple[list[GroupedRecord], bool]]:
    """Cut the records of a block into windows as `record_windows` does, but none inside a group.

    A group goes into one window as a record does. One that is over the limits by itself has windows
    of its own, one behind the other, so that what is held is bounded all the same.
    """
    window: list[GroupedRecord] = []
    group: list[GroupedRecord] = []
    window_bytes = group_bytes = 0
    is_begun = False
    """True where windows of the group went out already."""
    for record in records:
        if not record.is_continuing and group:
            if is_begun:
                yield group, False
            else:
                window, window_bytes = window + group, window_bytes + group_bytes
            group, group_bytes, is_begun = [], 0, False
        count, size_bytes = len(window) + len(group), record.size_bytes
        total_bytes = window_bytes + group_bytes + size_bytes
        if window and (count >= rule.window_records or total_bytes > rule.window_bytes):
            yield window, False
            window, window_bytes = [], 0
        if group and (
            len(group) >= rule.window_records or group_bytes + size_bytes > rule.window_bytes
        ):
            # What stood before it in the window is out by now: these limits are the wider ones.
            yield group, False
            group, group_bytes, is_begun = [], 0, True
        group.append(record)
        group_bytes += size_bytes
    yield window + group, True


def spread_groups(
    order: npt.NDArray[np.int64], is_continuing: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return the record at each place of a window whose groups stand in an order. Shape (records,).

    Args:
        order: The group at each place. Shape (groups,).
        is_continuing: Records that belong to the group of the one before. Shape (records,).
    """
    is_start = ~is_continuing
    is_start[:1] = True
    starts = np.flatnonzero(is_start)
    sizes = np.diff(np.append(starts, len(is_start)))[order]
    inside = np.arange(len(is_start)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    places: npt.NDArray[np.int64] = np.repeat(starts[order], sizes) + inside
    return places


def window_bounds(sizes: npt.NDArray[np.int64], rule: ShuffleRule) -> list[int]:
    """Return where the windows of a block begin, with its record count at the end.

    The same cuts as `record_windows`, for records whose sizes are known.

    Args:
        sizes: Raw bytes of each record. Shape (records,).
        rule: The limits.
    """
    ends = np.cumsum(sizes)
    bounds = [0]
    start, count = 0, len(sizes)
    while start < count:
        before = int(ends[start - 1]) if start else 0
        fitting = int(np.searchsorted(ends, before + rule.window_bytes, side="right"))
        start = min(max(fitting, start + 1), start + rule.window_records, count)
        bounds.append(start)
    return bounds
