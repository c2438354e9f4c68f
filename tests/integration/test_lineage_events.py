"""Lineage, verify and find of streams that were steered: mixes, skips, rewinds, events played back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import msd_daemon
from tests.support.ledger import Ledger, read_ledger
from tests.support.ledger_case import Case, large_and_little
from tests.support.node import Node, running_node, wait_until
from tests.support.told import Documents, given_pieces, run_msdctl, told_pieces

pytestmark = pytest.mark.processes

WEIGHTS = {"large": 1.0, "little": 4.0}


@pytest.fixture(scope="module")
def node(tmp_path_factory: Any) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n")) as running:
        yield running


@pytest.fixture(scope="module")
def case(tmp_path_factory: Any) -> Case:
    return large_and_little(tmp_path_factory.mktemp("steered"))


def run(node: Node, case: Case, name: str, steps: int, **options: Any) -> Ledger:
    return read_ledger(node, case.corpus, case.job | {"name": name}, {"dp": 2}, steps, **options)


def check_told(node: Node, case: Case, name: str, ledger: Ledger, generation: int) -> None:
    """Compare the lineage of every step of a generation with what its ranks were given."""
    documents = Documents(case.corpus.oracle_sources())
    for step in ledger.steps:
        told = msd_daemon.lineage(name, step, generation=generation, state_dir=state_dir(node))
        rows = [
            {name: getattr(row, name) for name in row.__dataclass_fields__} for row in told.rows
        ]
        own = [one for one in ledger.given if one.step == step]
        assert told_pieces(rows, documents) == given_pieces(own, case.corpus), (step, generation)


def state_dir(node: Node) -> Path:
    return node.folder / "state"


def verify(capsys: Any, node: Node, name: str, ledger: Ledger, generation: int) -> None:
    steps = f"{ledger.steps[0]}:{ledger.steps[-1] + 1}"
    code, found, _ = run_msdctl(
        capsys, "verify", name, "--steps", steps, "--generation", generation, "--state-dir",
        state_dir(node),
    )  # fmt: skip
    assert code == 0, found
    assert found["verified"] == len(ledger.steps)


def test_a_steered_run_and_what_came_again_of_it(node: Node, case: Case, capsys: Any) -> None:
    def act(data: Any, step: Any) -> None:
        if step.number == 2 and data.rank == 0:
            data.set_mixture(WEIGHTS, at=18)
            data.skip_steps(14, 16)

    parts = [run(node, case, "steered", 24, on_step=act)]
    # From a state that knows of neither: both hold again. Then without them.
    parts.append(run(node, case, "steered", 24, state=parts[0].state(1)))
    forgetful = {"state": parts[0].state(1), "forget_events_after": 17}
    parts.append(run(node, case, "steered", 22, **forgetful))
    assert parts[1].rows()[22] == parts[0].rows()[22] != parts[2].rows()[22]
    wait_until(node.is_at_rest, node.holdings)
    for generation, ledger in enumerate(parts, 1):
        check_told(node, case, "steered", ledger, generation)
        verify(capsys, node, "steered", ledger, generation)
    told = msd_daemon.lineage("steered", 20, generation=1, state_dir=state_dir(node))
    assert (told.step, told.plan_step) == (20, 22)


def test_a_rewind_that_skips_begins_with_steps_left_out(
    node: Node, case: Case, capsys: Any
) -> None:
    first = run(node, case, "spike", 20)
    wait_until(node.is_at_rest, node.holdings)
    code, told, _ = run_msdctl(
        capsys, "rewind", "spike", "--to", 10, "--skip", "10:12", "--socket", node.socket
    )
    assert code == 0, told
    again = run(node, case, "spike", 8, state=first.state(10))
    wanted = case.wanted(24)
    assert again.rows() == {step: wanted[step + 2] for step in range(10, 18)}
    for generation, ledger in ((1, first), (2, again)):
        check_told(node, case, "spike", ledger, generation)
        verify(capsys, node, "spike", ledger, generation)


def test_a_record_of_a_step_that_was_left_out_says_so(node: Node, case: Case) -> None:
    whole = run(node, case, "whole", 20)

    def act(data: Any, step: Any) -> None:
        if step.number == 2 and data.rank == 0:
            data.skip_steps(15, 16)

    run(node, case, "hole", 19, on_step=act)
    told = msd_daemon.lineage("whole", 15, state_dir=state_dir(node))
    rows = [row for row in told.rows if row.source == "little"][:12]
    assert whole.steps[-1] == 19
    fates = set()
    for row in rows:
        key = f"{Path(row.shard).name}:{row.place}"
        found = msd_daemon.find("hole", "little", key, state_dir=state_dir(node))
        one = next(one for one in found.occurrences if one.epoch == row.epoch)
        assert not any(delivered.plan_step == 15 for delivered in one.deliveries)
        fates.add((one.fate, one.reason))
    assert fates == {("dropped", "skipped")}
