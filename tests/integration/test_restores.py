"""A state goes on wherever it is loaded: at any step, when and on what it likes (P3).

What test_ledger.py has: cuts, meshes, worker counts by themselves, late loads of one state, two
restores inside an epoch. Here: all of it at once, over three epochs and a live mixture change.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import MeshMismatchError, StateMismatchError
from msd_client.contract.state import StreamState
from msd_client.joined_job import Data
from tests.support.ledger import Corpus, Ledger, note, read_ledger, rows_of
from tests.support.node import Node, run_ranks, running_node, wait_until
from tests.support.oracle import Oracle

pytestmark = pytest.mark.processes

CHANGE_AT = 6
WEIGHTS = {"large": 1.0, "little": 2.0, "odd": 0.0}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    rng = np.random.default_rng(21)
    return Corpus(
        {
            "large": [rng.integers(0, 200, 60).tolist() for _ in range(3)],
            "little": [rng.integers(0, 12, 90).tolist() for _ in range(2)],
            "odd": [[0, 64, 65, 1, *rng.integers(0, 300, 20).tolist()]],
        }
    )


SHUFFLE: dict[str, Any] = {"window_shards": 2, "block_records": 16, "window_records": 8}


@pytest.fixture(scope="module")
def job(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": "restores",
        "seed": 5,
        "tokenizer": {"vocabulary": corpus.vocabulary},
        "batch": {"rows": 12, "row_tokens": 64, "microbatch_rows": 1},
        "sources": corpus.write_tokens(tmp_path_factory.mktemp("restores")),
        "defaults": {"shuffle": SHUFFLE},
        "mixture": {"unit": "tokens", 0: {"large": 3, "little": 1, "odd": 2}},
        "epochs": 3,
    }


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Node]]:
    """Daemons by their count of loader workers: partitions lie elsewhere on each."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield {
            count: stack.enter_context(
                running_node(tmp_path_factory.mktemp(f"w{count}"), "--loader-workers", str(count))
            )
            for count in (1, 2, 4)
        }


class Run:
    """The uninterrupted run with one live change, checked against the oracle."""

    def __init__(self, node: Node, corpus: Corpus, job: dict[str, Any]) -> None:
        self.changed: list[int] = []
        self.sources = corpus.oracle_sources(**SHUFFLE)

        def change(data: Data, step: Any) -> None:
            if data.rank == 0 and step.number == CHANGE_AT:
                self.changed.append(data.set_mixture(WEIGHTS))

        self.ledger = read_ledger(node, corpus, job, {"dp": 2}, None, on_step=change)
        oracle = Oracle(job, self.sources, {self.changed[0]: WEIGHTS})
        self.wanted = {step.number: rows_of(step.rows) for step in oracle.steps(None)}
        self.last = len(self.wanted)
        """How many steps there are."""
        assert self.ledger.steps == list(range(self.last))
        self.ledger.check_equals(self.wanted)
        self.accounts = self.ledger.settle(job, self.sources)

    @property
    def aware(self) -> int:
        """First step whose state knows of the change: it holds from the step before on."""
        return self.changed[0] + 1


@pytest.fixture(scope="module")
def run(nodes: dict[int, Node], corpus: Corpus, job: dict[str, Any]) -> Run:
    return Run(nodes[2], corpus, job)


