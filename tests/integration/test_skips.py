"""Skips and rewinds of running jobs: the ledger equals the oracle with those steps cut out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import (
    ConfigError,
    NotFoundError,
    StateMismatchError,
    StreamRewoundError,
)
from msd_client.contract.state import SKIPPED_TOKENS, StreamState
from tests.support.ledger import Ledger, read_ledger
from tests.support.ledger_case import Case, large_and_little
from tests.support.node import Node, running_node, wait_until

pytestmark = pytest.mark.processes

WEIGHTS = {"large": 1.0, "little": 4.0}


@pytest.fixture(scope="module")
def case(tmp_path_factory: Any) -> Case:
    return large_and_little(tmp_path_factory.mktemp("skips"))


def named(case: Case, name: str) -> Case:
    """Return the case under another name: a job, and a journal, of its own."""
    return Case(case.corpus, case.job | {"name": name}, case.sources)


def without(
    wanted: dict[int, list[bytes]], *runs: tuple[int, int], begin: int = 0
) -> dict[int, list[bytes]]:
    """Return the content of plan steps by the trainer's step, runs of them cut out."""
    left_out = {step for first, end in runs for step in range(first, end)}
    kept = [step for step in sorted(wanted) if step not in left_out]
    return {number: wanted[step] for number, step in enumerate(kept, begin)}


def run_msdctl_of(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "msd_client.msdctl.main", *arguments, "--json",
         "--socket", str(node.socket)],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def msdctl(node: Node, *arguments: str) -> dict[str, Any]:
    done = run_msdctl_of(node, *arguments)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_live_skip_cuts_its_steps_out_on_every_rank(start_node: Any, case: Case) -> None:
    case = named(case, "live")
    node: Node = start_node()
    wanted = case.wanted(48)
    answers: list[Any] = []
    refused: list[ConfigError] = []

    def act(data: Any, step: Any) -> None:
        if data.rank == 0 and step.number == 3:
            answers.append(msdctl(node, "skip", "live", "--steps", "20:26"))
            (job,) = node.request("status", job="live")["jobs"]
            assert (job["waiting_skips"], job["waiting_mixtures"]) == ([[20, 26]], [])
            answers.append(data.skip_steps(30, 32))
            with pytest.raises(ConfigError, match="too late") as caught:
                data.skip_steps(1, 30)
            refused.append(caught.value)
        if step.number >= 20:
            assert step.plan_step == step.number + (6 if step.number < 24 else 8)

    ledger = read_ledger(node, case.corpus, case.job, {"dp": 2}, 40, on_step=act)
    assert answers[0]["step"] == 20
    assert answers[1] == 24
    assert 4 <= int(refused[0].attributes["limit"] or 0) <= 14
    ledger.check_equals(without(wanted, (20, 26), (30, 32)))
    state = ledger.last_state
    assert (state.step, state.plan_step, len(state.pending_skips)) == (40, 48, 0)
    assert state.dropped[SKIPPED_TOKENS].sum() > 0
    # A state of before, that knows of it, brings the skip to a cluster of its own, on other meshes.
    known = StreamState.decode(ledger.states[19])
    assert known.pending_skips.tolist() == [[20, 26], [30, 32]]
    other = read_ledger(start_node(), case.corpus, case.job, {"dp": 4}, 21, state=ledger.state(19))
    assert other.rows() == {step: rows for step, rows in ledger.rows().items() if step >= 19}
    assert other.states[40] == ledger.states[40]


def test_states_of_skipped_streams_are_the_planners_own(start_node: Any, case: Case) -> None:
    case = named(case, "own")

    def act(data: Any, step: Any) -> None:
        if step.number == 2:
            data.skip_steps(14, 90)  # longer than what is read ahead, and than a horizon

    ledger = read_ledger(start_node(), case.corpus, case.job, {"dp": 1}, 70, on_step=act)
    ledger.check_equals(without(case.wanted(146), (14, 90)))
    again = read_ledger(start_node(), case.corpus, case.job, {"dp": 2}, 20, state=ledger.state(50))
    assert again.states[70] == ledger.states[70]


@pytest.mark.parametrize("who", ["planner", "loader"])
def test_a_death_around_a_skip_changes_nothing(start_node: Any, case: Case, who: str) -> None:
    case = named(case, f"death-{who}")
    node: Node = start_node()

    def act(data: Any, step: Any) -> None:
        if step.number == 3:
            data.skip_steps(16, 60)
            node.child(f"msd-{who}").kill()
        if step.number in (8, 13):
            node.child(f"msd-{who}").kill()

    ledger = read_ledger(node, case.corpus, case.job, {"dp": 1}, 50, on_step=act)
    ledger.check_equals(without(case.wanted(94), (16, 60)))


def test_a_daemon_killed_behind_a_skip_plays_it_back(tmp_path: Path, case: Case) -> None:
    case = named(case, "killed")
    parts: list[Ledger] = []
    with running_node(tmp_path / "node") as node:

        def act(data: Any, step: Any) -> None:
            if step.number == 5:
                data.skip_steps(20, 24)

        parts.append(read_ledger(node, case.corpus, case.job, {"dp": 1}, 8, on_step=act))
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait(20)
    state = StreamState.decode(parts[0].states[3])
    assert not len(state.pending_skips)  # older than the skip
    with running_node(tmp_path / "node") as node:
        again = read_ledger(node, case.corpus, case.job, {"dp": 2}, 30, state=parts[0].state(3))
        wait_until(lambda: "hold again" in node.log, "the log to say so")
    wanted = without(case.wanted(40), (20, 24))
    again.check_equals(wanted)
    assert again.steps == list(range(3, 33))


