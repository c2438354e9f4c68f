"""Predicted times of steps: stages, encoders on the first, waits where embeddings are exchanged."""

import numpy as np
import pytest

from federation.model.cost import CostSpec, EncoderCost
from federation.planning.balance import Placement
from federation.planning.extra_rows import ExtraRows
from federation.planning.graph_compile import GraphPlan
from federation.planning.step_pool import LENGTH, Packed, runs
from federation.planning.step_time import model_loads, predicted_time

EXTRAS = ExtraRows(False, False, ("image",), (100,))
PLAIN = CostSpec()
VISION = CostSpec(encoders=(EncoderCost("image", 1),))


def made_of(lengths, units, dp, microbatch, encode_dp=None):
    """Return a plan of one segment a row."""
    count = len(lengths)
    segments = np.zeros((5, count), np.int64)
    segments[LENGTH] = lengths
    row = np.arange(count)
    none = np.zeros(0, np.int64)
    packed = Packed(
        segments, row, row * 0, *runs(row), none, segments[:, :0], row >= 0, np.array([units])
    )
    placement = Placement(np.array(dp), np.array(microbatch), row * 0)
    encode = None if encode_dp is None else np.array([encode_dp])
    return GraphPlan(packed, placement, none, none, none, b"", (), False, encode)


def time_of(made, cost, stages=1):
    return predicted_time(made, cost, EXTRAS, 2, stages)


def test_the_slowest_ranks_passes_are_summed():
    made = made_of([10, 20, 5, 5], [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1])
    assert time_of(made, PLAIN) == 3 * 30
    # Two stages of half the layers. Stage 1: F 5-10, B 10-20, F 20-30, B 30-50; the last B of stage
    # 0 waits for it: 50-70.
    assert time_of(made, PLAIN, 2) == 70


def test_encoders_are_on_the_first_stage_and_layers_make_up_for_them():
    made = made_of([20, 20], [10, 10], [0, 1], [0, 0])
    # 60 of work on two stages: 30 each, so the first has 10 of the backbone's 40 beside 20.
    assert time_of(made, VISION, 2) == 3 * 30
    assert model_loads(made, VISION, EXTRAS, 2).tolist() == [[[10], [10]]]
    assert model_loads(made, PLAIN, EXTRAS, 2).tolist() == [[[0], [0]]]


def test_groups_wait_for_the_slowest_encoder_where_they_exchange_embeddings():
    lengths, units = [4, 4, 4, 4], [8, 0, 0, 8]
    dp, microbatch = [0, 1, 0, 1], [0, 0, 1, 1]
    assert time_of(made_of(lengths, units, dp, microbatch), VISION) == 3 * 16
    home = made_of(lengths, units, dp, microbatch, [0, -1, -1, 1])
    assert time_of(home, VISION) == 3 * 24
    even = made_of([4, 4, 4, 4], [4, 4, 4, 4], dp, microbatch, [0, 1, 1, 0])
    assert time_of(even, VISION) == 3 * 16


@pytest.mark.parametrize("bits", [0, 20, 55])
def test_large_costs_are_scaled_alike(bits):
    cost = CostSpec(linear=1 << bits)
    made = made_of([10, 20, 5, 5], [0] * 4, [0, 0, 1, 1], [0, 1, 0, 1])
    other = made_of([10, 20, 5, 5], [0] * 4, [0, 1, 1, 0], [0, 0, 1, 1])
    times = [time_of(one, cost, 4) / time_of(one, PLAIN, 4) for one in (made, other)]
    assert times[0] == pytest.approx(times[1], rel=1e-9)