def test_the_run_has_three_epochs_and_a_change_inside(run: Run) -> None:
    epochs = {epoch for _, epoch in run.accounts}
    assert epochs == {0, 1, 2}
    assert CHANGE_AT < run.aware < run.last - 5
    for account in run.accounts.values():
        assert account.taken_in == account.delivered + account.dropped + account.held


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("where", ["change", "middle", "before the end", "end"])
def test_any_cut_goes_on_with_other_partitions_and_another_mesh(
    nodes: dict[int, Node], corpus: Corpus, job: dict[str, Any], run: Run, workers: int, where: str
) -> None:
    cut = {
        "change": run.aware,
        "middle": (run.aware + run.last) // 2,
        "before the end": run.last - 1,
        "end": run.last,
    }[where]
    mesh = {"dp": 3 if workers == 1 else 4}
    if cut == run.last:
        states: list[Any] = []
        run_ranks(
            nodes[workers], job, mesh, None, state=run.ledger.state(cut),
            read_step=lambda _data, step: pytest.fail(f"step {step.number} is one too many"),
            at_end=lambda data: states.append(data.train.state_dict()),
        )  # fmt: skip
        assert states == [run.ledger.state(cut)] * mesh["dp"]
        return
    later = read_ledger(nodes[workers], corpus, job, mesh, None, state=run.ledger.state(cut))
    assert later.steps == list(range(cut, run.last))
    later.check_equals(run.wanted)
    assert (run.ledger.upto(cut) + later).settle(job, run.sources) == run.accounts
    assert later.states == {s: state for s, state in run.ledger.states.items() if s > cut}


@pytest.mark.parametrize("cut", [0, 1])
def test_a_cut_at_the_beginning_goes_on_without_the_change(
    nodes: dict[int, Node], corpus: Corpus, job: dict[str, Any], run: Run, cut: int
) -> None:
    """Its state does not know of the change, as documented: the stream is the one without it."""
    wanted = {s.number: rows_of(s.rows) for s in Oracle(job, run.sources).steps(run.aware + 6)}
    if cut:
        state = run.ledger.state(cut)
    else:
        with nodes[4].connect(job, {"dp": 1}, 0) as data:
            state = data.train.state_dict()
        assert StreamState.decode(state["msd"]).step == 0
    later = read_ledger(nodes[4], corpus, job, {"dp": 6}, run.aware + 6 - cut, state=state)
    later.check_equals(wanted)
    assert later.steps[0] == cut


def test_five_restores_in_a_row_with_and_without_steps_between(
    nodes: dict[int, Node], corpus: Corpus, job: dict[str, Any], run: Run
) -> None:
    ledger = run.ledger.upto(run.aware)
    plan = itertools.cycle([(1, 1, 3), (4, 2, 0), (2, 6, 1), (1, 3, 0), (4, 4, 5)])
    for workers, dp, steps in itertools.islice(plan, 7):
        state = ledger.state(max(ledger.states))
        if steps:
            ledger += read_ledger(nodes[workers], corpus, job, {"dp": dp}, steps, state=state)
            continue
        saved: list[Any] = []

        def save(data: Data, state: Any = state, saved: list[Any] = saved) -> None:
            data.train.load_state_dict(state)
            data.train.load_state_dict(data.train.state_dict())
            saved.append(data.train.state_dict())

        run_ranks(nodes[workers], job, {"dp": dp}, 0, read_step=note_none, at_end=save)
        assert saved == [state] * dp
    assert ledger.steps[-1] > run.aware + 9
    ledger.check_equals(run.wanted)
    assert {step: run.ledger.states[step] for step in ledger.states} == ledger.states


def note_none(_data: Data, step: Any) -> None:
    pytest.fail(f"step {step.number} was not asked for")


def before(data: Data, load: Callable[[], None]) -> None:
    load()


def after_steps(data: Data, load: Callable[[], None]) -> None:
    for _ in itertools.islice(data.train, 3):
        pass
    load()


def in_a_step(data: Data, load: Callable[[], None]) -> None:
    for step in data.train:
        next(iter(step))
        load()
        return


def after_the_end(data: Data, load: Callable[[], None]) -> None:
    for _ in data.train:
        pass
    load()


@pytest.mark.parametrize("act", [before, after_steps, in_a_step, after_the_end])
def test_a_state_loaded_before_after_or_instead_of_iteration(
    nodes: dict[int, Node], corpus: Corpus, job: dict[str, Any], run: Run, act: Any
) -> None:
    cut = run.aware + 2
    parts = [Ledger(corpus) for _ in range(2)]

    def read(data: Data) -> None:
        act(data, lambda: data.train.load_state_dict(run.ledger.state(cut)))
        assert data.train.state_dict() == run.ledger.state(cut)
        for step in itertools.islice(data.train, 4):
            note(parts[data.rank], data, step)

    run_ranks(nodes[2], job, {"dp": 2}, 0, read_step=note_none, at_end=read)
    assert parts[0].states == parts[1].states
    parts[0].given += parts[1].given
    assert parts[0].steps == [cut, cut + 1, cut + 2, cut + 3]
    parts[0].check_equals(run.wanted)
    assert parts[0].states == {s: run.ledger.states[s] for s in range(cut + 1, cut + 5)}


