"""A step by itself: its factor of the loss, and that its microbatches are given once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from msd_client.batch import Batch
from msd_client.contract.errors import UsageError
from msd_client.step import Step


class Giver:
    """Gives private batches."""

    sources = ("a",)
    source_loss_weights = ()
    averaging_ranks = 6

    def next_batch(self, step: Step) -> Batch:
        return Batch({"step": step.number})

    def report_step(self, number: int, seconds: float) -> bool:
        return (number, seconds) == (4, 0.5)


@pytest.fixture
def step() -> Step:
    meta: dict[str, Any] = {
        "step": 4,
        "plan_step": 4,
        "valid_tokens": 12,
        "valid_segments": 3,
        "loss_weight": 12.0,
        "microbatches": 3,
        "stats": {},
    }
    return Step(Giver(), meta)


def test_the_factor_is_of_a_mean_or_of_a_sum(step: Step) -> None:
    assert step.loss_scale() == step.loss_scale("mean") == 0.5
    assert step.loss_scale("sum") == 6


@pytest.mark.parametrize("reduction", ["none", "MEAN", None, 1])
def test_another_reduction_is_refused_with_both_names(step: Step, reduction: Any) -> None:
    with pytest.raises(UsageError, match="'mean' or 'sum'"):
        step.loss_scale(reduction)


def test_a_step_goes_on_where_a_loop_left_it_and_is_given_once(step: Step) -> None:
    next(iter(step))
    assert step.left == 2
    assert len(list(step)) == 2
    with pytest.raises(UsageError, match=r"all 3 microbatches of step 4 .* clone\(\)"):
        list(step)


def test_a_skipped_step_gives_nothing_either(step: Step) -> None:
    step.skip_rest()
    step.skip_rest()
    with pytest.raises(UsageError, match="were given out"):
        next(iter(step))


def test_a_step_shows_where_it_is(step: Step) -> None:
    next(iter(step))
    assert repr(step) == "Step(4: 1 of 3 microbatches given out, 12 valid tokens)"


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_step_stays_in_its_process(step: Step, take: Any) -> None:
    with pytest.raises(UsageError, match=r"Step .*clone\(\)"):
        take(step)


def test_a_report_names_its_step(step: Step) -> None:
    assert step.report(compute_s=0.5)
    assert not step.report(compute_s=0.25)
