"""Runs of plan steps that are left out."""

from __future__ import annotations

from msd_client.contract.skips import (
    is_skipped,
    merged_skips,
    no_skips,
    plan_step_of,
    skipped_count,
    skips_from,
    skips_without,
)


def runs(*pairs):
    skips = no_skips()
    for first, end in pairs:
        skips = merged_skips(skips, first, end)
    return skips


def test_skips_that_touch_are_one():
    assert runs((8, 9), (2, 4), (4, 6), (3, 5)).tolist() == [[2, 6], [8, 9]]
    assert runs((2, 9), (3, 4)).tolist() == [[2, 9]]


def test_a_skip_is_over_behind_its_last_step():
    skips = runs((2, 4), (6, 7))
    assert [step for step in range(9) if is_skipped(skips, step)] == [2, 3, 6]
    assert skips_from(skips, 3).tolist() == [[2, 4], [6, 7]]
    assert skips_from(skips, 4).tolist() == [[6, 7]]
    assert skips_from(skips, 7).shape == (0, 2)


def test_steps_of_the_trainer_go_around_skips():
    skips = runs((2, 4), (6, 7))
    assert [plan_step_of(skips, 0, ahead) for ahead in range(6)] == [0, 1, 4, 5, 7, 8]
    assert plan_step_of(skips, 3, 0) == 4  # in the middle of one
    assert [skipped_count(skips, step) for step in (0, 3, 4, 7)] == [3, 2, 1, 0]


def test_a_part_of_a_skip_is_taken_out():
    skips = runs((2, 9), (12, 14))
    assert skips_without(skips, 4, 6).tolist() == [[2, 4], [6, 9], [12, 14]]
    assert skips_without(skips, 0, 13).tolist() == [[13, 14]]
    assert skips_without(skips, 9, 12).tolist() == skips.tolist()
