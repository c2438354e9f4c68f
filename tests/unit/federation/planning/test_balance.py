import numpy as np
import pytest

from federation.planning.balance import deal, place_balanced, place_in_turn


def loads_of(placement, costs, dp):
    return np.bincount(placement.dp, weights=costs, minlength=dp)


def check_permutation(placement, rows, dp, microbatch_rows):
    count = rows // (dp * microbatch_rows)
    cells = (placement.dp * count + placement.microbatch) * microbatch_rows + placement.slot
    assert sorted(cells.tolist()) == list(range(rows))


@pytest.mark.parametrize("objective", ["step", "microbatch"])
@pytest.mark.parametrize(("rows", "dp", "per"), [(8, 1, 2), (8, 8, 1), (64, 4, 2), (96, 6, 4)])
def test_every_row_has_one_place(rows, dp, per, objective):
    costs = np.random.default_rng(rows).integers(1, 1000, rows)
    check_permutation(place_balanced(costs, dp, per, objective, dp), rows, dp, per)
    check_permutation(place_in_turn(rows, dp, per), rows, dp, per)


def test_rounds_and_exchange_even_out_what_turns_do_not():
    costs = np.random.default_rng(1).lognormal(10, 0.4, 2048).astype(np.int64)
    even = loads_of(place_balanced(costs, 256, 1, "step", 256), costs, 256)
    turn = loads_of(place_in_turn(2048, 256, 1), costs, 256)
    assert even.max() / even.mean() <= 1.003
    assert turn.max() / turn.mean() > 1.2


def test_the_exchange_betters_lpt():
    costs = np.array([9, 8, 8, 5, 4, 2])
    found = deal(costs, 2)
    loads = np.bincount(found, weights=costs)
    assert np.bincount(found).tolist() == [3, 3]
    assert loads.max() == 18


def test_microbatches_of_all_ranks_hold_like_rows():
    costs = np.random.default_rng(2).lognormal(10, 1, 64).astype(np.int64)
    placement = place_balanced(costs, 4, 1, "microbatch", 4)
    turns = place_in_turn(64, 4, 1)

    def slowest(placement):
        cells = np.zeros((16, 4))
        np.add.at(cells, (placement.microbatch, placement.dp), costs)
        return cells.max(axis=1).sum()

    assert slowest(placement) < 0.8 * slowest(turns)
    assert slowest(placement) <= 1.2 * costs.sum() / 4


def test_a_rank_takes_its_rows_in_falling_cost():
    costs = np.random.default_rng(3).integers(1, 10**6, 32)
    placement = place_balanced(costs, 4, 2, "step", 4)
    for rank in range(4):
        rows = np.flatnonzero(placement.dp == rank)
        order = rows[np.lexsort((placement.slot[rows], placement.microbatch[rows]))]
        assert (np.diff(costs[order]) <= 0).all()


def test_groups_are_dealt_first_and_stay_even():
    costs = np.random.default_rng(4).integers(500, 1000, 256)
    placement = place_balanced(costs, 16, 1, "step", 4)
    check_permutation(placement, 256, 16, 1)
    loads = loads_of(placement, costs, 16)
    assert loads.max() / loads.mean() < 1.02


def test_small_and_large_deals_agree():
    costs = np.sort(np.random.default_rng(5).integers(1, 10**9, 8192))[::-1].copy()
    small = deal(costs[:4096], 64)
    assert np.bincount(small).tolist() == [64] * 64
    large = deal(costs, 64)
    loads = np.bincount(large, weights=costs)
    assert np.bincount(large).tolist() == [128] * 64
    assert loads.max() / loads.mean() < 1.003


def test_equal_costs_are_dealt_alike_each_time():
    costs = np.full(32, 7)
    first, second = (place_balanced(costs, 4, 2, "step", 4) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert np.bincount(first.dp).tolist() == [8] * 4
