"""What the balance bench compares with, by hand, and that its parts run."""

import numpy as np
import pytest

from bench import balance
from bench.balance_lengths import (
    Documents,
    bucketed,
    concat_costs,
    cost_of,
    crowded_bound,
    in_equal_tokens,
    split,
)
from federation.planning.costs import segment_costs


def array(*values):
    return np.array(values, np.int64)


def test_documents_are_cut_in_order():
    parts = split(Documents(array(5, 2, 9), array(0, 1, 2)), 4)
    assert parts.lengths.tolist() == [4, 1, 2, 4, 4, 1]
    assert parts.source.tolist() == [0, 0, 1, 2, 2, 2]


def test_one_long_text_is_cut_at_rows():
    # 6 + 3 + 7 in rows of 8: 6 and 2, then 1 and 7.
    by_hand = segment_costs(cost_of(8, 2), array(6, 2, 1, 7))
    assert concat_costs(array(6, 3, 7), 2, 8).tolist() == [
        by_hand[0] + by_hand[1],
        by_hand[2] + by_hand[3],
    ]


def test_ranks_take_items_until_they_have_their_part():
    assert in_equal_tokens(array(1, 2, 3, 4), array(5, 5, 5, 5), 2).tolist() == [3, 7]


def test_like_lengths_share_a_bucket():
    assert bucketed(array(9, 2, 3, 8, 1)).tolist() == [4, 1, 2, 0, 3]


def test_more_items_than_buckets_crowd_one():
    assert crowded_bound(array(9, 9, 9), 2) == 18
    assert crowded_bound(array(5, 5, 5, 5), 2) == 10


@pytest.mark.parametrize("part", ["groups", "objectives", "cp", "locality", "even"])
def test_a_part_runs(part):
    lines = []
    figures = balance.run(is_quick=True, say=lines.append, only=part)
    assert figures and lines
    assert all(np.isfinite(value) for value in figures.values())


def test_an_unknown_part_is_refused():
    with pytest.raises(SystemExit, match="the parts of this bench are packed"):
        balance.run(is_quick=True, say=print, only="nothing")
