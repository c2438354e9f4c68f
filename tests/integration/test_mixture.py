"""The mixture that a run has: what was asked for, over real documents; changed while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import ConfigError
from msd_client.contract.state import DRAWN_SAMPLES, DRAWN_TOKENS, StreamState
from tests.integration.test_corpora import corpora, corpora_job, tokens_of
from tests.support.inline_planner import InlineSources, InlineStream, inline_job
from tests.support.node import Node, RankRecord, run_ranks, text_job
from tests.support.sources import needs_data

ERROR_MAX = 0.001
"""A tenth of a percentage point."""


def mixtures() -> dict[str, dict[str, float]]:
    names = sorted(corpora())
    return {
        "by size": {name: float(tokens_of(name)) for name in names},
        "equal": dict.fromkeys(names, 1.0),
        "halves": {name: 2.0**-place for place, name in enumerate(names)},
        "one heavy": dict.fromkeys(names, 0.001) | {"shakespeare": 0.9},
        "huge documents": dict.fromkeys(names, 1.0) | {"debian_install_guide": 40.0, "gcide": 0.01},
        "some never": dict.fromkeys(names, 0.0)
        | {"code_rust": 97.0, "gsm8k": 2.0, "pgdocs_html": 1.0},
    }


@pytest.fixture(scope="module")
def inline_sources() -> Iterator[InlineSources]:
    sources = InlineSources(inline_job(corpora_job()))
    yield sources
    sources.close()


def shares_off(
    state: StreamState, weights: dict[str, float], column: int = DRAWN_TOKENS
) -> np.ndarray:
    wanted = np.array([weights[name] for name in state.source_names])
    drawn = state.progress[column]
    return np.abs(drawn / drawn.sum() - wanted / wanted.sum())


@needs_data
@pytest.mark.parametrize("mixture", mixtures())
def test_200_steps_of_64_rows_hold_what_was_asked_for(
    inline_sources: InlineSources, mixture: str
) -> None:
    weights = mixtures()[mixture]
    stream = InlineStream(inline_job(corpora_job(weights=weights)), inline_sources)
    stream.plan_steps(200)
    state = stream.planner.state()
    off = shares_off(state, weights)
    print(
        f"{mixture}: {100 * off.max():.4f} percentage points off ({state.source_names[off.argmax()]})"
    )
    assert off.max() <= ERROR_MAX
    never = [place for place, name in enumerate(state.source_names) if not weights[name]]
    assert not state.progress[DRAWN_TOKENS][never].any()


def saved(record: RankRecord) -> dict[int, bytes]:
    """Return a rank's states by completed steps, as bytes."""
    return {step: state["msd"] for step, state in record.states.items()}


def inline_states(
    job: dict[str, Any], steps: int, changes: dict[int, dict[str, float]]
) -> dict[int, bytes]:
    """Return the state after each step of a planner that is told of changes at given steps."""
    resolved = inline_job(job)
    sources = InlineSources(resolved)
    stream = InlineStream(resolved, sources)
    states = {}
    for step in range(steps):
        if step in changes:
            stream.planner.change_mixture(changes[step], step)
        stream.plan_steps(1)
        states[step + 1] = stream.planner.state().encode()
    sources.close()
    return states


def told_apart(states: dict[int, bytes]) -> tuple[dict[int, bytes], dict[int, list[int]]]:
    """Return the states as if no accepted change waited in them, and the changes that did.

    From which step on a state knows of a change depends on what was announced already; that it is
    the same on every rank, and in every state up to the change, does not.
    """
    plain, waiting = {}, {}
    for step, encoded in states.items():
        state = StreamState.decode(encoded)
        if len(state.pending_steps):
            waiting[step] = state.pending_steps.tolist()
        state = replace(
            state,
            event_number=0,
            pending_steps=state.pending_steps[:0],
            pending_shares=state.pending_shares[:0],
        )
        plain[step] = state.encode()
    return plain, waiting


def drawn_of(states: dict[int, bytes], first: int, last: int) -> np.ndarray:
    """Return tokens that each source gave in steps first..last-1."""
    totals = [StreamState.decode(states[step]).progress[DRAWN_TOKENS] for step in (first, last)]
    drawn: np.ndarray = totals[1] - totals[0]
    return drawn


