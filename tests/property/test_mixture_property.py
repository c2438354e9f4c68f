"""Mixtures by trained tokens, groups, caps: shares at every prefix, whatever arrives when."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.job import BatchRule
from federation.model.mixture import remaining_shares
from federation.planning.cuts import CUMULATIVE, FRAGMENT_COLUMNS, INDEX, LENGTH, SOURCE
from federation.planning.extra_rows import ExtraRows
from federation.planning.mix import MixDraw
from federation.planning.share_tree import NO_SOURCE
from federation.planning.step_pool import Need
from msd_client.contract.errors import ConfigError
from msd_client.contract.state import IS_EXHAUSTED, StreamState
from tests.support.marked import TEXT, Atom, length_of, marked_spec, marks_of_record
from tests.support.metadata import (
    Feed,
    SourceCorpus,
    make_job,
    make_spec,
    random_corpus,
    start,
)

seeds = st.integers(0, 2**32 - 1)
MASKED = ExtraRows(has_trained=True)
HIGH = 50


class TrainedQueue:
    """Stands in for a FragmentQueue whose fragments are trained in part, many not at all."""

    is_resuming = False
    base = 0

    def __init__(self, source: int, rng: random.Random) -> None:
        count = rng.randint(200, 400)
        self.all = np.zeros((FRAGMENT_COLUMNS + 1, count), np.int64)
        self.all[SOURCE] = source
        self.all[INDEX] = np.arange(count)
        self.all[LENGTH] = [rng.randint(1, HIGH) for _ in range(count)]
        empty_ratio = rng.choice([0, 0.3, 0.8])
        trained = [
            0 if rng.random() < empty_ratio else rng.randint(0, length)
            for length in self.all[LENGTH].tolist()
        ]
        self.all[-1] = 2 * np.array(trained)
        self.all[CUMULATIVE] = np.cumsum(trained)
        self.known = count

    @property
    def columns(self):
        return self.all[:, : self.known]


def trained_draw(queues, shares):
    draw = MixDraw(queues, HIGH, unit="trained", extras=MASKED)
    draw.set_shares(shares)
    return draw


def random_shares(rng, count):
    weights = [rng.random() ** rng.choice([0, 1, 3]) + 1e-4 for _ in range(count)]
    return np.array([round(weight / sum(weights) * 2**40) for weight in weights], np.int64)


@given(seeds, st.integers(1, 20))
@settings(deadline=None, max_examples=60)
def test_shares_of_trained_tokens_are_within_two_fragments_at_every_prefix(seed, count):
    rng = random.Random(seed)
    shares = random_shares(rng, count)
    draw = trained_draw([TrainedQueue(source, rng) for source in range(count)], shares)
    drawn, _ = draw.draw(Need(rng.randint(1, 3000 * count), 1 << 30), rng.randint(1, 5000))
    trained = np.zeros((count, drawn.shape[1]))
    trained[drawn[SOURCE], np.arange(drawn.shape[1])] = drawn[-1] // 2
    through = trained.cumsum(axis=1)
    off = np.abs(through - (shares / shares.sum())[:, None] * through.sum(axis=0))
    assert off.max(initial=0) <= 2 * HIGH


@given(seeds, st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_the_order_by_trained_tokens_depends_on_nothing_but_content(seed, count):
    rng = random.Random(seed)
    queues = [TrainedQueue(source, rng) for source in range(count)]
    shares = random_shares(rng, count)
    expected, blocked = trained_draw(queues, shares).draw(Need(1 << 40, 1 << 30), 1 << 30)
    # Nothing known is held back: a source that hinders the draw was drawn to its last fragment.
    assert np.count_nonzero(expected[SOURCE] == blocked) == queues[blocked].known
    for queue in queues:
        queue.known = rng.randint(0, 5)
    draw = trained_draw(queues, shares)
    parts = []
    while True:
        part, blocked = draw.draw(
            Need(rng.randint(1, 500), rng.randint(1, 30)), rng.randint(1, 999)
        )
        parts.append(part)
        if blocked == NO_SOURCE:
            if rng.random() < 0.1:  # a draw that goes on from a point is a restored one
                draw.go_to(draw.point)
            continue
        if queues[blocked].known == queues[blocked].all.shape[1]:
            break
        queues[blocked].known += min(
            rng.randint(1, 20), queues[blocked].all.shape[1] - queues[blocked].known
        )
    assert np.array_equal(np.concatenate(parts, axis=1), expected)


def chat_job(rng, unit, weights=None):
    """Return a job of two chats, one of long questions, and a source without masks."""
    specs = [marked_spec("long_questions"), marked_spec("answers"), make_spec("web")]
    corpora = []
    for number, spec in enumerate(specs[:2]):
        records = [
            [
                [
                    Atom(TEXT, rng.randint(1, 60 if number == 0 else 4), is_trained=False),
                    Atom(TEXT, rng.randint(1, 8)),
                ]
            ]
            for _ in range(60)
        ]
        corpus = SourceCorpus(spec, [[([length_of(r) for r in records], [0] * len(records))]])
        corpus.marks[0, 0] = [marks_of_record(record) for record in records]
        corpora.append(corpus)
    corpora.append(random_corpus(specs[2], rng.randint(0, 999), lambda r: r.randint(1, 40)))
    return make_job(specs, BatchRule(4, 32), weights, unit), corpora


@given(seeds)
@settings(deadline=None, max_examples=25)
def test_a_stream_by_trained_tokens_goes_on_alike_from_any_state(seed):
    rng = random.Random(seed)
    job, corpora = chat_job(rng, "trained")
    feed = Feed(start(job), corpora, seed=seed)
    plans, states = [], []
    for _ in range(12):
        states.append(feed.planner.state().encode())
        plans.append(feed.step())
    at = rng.randrange(12)
    other = Feed(
        start(job, {"dp": 2}, StreamState.decode(states[at])), corpora, chunk_records_max=3, seed=1
    )
    again = [plan.stream_digest for plan in other.steps(12 - at)]
    assert again == [plan.stream_digest for plan in plans[at:]]


def test_shares_of_trained_tokens_are_met_where_questions_are_long():
    job, corpora = chat_job(random.Random(3), "trained")
    feed = Feed(start(job), corpora)
    plans = feed.steps(200)
    assert plans[0].unit == "trained"
    # Labels: of a chat's segment its trained tokens but a first one, of web all but the first.
    valid = np.sum([plan.source_valid_tokens for plan in plans], axis=0)[:2]
    assert valid[0] / valid.sum() == pytest.approx(0.5, abs=0.04)
    by_tokens = Feed(start(chat_job(random.Random(3), "tokens")[0]), corpora).steps(200)
    valid = np.sum([plan.source_valid_tokens for plan in by_tokens], axis=0)[:2]
    assert valid[0] / valid.sum() < 0.3


@given(seeds)
@settings(deadline=None, max_examples=20)
def test_without_masks_trained_tokens_are_tokens(seed):
    rng = random.Random(seed)
    specs = [make_spec("a"), make_spec("b")]
    corpora = [random_corpus(spec, seed, lambda r: r.randint(1, 60)) for spec in specs]
    weights = [rng.random() + 0.01, 1.0]
    digests = [
        [
            plan.stream_digest
            for plan in Feed(
                start(make_job(specs, BatchRule(4, 32), weights, unit)), corpora, seed=seed
            ).steps(8)
        ]
        for unit in ("tokens", "trained")
    ]
    assert digests[0] == digests[1]


def test_a_source_that_is_not_trained_has_no_share_of_trained_tokens():
    job, _ = chat_job(random.Random(0), "trained")
    untrained = (replace(job.sources[0], loss_weight=0.0), *job.sources[1:])
    with pytest.raises(ConfigError, match=r"long_questions: weight 1.0 .* write weight 0"):
        start(replace(job, sources=untrained))
    assert start(replace(job, sources=untrained, mixture=replace(job.mixture, unit="tokens")))


@given(seeds, st.integers(2, 12))
@settings(deadline=None, max_examples=80)
def test_groups_keep_their_weight_while_a_source_of_them_is_left(seed, count):
    rng = random.Random(seed)
    names = ["x", "y"]
    paths = [tuple(rng.choice(names) for _ in range(rng.randint(0, 3))) for _ in range(count)]
    shares = random_shares(rng, count)
    shares[rng.randrange(count)] = 0
    gone = np.array([rng.random() < 0.4 for _ in range(count)])
    left = remaining_shares(shares, gone, paths)
    assert (left[gone | (shares == 0)] == 0).all()
    assert (left[~gone & (shares > 0)] > 0).all()
    if not left.any():
        return
    is_whole = all(
        (left[[path[:1] == (name,) for path in paths]] > 0).any()
        or not shares[[path[:1] == (name,) for path in paths]].any()
        for name in names
    )
    tops = [source for source in range(count) if not paths[source] and shares[source]]
    if is_whole and not any(gone[source] for source in tops):
        for name in names:
            inside = [path[:1] == (name,) for path in paths]
            expected = shares[inside].sum() / shares.sum()
            assert left[inside].sum() / left.sum() == pytest.approx(expected, abs=1e-9)


@given(seeds, st.integers(1, 3), st.sampled_from([0.0, 1e-6, 0.001, 0.3, 5.0]))
@settings(deadline=None, max_examples=40)
def test_a_cap_on_repetition_is_exact(seed, most, weight):
    """BUGS.md H05: what a source's last epoch holds is drawn to its end and no record more."""
    rng = random.Random(seed)
    specs = [
        make_spec("capped", at_exhaustion="drop", max_epochs=most),
        make_spec("other", at_exhaustion="drop", max_epochs=rng.randint(1, 3)),
        make_spec("endless"),
    ]
    corpora = [
        random_corpus(spec, seed + n, lambda r: r.randint(2, 30)) for n, spec in enumerate(specs)
    ]
    job = make_job(specs, BatchRule(4, 32), [weight, 1.0, 0.5])
    feed = Feed(start(job), corpora, seed=seed)
    counts: list[Counter] = [Counter(), Counter(), Counter()]
    epochs: list[set] = [set(), set(), set()]
    for plan in feed.steps(120):
        for source, key, index, offset in zip(
            plan.source.tolist(),
            plan.block_key.tolist(),
            plan.index.tolist(),
            plan.offset.tolist(),
            strict=True,
        ):
            counts[source][key & (1 << 48) - 1, index, offset] += 1
            epochs[source].add(key >> 48)
    state = feed.planner.state()
    carried = Counter(state.carried[0].tolist())
    for source, spec in enumerate(specs[:2]):
        assert max(epochs[source], default=0) < spec.max_epochs
        assert max(counts[source].values(), default=0) <= spec.max_epochs
        if state.progress[IS_EXHAUSTED, source] and not carried[source]:
            assert set(counts[source].values()) == {spec.max_epochs}
    assert weight < 5.0 or state.progress[IS_EXHAUSTED, 0]
    if weight == 0.0:
        assert not counts[0]
        assert not state.progress[:, 0].any()
