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
