"""Rows that are even in cost before they are placed."""

import random
from dataclasses import replace

import numpy as np
import pytest

from federation.model.cost import CostSpec, EncoderCost, SpanTerm
from federation.model.job import BatchRule
from federation.planning.costs import encoder_costs, segment_costs
from federation.planning.even_fit import even_rows, is_as_good
from federation.planning.packing import pack
from federation.planning.step_pool import LENGTH, Pool
from tests.support.metadata import Feed, make_job, make_spec, random_corpus, start
from tests.support.picture_mix import ROW_TOKENS, ROW_UNITS, picture_mix, units_of

SQUARE = CostSpec("transformer", 0, 1)


def array(*values):
    return np.array(values, np.int64)


def even(lengths, rows, tokens, segments_max=64, own_count=None):
    lengths = np.array(lengths)
    return even_rows(
        lengths * lengths,
        lengths[None],
        array(tokens)[:, None],
        (rows, segments_max),
        len(lengths) if own_count is None else own_count,
    ).tolist()


def test_long_ones_are_dealt_by_cost_and_short_ones_fill():
    # Best fit has 5 and 5 in row 0 and twos in row 1. Of 20 tokens an eighth, 2.5, is left for best
    # fit: the two last twos. Fives go apart, twos to the lighter row, the rest where it fits.
    assert even([5, 5, 2, 2, 2, 2, 2], 2, 10) == [0, 1, 0, 1, 0, 1, -1]
    assert even([5, 5, 2, 2, 2, 2, 1, 1], 2, 10) == [0, 1, 0, 1, 0, 1, 0, 1]


def test_fillers_change_nothing_for_others():
    own = [5, 5, 2, 2, 2, 2]
    assert even([*own, 1, 1, 9], 2, 10, own_count=6) == [*even(own, 2, 10), 0, 1, -1]


def test_a_row_takes_no_more_segments_than_its_most():
    found = even([3, 3, 3, 3, 3, 3, 1, 1, 1, 1], 2, 20, segments_max=3)
    assert np.bincount([row for row in found if row >= 0]).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("rows", "carried", "is_last", "expected"),
    [
        ([0, 1, 0, 1], 0, False, True),
        ([0, 1, 0, -1], 0, False, True),  # 1 token of 100 is carried on
        ([0, 1, -1, 1], 0, False, False),  # 9 of 100 are too many
        ([0, 1, 0, -1], 4, False, False),  # it was carried already
        ([0, 1, 0, -1], 0, True, False),  # nothing comes after
        ([0, 0, 0, 0], 0, False, False),  # row 1 is empty
    ],
)
def test_when_even_rows_stand_for_those_of_best_fit(rows, carried, is_last, expected):
    best, tokens = array(0, 0, 1, 1), array(50, 40, 9, 1)
    assert is_as_good(array(*rows), best, tokens, carried, 4, is_last=is_last) == expected


def test_what_best_fit_leaves_is_not_missed():
    assert is_as_good(array(0, -1), array(0, -1), array(5, 5), 2, 2, is_last=True)


def rows_of(packing, lengths, rows, tokens):
    pool = np.zeros((6, len(lengths)), np.int64)
    pool[2] = np.arange(len(lengths))
    pool[LENGTH] = lengths
    return pack(
        Pool(pool, 0, cost=SQUARE), BatchRule(rows, tokens, packing=packing, row_segments_max=4096)
    )


@pytest.mark.parametrize("longest", [1024, 2048])
def test_rows_of_shorter_documents_are_even_and_as_full(longest):
    rng = np.random.default_rng(longest)
    lengths = np.minimum(longest, (rng.lognormal(5.5, 1.3, 4000) + 1).astype(np.int64))
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), 64 * 4096 * 33 // 32))]
    spread, fill = {}, {}
    for packing in ("best_fit", "best_fit_even"):
        packed = rows_of(packing, lengths, 64, 4096)
        costs = np.add.reduceat(segment_costs(SQUARE, packed.segments[LENGTH]), packed.row_starts)
        spread[packing] = costs.max() / costs.mean()
        fill[packing] = packed.segments[LENGTH].sum() / (64 * 4096)
        assert (packed.column + packed.segments[LENGTH]).max() <= 4096
    assert spread["best_fit"] > 1.5
    assert spread["best_fit_even"] < 1.2
    assert fill["best_fit_even"] >= fill["best_fit"] - 0.002


def test_rows_of_a_planner_are_even_whatever_the_mesh():
    spread, digests = {}, {}
    for packing, mesh in (("best_fit", 1), ("best_fit_even", 1), ("best_fit_even", 16)):
        job = make_job(
            [make_spec("web", 4)],
            BatchRule(16, 512, packing=packing),
            cost=CostSpec("transformer", 1, 1),
        )
        corpus = random_corpus(job.sources[0], 3, lambda rng: rng.randint(1, 200))
        feed = Feed(start(job, {"dp": mesh}), [corpus], seed=random.random())
        plans = feed.steps(12)
        digests[packing, mesh] = [plan.stream_digest for plan in plans]
        ratios = []
        for plan in plans:
            costs = np.bincount(plan.row, weights=plan.length * (1 + plan.length))
            ratios.append(costs.max() / costs.mean())
        spread[packing, mesh] = np.mean(ratios)
    assert digests["best_fit_even", 1] == digests["best_fit_even", 16] != digests["best_fit", 1]
    assert spread["best_fit_even", 1] < 1.06
    assert spread["best_fit", 1] > 1.2


def test_a_short_text_with_a_dear_picture_is_dealt_by_its_cost():
    lengths = np.array([10, 10, 1, 1, 1, 1] + [3] * 12)
    costs = lengths * lengths + np.array([0, 0, 90, 90, 90, 90] + [0] * 12)

    def rows(is_media_weighed):
        shape = (2, 64)
        found = even_rows(
            costs, lengths[None], array(40)[:, None], shape, 18, is_media_weighed=is_media_weighed
        )
        return [int(costs[found == row].sum()) for row in range(2)]

    assert max(rows(True)) - min(rows(True)) < 60
    # By length alone pictures fill what is left, all in one row.
    assert max(rows(False)) - min(rows(False)) > 100


def media_row_costs(packing, cost, weighed):
    batch = BatchRule(32, 4 * ROW_TOKENS, packing=packing)
    job, corpora = picture_mix(5, batch, 12)
    media = (replace(job.media[0], row_units_max=4 * ROW_UNITS),)
    plans = Feed(start(replace(job, cost=cost, media=media), {"dp": 8}), corpora, seed=3).steps(2)
    found = []
    for plan in plans:
        places = (plan.source, plan.block_key, plan.index)
        units = [units_of(corpora, *at) for at in zip(*(c.tolist() for c in places), strict=True)]
        costs = segment_costs(weighed, plan.length.astype(np.int64))
        costs += encoder_costs(weighed.encoders[0], np.array(units))
        rows = np.bincount(plan.row, weights=costs, minlength=plan.rows)
        found.append(rows.max() / rows.mean())
    return np.mean(found)


def test_rows_of_pictures_are_even_in_the_cost_of_backbone_and_encoder():
    whole = CostSpec(
        "transformer", 6144, 4, encoders=(EncoderCost("image", 1536, (SpanTerm(4096, 1),)),)
    )
    best = media_row_costs("best_fit", whole, whole)
    text = media_row_costs("best_fit_even", whole.backbone, whole)
    even = media_row_costs("best_fit_even", whole, whole)
    assert even < text < best
    assert even < 1.2
