"""Costs in plans: encoders count, weights hold from their step on, and no sample moves."""

from dataclasses import replace

import numpy as np
import pytest

from federation.model.cost import CalibrationRule, CostSpec, EncoderCost, SpanTerm
from federation.model.job import BatchRule
from msd_client.contract.errors import ConfigError
from tests.support.marked import TEXT, Atom, image_rule, length_of, marked_spec, marks_of_record
from tests.support.metadata import Feed, SourceCorpus, make_job, make_spec, start

TEXT_COST = CostSpec("transformer", 1, 1)


def text_feed(**options):
    spec = make_spec("a")
    lengths = np.random.default_rng(3).integers(1, 200, 400).tolist()
    job = make_job([spec], BatchRule(16, 256), cost=TEXT_COST, **options)
    corpus = SourceCorpus(spec, [[(lengths, [0] * len(lengths))]])
    return Feed(start(job, {"dp": 4}), [corpus])


def places(plans):
    return [plan.row_dp.tolist() for plan in plans]


def digests(plans):
    return [(plan.membership_digest, plan.stream_digest) for plan in plans]


def test_weights_hold_from_their_step_on_and_move_no_sample():
    plain, weighed, early = text_feed(), text_feed(), text_feed()
    weighed.planner.weigh_cost((1_000_000, 1), 2)
    early.planner.weigh_cost((1_000_000, 1), 2)
    early.planner.weigh_cost((1, 1), 3)  # the later event holds from its step on
    expected, found, back = plain.steps(5), weighed.steps(5), early.steps(5)
    assert digests(expected) == digests(found) == digests(back)
    assert places(expected)[:2] == places(found)[:2]
    assert places(expected)[2:] != places(found)[2:]
    assert places(back)[2] == places(found)[2]
    assert places(back)[3:] == places(expected)[3:]
    assert plain.planner.state().encode() == weighed.planner.state().encode()


@pytest.mark.parametrize("weights", [(1,), (1, 2, 3), (-1, 2), (0, 0)])
def test_weights_that_do_not_fit_are_refused(weights):
    with pytest.raises(ConfigError, match="the cost has the parts linear, attention"):
        text_feed().planner.weigh_cost(weights, 1)


def test_parts_are_those_of_each_group_by_the_analytical_cost():
    feed = text_feed(calibration=CalibrationRule())
    feed.planner.weigh_cost((1, 9), 0)
    (plan,) = feed.steps(1)
    parts = feed.planner.last_parts()
    for group in range(4):
        held = plan.length[plan.row_dp[plan.row] == group].astype(np.int64)
        assert parts[:, group].tolist() == [int(held.sum()), int((held * held).sum())]


def test_a_rows_cost_is_of_its_text_and_of_its_media():
    picture, text = [[Atom(0, 2, 8), Atom(TEXT, 6)]], [[Atom(TEXT, 8)]]
    records = [picture, text, text, picture, text, text, picture, picture] * 4
    spec = marked_spec("chat")
    corpus = SourceCorpus(spec, [[([length_of(r) for r in records], [0] * len(records))]])
    corpus.marks[0, 0] = [marks_of_record(record) for record in records]
    encoder = EncoderCost("image", 10, (SpanTerm(4, 3),))
    job = make_job(
        [spec], BatchRule(8, 8), media=(image_rule(8),),
        cost=replace(TEXT_COST, encoders=(encoder,)), calibration=CalibrationRule(),
    )  # fmt: skip
    feed = Feed(start(job, {"dp": 4}), [corpus])
    (plan,) = feed.steps(1)
    parts = feed.planner.last_parts()
    # A picture of 8 units costs 80 + 3 * 8 * 4; a row is one sample of 8 tokens: 8 + 64.
    pictures = parts[2] // 176
    assert parts[2].tolist() == (176 * pictures).tolist()
    costs = 2 * (8 + 64) + 176 * pictures
    assert plan.cost_max == costs.max()
    assert plan.cost_mean == costs.mean()
    assert pictures.max() - pictures.min() <= 1  # by text alone any deal would do
