"""Rows that change number and length keep the stream exact: while training and at a resume."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.job import BatchRule, ErrorPolicy, RampPoint
from federation.planning.planner import Ended
from msd_client.contract.state import DELIVERED_TOKENS, DRAWN_TOKENS, StreamState
from tests.support.metadata import Feed, make_job, make_spec, random_corpus, start

seeds = st.integers(0, 2**32 - 1)
STEPS = 24


def length(rng):
    return rng.choice([2, 7, 64, 65, rng.randint(1, 90), rng.randint(1, 400)])


def ramp(rng, values):
    unit, span = rng.choice([("steps", 3), ("tokens", 1500)])
    starts = sorted(rng.sample(range(1, 9 * span), rng.randint(1, 3)))
    return tuple(RampPoint(start, rng.choice(values), unit) for start in starts)


def random_batch(rng, **changes):
    rule = BatchRule(
        8,
        64,
        packing=rng.choice(["best_fit", "best_fit_even", "concat", "padded"]),
        long=rng.choice(["split", "truncate", "skip"]),
        row_segments_max=rng.choice([8, 64]),
        documents="joined",
    )
    return replace(rule, **changes)


def random_job(rng, batch, **options):
    policy = ErrorPolicy("skip", 1.0)
    specs = [
        make_spec("web", 3, on_error=policy),
        make_spec("code", 3, "streaming", on_error=policy),
        make_spec("math"),
    ]
    job = make_job(specs, batch, [0.5, 0.3, 0.2], rng.choice(["tokens", "samples"]), **options)
    corpora = [
        random_corpus(spec, rng.random(), length, bad_ratio=ratio)
        for spec, ratio in zip(specs, (0.1, 0.03, 0.0), strict=True)
    ]
    return job, corpora


def ramped_job(rng):
    ramps = rng.sample(["rows", "row_tokens", "both"], 1)[0]
    changes = {}
    if ramps != "row_tokens":
        changes["rows_ramp"] = ramp(rng, [4, 8, 12, 20])
    if ramps != "rows":
        changes["row_tokens_ramp"] = ramp(rng, [16, 32, 48, 64, 128, 200])
    ends = rng.choice([{}, {"epochs": 1}, {"epochs": 2}, {"tokens": 9_000}])
    ends["end"] = rng.choice(["pad", "drop", "wrap"])
    return random_job(rng, random_batch(rng, **changes), **ends)


def pieces_of(plans):
    """Return (record, offset, length) of every segment, in the order of steps."""
    found = []
    for plan in plans:
        columns = (plan.source, plan.block_key, plan.index, plan.offset, plan.length)
        found += zip(*(column.tolist() for column in columns), strict=True)
    return found


def check_contiguous(pieces):
    """Refuse parts of a record that overlap or leave a gap."""
    spans = {}
    for *record, offset, size in pieces:
        spans.setdefault(tuple(record), []).append((offset, size))
    for parts in spans.values():
        ends = [0, *(offset + size for offset, size in sorted(parts))]
        assert [offset for offset, _ in sorted(parts)] == ends[:-1]


@given(seeds)
@settings(deadline=None, max_examples=60)
def test_a_ramp_restored_at_every_step_goes_on_as_if_never_stopped(seed):
    rng = random.Random(seed)
    job, corpora = ramped_job(rng)
    whole = Feed(start(job), corpora, seed=1)
    expected, states = [], [whole.planner.state()]
    while len(expected) < STEPS and not isinstance(plan := whole.step(), Ended):
        expected.append(plan)
        states.append(whole.planner.state())
        check_shape(job.batch, plan, states[-2])
    for number, state in enumerate(states[:-1]):
        feed = Feed(
            start(job, {"dp": rng.choice([1, 2, 4])}, StreamState.decode(state.encode())),
            corpora,
            rng.choice([1, 2, 3]),
            chunk_records_max=rng.randint(1, 50),
            seed=rng.random(),
            repeat_ratio=0.1,
        )
        plans = feed.steps(min(rng.randint(1, 5), len(expected) - number))
        following = expected[number : number + len(plans)]
        assert [plan.stream_digest for plan in plans] == [plan.stream_digest for plan in following]
        assert feed.planner.state().encode() == states[number + len(plans)].encode()


def check_shape(batch, plan, state):
    rule = batch.at(plan.step, int(state.progress[DELIVERED_TOKENS].sum()))
    assert (plan.rows, plan.row_tokens, plan.microbatch_count) == (
        rule.rows,
        rule.row_tokens,
        rule.rows,
    )
    assert int((plan.column + plan.length).max()) <= rule.row_tokens


@given(seeds)
@settings(deadline=None, max_examples=60)
def test_every_token_of_a_ramp_is_delivered_once_dropped_or_held(seed):
    rng = random.Random(seed)
    job, corpora = ramped_job(rng)
    feed = Feed(start(job), corpora, loaders=2, seed=rng.random())
    plans = feed.steps(STEPS)
    statistics = feed.planner.statistics()
    delivered = sum(statistics.delivered_tokens)
    assert sum(statistics.drawn_tokens) == delivered + statistics.carried_tokens
    assert sum(int(plan.length.sum()) for plan in plans) == delivered
    check_contiguous([*pieces_of(plans), *map(tuple, feed.planner.carried())])


@given(seeds)
@settings(deadline=None, max_examples=60)
def test_parts_of_a_document_are_served_in_order_under_a_ramp(seed):
    rng = random.Random(seed)
    job, corpora = ramped_job(rng)
    served: dict[tuple[int, int, int], int] = {}
    for plan in Feed(start(job), corpora, seed=rng.random()).steps(STEPS):
        for *record, offset, size in sorted(pieces_of([plan])):
            assert served.get(tuple(record), 0) == offset
            served[tuple(record)] = offset + size


@given(seeds)
@settings(deadline=None, max_examples=60)
def test_another_job_s_rows_go_on_with_the_same_samples(seed):
    rng = random.Random(seed)
    long = rng.choice(["split", "split", "truncate", "skip"])
    job, corpora = random_job(rng, random_batch(rng, long=long))
    shape = {"rows": rng.choice([4, 6, 16]), "row_tokens": rng.choice([32, 48, 128, 200])}
    other = replace(job, batch=replace(job.batch, **shape))
    first = Feed(start(job), corpora, seed=rng.random())
    before = first.steps(rng.randint(1, 12))
    state = first.planner.state()
    feed = Feed(start(other, state=state), corpora, seed=rng.random())
    after = feed.steps(12)
    assert {plan.row_tokens for plan in after} == {shape["row_tokens"]}
    assert feed.planner.state().job_digest == other.digest()
    pieces = pieces_of([*before, *after])
    check_contiguous([*pieces, *map(tuple, feed.planner.carried())])
    check_drawn(feed, pieces, job, corpora)


def check_drawn(feed, pieces, job, corpora):
    """Every record up to the cursor was drawn whole, but for what the long policy drops."""
    held = [tuple(part) for part in feed.planner.carried()]
    tokens = [0] * len(job.sources)
    for source, *_, size in [*pieces, *held]:
        tokens[source] += size
    state = feed.planner.state()
    assert tokens == state.progress[DRAWN_TOKENS].tolist()
    lengths = known_lengths(corpora, int(state.epoch.max()) + 1)
    seen: dict[tuple[int, int, int], int] = {}
    for *record, _, size in [*pieces, *held]:
        seen[tuple(record)] = seen.get(tuple(record), 0) + size
    for source, (key, index) in enumerate(feed.planner.cursors()):
        for record, length in lengths[source].items():
            if record < (key, index) and job.batch.long == "split":
                assert seen.pop((source, *record), 0) == length
        got = seen.pop((source, key, index), 0)
        assert got == int(state.cursor_offset[source])
    assert job.batch.long != "split" or not seen


def known_lengths(corpora, epochs):
    """Return the length of every good record of the first epochs, by (block key, index)."""
    found = []
    for corpus in corpora:
        lengths = {}
        for epoch in range(epochs):
            for key, part, block in corpus.keys(epoch, 0, 1):
                if block >= 0:
                    block_lengths = corpus.parts[part][block][0]
                    lengths |= {(key, index): size for index, size in enumerate(block_lengths)}
        found.append(lengths)
    return found
