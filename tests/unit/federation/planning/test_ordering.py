import numpy as np
import pytest

from federation.model.chunk import ChunkMeta
from federation.planning.ordering import BlockWalk, ChunkMerger
from msd_client.contract.errors import ConfigError, ProtocolError
from msd_client.contract.position import pack_block_key
from tests.support.metadata import make_spec


def chunk(block_key, first, count, *, is_end=True, window_blocks=0, is_lane_end=False):
    return ChunkMeta(
        0,
        block_key,
        first,
        np.ones(count, np.int32),
        np.zeros(count, np.uint8),
        is_end,
        window_blocks,
        is_lane_end,
    )


def taken(merger, *metas):
    return [
        (run.meta.block_key, run.meta.first_index + run.skip, len(run.meta.lengths) - run.skip)
        for meta in metas
        for run in merger.add(meta)
    ]


def test_blocks_windows_and_epochs_follow_each_other():
    merger = ChunkMerger(BlockWalk(make_spec("a", shards=3)))
    key = pack_block_key
    assert taken(
        merger,
        chunk(key(0, 0, 0), 0, 2, window_blocks=2),
        chunk(key(0, 0, 1), 0, 1, window_blocks=2),
        chunk(key(0, 1, 0), 0, 1, window_blocks=1),
    ) == [(key(0, 0, 0), 0, 2), (key(0, 0, 1), 0, 1), (key(0, 1, 0), 0, 1)]
    assert merger.position == (key(1, 0, 0), 0)


def test_early_chunks_wait_and_copies_are_ignored():
    merger = ChunkMerger(BlockWalk(make_spec("a")))
    late = chunk(1, 0, 3, window_blocks=3)
    assert taken(merger, late, late, chunk(0, 2, 2, window_blocks=3)) == []
    assert merger.early_count == 2
    assert taken(merger, chunk(0, 0, 2, is_end=False, window_blocks=3)) == [
        (0, 0, 2),
        (0, 2, 2),
        (1, 0, 3),
    ]
    assert taken(merger, late, chunk(0, 0, 4, window_blocks=3)) == []
    assert merger.early_count == 0


def test_chunks_cut_elsewhere_overlap_without_repeats():
    merger = ChunkMerger(BlockWalk(make_spec("a")))
    assert taken(
        merger,
        chunk(0, 0, 3, is_end=False, window_blocks=1),
        chunk(0, 1, 4, is_end=False, window_blocks=1),
        chunk(0, 4, 3, window_blocks=1),
    ) == [(0, 0, 3), (0, 3, 2), (0, 5, 2)]


def test_a_block_may_end_with_an_empty_chunk():
    merger = ChunkMerger(BlockWalk(make_spec("a")))
    taken(merger, chunk(0, 0, 3, is_end=False, window_blocks=2))
    assert taken(merger, chunk(0, 3, 0, window_blocks=2), chunk(1, 0, 1, window_blocks=2)) == [
        (1, 0, 1)
    ]


def test_a_window_without_blocks_is_passed_over():
    merger = ChunkMerger(BlockWalk(make_spec("a", shards=5)))
    key = pack_block_key
    assert taken(merger, chunk(key(0, 2, 0), 0, 1, window_blocks=1)) == [(key(0, 2, 0), 0, 1)]
    assert merger.position == (key(1, 0, 0), 0)


def test_a_window_is_waited_for_while_its_first_block_may_come():
    merger = ChunkMerger(BlockWalk(make_spec("a", shards=3)))
    key = pack_block_key
    assert taken(merger, chunk(key(0, 1, 1), 0, 1, window_blocks=2)) == []
    assert taken(merger, chunk(key(0, 0, 0), 0, 1, window_blocks=2)) == [(0, 0, 1)]
    assert taken(merger, chunk(key(0, 1, 0), 0, 1, window_blocks=2)) == []
    assert merger.position == (1, 0)


