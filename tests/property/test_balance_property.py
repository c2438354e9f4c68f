"""Deals and placements: C kernel == Python twin, equal counts, caps, and never worse than in turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.planning import best_fit, deal_twin, fill_twin, kernel, pipeline_twin
from federation.planning.balance import (
    OBJECTIVES,
    BalanceRule,
    objective_of,
    place_balanced,
    place_group,
    place_in_turn,
    rows_of_groups,
)
from federation.planning.capped_deal import deal_capped
from federation.planning.deals import deal, least_load

needs_kernel = pytest.mark.skipif(kernel.KERNEL != "c", reason="the C kernel was not built")
cost = st.one_of(st.integers(0, 4), st.integers(0, 1000), st.integers(0, 1 << 40))
methods = st.sampled_from(["greedy", "karmarkar_karp"])


def array(values):
    return np.array(values, np.int64)


@st.composite
def dealable(draw, dp_max=12, rows_max=8):
    """Costs, buckets: a multiple of them."""
    buckets = draw(st.integers(1, dp_max))
    rows = draw(st.integers(1, rows_max))
    costs = draw(st.lists(cost, min_size=buckets * rows, max_size=buckets * rows))
    return array(costs), buckets


def falling(costs):
    return np.sort(costs)[::-1].copy()


# --- one result by both paths


@needs_kernel
@given(
    st.lists(st.integers(0, 70), max_size=80),
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 4)), min_size=1, max_size=20),
)
def test_rows_are_filled_alike_by_tokens(sizes, rows):
    results = []
    for fill in (kernel.fill_tokens, fill_twin.fill_tokens):
        space, room = array(rows).T.copy()
        found = np.zeros(len(sizes), np.int64)
        fill(array(sizes), space, room, found)
        results.append((found.tolist(), space.tolist(), room.tolist()))
    assert results[0] == results[1]


@needs_kernel
@given(st.data())
@settings(deadline=None)
def test_rows_are_filled_alike_by_units(data):
    kinds, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 150))
    count = data.draw(st.integers(0, 200))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    taken = rng.integers(0, 12, (count, kinds)) * (rng.random((count, kinds)) < 0.6)
    leads = rng.integers(0, kinds, count)
    start = rng.integers(0, 25, (kinds, rows)), rng.integers(0, 5, rows)
    results = []
    for fill in (kernel.fill_units, fill_twin.fill_units):
        space, room = (part.copy() for part in start)
        found = np.zeros(count, np.int64)
        fill(taken.copy(), leads, space, room, found)
        results.append((found.tolist(), space.tolist(), room.tolist()))
    assert results[0] == results[1]


@needs_kernel
@given(dealable(), st.integers(0, 2), st.integers(1, 5))
def test_rounds_are_alike(case, head_rounds, head_weight):
    costs, buckets = falling(case[0]), case[1]
    results = []
    for rounds in (kernel.deal_rounds, deal_twin.deal_rounds):
        loads, found = np.zeros(buckets, np.int64), np.zeros(len(costs), np.int64)
        rounds(costs, loads, head_rounds, head_weight, found)
        results.append((found.tolist(), loads.tolist()))
    assert results[0] == results[1]


@needs_kernel
@given(dealable())
def test_differences_are_alike(case):
    costs, buckets = falling(case[0]), case[1]
    results = []
    for differences in (kernel.deal_differences, deal_twin.deal_differences):
        found = np.zeros(len(costs), np.int64)
        differences(costs, buckets, found)
        results.append(found.tolist())
    assert results[0] == results[1]


@needs_kernel
@given(dealable(), st.data())
def test_capped_deals_and_exchanges_are_alike(case, data):
    costs, buckets = falling(case[0]), case[1]
    kinds = data.draw(st.integers(0, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    sizes = rng.integers(0, 10, (kinds, len(costs)))
    caps = rng.integers(5, 60, kinds)
    count_max = data.draw(st.integers(1, len(costs)))
    start = rng.integers(0, buckets, len(costs))
    options = [data.draw(st.integers(0, most)) for most in (buckets, 1, 1 << 40, 20, 4, 4)]
    results = []
    for path in (kernel, deal_twin):
        found, loads = np.zeros(len(costs), np.int64), np.zeros(buckets, np.int64)
        has_room = path.deal_lightest(costs, sizes, caps, count_max, found, loads)
        bucket_of, held = start.copy(), np.zeros(buckets, np.int64)
        np.add.at(held, bucket_of, costs)
        path.exchange(costs, sizes, caps, bucket_of, held, count_max, *options)
        assert held.tolist() == np.bincount(bucket_of, costs, buckets).astype(np.int64).tolist()
        results.append(
            (has_room, found.tolist(), loads.tolist(), bucket_of.tolist(), held.tolist())
        )
    assert results[0] == results[1]


@needs_kernel
@given(st.data())
def test_pipelines_end_alike(data):
    shape = [data.draw(st.integers(1, most)) for most in (4, 6, 6)]
    most = data.draw(st.sampled_from([3, 100, 1 << 40]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    costs = rng.integers(0, most, shape)
    if data.draw(st.booleans()):
        costs = np.repeat(costs[:, :1], shape[1], axis=1)
    results = []
    for ends in (kernel.makespans, pipeline_twin.makespans):
        found = np.zeros(len(costs), np.int64)
        ends(costs, shape[1], found)
        results.append(found.tolist())
    assert results[0] == results[1]
    for end, mine in zip(results[0], costs, strict=True):
        # No stage starts before the first microbatch came to it, none ends before the last one went.
        before = np.cumsum(mine[:, 0]) - mine[:, 0] + 2 * (np.cumsum(mine[:, -1]) - mine[:, -1])
        assert (before + 3 * mine.sum(axis=1)).max() <= end <= 3 * mine.sum()


@needs_kernel
def test_what_does_not_fit_is_refused():
    good = np.zeros(4, np.int64)
    with pytest.raises(ValueError, match="multiple of the buckets"):
        kernel.deal_rounds(good, np.zeros(3, np.int64), 0, 1, good.copy())
    with pytest.raises(ValueError, match="found"):
        kernel.fill_tokens(good, good.copy(), good.copy(), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="do not fit"):
        kernel.exchange(good, good, array([1]), good + 9, good.copy(), 4, 0, 1, 0, 1, 1, 1)
    with pytest.raises(ValueError, match="beyond"):
        kernel.fill_units(good - 1, good, good.copy(), good.copy(), good.copy())


# --- best fit


@given(st.data())
@settings(deadline=None)
def test_best_fit_takes_the_tightest_row(data):
    """Against the words of its docstring, one fragment after the other."""
    row_count, row_tokens = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 60))
    segments_max = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(1, row_tokens), max_size=60))
    free, room, expected = [row_tokens] * row_count, [segments_max] * row_count, []
    for size in sizes:
        rows = [row for row in range(row_count) if free[row] >= size and room[row]]
        row = min(rows, key=lambda row: (free[row], row), default=-1)
        expected.append(row)
        if row >= 0:
            free[row] -= size
            room[row] -= 1
    found = best_fit.best_fit_rows(array(sizes), 0, row_count, row_tokens, segments_max)
    assert found.tolist() == expected


# --- deals


@given(dealable(), methods)
@settings(deadline=None)
def test_a_deal_is_of_equal_numbers_and_no_worse_than_rounds(case, method):
    costs, buckets = falling(case[0]), case[1]
    found = deal(costs, buckets, method)
    assert np.bincount(found, minlength=buckets).tolist() == [len(costs) // buckets] * buckets
    heaviest = int(np.bincount(found, costs, buckets).max())
    assert heaviest >= least_load(costs, buckets) or buckets == 1
    if method == "greedy":
        loads = np.zeros(buckets, np.int64)
        kernel.deal_rounds(costs, loads, 0, 1, found.copy())
        assert heaviest <= loads.max()


@given(st.data())
@settings(deadline=None)
def test_a_capped_deal_keeps_its_caps_and_is_no_worse_than_without_the_exchange(data):
    count, buckets = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 8))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    costs, sizes, more = rng.integers(0, 100, (3, count))
    most, more_max = data.draw(st.integers(50, 900)), data.draw(st.integers(50, 900))
    count_max = data.draw(st.none() | st.integers(1, 30))
    found = deal_capped(
        costs, sizes, buckets, most, count_max, more_sizes=more[None], more_max=(more_max,)
    )
    order = np.argsort(-costs, kind="stable")
    plain, loads = np.zeros(count, np.int64), np.zeros(buckets, np.int64)
    has_room = deal_twin.deal_lightest(
        costs[order],
        np.stack((sizes, more))[:, order],
        array([most, more_max]),
        count if count_max is None else count_max,
        plain,
        loads,
    )
    assert has_room == (found is not None)
    if found is not None:
        assert np.bincount(found, sizes, buckets).max() <= most
        assert np.bincount(found, more, buckets).max() <= more_max
        assert np.bincount(found, minlength=buckets).max() <= (
            count if count_max is None else count_max
        )
        assert np.bincount(found, costs, buckets).max() <= loads.max()


# --- placements


@st.composite
def placeable(draw):
    dp, per, count = (draw(st.integers(1, most)) for most in (8, 3, 6))
    costs = array(draw(st.lists(cost, min_size=dp * per * count, max_size=dp * per * count)))
    groups = [size for size in range(1, dp + 1) if dp % size == 0]
    rule = BalanceRule(
        draw(methods),
        draw(st.sampled_from(OBJECTIVES)),
        draw(st.sampled_from([0, *groups])),
        stages=draw(st.integers(1, 5)),
    )
    return costs, dp, per, rule


def cells_of(placement, rows, per):
    count = int(placement.microbatch.max()) + 1
    return (placement.dp * count + placement.microbatch) * per + placement.slot


@given(placeable())
@settings(deadline=None)
def test_a_placement_is_a_permutation_and_never_worse_than_in_turn(case):
    costs, dp, per, rule = case
    placement = place_balanced(costs, dp, per, rule)
    assert sorted(cells_of(placement, len(costs), per).tolist()) == list(range(len(costs)))
    turn = place_in_turn(len(costs), dp, per)
    values = [
        objective_of(costs, one, dp, rule.objective, rule.stages) for one in (placement, turn)
    ]
    assert values[0] <= values[1]
    again = place_balanced(costs.copy(), dp, per, rule)
    assert all(np.array_equal(a, b) for a, b in zip(placement, again, strict=True))


@given(placeable(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_rows_changes_nothing_but_ties(case, random):
    costs, dp, per, rule = case
    order = list(range(len(costs)))
    random.shuffle(order)
    values = []
    for mine in (costs, costs[order]):
        placement = place_group(mine, dp, per, rule)
        values.append(objective_of(mine, placement, dp, rule.objective, rule.stages))
        cells = cells_of(placement, len(mine), per)
        values.append(mine[np.argsort(cells)].tolist())
    assert values[:2] == values[2:]


@given(placeable())
@settings(deadline=None)
def test_groups_are_dealt_on_their_own(case):
    costs, dp, per, rule = case
    if not rule.group_size:
        return
    groups = rows_of_groups(costs, dp, per, rule)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(costs)))
    assert {len(rows) for rows in groups} == {len(costs) // len(groups)}
    placement = place_balanced(costs, dp, per, rule)
    turn = place_in_turn(len(costs), dp, per)
    if not np.array_equal(placement.dp, turn.dp) and rule.group_size < dp:
        for group, rows in enumerate(groups):
            own = place_group(costs[rows], rule.group_size, per, rule)
            assert (placement.dp[rows] == group * rule.group_size + own.dp).all()
