"""Fewest bytes across nodes among placements of like cost."""

import numpy as np
import pytest

from federation.model.place_tree import ClientPlaceTree
from federation.planning.balance import BalanceRule, objective_of, place_balanced
from federation.planning.locality import bytes_by_node, crossing_bytes, place_locally

STEP = BalanceRule(tolerance_ppm=0)


def one_each(count):
    return np.eye(count, dtype=np.int64)


def test_bytes_of_rows_by_node():
    found = bytes_by_node(
        np.array([5, 7, 1, 2]), np.array([0, 0, 1, 0]), np.array([1, 0, 1, 1]), 3, 2
    )
    assert found.tolist() == [[7, 7], [0, 1], [0, 0]]


def test_ranks_trade_their_shares():
    costs = np.array([4, 3, 2, 1])
    placement = place_balanced(costs, 2, 2, STEP)
    assert placement.dp.tolist() == [0, 1, 1, 0]
    local = np.array([[0, 10], [10, 0], [10, 0], [0, 10]])
    assert crossing_bytes(placement, local, one_each(2)) == 40
    found = place_locally(costs, placement, local, one_each(2), STEP)
    assert found.dp.tolist() == [1, 0, 0, 1]
    assert crossing_bytes(found, local, one_each(2)) == 0


def test_rows_of_equal_cost_trade_places():
    costs = np.array([5, 5, 5, 5])
    placement = place_balanced(costs, 2, 1, STEP)
    local = np.array([[9, 0], [9, 0], [0, 9], [0, 9]])
    found = place_locally(costs, placement, local, one_each(2), STEP)
    assert crossing_bytes(found, local, one_each(2)) == 0
    cells = found.dp * 2 + found.microbatch
    assert sorted(cells.tolist()) == [0, 1, 2, 3]


def test_one_node_or_nodes_that_read_alike_change_nothing():
    costs = np.arange(8)
    placement = place_balanced(costs, 4, 1, STEP)
    for reads in (np.ones((4, 1), np.int64), np.ones((4, 3), np.int64)):
        local = np.random.default_rng(1).integers(0, 9, (8, reads.shape[1]))
        found = place_locally(costs, placement, local, reads, STEP)
        assert found is placement


@pytest.mark.parametrize("objective", ["step", "microbatch", "pipeline"])
@pytest.mark.parametrize("tolerance", [0, 1000, 20_000])
def test_bytes_are_saved_within_the_tolerance(objective, tolerance):
    rng = np.random.default_rng(tolerance)
    dp, rows, nodes = 16, 128, 4
    costs = rng.lognormal(8, 0.3, rows).astype(np.int64)
    rule = BalanceRule(objective=objective, tolerance_ppm=tolerance, stages=4)
    placement = place_balanced(costs, dp, 1, rule)
    local = np.zeros((rows, nodes), np.int64)
    local[np.arange(rows), rng.integers(0, nodes, rows)] = 1000
    reads = np.repeat(np.eye(nodes, dtype=np.int64), dp // nodes, axis=0)
    found = place_locally(costs, placement, local, reads, rule)
    cells = found.dp * 8 + found.microbatch
    assert sorted(cells.tolist()) == list(range(rows))
    before = objective_of(costs, placement, dp, objective, 4)
    after = objective_of(costs, found, dp, objective, 4)
    assert after <= before * (1 + tolerance / 1e6)
    saved = crossing_bytes(placement, local, reads) - crossing_bytes(found, local, reads)
    assert saved > 0


def test_which_nodes_read_a_group():
    tree = ClientPlaceTree.from_mesh({"pp": 3, "dp": 2}, (0, 0, 1, 1, 2, 0))
    # Group 0 has ranks 0, 2, 4 and group 1 ranks 1, 3, 5; ranks 2 and 3 are of the middle stage.
    assert tree.reads.tolist() == [[1, 0, 1], [1, 0, 0]]
    assert ClientPlaceTree.from_mesh({}).reads.tolist() == [[1]]
    assert tree.stage_count == 3
