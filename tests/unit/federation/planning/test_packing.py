import os
import time
from pathlib import Path

import numpy as np
import pytest

from federation.model.job import BatchRule
from federation.planning.packing import CARRIED_STEPS_MAX, best_fit_rows, pack
from federation.planning.step_pool import LENGTH, OFFSET, Pool, draw_need, step_tokens

DATA = Path(os.environ.get("MSD_TEST_DATA", Path(__file__).parents[5] / "shared/data"))


def make_pool(lengths, carried=0, step=5, documents=None, offsets=None):
    pool = np.zeros((6, len(lengths)), np.int64)
    pool[2] = np.arange(len(lengths)) if documents is None else documents
    pool[3] = 0 if offsets is None else offsets
    pool[4] = lengths
    pool[5] = step
    pool[5, :carried] = step - 1
    return pool


def rows_of(packed):
    found = {}
    for row, column, length in zip(
        packed.row.tolist(), packed.column.tolist(), packed.segments[LENGTH].tolist(), strict=True
    ):
        found.setdefault(row, []).append((column, length))
    return found


def carry(pool, carried, packed):
    keep = np.ones(carried, bool)
    keep[packed.carried_out] = False
    return np.concatenate((pool[:, :carried][:, keep], packed.carried_in), axis=1)


def test_each_size_goes_where_least_space_is_left():
    assert best_fit_rows(np.array([7, 6, 4, 3]), 0, 2, 10, 64).tolist() == [0, 1, 1, 0]


def test_a_row_with_all_its_segments_is_closed():
    assert best_fit_rows(np.array([3, 1, 1, 1]), 0, 2, 10, 2).tolist() == [0, 0, 1, 1]
    assert best_fit_rows(np.array([3, 1, 1]), 0, 1, 10, 2).tolist() == [0, 0, -1]


def test_rows_fill_by_falling_length_and_stand_in_draw_order():
    packed = pack(Pool(make_pool([3, 7, 4, 6]), 0), BatchRule(2, 10))
    assert rows_of(packed) == {0: [(0, 3), (3, 7)], 1: [(0, 4), (4, 6)]}
    assert packed.carried_in.shape[1] == 0


def test_carried_fragments_are_placed_before_longer_drawn_ones():
    packed = pack(Pool(make_pool([2, 10, 10], carried=1), 1), BatchRule(2, 10))
    assert packed.carried_out.tolist() == [0]
    assert packed.carried_in[LENGTH].tolist() == [10]


def test_tiny_carried_fragments_do_not_close_empty_rows():
    lengths = [1] * 64 + [60] * 8 + [40] * 8
    packed = pack(Pool(make_pool(lengths, carried=64), 64), BatchRule(8, 120))
    assert int(packed.segments[LENGTH].sum()) == sum(lengths)


def test_a_later_part_never_precedes_an_earlier_one():
    # two full parts and a tail of one document, one row: the tail would fit nowhere else
    pool = make_pool([3, 10, 10, 4], carried=1, documents=[0, 1, 1, 1], offsets=[0, 0, 10, 20])
    packed = pack(Pool(pool, 1), BatchRule(2, 10))
    placed = sorted(packed.segments[OFFSET, packed.segments[2] == 1].tolist())
    assert placed == [0]
    assert packed.carried_in[OFFSET].tolist() == [10, 20]


def test_segments_keep_their_multiple():
    packed = pack(Pool(make_pool([3, 5, 8]), 0), BatchRule(2, 16, segment_multiple=4))
    assert all(column % 4 == 0 for cells in rows_of(packed).values() for column, _ in cells)
    assert packed.carried_in.shape[1] == 0


def test_concat_fills_rows_end_to_end():
    packed = pack(Pool(make_pool([5, 2, 9, 4]), 0), BatchRule(2, 8, packing="concat"))
    assert rows_of(packed) == {0: [(0, 5), (5, 2), (7, 1)], 1: [(0, 8)]}
    assert packed.segments[OFFSET].tolist() == [0, 0, 0, 1]
    assert packed.carried_in[[OFFSET, LENGTH]].tolist() == [[0], [4]]


