"""The journal of a job, over several generations and runs."""

from __future__ import annotations

import pytest

from federation.journal import Journal, StepRecord
from msd_client.contract.errors import ResourceError


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "jobs" / "a" / "journal.db")
    yield journal
    journal.close()


def record(step, delta=b"d"):
    return StepRecord(step, delta, f"{step:032x}")


def test_steps_and_snapshots_come_back_in_order(journal):
    journal.open_generation(1, 5, b"five")
    journal.append_steps(1, 0, [record(5), record(6)], None)
    journal.append_steps(1, 0, [record(7)], (8, b"eight"))
    assert journal.last_snapshot(1) == (8, b"eight")
    assert [step.step for step in journal.steps_after(1, 6)] == [6, 7]


def test_a_new_generation_leaves_nothing_of_older_ones(journal):
    journal.open_generation(1, 0, b"zero")
    journal.append_steps(1, 0, [record(0)], None)
    journal.open_generation(2, 1, b"one")
    assert journal.steps_after(1, 0) == []
    assert journal.last_snapshot(1) is None
    assert journal.last_snapshot(2) == (1, b"one")
    assert journal.last_generation() == 2


@pytest.mark.parametrize("generations", [1, 3])
def test_a_job_that_runs_again_numbers_its_generations_anew(journal, generations):
    for generation in range(1, generations + 1):
        journal.open_generation(generation, 0, b"zero")
        journal.append_steps(generation, 0, [record(0, b"old"), record(1, b"old")], (2, b"two"))
        journal.append_event(generation, 1, "mixture", b"old")
    journal.open_generation(1, 1, b"one")
    journal.append_steps(1, 0, [record(1, b"new")], None)
    assert journal.steps_after(1, 0) == [record(1, b"new")]
    assert journal.last_snapshot(1) == (1, b"one")
    assert journal.events(1) == []
    assert journal.last_generation() == 1


def test_a_step_is_written_once(journal):
    journal.open_generation(1, 0, b"zero")
    journal.append_steps(1, 0, [record(0)], None)
    with pytest.raises(ResourceError, match="journal"):
        journal.append_steps(1, 0, [record(1), record(0)], None)
    assert journal.steps_after(1, 0) == [record(0)]
