"""Items of cost and size in buckets."""

import numpy as np

from federation.planning.capped_deal import deal_capped


def array(*values):
    return np.array(values, np.int64)


def test_dear_items_go_to_the_lightest_bucket():
    assert deal_capped(array(5, 4, 3, 2), array(1, 1, 1, 1), 2, 10).tolist() == [0, 1, 1, 0]


def test_a_full_bucket_is_passed_over():
    assert deal_capped(array(9, 1, 1), array(2, 8, 8), 2, 10).tolist() == [0, 1, 0]


def test_no_room_is_said():
    assert deal_capped(array(1, 1, 1), array(6, 6, 6), 2, 10) is None
    assert deal_capped(array(1, 1, 1), array(0, 0, 0), 2, 10, count_max=1) is None


def test_a_heavy_bucket_trades_with_a_light_one():
    # By falling cost 9+8+2 and 8+5+4 against 18 and 18 after the trade of 5 for 4 and so on.
    costs = array(9, 8, 8, 5, 4, 2)
    found = deal_capped(costs, array(1, 1, 1, 1, 1, 1), 2, 6)
    loads = np.bincount(found, weights=costs)
    assert loads.max() == 18


def test_a_trade_keeps_the_caps():
    for seed in range(50):
        costs, sizes, memory = np.random.default_rng(seed).integers(1, 100, (3, 40))
        size_max, memory_max = (int(part.sum()) // 4 + 200 for part in (sizes, memory))
        found = deal_capped(
            costs, sizes, 4, size_max, 14, more_sizes=memory[None], more_max=(memory_max,)
        )
        assert found is not None
        assert np.bincount(found, weights=sizes, minlength=4).max() <= size_max
        assert np.bincount(found, weights=memory, minlength=4).max() <= memory_max
        assert np.bincount(found, minlength=4).max() <= 14


def test_no_items_and_no_cost():
    assert deal_capped(array(), array(), 3, 10).tolist() == []
    assert sorted(deal_capped(array(0, 0, 0), array(5, 5, 5), 3, 5).tolist()) == [0, 1, 2]