# ---- refusals ------------------------------------------------------------------------------------


def test_ranks_with_different_states_are_refused_and_named(
    nodes: dict[int, Node], job: dict[str, Any], run: Run
) -> None:
    errors: dict[int, BaseException] = {}

    def read(data: Data) -> None:
        data.train.load_state_dict(run.ledger.state(9 if data.rank == 2 else 10))
        try:
            next(iter(data.train))
        except StateMismatchError as error:
            errors[data.rank] = error
        data.train.load_state_dict(run.ledger.state(10))
        assert next(iter(data.train)).number == 10

    run_ranks(nodes[2], job, {"dp": 3}, 0, read_step=note_none, at_end=read)
    assert set(errors) == {0, 1, 2}
    assert all("ranks [2]" in str(error) for error in errors.values())


def test_four_ranks_that_become_five_are_refused_with_the_numbers(
    nodes: dict[int, Node], job: dict[str, Any], run: Run
) -> None:
    with pytest.raises(MeshMismatchError, match=r"12.*5|5.*12"):
        nodes[2].connect(job, {"dp": 5}, 0)


def test_a_state_that_is_none_is_refused_and_changes_nothing(
    nodes: dict[int, Node], job: dict[str, Any], run: Run
) -> None:
    whole = run.ledger.state(8)["msd"]
    with nodes[2].connect({**job, "seed": 6}, {"dp": 1}, 0) as other:
        foreign = other.train.state_dict()
    wrongs: dict[str, dict[str, bytes]] = {
        "cut": {"msd": whole[:-1]},
        "flipped": {"msd": whole[:99] + bytes([whole[99] ^ 4]) + whole[100:]},
        "empty": {"msd": b""},
        "no key": {},
        "another job": foreign,
    }
    with nodes[2].connect(job, {"dp": 1}, 0) as data:
        data.train.load_state_dict(run.ledger.state(8))
        for what, wrong in wrongs.items():
            with pytest.raises(StateMismatchError):
                data.train.load_state_dict(wrong)
            assert data.train.state_dict() == run.ledger.state(8), what
        assert next(iter(data.train)).number == 8


def test_a_planner_that_stood_still_says_nothing_to_the_next_run(
    tmp_path: Path, job: dict[str, Any], corpus: Corpus
) -> None:
    """What it was told of the run before it stopped it answers later: under that run's number."""
    whole: dict[int, list[bytes]] = {
        step.number: rows_of(step.rows)
        for step in Oracle(job, corpus.oracle_sources(**SHUFFLE, token_bytes=4)).steps(30)
    }
    with running_node(tmp_path / "n") as node:
        planner: Any = None
        state: dict[str, bytes] = {}

        def act(data: Data, step: Any) -> None:
            nonlocal planner
            if step.number == 5 and data.rank == 0:
                state.update(data.train.state_dict())
                planner = node.child("msd-planner")
                planner.send_signal(signal.SIGSTOP)

        read_ledger(node, corpus, job, {"dp": 1}, 8, on_step=act)
        wait_until(lambda: not node.request("jobs")["jobs"], "the job to end")
        assert planner is not None

        def go_on() -> None:
            wait_until(lambda: bool(node.request("jobs")["jobs"]), "a rank to come back")
            planner.send_signal(signal.SIGCONT)

        thread = threading.Thread(target=go_on)
        thread.start()
        again = read_ledger(node, corpus, job, {"dp": 1}, 20, state=state)
        thread.join()
        again.check_equals({step: rows for step, rows in whole.items() if 6 <= step < 26})
