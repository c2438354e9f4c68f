"""Exactly once, in one order, whatever serves it: ledgers of real daemons against the oracle.

Every token names its document, so what ranks were given is traced to the last one. DESIGN.md P1-P4;
the numbers of the tests are those of the bug reports that they were made from.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import MeshMismatchError
from msd_client.contract.state import StreamState
from msd_client.joined_job import Data
from tests.support.ledger import Account, Corpus, Ledger, note, read_ledger, settle
from tests.support.ledger_case import Case, make_case
from tests.support.node import Node, run_ranks, running_node

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One daemon for every test that does not care which."""
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", "2") as running:
        yield running


# ---- one stream over workers, restores and meshes (H03) ------------------------------------------

STEPS = 60
CUTS = (1, 20, 37)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """H03: three sources, 4,000 documents, rows of 512, 16 of them a step whatever the mesh."""
    rng = np.random.default_rng(3)

    def shards(documents: int, count: int, longest: int) -> list[list[int]]:
        return [rng.integers(0, longest, documents // count).tolist() for _ in range(count)]

    lengths = {
        "common": shards(2000, 4, 170),
        "rare": shards(400, 2, 700),
        "small": [[0, 1, 512, 513, *row] for row in shards(1596, 3, 70)],
    }
    return make_case(
        tmp_path_factory.mktemp("three"),
        lengths,
        {"rows": 16, "row_tokens": 512, "microbatch_rows": 2},
        shuffle={"window_shards": 2, "block_records": 64, "window_records": 32},
        mixture={"unit": "tokens", 0: {"common": 0.5, "rare": 0.3, "small": 0.2}},
    )


@pytest.fixture(scope="module")
def wanted(three: Case) -> dict[int, list[bytes]]:
    return three.wanted(STEPS)


@pytest.fixture(scope="module")
def whole(node: Node, three: Case, wanted: dict[int, list[bytes]]) -> Ledger:
    """The uninterrupted run, on four ranks."""
    ledger = read_ledger(node, three.corpus, three.job, {"dp": 4}, STEPS)
    ledger.check_equals(wanted)
    return ledger


def test_every_token_is_delivered_once_an_epoch_dropped_or_held(three: Case, whole: Ledger) -> None:
    for step in (1, 2, 20, 37, STEPS):
        accounts = three.settle(whole.upto(step))
    epochs = Counter(name for name, _ in accounts)
    assert min(epochs.values()) >= 2, epochs  # it rolled over
    for (name, epoch), account in accounts.items():
        whole_epoch = sum(map(sum, three.corpus.lengths[name]))
        if epoch + 1 < epochs[name]:
            assert account.taken_in == whole_epoch
        assert account.taken_in == account.delivered + account.dropped + account.held
    assert sum(account.held for account in accounts.values()) < 16 * 512


def test_parts_of_a_document_are_delivered_in_their_order(whole: Ledger) -> None:
    seen: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for step, _, piece in whole.pieces():
        seen.setdefault((piece.source, piece.document), []).append((piece.offset, step))
    parted = 0
    for parts in seen.values():
        by_offset: dict[int, list[int]] = {}
        for offset, step in parts:
            by_offset.setdefault(offset, []).append(step)
        times = [sorted(steps) for _, steps in sorted(by_offset.items())]
        for former, later in itertools.pairwise(times):
            parted += 1
            assert all(a <= b for a, b in zip(former, later, strict=False))
    assert parted > 100


@pytest.mark.parametrize("workers", [1, 4])
def test_worker_counts_change_nothing(
    start_node: StartNode, three: Case, wanted: dict[int, list[bytes]], whole: Ledger, workers: int
) -> None:
    node = start_node("--loader-workers", str(workers))
    ledger = read_ledger(node, three.corpus, three.job, {"dp": 2}, 40)
    ledger.check_equals(wanted)
    assert ledger.states == whole.upto(40).states


def test_a_reader_in_one_process_gives_every_rank_the_same_batches(
    three: Case, whole: Ledger
) -> None:
    whole.check_inline(three.job, 4, STEPS)


@pytest.mark.parametrize("dp", [1, 2, 8])
def test_another_mesh_continues_with_the_same_rows(
    node: Node,
    start_node: StartNode,
    three: Case,
    wanted: dict[int, list[bytes]],
    whole: Ledger,
    dp: int,
) -> None:
    if dp == 8:
        node = start_node("--loader-workers", "7")
    later = read_ledger(node, three.corpus, three.job, {"dp": dp}, 40, state=whole.state(20))
    assert later.steps == list(range(20, STEPS))
    later.check_equals(wanted)
    joined = whole.upto(20) + later
    three.settle(joined)
    assert {len(set(joined.rows()[step])) for step in joined.steps} == {16}
    assert later.states == {step: state for step, state in whole.states.items() if step > 20}


def test_a_mesh_that_does_not_divide_the_rows_is_refused_with_the_numbers(
    node: Node, three: Case, whole: Ledger
) -> None:
    with pytest.raises(MeshMismatchError) as caught, node.connect(three.job, {"dp": 3}, 0) as data:
        data.train.load_state_dict(whole.state(20))
        next(iter(data.train))
    message = str(caught.value)
    assert "16" in message
    assert "3" in message
    assert "2" in message  # rows of a microbatch, or the nearest mesh that fits


@pytest.mark.parametrize("cut", CUTS)
def test_a_restore_continues_anywhere(
    node: Node, three: Case, wanted: dict[int, list[bytes]], whole: Ledger, cut: int
) -> None:
    later = read_ledger(node, three.corpus, three.job, {"dp": 2}, 6, state=whole.state(cut))
    later.check_equals(wanted)
    three.settle(whole.upto(cut) + later)


# ---- H01: restarts inside one epoch --------------------------------------------------------------


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Case:
    rng = np.random.default_rng(1)
    return make_case(
        tmp_path_factory.mktemp("thousand"),
        {"one": [rng.integers(1, 40, 250).tolist() for _ in range(4)]},
        {"rows": 4, "row_tokens": 64, "microbatch_rows": 2},
        epochs=1,
    )


def saved_now(node: Node, case: Case, state: dict[str, bytes] | None) -> dict[str, bytes]:
    """Load a state and save it, again and again, no step between."""
    with node.connect(case.job, {"dp": 1}, 0) as data:
        found = data.train.state_dict() if state is None else state
        for _ in range(3):
            data.train.load_state_dict(found)
            found = data.train.state_dict()
    return found


def test_restarts_inside_an_epoch_lose_and_repeat_nothing(
    start_node: StartNode, thousand: Case
) -> None:
    wanted = thousand.wanted()
    node = start_node()
    fresh = saved_now(node, thousand, None)
    assert StreamState.decode(fresh["msd"]).step == 0
    ledger = read_ledger(node, thousand.corpus, thousand.job, {"dp": 2}, 30, state=fresh)
    for steps in (1, 9, 10, None):
        cut = ledger.steps[-1] + 1
        state = ledger.state(cut)
        assert StreamState.decode(state["msd"]).step == cut
        if steps != 9:
            assert saved_now(node, thousand, state) == state
        if cut == 31:
            node = start_node("--loader-workers", "1")
        later = read_ledger(node, thousand.corpus, thousand.job, {"dp": 2}, steps, state=state)
        ledger = ledger + later
    assert ledger.steps == list(range(len(wanted)))
    ledger.check_equals(wanted)
    assert thousand.settle(ledger) == {
        ("one", 0): Account(*[int(thousand.corpus.sizes.sum())] * 2, 0, 0)
    }


def test_the_state_of_the_last_step_has_nothing_left(node: Node, thousand: Case) -> None:
    with node.connect(thousand.job, {"dp": 1}, 0) as data:
        count = sum(1 for _ in data.train)
        last = data.train.state_dict()
        assert sum(1 for _ in data.train) == 0
        assert data.train.state_dict() == last
    assert StreamState.decode(last["msd"]).step == count == len(thousand.wanted())
    states: list[Any] = []
    run_ranks(
        node,
        thousand.job,
        {"dp": 2},
        None,
        state=last,
        read_step=lambda data, step: pytest.fail(f"step {step.number} follows the last one"),
        at_end=lambda data: states.append(data.train.state_dict()),
    )
    assert states == [last, last]


# ---- H02: a state loaded before, after and instead of iteration ----------------------------------


def one_batch(data: Data) -> None:
    for step in data.train:
        for batch in step:
            del batch
            break
        break


def nothing(data: Data) -> None:
    iter(data.train)


def a_step_without_its_batches(data: Data) -> None:
    next(iter(data.train))


def ten_steps(data: Data) -> None:
    for _ in itertools.islice(data.train, 10):
        pass


def note_nothing(data: Data, step: Any) -> None:
    pytest.fail(f"step {step.number} was not asked for")


@pytest.mark.parametrize("workers", [1, 4])
def test_a_state_loaded_late_is_not_ignored(
    start_node: StartNode, thousand: Case, workers: int
) -> None:
    wanted = thousand.wanted()
    node = start_node("--loader-workers", str(workers))
    whole = read_ledger(node, thousand.corpus, thousand.job, {"dp": 2}, 60)

    def another_state(data: Data) -> None:
        data.train.load_state_dict(whole.state(3))
        next(iter(data.train))

    befores = (nothing, one_batch, a_step_without_its_batches, ten_steps, another_state)
    parts = [[Ledger(thousand.corpus) for _ in range(2)] for _ in befores]

    def act(data: Data) -> None:
        for before, ledgers in zip(befores, parts, strict=True):
            before(data)
            data.train.load_state_dict(whole.state(50))
            for step in itertools.islice(data.train, 5):
                note(ledgers[data.rank], data, step)

    run_ranks(node, thousand.job, {"dp": 2}, 0, read_step=note_nothing, at_end=act)
    for before, ledgers in zip(befores, parts, strict=True):
        for ledger in ledgers:
            assert ledger.steps == [50, 51, 52, 53, 54], before.__name__
            assert StreamState.decode(ledger.states[55]).step == 55
            assert ledger.states == {step: whole.states[step] for step in range(51, 56)}
        ledgers[0].given += ledgers[1].given
        ledgers[0].check_equals(wanted)


def test_a_state_goes_back_and_forth_in_one_session(node: Node, thousand: Case) -> None:
    wanted = thousand.wanted()
    ledger = Ledger(thousand.corpus)
    with node.connect(thousand.job, {"dp": 1}, 0) as data:
        for step in itertools.islice(data.train, 40):
            note(ledger, data, step)
        for cut in (7, 33, 33, 0, 40):
            state = ledger.state(cut) if cut else None
            if state is None:
                continue
            data.train.load_state_dict(state)
            assert data.train.state_dict() == state
            again = Ledger(thousand.corpus)
            for step in itertools.islice(data.train, 3):
                note(again, data, step)
            assert again.steps == [cut, cut + 1, cut + 2]
            again.check()
            again.check_equals(wanted)


# ---- H04: ranks share nothing --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "dp", "is_shuffled"),
    [(1, 8, True), (3, 4, True), (7, 2, True), (64, 8, True), (3, 8, False), (64, 2, False)],
)
def test_ranks_get_disjoint_documents_and_together_all(
    node: Node, tmp_path: Path, files: int, dp: int, is_shuffled: bool
) -> None:
    rng = np.random.default_rng(files)
    case = make_case(
        tmp_path / f"files{files}",
        {"only": [rng.integers(1, 20, 192 // files).tolist() for _ in range(files)]},
        {"rows": 8, "row_tokens": 32},
        shuffle={"is_shuffled": is_shuffled},
        mixture={"unit": "tokens", 0: {"only": 1.0}},
        epochs=1,
    )
    ledger = read_ledger(node, case.corpus, case.job, {"dp": dp}, None)
    ledger.check_equals(case.wanted())
    found = Counter((piece.document, piece.offset) for _, _, piece in ledger.pieces())
    assert set(found.values()) == {1}
    assert len(found) == len(case.corpus.sizes)
    case.settle(ledger)
    firsts = [given.tokens.tobytes() for given in ledger.given if given.step == 0]
    assert len(set(firsts)) == len(firsts)


# ---- a mixture changed live ----------------------------------------------------------------------


def test_a_mixture_changed_live_keeps_every_account(
    node: Node, three: Case, tmp_path: Path
) -> None:
    accepted: dict[int, dict[str, float]] = {}
    weights = {
        4: {"common": 1.0, "rare": 0.0, "small": 1.0},
        25: {"common": 0.1, "rare": 3.0, "small": 0.0},
    }

    def change(data: Data, step: Any) -> None:
        if data.rank == 1 and step.number in weights:
            accepted[data.set_mixture(weights[step.number])] = weights[step.number]

    job = three.job | {"name": "live"}
    ledger = read_ledger(node, three.corpus, job, {"dp": 2}, 50, on_step=change)
    assert len(accepted) == 2
    wanted = three.wanted(50, accepted)
    ledger.check_equals(wanted)
    three.settle(ledger)
    # Steps before it were planned before it was accepted: their states do not know of it.
    cut = max(accepted) + 1
    again = read_ledger(node, three.corpus, job, {"dp": 1}, 8, state=ledger.state(cut))
    again.check_equals(wanted)


# ---- text, streams, many epochs ------------------------------------------------------------------


def test_text_and_streams_over_three_epochs(node: Node, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    kinds = {"gz": "gz", "plain": "", "zst": "zst"}
    corpus = Corpus(
        {
            name: [rng.integers(0, 30, 60).tolist() for _ in range(shards)]
            for name, shards in (("gz", 1), ("plain", 3), ("zst", 5))
        }
    )
    shuffle: dict[str, Any] = {
        "window_shards": 2,
        "window_records": 8,
        "block_bytes": 4096,
        "stream_block_records": 16,
    }
    job = {
        "schema": 1,
        "name": "texts",
        "seed": 2,
        "tokenizer": {"file": str(tmp_path / "c" / "tokenizer.json")},
        "batch": {"rows": 8, "row_tokens": 48},
        "sources": corpus.write_texts(tmp_path / "c", kinds),
        "mixture": {"unit": "tokens", 0: {"gz": 1, "plain": 2, "zst": 3}},
        "defaults": {"shuffle": shuffle},
        "epochs": 3,
    }
    case = Case(corpus, job, corpus.oracle_sources(kinds, **shuffle))
    wanted = case.wanted()
    whole = read_ledger(node, corpus, job, {"dp": 4}, None)
    assert whole.steps == list(range(len(wanted)))
    whole.check_equals(wanted)
    accounts = case.settle(whole)
    assert set(accounts) == {(name, epoch) for name in kinds for epoch in range(3)}
    for (name, _), account in accounts.items():
        assert account == Account(*[sum(map(sum, corpus.lengths[name]))] * 2, 0, 0)
    delivered = whole.delivered()
    assert set(delivered[delivered > 0].tolist()) == {3}
    for cut in (5, len(wanted) - 1):
        later = read_ledger(node, corpus, job, {"dp": 1}, None, state=whole.state(cut))
        later.check_equals(wanted)


def test_the_ledger_notices_what_is_lost_repeated_or_moved(three: Case, whole: Ledger) -> None:
    part = whole.upto(20)
    delivered = part.delivered()
    state = part.last_state
    settle(three.corpus, three.job, three.sources, delivered, state)
    at = int(np.flatnonzero(delivered)[7])
    for change in (-1, 1):
        wrong = delivered.copy()
        wrong[at] += change
        with pytest.raises(AssertionError, match="due 1 times"):
            settle(three.corpus, three.job, three.sources, wrong, state)
    given = part.given[0]
    swapped = replace(given, tokens=given.tokens[:, ::-1].copy())
    with pytest.raises(AssertionError):
        swapped.check(three.corpus)
    shifted = replace(given, labels=np.roll(given.labels, 1))
    with pytest.raises(AssertionError):
        shifted.check(three.corpus)
