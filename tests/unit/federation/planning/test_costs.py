import numpy as np

from federation.model.job import CostSpec
from federation.planning.costs import (
    STEP_COST_MAX,
    TransformerShape,
    bounded_cost,
    row_costs,
    segment_costs,
    transformer_cost,
)


def test_flops_of_a_small_decoder():
    spec = transformer_cost(TransformerShape(hidden=8, layers=2, heads=2, ffn=32, vocabulary=100))
    # per token: 2 * (2 layers * (4 * 64 + 2 * 8 * 32) + 8 * 100); per token pair: 2 * 2 * 8
    assert spec.linear * 32 == spec.quadratic * 2 * (2 * (256 + 512) + 800)
    assert np.gcd(spec.linear, spec.quadratic) == 1


def test_attention_makes_one_long_segment_dearer_than_many_short_ones():
    spec = transformer_cost(TransformerShape(1024, 16, 16, 4096, 50000))
    long, short = segment_costs(spec, np.array([8192, 512])).tolist()
    assert long > 16 * short
    assert segment_costs(CostSpec(), np.array([5, 0])).tolist() == [5, 0]


def test_row_costs_are_sums_of_segments():
    spec = CostSpec("transformer", 3, 2)
    lengths = np.array([1, 2, 5])
    costs = row_costs(spec, lengths, np.array([0, 2]), np.array([0, 2]), 4)
    assert costs.tolist() == [5 + 14, 0, 65, 0]
    nothing = np.zeros(0, np.int64)
    assert row_costs(spec, nothing, nothing, nothing, 2).tolist() == [0, 0]


def test_a_step_never_overflows():
    spec = CostSpec("transformer", 10**14, 10**9)
    bounded = bounded_cost(spec, 4096, 1 << 20)
    worst = (bounded.linear + bounded.quadratic * (1 << 20)) * 4096 * (1 << 20)
    assert worst <= STEP_COST_MAX
    assert abs(bounded.linear / bounded.quadratic / (spec.linear / spec.quadratic) - 1) < 0.01
    assert bounded_cost(CostSpec("transformer", 7, 3), 8, 128) == CostSpec("transformer", 7, 3)
