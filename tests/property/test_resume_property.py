"""States go on in jobs that were changed since (E15): whatever changes, no source loses its place."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.job import BatchRule, ErrorPolicy, MixturePoint, ResolvedJob
from federation.model.plan import StepPlan
from federation.planning.resume import adapt_state
from msd_client.contract.errors import StateMismatchError
from msd_client.contract.position import unpack_block_key
from msd_client.contract.state import DRAWN_TOKENS, StreamState
from tests.support.metadata import (  # fmt: skip
    FakeLoader,
    Feed,
    SourceCorpus,
    make_job,
    make_spec,
    random_corpus,
    start,
)

BATCH = BatchRule(8, 64, packing="best_fit")
Piece = tuple[int, int, int, int]
"""Block key, index, offset, length."""


def corpora_of(names: Sequence[str], seed: int) -> dict[str, SourceCorpus]:
    rng = random.Random(seed)
    made = {}
    for number, name in enumerate(names):
        kind = "streaming" if number % 3 == 2 else "seekable"
        listed = ErrorPolicy("quarantine")  # however many there are, none ends the stream
        spec = make_spec(name, shards=rng.randint(1, 6), order_class=kind, on_error=listed)
        made[name] = random_corpus(spec, seed + number, lambda r: r.randint(0, 150), bad_ratio=0.02)
    return made


def job_of(corpora: Mapping[str, SourceCorpus], weights: Mapping[str, float], **options: Any) -> ResolvedJob:  # fmt: skip
    names = sorted(weights)
    specs = [replace(corpora[name].spec, name=name) for name in names]
    return make_job(specs, options.pop("batch", BATCH), [weights[name] for name in names], **options)  # fmt: skip


def run(job: ResolvedJob, corpora: Mapping[str, SourceCorpus], steps: int, state: StreamState | None, seed: int) -> tuple[list[StepPlan], StreamState]:  # fmt: skip
    planner = start(job, state=state)
    feed = Feed(planner, [corpora[source.name] for source in job.sources], seed=seed, loaders=2)
    plans = feed.steps(steps)
    assert len(plans) == steps
    return plans, planner.state()


def pieces_of(job: ResolvedJob, plans: list[StepPlan]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {source.order_name: [] for source in job.sources}
    for plan in plans:
        for source, *piece in zip(
            plan.source.tolist(), plan.block_key.tolist(), plan.index.tolist(),
            plan.offset.tolist(), plan.length.tolist(), strict=True,
        ):  # fmt: skip
            found[job.sources[source].order_name].append(tuple(piece))
    return found


def carried_of(job: ResolvedJob, state: StreamState) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {source.order_name: [] for source in job.sources}
    for source, *piece in state.carried[:5].T.tolist():
        found[job.sources[source].order_name].append(tuple(piece))
    return found


def check_prefix(corpus: SourceCorpus, pieces: list[Piece]) -> int:
    """Check that the pieces are the first tokens of a source's order, each once; return how many."""
    loader = FakeLoader(corpus, 0)
    records: list[tuple[int, int, int]] = []
    last = max(pieces)[:2] if pieces else (0, 0)
    while not records or records[-1][:2] < last:
        meta = loader.next_chunk()
        assert meta is not None
        for place, length in enumerate(meta.lengths.tolist()):
            records.append((meta.block_key, meta.first_index + place, length))
    pieces = sorted(pieces)
    at = 0
    for block_key, index, length in records:
        offset = 0
        while at < len(pieces) and pieces[at][:2] == (block_key, index):
            assert pieces[at][2] == offset, f"record {block_key, index}: {pieces[at]}"
            offset += pieces[at][3]
            at += 1
        assert offset == length or (block_key, index) >= last, f"{block_key, index} lost"
    assert at == len(pieces)
    return sum(piece[3] for piece in pieces)


