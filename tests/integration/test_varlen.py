"""Varlen jobs on real daemons: what steps hold on any mesh, from any state, and how ranks get it (E9)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msd_daemon
from msd_client.contract.errors import StateMismatchError
from msd_client.contract.state import StreamState
from msd_client.joined_job import Data
from msd_client.step import Step
from tests.support.ledger import Ledger, read_ledger
from tests.support.ledger_case import Case, make_case
from tests.support.node import Node, run_ranks, running_node

pytestmark = pytest.mark.processes

STEPS = 24
STEP_TOKENS, MICROBATCH_TOKENS = 4000, 512


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Node]]:
    """Daemons by their count of loader workers."""
    with (
        running_node(tmp_path_factory.mktemp("w1"), "--loader-workers", "1") as one,
        running_node(tmp_path_factory.mktemp("w2"), "--loader-workers", "2") as two,
    ):
        yield {1: one, 2: two}


def varlen_case(folder: Path, **changes: Any) -> Case:
    rng = np.random.default_rng(8)

    def shards(documents: int, count: int, longest: int) -> list[list[int]]:
        return [rng.integers(0, longest, documents // count).tolist() for _ in range(count)]

    batch = {
        "packing": "varlen",
        "step_tokens": STEP_TOKENS,
        "microbatch_tokens": MICROBATCH_TOKENS,
        "long": "skip",
    }
    return make_case(
        folder,
        {
            "chats": shards(900, 3, 170),
            "long": [[0, 1, 512, 513, *row] for row in shards(300, 2, 700)],
        },
        batch,
        shuffle={"window_shards": 2, "block_records": 64, "window_records": 32},
        mixture={"unit": "tokens", 0: {"chats": 2, "long": 1}},
        **changes,
    )


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return varlen_case(tmp_path_factory.mktemp("varlen"))


@pytest.fixture(scope="module")
def wanted(case: Case) -> dict[int, list[bytes]]:
    return case.wanted(STEPS)


@pytest.fixture(scope="module")
def whole(nodes: dict[int, Node], case: Case, wanted: dict[int, list[bytes]]) -> Ledger:
    """The uninterrupted run, on two ranks."""
    ledger = read_ledger(nodes[2], case.corpus, case.job, {"dp": 2}, STEPS)
    ledger.check_equals(wanted, is_varlen=True)
    return ledger


def test_every_token_is_delivered_or_dropped_and_none_is_held(case: Case, whole: Ledger) -> None:
    for step in (1, 9, STEPS):
        accounts = case.settle(whole.upto(step))
        assert all(account.held == 0 for account in accounts.values())
    assert any(account.dropped for account in accounts.values())
    tokens = [sum(piece.length for step, _, piece in whole.pieces() if step == n) for n in range(9)]
    assert all(STEP_TOKENS <= count < STEP_TOKENS + MICROBATCH_TOKENS for count in tokens)


@pytest.mark.parametrize(("dp", "workers", "cut"), [(1, 1, 0), (4, 1, 5), (8, 2, 13)])
def test_another_mesh_continues_with_the_same_steps(
    nodes: dict[int, Node],
    case: Case,
    wanted: dict[int, list[bytes]],
    whole: Ledger,
    dp: int,
    workers: int,
    cut: int,
) -> None:
    state = whole.state(cut) if cut else None
    count = STEPS - cut
    later = read_ledger(nodes[workers], case.corpus, case.job, {"dp": dp}, count, state=state)
    later.check_equals(wanted, is_varlen=True)
    assert later.states == {step: state for step, state in whole.states.items() if step > cut}
    if cut:
        case.settle(whole.upto(cut) + later)


def test_all_ranks_have_as_many_microbatches_as_the_step_says(
    nodes: dict[int, Node], case: Case
) -> None:
    counts: dict[tuple[int, int], int] = {}
    fills: dict[int, float] = {}

    def read(data: Data, step: Step) -> None:
        batches = [(batch.used_tokens, batch.tokens.shape, batch.microbatch) for batch in step]
        assert len(batches) == step.microbatches == len(step)
        assert [number for *_, number in batches] == list(range(step.microbatches))
        assert all(used <= MICROBATCH_TOKENS for used, *_ in batches)
        assert {tuple(shape) for _, shape, _ in batches} == {(1, MICROBATCH_TOKENS)}
        counts[data.rank, step.number] = step.microbatches
        fills[step.number] = step.stats["fill"] * 4 * step.microbatches * MICROBATCH_TOKENS

    run_ranks(nodes[2], case.job, {"dp": 4}, STEPS, read_step=read)
    for step in range(STEPS):
        assert len({counts[rank, step] for rank in range(4)}) == 1
        assert STEP_TOKENS <= round(fills[step]) < STEP_TOKENS + MICROBATCH_TOKENS
    assert len(set(counts.values())) > 1, "no step needed one more"


def test_a_reader_in_one_process_gives_every_rank_the_same_batches(
    case: Case, whole: Ledger
) -> None:
    whole.check_inline(case.job, 2, STEPS)


@pytest.mark.parametrize("end", ["pad", "drop", "wrap"])
def test_ends_of_streams_are_the_oracles(nodes: dict[int, Node], tmp_path: Path, end: str) -> None:
    case = varlen_case(tmp_path / "c", epochs=1, end=end)
    wanted = case.wanted()
    ledger = read_ledger(nodes[2], case.corpus, case.job, {"dp": 4}, None)
    assert ledger.steps == list(range(len(wanted)))
    ledger.check_equals(wanted, is_varlen=True)


def test_validation_steps_have_tokens_of_their_own(nodes: dict[int, Node], tmp_path: Path) -> None:
    case = varlen_case(tmp_path / "c")
    loaders = {"val": {"from": "long", "part": "all", "step_tokens": 1500}}
    job = {**case.job, "loaders": loaders, "mixture": {0: {"chats": 1.0}}}
    found: dict[tuple[int, int], list[bytes]] = {}

    def read(data: Data, dp: int) -> None:
        for step in data.val.once():
            for batch in step:
                bounds, flat = batch.cu_seqlens.tolist(), np.array(batch.tokens).reshape(-1)
                sources = batch.segment_source.tolist()
                found.setdefault((dp, step.number), []).extend(
                    flat[start:stop].tobytes()
                    for source, start, stop in zip(sources, bounds, bounds[1:], strict=False)
                    if source >= 0
                )
                del batch

    for dp in (1, 4):
        run_ranks(nodes[2], job, {"dp": dp}, 0, at_end=partial(read, dp=dp))
    steps = sorted({step for _, step in found})
    assert len(steps) > 3
    for step in steps:
        assert sorted(found[1, step]) == sorted(found[4, step])
    sizes = [sum(len(tokens) // 4 for tokens in found[1, step]) for step in steps]
    assert all(1500 <= size < 1500 + MICROBATCH_TOKENS for size in sizes[:-1])


def test_two_ranks_of_a_step_that_one_segment_fills(nodes: dict[int, Node], tmp_path: Path) -> None:
    """Fewer segments than ranks: the others get microbatches without any, which they can run."""
    case = make_case(
        tmp_path / "c",
        {"one": [[40] * 7]},
        {"packing": "varlen", "step_tokens": 30, "microbatch_tokens": 64, "segment_multiple": 8},
        epochs=1,
    )
    used: dict[int, list[tuple[int, int, int]]] = {}

    def read(data: Data, step: Step) -> None:
        for batch in step:
            trimmed = batch.trimmed()
            used.setdefault(data.rank, []).append(
                (batch.used_tokens, trimmed.tokens.shape[1], batch.valid_tokens)
            )
            del batch, trimmed

    run_ranks(nodes[2], case.job, {"dp": 2}, None, read_step=read)
    assert sorted((used[0], used[1])) == [[(0, 8, 0)] * 7, [(40, 40, 39)] * 7]


def test_a_state_of_a_varlen_job_is_refused_by_one_of_rows(
    nodes: dict[int, Node], case: Case, whole: Ledger
) -> None:
    rows = {**case.job, "batch": {"rows": 8, "row_tokens": MICROBATCH_TOKENS, "long": "skip"}}
    assert StreamState.decode(whole.states[3]).step == 3
    with pytest.raises(StateMismatchError, match="batch"), nodes[2].connect(rows, {}, 0) as data:
        data.train.load_state_dict(whole.state(3))
        next(iter(data.train))


def test_context_parallel_ranks_hold_the_microbatch_between_them(
    nodes: dict[int, Node], tmp_path: Path
) -> None:
    """Slices of a trimmed microbatch, put back by their places, are the whole one without padding."""
    batch = {
        "packing": "varlen", "step_tokens": 1500, "microbatch_tokens": 512, "long": "skip",
        "segment_multiple": 8, "cp_layout": "zigzag_document",
    }  # fmt: skip
    case = varlen_case(tmp_path / "c")
    job = {**case.job, "batch": batch}
    found: dict[int, dict[tuple[int, int], Any]] = {}

    def read(data: Data, step: Step) -> None:
        for batch in step:
            own = batch.trimmed()
            kept = (np.array(own.tokens), np.array(own.cp_places), np.array(own.cu_seqlens))
            found.setdefault(data.rank, {})[step.number, own.microbatch] = (own.row_tokens, *kept)
            del batch, own

    run_ranks(nodes[2], job, {"dp": 2, "cp": 2}, 4, read_step=read)
    with msd_daemon.inline(job, dp=2) as stream:
        for step in itertools.islice(stream, 4):
            for group in range(2):
                for number, inline in enumerate(step.microbatches(group)):
                    parts = [found[2 * group + cp][step.number, number] for cp in range(2)]
                    used = parts[0][0]
                    whole = np.full(used, -1)
                    for size, tokens, places, bounds in parts:
                        assert (size, tokens.shape) == (used, (1, used // 2))
                        whole[places.reshape(-1)] = tokens.reshape(-1)
                        count = len(bounds) - 1
                        assert bounds.tolist() == inline.cu_seqlens[: count + 1].tolist()
                    assert whole.tolist() == inline.tokens.reshape(-1)[:used].tolist()
                    assert not inline.tokens.reshape(-1)[used:].any()


def test_another_size_at_a_resume_keeps_the_sample_stream(
    nodes: dict[int, Node], case: Case, whole: Ledger
) -> None:
    """Larger steps and microbatches from a state on: no sample is lost or comes twice."""
    batch = {**case.job["batch"], "step_tokens": 9000}
    job = {**case.job, "batch": batch}
    later = read_ledger(nodes[2], case.corpus, job, {"dp": 8}, 6, state=whole.state(7))
    case.settle(whole.upto(7) + later)
    tokens = [sum(p.length for n, _, p in later.pieces() if n == step) for step in later.steps]
    assert later.steps == list(range(7, 13))
    assert all(9000 <= count < 9000 + MICROBATCH_TOKENS for count in tokens)
