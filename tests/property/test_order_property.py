"""The frozen order: permutations are permutations, and the numbers are those of stream version 1."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from federation.model.job import GrowthPoint, ShuffleRule
from msd_daemon.sources.order import (
    SourceOrder,
    extend_key,
    hashes,
    mix64,
    permutation,
    record_windows,
    source_id,
    window_bounds,
)

KEYS = st.integers(0, 2**64 - 1)


@dataclass
class Item:
    size_bytes: int


@given(KEYS, st.integers(0, 3000))
def test_a_permutation_holds_each_place_once(key: int, count: int) -> None:
    assert sorted(permutation(key, count).tolist()) == list(range(count))


@given(KEYS, st.integers(0, 50))
def test_array_hashes_are_the_scalar_ones(key: int, count: int) -> None:
    golden = 0x9E3779B97F4A7C15
    assert hashes(key, count).tolist() == [mix64(key + (i + 1) * golden) for i in range(count)]


def test_stream_version_1_is_frozen() -> None:
    assert mix64(1) == 0x5692161D100B05E5
    assert source_id("web") == 0xB9422FEBF6575E4B
    order = SourceOrder(17, "web", 20, ShuffleRule())
    assert order.shards(0).tolist() == [
        2,
        14,
        0,
        19,
        3,
        15,
        8,
        16,
        17,
        13,
        7,
        4,
        9,
        11,
        5,
        18,
        1,
        12,
        6,
        10,
    ]
    assert order.blocks(1, 0, 8).tolist() == [7, 2, 4, 0, 6, 1, 5, 3]
    assert order.records(order.record_key(0, 3, 5), 2, 8).tolist() == [6, 5, 0, 2, 3, 7, 4, 1]


def test_keys_differ_in_every_part() -> None:
    order = SourceOrder(17, "web", 4, ShuffleRule())
    keys = {order.record_key(e, p, b) for e in range(4) for p in range(4) for b in range(4)}
    keys |= {SourceOrder(s, n, 4, ShuffleRule()).record_key(0, 0, 0) for s in (1, 2) for n in "ab"}
    assert len(keys) == 64 + 4
    assert extend_key(1, 2, 3) != extend_key(1, 3, 2)


@given(st.lists(st.integers(0, 700), max_size=60), st.integers(1, 9), st.integers(1, 900))
def test_windows_of_known_sizes_are_those_of_a_stream(
    sizes: list[int], records_max: int, bytes_max: int
) -> None:
    rule = ShuffleRule(window_records=records_max, window_bytes=bytes_max)
    windows = list(record_windows(iter([Item(size) for size in sizes]), rule))
    bounds = window_bounds(np.array(sizes, dtype=np.int64), rule)
    lengths = [len(window) for window, _ in windows]
    assert lengths == (np.diff(bounds).tolist() or [0])
    assert [is_last for _, is_last in windows] == [False] * (len(windows) - 1) + [True]
    for window, _ in windows:
        total = sum(item.size_bytes for item in window)
        assert len(window) <= records_max
        assert total <= bytes_max or len([i for i in window if i.size_bytes]) == 1


@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 12))
def test_lanes_and_windows_cover_each_position_once(
    shards: int, interleave: int, is_shuffled: bool, grown: int
) -> None:
    rule = ShuffleRule(is_shuffled=is_shuffled, interleave=interleave, window_shards=5)
    order = SourceOrder(1, "s", shards, rule)
    order = replace(order, growth=(GrowthPoint(0, shards), GrowthPoint(3, shards + grown)))
    for epoch, count in ((0, shards), (2, shards), (3, shards + grown), (9, shards + grown)):
        lanes, windows = range(order.lane_count), range(order.window_count(epoch))
        by_lane = [at for lane in lanes for at in order.lane_positions(epoch, lane)]
        by_window = [at for w in windows for at in order.window_positions(epoch, w)]
        assert sorted(by_lane) == by_window == sorted(order.shards(epoch)) == list(range(count))
    assert is_shuffled or order.lane_count == 1
