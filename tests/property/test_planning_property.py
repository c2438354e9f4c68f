"""What a step holds depends on the job and its events alone; states and deltas are exact."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.cost import CostSpec
from federation.model.job import BatchRule, ErrorPolicy, MixturePoint
from federation.model.plan import StepPlan
from federation.planning.fragments import (
    CUMULATIVE,
    FRAGMENT_COLUMNS,
    INDEX,
    LENGTH,
    OFFSET,
    SOURCE,
)
from federation.planning.mix import MixDraw
from federation.planning.share_tree import NO_SOURCE, ShareTree
from federation.planning.step_pool import Need
from msd_client.contract.state import StreamState
from tests.support.metadata import (
    Feed,
    initial_state,
    make_job,
    make_spec,
    random_corpus,
    start,
)

seeds = st.integers(0, 2**32 - 1)


# --- the draw rule


class KnownQueue:
    """Stands in for a FragmentQueue: the first `count` fragments are known."""

    def __init__(self, source, lengths, offsets, *, is_sample_unit):
        self.all = np.zeros((FRAGMENT_COLUMNS, len(lengths)), np.int64)
        self.all[SOURCE] = source
        self.all[INDEX] = np.cumsum(np.array(offsets) == 0) - 1
        self.all[OFFSET] = offsets
        self.all[LENGTH] = lengths
        weights = self.all[OFFSET] == 0 if is_sample_unit else self.all[LENGTH]
        self.all[CUMULATIVE] = np.cumsum(weights)
        self.base = 0
        self.is_resuming = False
        self.known = len(lengths)

    def learn(self, count):
        """Know so many more fragments, and the rest of the last one's document."""
        offsets = self.all[OFFSET]
        self.known = min(self.known + count, len(offsets))
        while 0 < self.known < len(offsets) and offsets[self.known]:
            self.known += 1

    @property
    def columns(self):
        return self.all[:, : self.known]


def random_queues(rng, count, high, *, is_sample_unit):
    queues = []
    for source in range(count):
        lengths, offsets = [], []
        for _ in range(rng.randint(300, 600)):
            parts = 1 if rng.random() < 0.9 else rng.randint(1, 4)
            offsets += [part * high for part in range(parts)]
            lengths += [high] * (parts - 1) + [rng.randint(1, high)]
        queues.append(KnownQueue(source, lengths, offsets, is_sample_unit=is_sample_unit))
    return queues


def random_shares(rng, count):
    power = rng.choice([0, 1, 3, 6])
    weights = [rng.random() ** power + 1e-5 for _ in range(count)]
    return np.array([round(weight / sum(weights) * 2**40) for weight in weights], np.int64)


def drift(drawn, shares, *, is_sample_unit):
    """Return how far shares are off at the worst prefix, in units of the largest fragment."""
    amounts = (drawn[OFFSET] == 0).astype(np.int64) if is_sample_unit else drawn[LENGTH]
    each = np.zeros((len(shares), drawn.shape[1]))
    each[drawn[SOURCE], np.arange(drawn.shape[1])] = amounts
    through = each.cumsum(axis=1)
    wanted = (shares / shares.sum())[:, None] * through.sum(axis=0)
    return np.abs(through - wanted).max() / max(1, amounts.max())


@given(seeds, st.integers(1, 40), st.sampled_from([1, 7, 400]), st.booleans())
@settings(deadline=None, max_examples=60)
def test_shares_are_within_two_fragments_at_every_prefix(seed, count, high, is_sample_unit):
    rng = random.Random(seed)
    queues = random_queues(rng, count, high, is_sample_unit=is_sample_unit)
    shares = random_shares(rng, count)
    draw = MixDraw(queues, high, unit="samples" if is_sample_unit else "tokens")
    draw.set_shares(shares)
    drawn, _ = draw.draw(Need(rng.randint(1, 100 * count * high), 1 << 30), rng.randint(1, 10_000))
    if drawn.shape[1]:
        assert drift(drawn, shares, is_sample_unit=is_sample_unit) <= 2