def weights_strategy() -> Any:
    names = st.sampled_from(["a", "b", "c", "d", "e"])
    return st.dictionaries(names, st.integers(1, 9).map(float), min_size=1)


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(weights_strategy(), min_size=2, max_size=4),
    lives=st.lists(st.integers(1, 25), min_size=4, max_size=4),
    seed=st.integers(0, 1 << 20),
    packing=st.sampled_from(["best_fit", "concat"]),
)
def test_sources_come_and_go_and_the_others_stay_in_their_order(
    jobs: list[dict[str, float]], lives: list[int], seed: int, packing: str
) -> None:
    corpora = corpora_of("abcde", seed)
    delivered: dict[str, list[Piece]] = {}
    state: StreamState | None = None
    old: ResolvedJob | None = None
    for weights, steps in zip(jobs, lives, strict=False):
        job = job_of(corpora, weights, batch=replace(BATCH, packing=packing))
        if state is not None:
            adapted = adapt_state(state, job, old_job=old)
            assert not [c for c in adapted.changes if c.change_class == "refused"]
            assert old is not None
            gone = {s.name for s in old.sources} - set(weights)
            for name in gone:
                delivered.pop(name, None)  # it begins anew, should it come back
            state = adapted.state
            assert StreamState.decode(state.encode()).encode() == state.encode()
        plans, state = run(job, corpora, steps, state, seed)
        for name, pieces in pieces_of(job, plans).items():
            delivered.setdefault(name, []).extend(pieces)
        for place, source in enumerate(job.sources):
            pieces = delivered[source.name] + carried_of(job, state)[source.name]
            tokens = check_prefix(corpora[source.name], pieces)
            assert tokens == int(state.progress[DRAWN_TOKENS, place])
        old = job


@pytest.mark.parametrize("is_known", [True, False])
def test_a_source_that_is_added_takes_its_share_at_once(is_known: bool) -> None:
    corpora = corpora_of("abc", 3)
    before = job_of(corpora, {"a": 1.0, "b": 1.0})
    after = job_of(corpora, {"a": 1.0, "b": 1.0, "c": 2.0})
    _, state = run(before, corpora, 100, None, 1)
    adapted = adapt_state(state, after, old_job=before if is_known else None)
    assert {c.key: c.change_class for c in adapted.changes} == {
        "mixture": "journalled", "sources.c": "journalled"
    }  # fmt: skip
    _, end = run(after, corpora, 100, adapted.state, 1)
    drawn = end.progress[DRAWN_TOKENS] - adapted.state.progress[DRAWN_TOKENS]
    assert np.abs(drawn / drawn.sum() - [0.25, 0.25, 0.5]).max() * drawn.sum() <= 2 * 64 + 64
    # The first half is the oracle's: what was planned before is what the job with c never saw.
    assert adapted.state.progress[:, :2].tolist() == state.progress.tolist()


def test_a_renamed_source_goes_on_where_it_stood() -> None:
    corpora = corpora_of("ab", 5)
    before = job_of(corpora, {"a": 3.0, "b": 1.0})
    plans, state = run(before, corpora, 30, None, 1)
    whole, _ = run(before, corpora, 60, None, 1)
    renamed = {"a": corpora["a"], "z": SourceCorpus(replace(corpora["b"].spec, was="b"), corpora["b"].parts)}  # fmt: skip
    after = job_of(renamed, {"a": 3.0, "z": 1.0})
    adapted = adapt_state(state, after, old_job=before)
    assert any("renamed" in c.text and c.key == "sources.z" for c in adapted.changes)
    later, mid = run(after, renamed, 15, adapted.state, 1)
    # And once more.
    twice = {"a": corpora["a"], "y": SourceCorpus(replace(corpora["b"].spec, was="b"), corpora["b"].parts)}  # fmt: skip
    again = job_of(twice, {"a": 3.0, "y": 1.0})
    last, _ = run(again, twice, 15, adapt_state(mid, again).state, 1)
    digests = [plan.membership_digest for plan in [*plans, *later, *last]]
    assert digests == [plan.membership_digest for plan in whole]
    hint = adapt_state(state, job_of({"a": corpora["a"], "z": corpora["b"]}, {"a": 3.0, "z": 1.0}), old_job=before)  # fmt: skip
    assert any("write `was: b`" in c.text for c in hint.changes)


def test_the_same_job_changes_nothing_and_neutral_changes_are_told() -> None:
    corpora = corpora_of("ab", 6)
    job = job_of(corpora, {"a": 1.0, "b": 1.0})
    _, state = run(job, corpora, 9, None, 1)
    same = adapt_state(state, job, old_job=job)
    assert same.state.encode() == state.encode()
    assert same.changes == ()
    other = replace(job, steps=70, batch=replace(job.batch, rows=4))
    adapted = adapt_state(state, other, old_job=job)
    assert {c.key: c.change_class for c in adapted.changes} == {"steps": "neutral", "batch": "neutral"}  # fmt: skip
    assert "None -> 70" in str(adapted.changes)