def test_concat_carries_the_rest_of_a_cut_fragment():
    pool = make_pool([5, 6, 3], carried=1)
    packed = pack(Pool(pool, 1), BatchRule(1, 8, packing="concat"))
    carried = carry(pool, 1, packed)
    assert carried[[2, OFFSET, LENGTH]].tolist() == [[1, 2], [3, 0], [3, 3]]


def test_concat_keeps_order_when_a_carried_fragment_is_cut_again():
    pool = make_pool([9, 4, 3], carried=2)
    carried = carry(pool, 2, pack(Pool(pool, 2), BatchRule(1, 8, packing="concat")))
    assert carried[[2, OFFSET, LENGTH]].tolist() == [[0, 1, 2], [8, 0, 0], [1, 4, 3]]


def test_concat_joins_touching_parts_of_a_document_inside_a_row():
    pool = make_pool([3, 8, 8], documents=[0, 1, 1], offsets=[0, 0, 8])
    packed = pack(Pool(pool, 0), BatchRule(2, 8, packing="concat"))
    assert rows_of(packed) == {0: [(0, 3), (3, 5)], 1: [(0, 8)]}
    assert packed.segments[OFFSET].tolist() == [0, 0, 5]


def test_concat_joins_a_carried_part_with_the_drawn_one_behind_it():
    pool = make_pool([3, 8, 4], carried=1, documents=[1, 1, 2], offsets=[5, 8, 0])
    packed = pack(Pool(pool, 1), BatchRule(2, 8, packing="concat"))
    assert rows_of(packed) == {0: [(0, 8)], 1: [(0, 3), (3, 4)]}
    assert packed.segments[OFFSET].tolist() == [5, 13, 0]
    assert packed.carried_out.tolist() == [0]
    # Two carried parts may lie in pieces of memory of their own.
    pool = make_pool([3, 8, 4], carried=2, documents=[1, 1, 2], offsets=[5, 8, 0])
    packed = pack(Pool(pool, 2), BatchRule(2, 8, packing="concat"))
    assert rows_of(packed) == {0: [(0, 3), (3, 5)], 1: [(0, 3), (3, 4)]}


def test_concat_joins_nothing_across_rows():
    pool = make_pool([8, 8], documents=[1, 1], offsets=[0, 8])
    packed = pack(Pool(pool, 0), BatchRule(2, 8, packing="concat"))
    assert rows_of(packed) == {0: [(0, 8)], 1: [(0, 8)]}


def test_concat_closes_a_row_that_has_all_its_segments():
    pool = make_pool([1] * 10 + [8])
    packed = pack(Pool(pool, 0), BatchRule(2, 8, packing="concat", row_segments_max=3))
    assert rows_of(packed) == {0: [(0, 1), (1, 1), (2, 1)], 1: [(0, 1), (1, 1), (2, 1)]}
    assert carry(pool, 0, packed)[LENGTH].tolist() == [1, 1, 1, 1, 8]


def test_padded_gives_each_fragment_a_row():
    packed = pack(Pool(make_pool([5, 2, 9]), 0), BatchRule(2, 9, packing="padded"))
    assert rows_of(packed) == {0: [(0, 5)], 1: [(0, 2)]}
    assert packed.carried_in[LENGTH].tolist() == [9]


def test_the_end_of_a_stream_places_no_more_than_is_left():
    packed = pack(Pool(make_pool([4, 4, 4]), 0, tokens_left=5), BatchRule(2, 8))
    assert int(packed.segments[LENGTH].sum()) == 8
    packed = pack(Pool(make_pool([4, 4, 4]), 0, tokens_left=5), BatchRule(2, 8, packing="concat"))
    assert int(packed.segments[LENGTH].sum()) == 5


