"""Intervals of the observation bench."""

from __future__ import annotations

import pytest

from bench.observe import interval


def test_an_interval_holds_the_mean_and_shrinks_with_pairs():
    low, mean, high = interval([1.0, 1.1, 0.9, 1.0, 1.05])
    assert low < mean < high
    assert mean == pytest.approx(1.008, abs=0.01)
    wide = high - low
    low, _, high = interval([1.0, 1.1, 0.9, 1.0, 1.05] * 4)
    assert high - low < wide / 2


def test_equal_pairs_have_no_width():
    assert interval([1.02, 1.02, 1.02]) == pytest.approx((1.02, 1.02, 1.02))
