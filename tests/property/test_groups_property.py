"""Groups are never torn: over rows, microbatches, steps, restores; whatever is fed how to whom."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.job import BatchRule, RampPoint, ResolvedJob, varlen_rows
from federation.model.plan import StepPlan
from federation.planning.planner import Ended
from msd_client.contract.errors import DataError
from msd_client.contract.state import (
    DELIVERED_TOKENS,
    DRAWN_TOKENS,
    DROPPED_COLUMNS,
    DROPPED_TOKENS,
    StreamState,
)
from tests.support.grouped import (
    BY_FIELD,
    BY_RECORD,
    POLICY,
    GroupedCorpus,
    check_whole_groups,
    grouped_corpus,
    grouped_spec,
)
from tests.support.marked import MarkedCorpus, image_rule, marked_spec, random_marked_corpus
from tests.support.metadata import Feed, initial_state, make_job, start

seeds = st.integers(0, 2**32 - 1)
Corpora = list[GroupedCorpus | MarkedCorpus]
LONG = DROPPED_COLUMNS.index("long_skipped")


def random_job(rng: random.Random, **ends: Any) -> tuple[ResolvedJob, Corpora]:
    """Return a job of pairs, of rollouts and of plain documents, any packing."""
    row_tokens = rng.choice([32, 128])
    units_max = rng.choice([(), (), (24,), (12, 60)])
    has_masks = bool(units_max) or rng.random() < 0.4
    pairs = grouped_spec(
        "pairs",
        BY_FIELD,
        rng.randint(1, 4),
        has_masks=has_masks,
        is_many=rng.random() < 0.3,
        at_exhaustion="drop",
    )
    order = rng.choice(["seekable", "streaming"])
    rollouts = grouped_spec(
        "rollouts", BY_RECORD, 3, order_class=order, has_masks=False, at_exhaustion="drop"
    )
    plain = replace(marked_spec("text", 2, on_error=POLICY, at_exhaustion="drop"), recipe=None)
    batch = BatchRule(
        8,
        row_tokens,
        packing=rng.choice(["best_fit", "best_fit_even", "varlen"]),
        long=rng.choice(["split", "truncate", "skip"]),
        documents="separate",
        row_segments_max=rng.choice([4, 16]),
        segment_multiple=rng.choice([1, 1, 8]),
    )
    if batch.is_varlen:
        tokens = row_tokens * rng.randint(2, 9)
        batch = replace(batch, rows=varlen_rows(tokens, row_tokens), step_tokens=tokens)
    job = make_job(
        [pairs, rollouts, plain],
        batch,
        [0.4, 0.3, 0.3],
        rng.choice(["tokens", "samples", "trained"]),
        media=tuple(map(image_rule, units_max, ("image", "audio"))),
        **ends,
    )
    corpora: Corpora = [
        grouped_corpus(pairs, rng, row_tokens, units_max, bad_ratio=0.1),
        grouped_corpus(rollouts, rng, row_tokens, bad_ratio=0.05),
        random_marked_corpus(plain, rng.random(), row_tokens, (), plain_ratio=1.0),
    ]
    return job, corpora


def feed_of(job: ResolvedJob, corpora: Corpora, rng: random.Random, state=None, dp=None) -> Feed:
    return Feed(
        start(job, {"dp": dp or rng.choice([1, 2, 4, 8])}, state),
        [one.corpus for one in corpora],
        rng.choice([1, 2, 3]),
        chunk_records_max=rng.choice([1, 3, 50]),
        seed=rng.random(),
        repeat_ratio=0.1,
    )


def planned(feed: Feed, count: int) -> list[StepPlan]:
    plans = []
    try:
        while len(plans) < count and not isinstance(outcome := feed.step(), Ended):
            plans.append(outcome)
    except DataError as error:
        assert "no valid label" in error.message
    return plans


def check_caps(plan: StepPlan, rule: BatchRule) -> None:
    sizes = -(-plan.length // rule.segment_multiple) * rule.segment_multiple
    assert int(np.bincount(plan.row, sizes).max()) <= rule.row_tokens
    assert int(np.bincount(plan.row).max()) <= rule.row_segments_max


@given(seeds)
@settings(deadline=None, max_examples=80)
def test_an_epoch_delivers_every_group_that_fits_a_row_whole_and_once(seed: int) -> None:
    rng = random.Random(seed)
    job, corpora = random_job(rng, epochs=1, end="pad")
    units_max = tuple(rule.row_units_max for rule in job.media)
    feed = feed_of(job, corpora, rng)
    plans = planned(feed, 10_000)
    assert isinstance(feed.step(), Ended)
    state = feed.step().state or feed.planner.state()
    found = Counter(
        (source, key, group)
        for plan in plans
        for source, key, group in check_whole_groups(plan, corpora, job)
    )
    for plan in plans:
        check_caps(plan, job.batch)
    for source, corpus in enumerate(corpora[:2]):
        assert isinstance(corpus, GroupedCorpus)
        wanted, lost_samples, lost_tokens = Counter(), 0, 0
        for key, part, block in corpus.corpus.keys(0, 0, 1):
            for group in corpus.groups.get((part, block), ()):
                units = group.units or (0,) * len(units_max)
                if group._replace(units=units).fits(job.batch, units_max):
                    wanted[source, key, group] += 1
                else:
                    lost_samples += len(group.samples)
                    lost_tokens += sum(tokens for *_, tokens in group.samples)
        mine = Counter({one: count for one, count in found.items() if one[0] == source})
        dropped = state.dropped[:, source]
        if feed.step().state is None:  # else what has no label was dropped at the end
            assert mine == wanted
            assert dropped[DROPPED_TOKENS] == lost_tokens
        assert dropped[LONG] == lost_samples
        total = sum(sum(lengths) for part in corpus.corpus.parts for lengths, _ in part)
        assert total == state.progress[DRAWN_TOKENS, source] + dropped[DROPPED_TOKENS]
        assert state.progress[DRAWN_TOKENS, source] == state.progress[DELIVERED_TOKENS, source]


@given(seeds)
@settings(deadline=None, max_examples=60)
def test_no_step_and_no_restore_tears_a_group(seed: int) -> None:
    rng = random.Random(seed)
    ends = rng.choice([{}, {"epochs": 2}, {"tokens": 6_000}, {"steps": 13}])
    job, corpora = random_job(rng, **ends, end=rng.choice(["pad", "drop", "wrap"]))
    if rng.random() < 0.4:
        ramp = (RampPoint(rng.randint(1, 9), job.batch.row_tokens + 16),)
        job = replace(job, batch=replace(job.batch, row_tokens_ramp=ramp))
    expected = planned(feed_of(job, corpora, rng, dp=1), 20)
    for plan in expected:
        check_whole_groups(plan, corpora, job)
    state, got = initial_state(job), []
    while len(got) < len(expected):
        feed = feed_of(job, corpora, rng, state)
        plans = planned(feed, min(rng.randint(1, 6), len(expected) - len(got)))
        assert plans, "the stream ended early"
        for plan in plans:
            header, frames = plan.encode()
            again = StepPlan.decode(header, frames)
            assert np.array_equal(again.group_begins, plan.group_begins)
            check_whole_groups(plan, corpora, job)
            state = state.apply(again.delta)
        assert state.encode() == feed.planner.state().encode()
        state = StreamState.decode(state.encode())
        got += plans
    assert [plan.stream_digest for plan in got] == [plan.stream_digest for plan in expected]


@given(seeds)
@settings(deadline=None, max_examples=30)
def test_shares_stay_within_the_largest_groups(seed: int) -> None:
    rng = random.Random(seed)
    job, corpora = random_job(rng)
    job = replace(
        job,
        mixture=replace(job.mixture, unit="tokens"),
        sources=tuple(replace(source, at_exhaustion="repeat") for source in job.sources),
    )
    plans = planned(feed_of(job, corpora, rng), 15)
    drawn = np.cumsum([plan.drawn_tokens for plan in plans], axis=0)
    wanted = drawn.sum(axis=1, keepdims=True) * np.array([0.4, 0.3, 0.3])
    assert np.abs(drawn - wanted).max() <= 2 * job.batch.row_tokens