def test_needs_count_what_is_carried():
    carried = make_pool([100, 20])
    rule = BatchRule(4, 64)
    assert draw_need(rule, carried, None).places == 256 + 8 - 120
    assert draw_need(rule, carried, None).fragments == 4 * 64 - 2
    assert draw_need(rule, carried, 130).places == 10
    concat = BatchRule(4, 64, packing="concat")
    assert draw_need(concat, carried, None).places == 256 - 120
    assert draw_need(BatchRule(4, 64, packing="padded"), carried, None).fragments == 2


def drawn_steps(lengths, rule, steps):
    """Yield (pool, carried count, packed) of steps that draw from `lengths` in turn."""
    carried = np.zeros((6, 0), np.int64)
    place = 0
    for step in range(steps):
        need = draw_need(rule, carried, None)
        through = np.cumsum(lengths[place : place + max(0, need.fragments)])
        count = min(int(np.searchsorted(through, need.places)) + 1, len(through))
        count = 0 if need.is_met else count
        drawn = make_pool(lengths[place : place + count], step=step)
        drawn[2] += place
        place += count
        pool = np.concatenate((carried, drawn), axis=1)
        packed = pack(Pool(pool, carried.shape[1]), rule)
        carried = carry(pool, carried.shape[1], packed)
        yield pool, carried, packed


PACKINGS = pytest.mark.parametrize("packing", ["best_fit", "best_fit_even"])


@PACKINGS
def test_real_text_packs_to_99_percent(packing):
    parquet = pytest.importorskip("pyarrow.parquet")
    file = DATA / "lengths/text_o200k.parquet"
    if not file.exists():
        pytest.skip(f"{file} is not here; MSD_TEST_DATA names the folder of test data")
    table = parquet.read_table(file)
    lengths = np.random.default_rng(1).permutation(table["tokens"].to_numpy())
    parts = -(-lengths // 4096)
    starts = np.repeat(np.cumsum(parts) - parts, parts)
    offsets = (np.arange(parts.sum()) - starts) * 4096
    fragments = np.minimum(np.repeat(lengths, parts) - offsets, 4096)
    fragments = np.tile(np.random.default_rng(2).permutation(fragments), 3)
    rule = BatchRule(64, 4096, packing=packing)
    placed = 0
    for step, (_, carried, packed) in enumerate(drawn_steps(fragments, rule, 200)):
        placed += int(packed.segments[LENGTH].sum())
        assert int(carried[LENGTH].sum()) < step_tokens(rule)
        if carried.shape[1]:
            assert step + 1 - int(carried[5].min()) <= CARRIED_STEPS_MAX
    assert placed >= 0.99 * 200 * step_tokens(rule)


@PACKINGS
@pytest.mark.parametrize("low_high", [(1, 12), (51, 60), (1, 100), (90, 100)])
@pytest.mark.parametrize("rows", [1, 2, 8, 33, 130])
def test_nothing_is_carried_for_ever(low_high, rows, packing):
    low, high = low_high
    lengths = np.random.default_rng(rows).integers(low, high + 1, 60 * rows * 64)
    rule = BatchRule(rows, 100, packing=packing, row_segments_max=16)
    for step, (pool, carried, packed) in enumerate(drawn_steps(lengths, rule, 60)):
        assert len(packed.row_starts) == rows
        assert int(carried[LENGTH].sum()) < step_tokens(rule) + 100
        if carried.shape[1]:
            assert step + 1 - int(carried[5].min()) <= CARRIED_STEPS_MAX
        assert pool.shape[1] <= rows * 16


def test_packing_many_fragments_is_quick():
    lengths = np.random.default_rng(0).integers(1, 400, 1500)
    begun = time.process_time()
    for _ in range(5):
        pack(Pool(make_pool(lengths), 0), BatchRule(64, 4096))
    assert (time.process_time() - begun) / 5 < 0.02
