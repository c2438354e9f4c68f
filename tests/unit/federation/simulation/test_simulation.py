"""Runs planned from statistics alone."""

from dataclasses import replace

import numpy as np
import pytest

from federation.model.cost import CostSpec
from federation.model.job import BatchRule, MixturePoint, varlen_rows
from federation.model.place_tree import ClientPlaceTree
from federation.planning.strategies import STRATEGIES
from federation.simulation.length_statistics import SourceLengths
from federation.simulation.simulation import simulate
from federation.simulation.statistic_feed import BLOCK_RECORDS, StatisticFeed
from msd_client.contract.errors import ConfigError, SourceExhaustedError
from msd_client.contract.position import BLOCK_MAX, unpack_block_key
from tests.support.metadata import make_job, make_spec

VARLEN = BatchRule(
    varlen_rows(8000, 128), 128, packing="varlen", step_tokens=8000, row_segments_max=64
)


def statistics(count, records=500, seed=0):
    rng = np.random.default_rng(seed)
    return [SourceLengths.of(rng.integers(1, 90, 200), records) for _ in range(count)]


def job_of(count, **options):
    specs = [make_spec(f"s{number}") for number in range(count)]
    batch = BatchRule(rows=32, row_tokens=128)
    return make_job(specs, batch, cost=CostSpec("transformer", 10, 1), **options)


def test_shares_padding_and_balance_of_a_mixture_that_changes():
    points = (MixturePoint(0, {"s0": 3.0, "s1": 1.0}), MixturePoint(10, {"s0": 1.0, "s1": 1.0}))
    tree = ClientPlaceTree.from_mesh({"dp": 8}, [rank // 4 for rank in range(8)])
    seen = []
    found = simulate(job_of(2, points=points), tree, statistics(2), 20, seen.append)
    assert found.steps == 20 == len(seen)
    shares = found.drawn_tokens / found.drawn_tokens.sum(axis=1, keepdims=True)
    assert np.allclose(shares[:10, 0], 0.75, atol=0.05)
    assert np.allclose(shares[10:, 0], 0.5, atol=0.05)
    assert np.array_equal(found.wanted[[0, 10], 0], [0.75, 0.5])
    assert found.placed_tokens.sum() == sum(int(plan.length.sum()) for plan in seen)
    assert (found.imbalance >= 1).all()
    assert (found.padding < 0.05).all()
    tokens, samples = found.realised
    assert tokens.sum() == pytest.approx(1)
    assert samples.sum() == pytest.approx(1)


def test_the_same_figures_whatever_was_planned_before():
    tree = ClientPlaceTree.from_mesh({"dp": 4})
    first = simulate(job_of(3), tree, statistics(3), 6).plain()
    assert simulate(job_of(3), tree, statistics(3), 6).plain() == first


def test_repetition_is_counted_in_epochs():
    tree = ClientPlaceTree.from_mesh({"dp": 1})
    found = simulate(job_of(1), tree, [SourceLengths.of([64], 10)], 4)
    # 4 steps of 32 rows of two records each, and what is carried: 10 records are an epoch.
    drawn = int(found.drawn_samples.sum())
    assert found.epochs[0] == pytest.approx((drawn - 1) / 10)


def test_a_source_that_may_not_be_repeated_ends_the_run():
    specs = [make_spec("s0", at_exhaustion="stop", max_epochs=1)]
    job = make_job(specs, BatchRule(rows=4, row_tokens=64))
    tree = ClientPlaceTree.from_mesh({"dp": 1})
    found = simulate(job, tree, [SourceLengths.of([64], 10)], 50)
    assert found.ending == "source s0 is exhausted"
    assert found.steps == 3
    specs = [make_spec("s0", max_epochs=1)]
    with pytest.raises(SourceExhaustedError, match="max_epochs"):
        simulate(make_job(specs, BatchRule(rows=4, row_tokens=64)), tree,
                 [SourceLengths.of([64], 10)], 50)  # fmt: skip


def test_blocks_are_a_function_of_their_place_alone():
    records = BLOCK_RECORDS + 5
    one, other = (StatisticFeed(statistics(2, records), 7) for _ in range(2))
    other.next_block(0)
    blocks = [one.next_block(1) for _ in range(4)]
    assert [len(block.lengths) for block in blocks] == [BLOCK_RECORDS, 5, BLOCK_RECORDS, 5]
    assert [unpack_block_key(block.block_key)[::2] for block in blocks] == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip
    again = [other.next_block(1) for _ in range(4)]
    for block, same in zip(blocks, again, strict=True):
        assert np.array_equal(block.lengths, same.lengths)
    assert not np.array_equal(blocks[0].lengths, blocks[2].lengths)


def test_more_records_than_a_window_holds_are_refused():
    with pytest.raises(ConfigError, match="at most"):
        StatisticFeed([SourceLengths.of([1], BLOCK_RECORDS * (BLOCK_MAX + 2))], 0)


def test_bytes_between_nodes_are_counted_once_a_node():
    # Four groups of two ranks on two nodes; the ranks of group 3 lie on both.
    tree = ClientPlaceTree.from_mesh({"dp": 4, "tp": 2}, [0, 0, 0, 0, 1, 1, 1, 0])
    job = job_of(2)
    job = replace(job, sources=(replace(job.sources[0], token_bytes=2), job.sources[1]))
    plans = []
    found = simulate(job, tree, statistics(2, 5 * BLOCK_RECORDS), 1, plans.append)
    plan = plans[0]
    expected = 0
    for row, key, source, length in zip(
        plan.row.tolist(), plan.block_key.tolist(), plan.source.tolist(), plan.length.tolist(),
        strict=True,
    ):  # fmt: skip
        wanted = set(tree.nodes_of_dp_group(int(plan.row_dp[row])))
        made = unpack_block_key(key).block % 2
        expected += len(wanted - {made}) * length * (2, 4)[source]
    assert found.crossing_bytes.tolist() == [expected]
    assert expected > 0
    alone = ClientPlaceTree.from_mesh({"dp": 4, "tp": 2})
    assert not simulate(job, alone, statistics(2, 5 * BLOCK_RECORDS), 1).crossing_bytes.any()


@pytest.mark.parametrize("batch", [BatchRule(64, 128), VARLEN], ids=["rows", "varlen"])
def test_strategy_local_moves_fewer_bytes_at_the_same_balance(batch):
    tree = ClientPlaceTree.from_mesh({"dp": 8}, [rank // 2 for rank in range(8)])
    job = make_job([make_spec("s0"), make_spec("s1")], batch, cost=CostSpec("transformer", 1000, 1))
    known = statistics(2, 40 * BLOCK_RECORDS)
    native, balanced, local = (
        simulate(job, tree, known, 8, strategy=STRATEGIES[name])
        for name in ("native", "balanced", "local")
    )
    assert local.crossing_bytes.sum() < balanced.crossing_bytes.sum()
    assert np.array_equal(local.drawn_tokens, balanced.drawn_tokens)
    assert (local.imbalance <= balanced.imbalance * 1.0011).all()
    assert local.imbalance.mean() < native.imbalance.mean()
