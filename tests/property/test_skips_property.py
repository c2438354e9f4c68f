"""Skips cut content out and change nothing else: against a planner of the same job without any."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.job import BatchRule, ErrorPolicy, ResolvedJob
from federation.model.plan import StepPlan
from msd_client.contract.state import (
    DELIVERED_TOKENS,
    DRAWN_TOKENS,
    DROPPED_TOKENS,
    SKIPPED_TOKENS,
    StreamState,
)
from tests.support.metadata import Feed, SourceCorpus, make_job, make_spec, random_corpus, start

CONTENT = 40


def make_stream(rng: random.Random) -> tuple[ResolvedJob, list[SourceCorpus]]:
    skip = ErrorPolicy("skip", 1.0)
    specs = [
        make_spec("plain", rng.randint(1, 6), on_error=skip),
        make_spec("lanes", rng.randint(2, 5), "streaming", interleave=2, on_error=skip),
    ]
    corpora = [
        random_corpus(spec, rng.randrange(1 << 30), lambda r: r.randint(1, 90), 3, 12, 0.1)
        for spec in specs
    ]
    packing = rng.choice(["best_fit", "concat", "padded"])
    return make_job(specs, BatchRule(4, 24, packing=packing)), corpora


def content(plan: StepPlan) -> tuple[bytes, ...]:
    return tuple(
        column.tobytes()
        for column in (plan.source, plan.block_key, plan.index, plan.offset, plan.length, plan.row)
    )


def cuts_of(rng: random.Random) -> list[tuple[int, int]]:
    cuts = []
    for _ in range(rng.randint(1, 3)):
        first = rng.randrange(CONTENT - 10)
        cuts.append((first, first + rng.randint(1, 6)))
    return cuts


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_a_skip_cuts_its_steps_out_and_no_others(seed: int) -> None:
    rng = random.Random(seed)
    job, corpora = make_stream(rng)
    whole = Feed(start(job), corpora, seed=seed).steps(CONTENT)
    cuts = cuts_of(rng)
    left_out = {step for first, end in cuts for step in range(first, end)}
    wanted = [plan for plan in whole if plan.plan_step not in left_out]
    planner = start(job)
    for first, end in cuts:
        planner.skip_steps(first, end)
    feed = Feed(planner, corpora, seed=seed + 1)
    state = start(job).state()
    for step, plan in enumerate(wanted):
        found = feed.step()
        assert isinstance(found, StepPlan)
        assert (found.step, found.plan_step) == (step, plan.plan_step)
        assert content(found) == content(plan)
        state = state.apply(found.delta)  # one difference a served step, whatever was left out
        assert state.encode() == planner.state().encode()
        if rng.random() < 0.2:  # anyone may go on from it, elsewhere
            planner = start(job, state=StreamState.decode(state.encode()))
            feed = Feed(planner, corpora, 2, seed=seed + 2 + step)
    thrown = sum(plan.placed_tokens for plan in whole if plan.plan_step in left_out)
    assert state.dropped[SKIPPED_TOKENS].tolist() == list(thrown)
    assert state.skipped_steps == len(left_out)
    assert not len(state.pending_skips)


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_tokens_in_are_delivered_dropped_or_held(seed: int) -> None:
    rng = random.Random(seed)
    job, corpora = make_stream(rng)
    planner, plain = start(job), start(job)
    cuts = cuts_of(rng)
    for first, end in cuts:
        planner.skip_steps(first, end)
    feed = Feed(planner, corpora, seed=seed)
    plans = feed.steps(CONTENT - len({s for first, end in cuts for s in range(first, end)}))
    state = planner.state()
    others = Feed(plain, corpora, seed=seed)
    others.steps(state.plan_step)
    wanted = plain.state()
    held = state.carried[4].sum()
    assert state.progress[DRAWN_TOKENS].sum() == state.progress[DELIVERED_TOKENS].sum() + held
    assert state.progress[DELIVERED_TOKENS].tolist() == sum(p.placed_tokens for p in plans).tolist()
    moved = state.dropped[DROPPED_TOKENS] - wanted.dropped[DROPPED_TOKENS]
    assert (state.progress[DRAWN_TOKENS] + moved).tolist() == wanted.progress[DRAWN_TOKENS].tolist()
    assert moved.tolist() == state.dropped[SKIPPED_TOKENS].tolist()
    assert state.carried.tolist() == wanted.carried.tolist()


@given(st.integers(0, 2**32 - 1), st.sampled_from(["steps", "tokens"]))
@settings(deadline=None, max_examples=30)
def test_ends_count_steps_of_the_trainer_and_tokens_of_the_content(seed: int, end: str) -> None:
    rng = random.Random(seed)
    job, corpora = make_stream(rng)
    whole = Feed(start(job), corpora, seed=seed).steps(30)
    first = rng.randrange(8)
    limited = replace(job, steps=12)
    if end == "tokens":
        limited = replace(job, tokens=int(sum(plan.placed_tokens.sum() for plan in whole[:12])))
        whole = Feed(start(limited), corpora, seed=seed).steps(30)  # cut short at the same token
    planner = start(limited)
    planner.skip_steps(first, first + 3)
    feed = Feed(planner, corpora, seed=seed)
    found = feed.steps(30)
    last = 15 if end == "steps" else len(whole)
    wanted = [plan for plan in whole[:last] if not first <= plan.plan_step < first + 3]
    assert [content(plan) for plan in found] == [content(plan) for plan in wanted]