@given(seeds, st.integers(1, 12), st.booleans())
@settings(deadline=None, max_examples=60)
def test_the_order_depends_on_neither_steps_horizon_nor_what_is_known(seed, count, is_sample_unit):
    rng = random.Random(seed)
    high = rng.choice([5, 100])
    queues = random_queues(rng, count, high, is_sample_unit=is_sample_unit)
    shares = random_shares(rng, count)
    whole = MixDraw(queues, high, unit="samples" if is_sample_unit else "tokens")
    whole.set_shares(shares)
    expected, _ = whole.draw(Need(20_000, 1 << 30), 1 << 20)

    for queue in queues:
        queue.known = 0
        queue.learn(rng.randint(0, 10))
    piecewise = MixDraw(queues, high, unit="samples" if is_sample_unit else "tokens")
    piecewise.set_shares(shares)
    parts, total = [], 0
    while total < expected.shape[1]:
        part, blocked = piecewise.draw(
            Need(rng.randint(1, 900), rng.randint(1, 40)), rng.randint(1, 999)
        )
        parts.append(part)
        total += part.shape[1]
        if blocked != NO_SOURCE:
            if queues[blocked].known == queues[blocked].all.shape[1]:
                break
            queues[blocked].learn(rng.randint(1, 20))
    got = np.concatenate(parts, axis=1)
    shared = min(got.shape[1], expected.shape[1])
    assert np.array_equal(got[:, :shared], expected[:, :shared])


@given(seeds, st.integers(2, 20))
@settings(deadline=None, max_examples=40)
def test_a_change_of_shares_starts_afresh_but_for_a_fragment(seed, count):
    rng = random.Random(seed)
    queues = random_queues(rng, count, 100, is_sample_unit=False)
    draw = MixDraw(queues, 100, unit="tokens")
    draw.set_shares(random_shares(rng, count))
    draw.draw(Need(rng.randint(1, 8000), 1 << 30), 4000)
    shares = random_shares(rng, count)
    draw.set_shares(shares)
    drawn, _ = draw.draw(Need(4000, 1 << 30), 4000)
    if drawn.shape[1]:
        assert drift(drawn, shares, is_sample_unit=False) * max(1, drawn[LENGTH].max()) <= 400


