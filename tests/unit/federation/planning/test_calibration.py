"""Fits of planted weights, through noise and outliers; what is not better is not taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.cost import CalibrationRule, CostSpec, EncoderCost
from federation.model.place_tree import ClientPlaceTree
from federation.planning.calibration import WEIGHT_ONE, fit_weights
from federation.planning.calibrator import Calibrator
from federation.planning.step_times import OBSERVATIONS_MAX, StepTimes

STEPS, GROUPS = 100, 8
ONES = (WEIGHT_ONE,) * 3


def observed(seed, weights, constant_s=0.1, noise_s=0.02, outliers=0.2):
    """Return steps, parts and seconds of ranks with an encoder, a share of them far too slow."""
    rng = np.random.default_rng(seed)
    count = STEPS * GROUPS
    parts = np.stack(
        (
            rng.normal(1e9, 2e7, count),  # rows are nearly full: tokens hardly differ
            rng.lognormal(19.5, 0.5, count),
            rng.lognormal(19.0, 0.7, count) * (rng.random(count) < 0.8),
        ),
        axis=1,
    )
    seconds = constant_s + parts @ np.array(weights) * 1e-9 + rng.normal(0, noise_s, count)
    slow = rng.random(count) < outliers
    seconds[slow] += rng.exponential(2.0, int(slow.sum()))
    return np.repeat(np.arange(STEPS), GROUPS), parts, seconds


@pytest.mark.parametrize("seed", range(5))
def test_planted_weights_come_back_through_a_fifth_of_outliers(seed):
    planted = (1.0, 2.5, 0.5)
    fit = fit_weights(*observed(seed, planted), ONES, 0.05)
    assert fit is not None
    assert fit.is_accepted
    assert fit.error_fitted_s < 0.2 * fit.error_present_s
    # Tokens are told from the constant by hardly anything, so their weight is held by the prior.
    assert np.allclose(np.array(fit.seconds) * 1e9, planted, rtol=(0.15, 0.03, 0.05))
    assert max(fit.weights) == WEIGHT_ONE
    assert fit.weights[1] / fit.weights[2] == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_weights_that_are_right_stay(seed):
    fit = fit_weights(*observed(seed, (1.0, 1.0, 1.0)), ONES, 0.05)
    assert fit is not None
    assert not fit.is_accepted


def test_weights_in_force_are_what_a_fit_is_compared_with():
    times = observed(3, (1.0, 2.5, 0.5))
    first = fit_weights(*times, ONES, 0.05)
    assert first is not None
    again = fit_weights(*times, first.weights, 0.05)
    assert again is not None
    assert not again.is_accepted
    back = fit_weights(*observed(4, (1.0, 1.0, 1.0)), first.weights, 0.05)
    assert back is not None
    assert back.is_accepted


def test_a_margin_is_kept():
    times = observed(1, (1.0, 1.1, 1.0))
    slight = fit_weights(*times, ONES, 0.05)
    assert slight is not None
    assert slight.is_accepted == (slight.error_fitted_s <= 0.95 * slight.error_present_s)
    strict = fit_weights(*times, ONES, 0.99)
    assert strict is not None
    assert not strict.is_accepted


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.floats(0, 5), st.floats(0, 5), st.floats(0, 0.9))
def test_weights_are_never_negative_and_the_same_fit_gives_the_same(seed, tokens, media, outliers):
    steps, parts, seconds = observed(seed, (tokens, 0.0, media), 0.0, 0.5, outliers)
    fit = fit_weights(steps, parts, seconds, ONES, 0.05)  # noise far below zero, no attention
    assert fit == fit_weights(steps, parts, seconds, ONES, 0.05)
    if fit is not None:
        assert min(fit.weights) >= 0
        assert max(fit.weights) == WEIGHT_ONE
        assert fit.constant_s >= 0
        assert all(np.isfinite(fit.seconds))


def test_a_part_that_nobody_had_weighs_as_before():
    steps, parts, seconds = observed(2, (1.0, 3.0, 0.0))
    parts[:, 2] = 0
    fit = fit_weights(steps, parts, seconds, ONES, 0.05)
    assert fit is not None
    linear, attention, media = fit.weights
    # Beside the two others together it weighs what it did: between them.
    assert linear < media < attention


@pytest.mark.parametrize("steps", [0, 2])
def test_too_few_times_give_no_fit(steps):
    numbers, parts, seconds = observed(0, (1.0, 1.0, 1.0))
    few = slice(0, steps * GROUPS)
    assert fit_weights(numbers[few], parts[few], seconds[few], ONES, 0.05) is None


def test_times_that_do_not_depend_on_the_cost_give_none():
    numbers, parts, _ = observed(0, (1.0, 1.0, 1.0))
    falling = 10.0 - parts.sum(axis=1) * 1e-10
    fit = fit_weights(numbers, parts, falling, ONES, 0.05)
    assert fit is None or not fit.is_accepted


# -- the window -----------------------------------------------------------------------------------

RULE = CalibrationRule(every_steps=10, window_steps=20)


def test_reports_are_of_steps_that_are_known_and_the_slowest_of_a_group_counts():
    times = StepTimes(RULE, 2, 4)
    assert not times.report(0, 0, 1.0)
    times.planned(0, np.ones((1, 2), np.int64))
    assert times.report(0, 0, 1.0)
    assert times.report(0, 0, 3.0)
    assert times.report(0, 0, 2.0)
    for step, group, seconds in ((0, 2, 1.0), (0, -1, 1.0), (1, 0, 1.0), (0, 0, 0.0)):
        assert not times.report(step, group, seconds)
    assert times.reports == 3
    assert times._seconds[0].tolist() == [3.0, 0.0]


def test_the_window_is_bounded_whatever_is_reported():
    groups = 4096
    times = StepTimes(replace(RULE, window_steps=4096), groups, 8)
    for step in range(200):
        times.planned(step, np.ones((1, groups), np.int64))
    assert len(times._parts) * groups <= 3 * OBSERVATIONS_MAX
    assert not times.report(100, 0, 1.0)
    assert times.report(199, 0, 1.0)


TEXT = CostSpec("transformer", 3, 2)


def calibrator(cost=TEXT, dp=2):
    return Calibrator(RULE, cost, ClientPlaceTree.from_mesh({"dp": dp, "tp": 2}), 4)


def test_a_fit_is_made_on_the_cadence_and_taken_by_whoever_journals_it():
    rng = np.random.default_rng(1)
    it = calibrator()
    assert it.parts == ("linear", "attention")
    assert it.status()["since_step"] is None
    fitted = []
    for step in range(60):
        parts = rng.integers(1000, 9000, (2, 2))
        it.planned(step, parts)
        seconds = 1e-6 * (parts[0] + 4 * parts[1])
        # Ranks 0 and 1 are of group 0; the tensor-parallel peer is a little slower.
        reports = [
            [step, r, int(1e9 * seconds[r // 2] * (1 - 0.1 * (r % 2 == 0)))] for r in range(4)
        ]
        it.reported(reports)
        fit = it.fit_if_due(step + 3)
        if fit is not None:
            fitted.append((step, fit.is_accepted))
            if fit.is_accepted:
                it.accepted(fit.weights, step + 3)
    # At step 10 there were 22 times, too few.
    assert fitted == [(20, True), (30, False), (40, False), (50, False)]
    status = it.status()
    assert status["relative"] == pytest.approx([1.0, 4.0], rel=0.01)
    assert status["reports"] == 240
    assert status["last_fit"]["is_accepted"] is False
    it.reported([[5, 99, 7]])  # no such rank
    assert it.status()["reports"] == 240


def test_a_cost_of_encoders_has_a_weight_for_each():
    cost = CostSpec(
        "transformer", 3, 2, encoders=(EncoderCost("image", 1), EncoderCost("audio", 1))
    )
    assert calibrator(cost).parts == ("linear", "attention", "image", "audio")
