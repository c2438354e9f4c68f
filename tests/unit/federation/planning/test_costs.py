"""Integer costs: hand-computed values, and what holds for all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.model.cost import ActivationBytes, CostSpec, EncoderCost, SpanTerm, WindowTerm
from federation.planning.costs import (
    STEP_COST_MAX,
    activation_bytes,
    bounded_cost,
    encoder_costs,
    factors_of,
    part_names,
    row_costs,
    segment_costs,
    segment_parts,
    weighted_cost,
    with_factors,
)

ENCODER = EncoderCost("image", 5, (SpanTerm(4, 1), SpanTerm(16, 2)))
SPEC = CostSpec("transformer", 3, 2, (WindowTerm(4, 1), WindowTerm(10, 5)), (ENCODER,))

factors = st.integers(0, 1 << 40)
specs = st.builds(
    CostSpec,
    st.just("transformer"),
    st.integers(1, 1 << 40),
    factors,
    st.lists(st.builds(WindowTerm, st.integers(1, 1 << 20), factors), max_size=3).map(tuple),
    st.builds(
        EncoderCost,
        st.just("image"),
        factors,
        st.lists(st.builds(SpanTerm, st.integers(1, 1 << 16), factors), max_size=2).map(tuple),
    ).map(lambda encoder: (encoder,)),
)
row_lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=12)


def test_attention_makes_one_long_segment_dearer_than_many_short_ones():
    spec = CostSpec("transformer", 2 * 16 * 12 * 1024**2, 2 * 16 * 1024)
    long, short = segment_costs(spec, np.array([8192, 512])).tolist()
    assert long > 16 * short
    assert segment_costs(CostSpec(), np.array([5, 0])).tolist() == [5, 0]


def test_a_window_costs_twice_the_pairs_that_the_mask_leaves():
    spec = CostSpec("transformer", 0, 0, (WindowTerm(4, 1),))
    for tokens in range(12):
        query, key = np.mgrid[:tokens, :tokens]
        pairs = int(np.count_nonzero((key <= query) & (key > query - 4)))
        # As in n * n, the pairs of a token with itself and on the rim count half.
        (found,) = segment_costs(spec, np.array([tokens])).tolist()
        assert found == 2 * pairs - min(tokens, 4)


def test_segments_at_below_and_over_the_window():
    spec = CostSpec("transformer", 3, 2, (WindowTerm(4, 10),))
    costs = segment_costs(spec, np.array([0, 1, 4, 5, 100])).tolist()
    assert costs == [
        0,
        3 + 2 + 10,
        12 + 32 + 160,
        15 + 50 + 10 * 4 * 6,
        300 + 20_000 + 10 * 4 * 196,
    ]


def test_media_attend_to_their_item_and_to_no_more_than_there_are():
    units = np.array([0, 1, 4, 10, 100])
    assert encoder_costs(ENCODER, units).tolist() == [
        0,
        5 + 1 + 2,
        20 + 16 + 2 * 16,
        50 + 40 + 2 * 100,
        500 + 400 + 2 * 1600,
    ]
    # Four typical items cost four times one.
    one, four = encoder_costs(ENCODER, np.array([16, 64])).tolist()
    assert four == 4 * one


def test_row_costs_are_sums_of_segments_and_media():
    spec = CostSpec("transformer", 3, 2)
    lengths = np.array([1, 2, 5])
    costs = row_costs(spec, lengths, np.array([0, 2]), np.array([0, 2]), 4)
    assert costs.tolist() == [5 + 14, 0, 65, 0]
    nothing = np.zeros(0, np.int64)
    assert row_costs(spec, nothing, nothing, nothing, 2).tolist() == [0, 0]
    with_media = CostSpec("transformer", 3, 2, encoders=(ENCODER,))
    units = {"image": np.array([0, 4, 0])}
    costs = row_costs(with_media, lengths, np.array([0, 2]), np.array([0, 2]), 4, units)
    assert costs.tolist() == [5 + 14 + 68, 0, 65, 0]


@given(specs, row_lengths, st.data())
def test_costs_are_additive_monotone_and_independent_of_order(spec, lengths, data):
    rows, row_tokens, most = 64, sum(lengths), 1 << 16
    spec = bounded_cost(spec, rows, row_tokens, {"image": most})
    units = data.draw(
        st.lists(st.integers(0, most // 16), min_size=len(lengths), max_size=len(lengths))
    )
    order = data.draw(st.permutations(range(len(lengths))))
    held, media = np.array(lengths), np.array(units)
    start, row = np.array([0]), np.array([0])
    (cost,) = row_costs(spec, held, start, row, 1, {"image": media}).tolist()
    assert cost == row_costs(spec, held[order], start, row, 1, {"image": media[order]}).tolist()[0]
    (encoder,) = spec.encoders
    assert cost == int(segment_costs(spec, held).sum() + encoder_costs(encoder, media).sum())
    longer = segment_costs(spec, held + 1) - segment_costs(spec, held)
    assert longer.min() >= spec.linear
    assert (encoder_costs(encoder, media + 1) >= encoder_costs(encoder, media)).all()
    parts = segment_parts(spec, held, {"image": media})
    assert parts.shape == (len(part_names(spec)), len(lengths))
    assert int(parts.sum()) == cost


@given(specs, st.integers(1, 1 << 20), st.integers(2, 1 << 24), st.integers(0, 1 << 24))
def test_a_step_never_overflows_and_ratios_stay(spec, rows, row_tokens, units):
    if rows * row_tokens > 1 << 36 or rows * units > 1 << 36:
        row_tokens, units = min(row_tokens, (1 << 36) // rows), min(units, (1 << 36) // rows)
        row_tokens = max(2, row_tokens)
    bounded = bounded_cost(spec, rows, row_tokens, {"image": units})
    exact = row_cost_max(bounded, row_tokens, units)
    assert exact * rows <= STEP_COST_MAX or max(factors_of(bounded)) <= 1
    held = np.array([row_tokens])
    found = row_costs(bounded, held, np.array([0]), np.array([0]), 1, {"image": np.array([units])})
    assert 0 <= int(found[0]) <= exact  # no wrap-around
    for before, after in zip(factors_of(spec), factors_of(bounded), strict=True):
        assert (after == 0) == (before == 0)


def row_cost_max(spec: CostSpec, tokens: int, units: int) -> int:
    total = tokens * (spec.linear + spec.quadratic * tokens)
    for window in spec.windowed:
        total += window.quadratic * tokens * min(tokens, 2 * window.window_tokens)
    for encoder in spec.encoders:
        total += encoder.linear * units
        total += sum(span.quadratic * units * min(units, span.span_units) for span in encoder.spans)
    return total


def test_halving_keeps_ratios():
    spec = CostSpec("transformer", 10**14, 10**9)
    bounded = bounded_cost(spec, 4096, 1 << 20)
    worst = (bounded.linear + bounded.quadratic * (1 << 20)) * 4096 * (1 << 20)
    assert worst <= STEP_COST_MAX
    assert abs(bounded.linear / bounded.quadratic / (spec.linear / spec.quadratic) - 1) < 0.01
    assert bounded_cost(CostSpec("transformer", 7, 3), 8, 128) == CostSpec("transformer", 7, 3)


def test_factors_come_back_in_their_places():
    assert factors_of(SPEC) == [3, 2, 1, 5, 5, 1, 2]
    assert with_factors(SPEC, factors_of(SPEC)) == SPEC
    assert factors_of(weighted_cost(SPEC, (10, 3, 7))) == [30, 6, 3, 15, 35, 7, 14]


def test_activations_are_of_tokens_and_units():
    spec = CostSpec(encoders=(ENCODER,), activations=ActivationBytes(100, image=7, audio=9))
    tokens = np.array([10, 0])
    assert activation_bytes(spec, tokens).tolist() == [1000, 0]
    units = {"image": np.array([3, 1]), "audio": np.array([5, 5])}
    assert activation_bytes(spec, tokens, units).tolist() == [1021, 7]  # sounds have no encoder


@pytest.mark.parametrize("weights", [(1, 1), (1, 1, 1, 1)])
def test_weights_are_one_a_part(weights):
    with pytest.raises(ValueError, match="zip"):
        weighted_cost(SPEC, weights)