def test_older_states_play_events_back_at_their_steps(start_node: Any, case: Case) -> None:
    case = named(case, "older")
    node: Node = start_node()

    def act(data: Any, step: Any) -> None:
        if step.number == 2:
            assert data.set_mixture(WEIGHTS, at=24) == 24
            data.skip_steps(16, 18)

    first = read_ledger(node, case.corpus, case.job, {"dp": 2}, 40, on_step=act)
    wanted = without(case.wanted(44, {24: WEIGHTS}), (16, 18))
    first.check_equals(wanted)
    again = read_ledger(node, case.corpus, case.job, {"dp": 1}, 39, state=first.state(1))
    again.check_equals(wanted)
    assert again.states[40] == first.states[40]
    # A third time, from a state of the second: nothing is applied twice.
    third = read_ledger(node, case.corpus, case.job, {"dp": 1}, 20, state=again.state(10))
    assert third.states[30] == first.states[30]
    forgetful = read_ledger(
        node, case.corpus, case.job, {"dp": 1}, 30, state=first.state(1), forget_events_after=20
    )
    forgetful.check_equals(without(case.wanted(40), (16, 18)))
    after = read_ledger(node, case.corpus, case.job, {"dp": 1}, 10, state=forgetful.state(20))
    after.check_equals(without(case.wanted(40), (16, 18)))


def test_a_fork_knows_nothing_of_its_parents_journal(start_node: Any, case: Case) -> None:
    parent, child = named(case, "parent"), named(case, "child")
    node: Node = start_node()

    def act(data: Any, step: Any) -> None:
        if step.number == 12:
            data.skip_steps(28, 30)

    first = read_ledger(node, parent.corpus, parent.job, {"dp": 1}, 30, on_step=act)
    assert not len(StreamState.decode(first.states[10]).pending_skips)
    forked = read_ledger(node, child.corpus, child.job, {"dp": 2}, 30, state=first.state(10))
    forked.check_equals(parent.wanted(42))
    wait_until(node.is_at_rest, node.holdings)


def test_a_rewind_ends_the_generation_and_the_next_one_goes_around(
    start_node: Any, case: Case, tmp_path: Path
) -> None:
    case = named(case, "spike")
    node: Node = start_node()
    state_file = tmp_path / "data.state"
    told: list[StreamRewoundError] = []

    def act(data: Any, step: Any) -> None:
        if step.number == 30 and data.rank == 0:
            refused = run_msdctl_of(
                node, "rewind", "spike", "--to", "20", "--state", str(tmp_path / "no" / "file")
            )
            assert refused.returncode == 1
            assert "nothing was rewound" in refused.stderr
            assert node.request("status", job="spike")["jobs"][0]["generation"] == 1
            answer = msdctl(
                node, "rewind", "spike", "--to", "20", "--skip", "24:28", "--state", str(state_file)
            )
            assert answer["step"] == 20
            assert answer["was_running"]

    ledger = Ledger(case.corpus)
    with pytest.raises(StreamRewoundError) as caught:
        ledger = read_ledger(node, case.corpus, case.job, {"dp": 2}, 60, on_step=act)
    told.append(caught.value)
    assert told[0].attributes["step"] == 20
    assert not ledger.given
    state = {"msd": state_file.read_bytes()}
    again = read_ledger(node, case.corpus, case.job, {"dp": 4}, 30, state=state)
    again.check_equals(without(case.wanted(60), (24, 28)))
    assert again.steps[0] == 20
    # What lies behind the step on the line that was left is refused; of the new line it is not.
    wait_until(node.is_at_rest, node.holdings)
    old = read_ledger(start_node(), case.corpus, case.job, {"dp": 1}, 30)
    with pytest.raises(StateMismatchError, match="rewound to step 20"):
        read_ledger(node, case.corpus, case.job, {"dp": 1}, 3, state=old.state(27))
    later = read_ledger(node, case.corpus, case.job, {"dp": 1}, 3, state=again.state(40))
    later.check_equals(without(case.wanted(60), (24, 28)))
    wait_until(node.is_at_rest, node.holdings)
    assert msdctl(node, "rewind", "spike", "--clear")["cleared"] == 1
    cleared = read_ledger(node, case.corpus, case.job, {"dp": 1}, 3, state=old.state(27))
    cleared.check_equals(case.wanted(40))


def test_a_job_at_rest_is_rewound_too(start_node: Any, case: Case, tmp_path: Path) -> None:
    case = named(case, "rest")
    node: Node = start_node()
    first = read_ledger(node, case.corpus, case.job, {"dp": 1}, 20)
    wait_until(node.is_at_rest, node.holdings)
    with pytest.raises(NotFoundError, match="no job matches"):
        node.request("rewind", job="nobody", to=3)
    with pytest.raises(NotFoundError, match="does not hold step 900"):
        node.request("rewind", job="rest", to=900)
    state_file = tmp_path / "ten"
    only = msdctl(node, "rewind", "rest", "--to", "10", "--state", str(state_file), "--state-only")
    assert only["state_bytes"] == len(state_file.read_bytes())
    assert state_file.read_bytes() == first.states[10]
    rewound = msdctl(node, "rewind", "rest", "--to", "10", "--skip", "12:13")
    assert not rewound["was_running"]
    with pytest.raises(StateMismatchError, match="msdctl rewind JOB --clear"):
        read_ledger(node, case.corpus, case.job, {"dp": 1}, 3, state=first.state(11))
    again = read_ledger(node, case.corpus, case.job, {"dp": 1}, 8, state=first.state(10))
    again.check_equals(without(case.wanted(30), (12, 13)))
