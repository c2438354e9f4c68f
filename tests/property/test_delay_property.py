"""Long documents that wait: membership is still a function of the job, and the pool stays small."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.job import BatchRule
from federation.model.place_tree import ClientPlaceTree
from federation.planning.delay import HELD_DIVISOR
from federation.planning.packing import CARRIED_STEPS_MAX
from federation.planning.planner import Ended, StepPlanner
from msd_client.contract.errors import ConfigError, UsageError
from msd_client.contract.state import DRAWN_TOKENS, StreamState
from tests.support.marked import marked_spec
from tests.support.metadata import Feed, initial_state, make_job, make_spec, random_corpus, start

seeds = st.integers(0, 2**32 - 1)
ROW_TOKENS = 64


def strategy_of(over_tokens, steps):
    def strategy(graph, step):
        graph = graph.delay(over_tokens, steps).mix(graph.schedule).distribute("dp")
        return graph.cost(graph.cost_model).balance("greedy", "step")

    return strategy


def case_of(seed):
    """Return a job of mostly short documents, its corpora, a strategy, and the steps of a window."""
    rng = random.Random(seed)
    long_ratio = rng.choice([0.01, 0.05, 0.3])

    def length(r):
        return r.randint(33, 150) if r.random() < long_ratio else r.randint(1, 32)

    specs = [make_spec("a"), make_spec("b", shards=3)]
    corpora = [random_corpus(spec, seed + n, length) for n, spec in enumerate(specs)]
    ends = rng.choice([{}, {"epochs": 2}, {"tokens": 9_000}, {"epochs": 2, "end": "drop"}])
    batch = BatchRule(8, ROW_TOKENS, segment_multiple=rng.choice([1, 4]))
    steps = rng.choice([1, 2, 5, 8])
    job = make_job(specs, batch, [rng.random() + 0.1, 1.0], **ends)
    return job, corpora, strategy_of(rng.choice([20, 32, 48]), steps), steps


def feed_of(case, *, dp=1, state=None, **options):
    job, corpora, strategy, _ = case
    tree = ClientPlaceTree.from_mesh({"dp": dp})
    return Feed(StepPlanner(job, tree, state or initial_state(job), strategy), corpora, **options)


@given(seeds)
@settings(deadline=None, max_examples=40)
def test_what_a_step_holds_depends_on_the_job_alone(seed):
    case = case_of(seed)
    feed = feed_of(case, seed=seed)
    states, plans = [], []
    for _ in range(14):
        states.append(feed.planner.state().encode())
        plan = feed.step()
        if isinstance(plan, Ended):
            break
        plans.append(plan)
    digests = [plan.stream_digest for plan in plans]
    other = feed_of(case, dp=4, loaders=2, chunk_records_max=2, seed=seed + 1, repeat_ratio=0.2)
    assert [plan.stream_digest for plan in other.steps(len(plans))] == digests
    at = random.Random(seed).randrange(len(states))
    again = feed_of(case, dp=2, state=StreamState.decode(states[at]), chunk_records_max=5)
    assert [plan.stream_digest for plan in again.steps(len(plans) - at)] == digests[at:]


@given(seeds)
@settings(deadline=None, max_examples=40)
def test_every_token_comes_once_and_the_pool_stays_below_a_step(seed):
    case = case_of(seed)
    job, _, _, steps = case
    feed = feed_of(case, seed=seed)
    seen: Counter = Counter()
    placed = 0
    for _ in range(40):
        plan = feed.step()
        if isinstance(plan, Ended):
            break
        columns = (plan.source, plan.block_key, plan.index, plan.offset, plan.length)
        for *place, length in zip(*(column.tolist() for column in columns), strict=True):
            seen[tuple(place)] += 1
            placed += length
        state = feed.planner.state()
        assert plan.carried_tokens < job.batch.rows * job.batch.row_tokens
        drawn = int(state.progress[DRAWN_TOKENS].sum())
        assert drawn == placed + plan.carried_tokens
        if state.carried.shape[1]:
            age = plan.step + 1 - int(state.carried[5].min())
            assert age <= CARRIED_STEPS_MAX + steps
        # Rows are as full as without a delay: what waits is drawn for by others.
        if not feed.planner.state().ending and job.tokens is None:
            assert plan.fill_ratio > 0.5
    assert max(seen.values(), default=1) == 1


def test_long_documents_come_in_every_eighth_step_alone():
    spec = make_spec("a")
    corpus = random_corpus(
        spec, 3, lambda r: r.randint(40, 60) if r.random() < 0.004 else r.randint(1, 24), 40, 400
    )
    job = make_job([spec], BatchRule(32, 64), strategy="long_context")
    plans = Feed(start(job), [corpus]).steps(64)
    with_long = [plan.step for plan in plans if (plan.length > 32).any()]
    assert set(with_long) <= set(range(0, 64, 8))
    assert len(with_long) >= 6
    plain = Feed(start(make_job([spec], BatchRule(32, 64))), [corpus]).steps(64)
    assert sum((plan.length > 32).any() for plan in plain) > 2 * len(with_long)
    held = max(plan.carried_tokens for plan in plans)
    assert 100 < held <= 32 * 64 // HELD_DIVISOR + 32 * 64 // 16


def test_more_than_a_quarter_of_a_step_does_not_wait():
    spec = make_spec("a")
    corpus = random_corpus(spec, 3, lambda r: r.randint(33, 60), 40, 400)
    job = make_job([spec], BatchRule(16, 64), strategy="long_context")
    plans = Feed(start(job), [corpus]).steps(16)
    assert all((plan.length > 32).any() for plan in plans)
    assert max(plan.carried_tokens for plan in plans) < 16 * 64


@pytest.mark.parametrize(
    ("batch", "specs", "error", "said"),
    [
        (BatchRule(4, 64, packing="concat"), None, UsageError, "packing best_fit"),
        (BatchRule(4, 64), [marked_spec("chat")], UsageError, "without masks"),
    ],
)
def test_jobs_that_it_does_not_fit(batch, specs, error, said):
    job = make_job(specs or [make_spec("a")], batch, strategy="long_context")
    with pytest.raises(error, match=said):
        start(job).plan_step()


@pytest.mark.parametrize(("over_tokens", "steps"), [(0, 8), (8, 0)])
def test_numbers_that_it_does_not_take(over_tokens, steps):
    job = make_job([make_spec("a")], BatchRule(4, 64))
    tree = ClientPlaceTree.from_mesh({"dp": 1})
    planner = StepPlanner(job, tree, initial_state(job), strategy_of(over_tokens, steps))
    with pytest.raises(ConfigError, match="write 1 or more of each"):
        planner.plan_step()


@given(seeds, st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=20)
def test_a_shuffled_deal_moves_rows_alone(seed, dp):
    spec = make_spec("a")
    corpus = random_corpus(spec, seed, lambda r: r.randint(1, 60))
    batch = BatchRule(16, 64, microbatch_rows=2)
    found = {}
    for name in ("native", "random"):
        feed = Feed(start(make_job([spec], batch, strategy=name), {"dp": dp}), [corpus])
        found[name] = feed.steps(4)
    for plain, dealt in zip(found["native"], found["random"], strict=True):
        assert plain.membership_digest == dealt.membership_digest
        cells = np.stack((dealt.row_dp, dealt.row_microbatch, dealt.row_slot))
        assert len(np.unique(cells, axis=1).T) == 16
        assert sorted(cells.T.tolist()) == sorted(
            np.stack((plain.row_dp, plain.row_microbatch, plain.row_slot)).T.tolist()
        )
    orders = {tuple(plan.row_dp * 100 + plan.row_microbatch * 10) for plan in found["random"]}
    assert len(orders) > 1