REFUSED = {
    "seed": lambda job: replace(job, seed=18),
    "batch": lambda job: replace(job, batch=replace(job.batch, packing="concat")),
    "tokenizer": lambda job: replace(job, tokenizer=replace(job.tokenizer, vocabulary_count=300)),
    "epochs": lambda job: replace(job, epochs=7),
    "sources.a": lambda job: replace(
        job, sources=(replace(job.sources[0], record_bytes_max=77), *job.sources[1:])
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_moves_positions_is_refused_until_its_key_is_accepted(key: str) -> None:
    corpora = corpora_of("abc", 8)
    job = job_of(corpora, {"a": 1.0, "b": 1.0, "c": 1.0})
    _, state = run(job, corpora, 12, None, 1)
    changed = REFUSED[key](job)
    with pytest.raises(StateMismatchError, match=rf"refused: {key}.*\n(.*\n)*.*accept=\['{key}'\]"):
        adapt_state(state, changed, accept=["other"], old_job=job)
    adapted = adapt_state(state, changed, accept=[key])
    plans, _ = run(changed, corpora, 12, adapted.state, 1)
    assert plans[0].step == 12
    first = {}
    for name, pieces in pieces_of(changed, plans).items():
        first[name] = unpack_block_key(min(pieces)[0]).epoch
    epochs = dict(zip("abc", state.epoch.tolist(), strict=True))
    if key == "seed":
        assert first == {name: epoch + 1 for name, epoch in epochs.items()}
    if key == "sources.a":
        assert first["a"] == epochs["a"] + 1


def test_all_refused_changes_are_told_at_once() -> None:
    corpora = corpora_of("ab", 9)
    job = job_of(corpora, {"a": 1.0, "b": 1.0})
    _, state = run(job, corpora, 3, None, 1)
    changed = replace(job, seed=4, batch=replace(job.batch, packing="concat"))
    with pytest.raises(StateMismatchError, match=r"17 -> 4(.*\n)+.*MSD_ACCEPT=batch,seed"):
        adapt_state(state, changed, old_job=job)
    assert adapt_state(state, changed, accept=["seed", "batch"]).state.step == 3


def test_a_change_that_waits_for_its_step_survives_a_source_that_goes() -> None:
    corpora = corpora_of("abc", 10)
    job = job_of(corpora, {"a": 1.0, "b": 1.0, "c": 1.0})
    planner = start(job)
    feed = Feed(planner, [corpora[name] for name in "abc"])
    feed.steps(4)
    planner.change_mixture({"a": 5.0, "b": 1.0, "c": 1.0}, 30)
    planner.change_mixture({"a": 0.0, "b": 0.0, "c": 1.0}, 40)
    feed.steps(1)
    after = job_of(corpora, {"a": 1.0, "b": 1.0})
    adapted = adapt_state(planner.state(), after).state
    assert adapted.pending_steps.tolist() == [30]  # of 40 nothing is left
    assert adapted.pending_shares.shape == (1, 2)
    plans, _ = run(after, corpora, 40, adapted, 1)
    late = [int(plan.drawn_tokens[0]) for plan in plans if plan.step >= 31]
    everything = [int(plan.drawn_tokens.sum()) for plan in plans if plan.step >= 31]
    assert sum(late) / sum(everything) == pytest.approx(5 / 6, abs=0.03)


def test_a_schedule_that_was_changed_goes_by_the_states_step() -> None:
    corpora = corpora_of("ab", 11)
    job = job_of(corpora, {"a": 1.0, "b": 1.0})
    _, state = run(job, corpora, 20, None, 1)
    points = (
        MixturePoint(0, {"a": 1.0, "b": 1.0}),
        MixturePoint(15, {"a": 1.0, "b": 3.0}),
        MixturePoint(25, {"a": 3.0, "b": 1.0}),
    )
    after = replace(job, mixture=replace(job.mixture, points=points))
    adapted = adapt_state(state, after).state
    assert adapted.schedule_index == 2
    plans, end = run(after, corpora, 20, adapted, 1)
    assert plans[0].wanted_shares.tolist() == pytest.approx([0.25, 0.75])
    assert end.schedule_index == 3