@pytest.mark.processes
def test_a_live_change_holds_from_the_step_that_it_returns(start_node: Any, tmp_path: Any) -> None:
    job = text_job(
        tmp_path, texts={"sources": 4}, mixture={"unit": "tokens", 0: {"s0": 3, "s1": 1, "s2": 1}}
    )
    changes: list[dict[str, float]] = [
        {"s0": 0.0, "s1": 1.0, "s2": 1.0, "s3": 2.0},  # one leaves, one that was never open joins
        {"s0": 9.0, "s1": 1.0, "s2": 0.0, "s3": 0.0},
    ]
    accepted: dict[int, dict[str, float]] = {}

    def change(data: Any, step: Any, record: Any) -> None:
        if data.rank == 1 and step.number in (5, 40):
            weights = changes[step.number // 40]
            accepted[data.set_mixture(weights)] = weights

    records = run_ranks(start_node(), job, {"dp": 2}, 80, keep_states=True, on_step=change)
    first, second = sorted(accepted)
    assert 5 < first <= 5 + 10
    assert 40 < second <= 40 + 10
    states = saved(records[0])
    assert states == saved(records[1])
    plain, waiting = told_apart(states)
    assert plain == told_apart(inline_states(job, 80, accepted))[0]
    assert StreamState.decode(states[80]).event_number == 2
    for at in accepted:
        told = [step for step, told in waiting.items() if told == [at]]
        assert told == list(range(told[0], at + 1))  # once known, in every state until it holds
    before, between, after = (
        drawn_of(states, 1, first),
        drawn_of(states, first, second),
        drawn_of(states, second, 80),
    )
    assert before[0] > 2 * before[1] > 0 == before[3]
    assert between[0] == 0 < between[1]
    assert abs(between[3] / between.sum() - 0.5) <= 2 * 256 / between.sum()
    assert after[2] == after[3] == 0
    assert abs(after[0] / after.sum() - 0.9) <= 2 * 256 / after.sum()


@pytest.mark.processes
def test_a_change_outlives_a_restore(start_node: Any, tmp_path: Any) -> None:
    job = text_job(tmp_path, texts={"sources": 3})
    accepted: dict[int, dict[str, float]] = {}

    def change(data: Any, step: Any, record: Any) -> None:
        if step.number == 3:
            weights = {"s0": 0.0, "s1": 1.0, "s2": 3.0}
            accepted[data.set_mixture(weights)] = weights

    node: Node = start_node()
    (first,) = run_ranks(node, job, {"dp": 1}, 20, keep_states=True, on_step=change)
    (at,) = accepted
    (again,) = run_ranks(node, job, {"dp": 1}, 10, state=first.states[at + 2], keep_states=True)
    wanted = inline_states(job, at + 12, accepted)
    assert saved(again) == {step: wanted[step] for step in range(at + 3, at + 13)}


@pytest.mark.processes
def test_states_saved_before_a_change_takes_effect_know_of_it(
    start_node: Any, tmp_path: Any
) -> None:
    job = text_job(tmp_path, texts={"sources": 3})
    changes = {3: {"s0": 0.0, "s1": 1.0, "s2": 3.0}, 4: {"s0": 1.0, "s1": 5.0, "s2": 0.0}}
    accepted: dict[int, dict[str, float]] = {}

    def change(data: Any, step: Any, record: Any) -> None:
        if step.number in changes:
            accepted[data.set_mixture(changes[step.number])] = changes[step.number]

    (first,) = run_ranks(start_node(), job, {"dp": 1}, 90, keep_states=True, on_step=change)
    _, waiting = told_apart(saved(first))
    knowing = [step for step in waiting if StreamState.decode(saved(first)[step]).event_number == 2]
    assert knowing
    assert max(knowing) == max(accepted)
    for step in (min(knowing), max(knowing)):
        node: Node = start_node()
        (again,) = run_ranks(node, job, {"dp": 1}, 30, state=first.states[step], keep_states=True)
        assert again.rows == {number: first.rows[number] for number in range(step, step + 30)}
        assert told_apart(saved(again))[0] == {
            number: told_apart(saved(first))[0][number] for number in range(step + 1, step + 31)
        }


@pytest.mark.processes
def test_a_change_that_does_not_fit_is_refused_and_the_run_goes_on(
    start_node: Any, tmp_path: Any
) -> None:
    job = text_job(tmp_path, texts={"sources": 2})
    refused: list[str] = []

    def change(data: Any, step: Any, record: Any) -> None:
        wrong = [
            {"s0": 1.0, "web": 1.0},
            {"s0": -1.0, "s1": 1.0},
            {"s0": 0.0, "s1": 0.0},
            {"s0": float("nan"), "s1": 1.0},
        ]
        if step.number < len(wrong):
            with pytest.raises(ConfigError) as caught:
                data.set_mixture(wrong[step.number])
            refused.append(str(caught.value))

    (record,) = run_ranks(start_node(), job, {"dp": 1}, 12, keep_states=True, on_step=change)
    assert [
        word in text for word, text in zip(("web", "negative", "0", "finite"), refused, strict=True)
    ] == [True] * 4
    assert saved(record) == inline_states(job, 12, {})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("points", "starts"),
    [((7, 19), (7, 19)), (("0.03M", "0.08M"), (8, 20))],
    ids=["steps", "tokens"],
)
def test_a_schedule_takes_effect_where_it_says(
    start_node: Any, tmp_path: Any, points: Any, starts: Any
) -> None:
    weights = [{"s0": 1, "s1": 1}, {"s0": 1, "s2": 3}, {"s1": 1}]
    mixture = {"unit": "tokens", 0: weights[0], points[0]: weights[1], points[1]: weights[2]}
    # concat: a step holds exactly 4,096 tokens, so the step that a token count falls into is known
    job = text_job(tmp_path, mixture=mixture, batch={"packing": "concat"})
    (record,) = run_ranks(start_node(), job, {"dp": 1}, 30, keep_states=True)
    wanted = [stats["wanted_shares"] for stats in record.stats]
    first, second = starts
    assert wanted[:first] == [[0.5, 0.5, 0.0]] * first
    assert wanted[first:second] == [[0.25, 0.0, 0.75]] * (second - first)
    assert wanted[second:] == [[0.0, 1.0, 0.0]] * (30 - second)
    drawn = drawn_of(saved(record), first, second)
    assert drawn[1] == 0
    assert abs(drawn[2] / drawn.sum() - 0.75) <= 2 * 256 / drawn.sum()
    assert saved(record) == inline_states(job, 30, {})