@given(seeds, st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_what_a_source_is_ahead_survives_a_rebuilt_tree(seed, count):
    rng = random.Random(seed)
    tree = ShareTree(random_shares(rng, count), 100)
    amounts = np.array([rng.randint(0, 300) for _ in range(count)])
    times = tree.advance(np.zeros(tree.branch_count, np.int64), amounts)
    ahead = tree.residuals(times)
    shares = tree.shares / tree.shares.sum()
    exact = amounts - shares * amounts.sum()
    assert np.abs(np.array(ahead) / 2**16 - exact).max() < 0.1
    again = tree.residuals(tree.times_of(ahead))
    assert np.abs(np.array(again) - np.array(ahead)).max() < 2**13


# --- the stream


def length(rng):
    return rng.choice([rng.randint(1, 30), rng.randint(20, 100), rng.randint(100, 400)])


def random_job(rng):
    policy = ErrorPolicy("skip", 1.0)
    specs = [
        make_spec("web", rng.randint(1, 5), on_error=policy),
        make_spec("code", rng.randint(1, 6), "streaming", on_error=policy),
        make_spec("math", 1, rng.choice(["seekable", "streaming"])),
    ]
    batch = BatchRule(
        8,
        128,
        packing=rng.choice(["best_fit", "best_fit_even", "concat", "padded"]),
        long=rng.choice(["split", "truncate", "skip"]),
        documents=rng.choice(["separate", "joined"]),
        row_segments_max=rng.choice([4, 64]),
    )
    if batch.packing != "concat":
        batch = replace(batch, segment_multiple=rng.choice([1, 1, 8, 16]))
    change = rng.randint(1, 25)
    points = (
        MixturePoint(0, {"web": 0.5, "code": 0.3, "math": 0.2}),
        MixturePoint(change, {"web": rng.random(), "code": 1, "math": rng.choice([0, 0.4])}),
    )
    ends = rng.choice([{}, {"epochs": rng.randint(1, 3)}, {"tokens": 20_000}, {"steps": 23}])
    ends["end"] = rng.choice(["pad", "drop", "wrap"])
    job = make_job(
        specs,
        batch,
        unit=rng.choice(["tokens", "samples"]),
        points=points,
        cost=CostSpec("transformer", 1, 1),
        balance_objective=rng.choice(["step", "microbatch"]),
        **ends,
    )
    ratios = (0.1, 0.03, 0.0)
    corpora = [
        random_corpus(spec, rng.random(), length, bad_ratio=ratio)
        for spec, ratio in zip(specs, ratios, strict=True)
    ]
    return job, corpora


def check_step(plan: StepPlan, rule: BatchRule, *, is_last: bool) -> None:
    order = np.lexsort((plan.column, plan.row))
    assert (order == np.arange(len(order))).all()
    assert int((plan.column + plan.length).max()) <= rule.row_tokens
    assert int(np.bincount(plan.row).max()) <= rule.row_segments_max
    assert plan.valid_tokens == plan.row_valid_tokens.sum() == plan.source_valid_tokens.sum() > 0
    if not is_last:
        assert set(plan.row.tolist()) == set(range(rule.rows))


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_one_stream_whatever_the_mesh_loaders_chunks_and_arrival(seed):
    rng = random.Random(seed)
    job, corpora = random_job(rng)
    reference = Feed(start(job), corpora, seed=1).steps(30)
    for loaders, mesh in ((1, {"dp": 8}), (2, {"tp": 2, "dp": 2}), (4, {"dp": 4})):
        feed = Feed(
            start(job, mesh),
            corpora,
            loaders,
            chunk_records_max=rng.randint(1, 60),
            seed=rng.random(),
            repeat_ratio=0.2,
        )
        plans = feed.steps(30)
        assert [plan.stream_digest for plan in plans] == [plan.stream_digest for plan in reference]
        for number, plan in enumerate(plans):
            cells = (plan.row_dp * plan.microbatch_count + plan.row_microbatch).tolist()
            assert sorted(cells) == list(range(8))
            check_step(plan, job.batch, is_last=number >= len(plans) - 2)


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_restores_at_any_step_continue_the_stream(seed):
    rng = random.Random(seed)
    job, corpora = random_job(rng)
    oracle = Feed(start(job), corpora)
    expected = oracle.steps(30)
    state = initial_state(job)
    got = []
    while len(got) < len(expected):
        feed = Feed(
            start(job, {"dp": rng.choice([1, 2, 4, 8])}, state),
            corpora,
            rng.choice([1, 2, 3]),
            chunk_records_max=rng.randint(1, 50),
            seed=rng.random(),
        )
        plans = feed.steps(min(rng.randint(0, 9), len(expected) - len(got)))
        for plan in plans:
            header, frames = plan.encode()
            state = state.apply(StepPlan.decode(header, frames).delta)
        assert state.encode() == feed.planner.state().encode()
        state = StreamState.decode(state.encode())
        got += plans
    assert [plan.stream_digest for plan in got] == [plan.stream_digest for plan in expected]
    whole = initial_state(job)
    for plan in expected:
        whole = whole.apply(plan.delta)
    assert state.encode() == whole.encode()


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_every_sample_is_delivered_once_dropped_or_held(seed):
    rng = random.Random(seed)
    job, corpora = random_job(rng)
    feed = Feed(start(job), corpora, loaders=2)
    plans = feed.steps(30)
    statistics = feed.planner.statistics()
    drawn = sum(statistics.drawn_tokens)
    assert drawn == sum(statistics.delivered_tokens) + statistics.carried_tokens
    spans: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for plan in plans:
        columns = (plan.source, plan.block_key, plan.index, plan.offset, plan.length)
        for *record, offset, size in zip(*(column.tolist() for column in columns), strict=True):
            spans.setdefault(tuple(record), []).append((offset, size))
    for *record, offset, size in feed.planner.carried():
        spans.setdefault(tuple(record), []).append((offset, size))
    for pieces in spans.values():
        ends = [0, *(offset + size for offset, size in sorted(pieces))]
        assert [offset for offset, _ in sorted(pieces)] == ends[:-1]


@given(seeds)
@settings(deadline=None, max_examples=20)
def test_no_part_of_a_document_is_served_before_an_earlier_part(seed):
    rng = random.Random(seed)
    job, corpora = random_job(rng)
    served: dict[tuple[int, int, int], int] = {}
    for plan in Feed(start(job), corpora).steps(25):
        columns = (plan.source, plan.block_key, plan.index, plan.offset, plan.length)
        parts = sorted(zip(*(column.tolist() for column in columns), strict=True))
        for *record, offset, size in parts:
            assert served.get(tuple(record), 0) == offset
            served[tuple(record)] = offset + size


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_realised_shares_stay_close_over_a_run(packing):
    rng = random.Random(5)
    specs = [make_spec(name, 2) for name in "abcdef"]
    weights = [0.4, 0.25, 0.15, 0.1, 0.07, 0.03]
    job = make_job(specs, BatchRule(64, 512, packing=packing), weights)
    corpora = [random_corpus(spec, seed, length) for seed, spec in enumerate(specs)]
    plans = Feed(start(job), corpora, seed=rng.random()).steps(60)
    drawn = sum(plan.drawn_tokens for plan in plans)
    assert np.abs(drawn / drawn.sum() - weights).max() < 0.001