def lanes_walk(lanes_ended=0, block=0):
    spec = make_spec("a", shards=3, order_class="streaming", interleave=3)
    return BlockWalk(spec, block, 0, lanes_ended)


def test_lanes_take_turns_and_ended_ones_are_passed_over():
    merger = ChunkMerger(lanes_walk())
    runs = taken(
        merger,
        chunk(0, 0, 1),
        chunk(1, 0, 1, is_lane_end=True),
        chunk(2, 0, 1),
        chunk(3, 0, 1),
        chunk(5, 0, 1, is_lane_end=True),
        chunk(6, 0, 1, is_lane_end=True),
    )
    assert [run[0] for run in runs] == [0, 1, 2, 3, 5, 6]
    assert merger.position == (pack_block_key(1, 0, 0), 0)
    assert merger.walk.take_skips(pack_block_key(1, 0, 0)) == [(4, 1)]


def test_how_a_lane_ends_makes_no_difference():
    flagged, told = ChunkMerger(lanes_walk()), ChunkMerger(lanes_walk())
    taken(flagged, chunk(0, 0, 1), chunk(1, 0, 1, is_lane_end=True), chunk(2, 0, 1), chunk(3, 0, 1))
    taken(
        told,
        chunk(0, 0, 1),
        chunk(1, 0, 1),
        chunk(2, 0, 1),
        chunk(3, 0, 1),
        chunk(4, 0, 0, is_lane_end=True),
    )
    assert flagged.position == told.position == (5, 0)
    assert flagged.walk.take_skips(5) == told.walk.take_skips(5) == [(4, 1)]


def test_a_restored_walk_knows_ended_lanes():
    merger = ChunkMerger(lanes_walk(lanes_ended=0b010, block=3))
    assert [run[0] for run in taken(merger, chunk(3, 0, 1), chunk(5, 0, 1), chunk(6, 0, 1))] == [
        3,
        5,
        6,
    ]
    assert merger.walk.skips == []


def test_more_lanes_than_a_state_tells_apart_are_refused():
    spec = make_spec("a", shards=80, order_class="streaming", interleave=70)
    with pytest.raises(ConfigError, match="interleave 70 exceeds 62"):
        BlockWalk(spec)


def test_a_chunk_that_contradicts_itself_is_refused():
    bad = ChunkMeta(0, 0, 0, np.ones(2, np.int32), np.zeros(1, np.uint8), True, 1)
    with pytest.raises(ProtocolError, match="2 lengths, 1 statuses"):
        taken(ChunkMerger(BlockWalk(make_spec("a"))), bad)


def test_a_window_that_was_drawn_from_is_never_passed_over():
    key = pack_block_key
    first = chunk(key(0, 1, 0), 0, 2, window_blocks=1)
    later = chunk(key(0, 2, 0), 0, 2, window_blocks=1)
    for is_begun, wanted in ((True, []), (False, [(key(0, 2, 0), 0, 2)])):
        walk = BlockWalk(make_spec("a", shards=8), key(0, 1, 0))
        merger = ChunkMerger(walk, is_begun=is_begun)
        assert taken(merger, later) == wanted
    merger = ChunkMerger(BlockWalk(make_spec("a", shards=8), key(0, 1, 0)), is_begun=True)
    assert taken(merger, later, first) == [(key(0, 1, 0), 0, 2), (key(0, 2, 0), 0, 2)]
    # From there on windows without a block are passed as ever.
    assert taken(merger, chunk(key(1, 1, 0), 0, 1, window_blocks=1)) == [(key(1, 1, 0), 0, 1)]


def test_a_block_that_ends_before_the_place_to_go_on_at_is_told():
    merger = ChunkMerger(BlockWalk(make_spec("a"), 0, 100))
    assert taken(merger, chunk(0, 40, 10, is_end=False)) == []
    assert merger.short_of is None  # an old copy, whose block goes on
    assert taken(merger, chunk(0, 1, 0)) == []
    assert merger.short_of == 1
    assert merger.position == (0, 100)