@pytest.mark.processes
def test_shares_of_samples_count_samples(start_node: Any, tmp_path: Any) -> None:
    weights = {"s0": 5.0, "s1": 2.0, "s2": 1.0}
    job = text_job(tmp_path, mixture={"unit": "samples", 0: weights})
    (record,) = run_ranks(start_node(), job, {"dp": 1}, 40, keep_states=True)
    state = StreamState.decode(saved(record)[40])
    assert (
        shares_off(state, weights, DRAWN_SAMPLES).max() <= 2 / state.progress[DRAWN_SAMPLES].sum()
    )


@pytest.mark.processes
def test_a_change_at_a_stated_step_holds_there_on_every_rank_and_after_a_resize(
    start_node: Any, tmp_path: Any
) -> None:
    job = text_job(tmp_path, texts={"sources": 3})
    weights, later = {"s0": 0.0, "s1": 1.0, "s2": 3.0}, {"s0": 1.0, "s1": 0.0, "s2": 0.0}
    firsts: list[int] = []
    known: list[int] = []

    def change(data: Any, step: Any, record: Any) -> None:
        if data.rank or step.number != 3:
            return
        changed = data.set_mixture(weights, at=40)
        assert changed == 40
        known.append(changed.known_from)
        assert data.set_mixture(later, at=46) == 46
        for late in (0, 3):
            with pytest.raises(ConfigError, match=f"at step {late} comes too late") as caught:
                data.set_mixture(weights, at=late)
            firsts.append(int(caught.value.attributes["limit"] or 0))

    records = run_ranks(start_node(), job, {"dp": 2}, 60, keep_states=True, on_step=change)
    states = saved(records[0])
    assert states == saved(records[1])
    assert told_apart(states)[0] == told_apart(inline_states(job, 60, {40: weights, 46: later}))[0]
    assert 3 < firsts[0] <= 3 + 10  # not far off: only what is planned is in the way
    assert firsts[0] <= firsts[1] <= firsts[0] + 10  # the other rank reads on meanwhile
    assert known[0] < 30
    knows = StreamState.decode(states[known[0] + 1])
    assert 40 in knows.pending_steps.tolist()
    # Restored before it takes effect, on other meshes: the change travels in the state.
    for step, mesh in ((known[0] + 8, {"dp": 4}), (43, {"dp": 1})):
        (again, *_) = run_ranks(
            start_node(), job, mesh, 60 - step, state=records[0].states[step], keep_states=True
        )
        assert saved(again)[60] == states[60]


@pytest.mark.processes
def test_a_change_that_would_never_take_effect_is_refused(start_node: Any, tmp_path: Any) -> None:
    job = text_job(tmp_path, texts={"sources": 2}, steps=30)

    def change(data: Any, step: Any, record: Any) -> None:
        if step.number == 1:
            with pytest.raises(ConfigError, match="the job ends after step 29"):
                data.set_mixture({"s0": 1, "s1": 2}, at=30)
            for number in range(64):
                data.set_mixture({"s0": 1, "s1": number}, at=29)
            with pytest.raises(ConfigError, match="64 mixture changes wait"):
                data.set_mixture({"s0": 1, "s1": 2}, at=28)

    (record,) = run_ranks(start_node(), job, {"dp": 1}, 30, keep_states=True, on_step=change)
    assert StreamState.decode(saved(record)[30]).event_number == 64
