"""The journal of a job, over several generations and runs."""

from __future__ import annotations

import pytest

from federation.journal import GENERATIONS_KEPT, StepRecord
from msd_client.contract.errors import ResourceError


@pytest.fixture
def place(places, tmp_path):
    return places.make(tmp_path).place


@pytest.fixture
def journal(place):
    journal = place.open(100_000)
    yield journal
    journal.close()


def record(step, delta=b"d"):
    return StepRecord(step, delta, f"{step:032x}")


def test_steps_and_snapshots_come_back_in_order(journal):
    generation = journal.open_generation(5, b"five")
    journal.append_steps(generation, 0, [record(5), record(6)], None)
    journal.append_steps(generation, 0, [record(7)], (8, b"eight"))
    assert journal.last_snapshot(generation, 8) == (8, b"eight")
    assert journal.last_snapshot(generation, 7) == (5, b"five")
    assert [step.step for step in journal.steps_after(generation, 6)] == [6, 7]


def test_generations_number_on_over_the_runs_of_a_job(place):
    numbers = []
    for run in range(3):
        journal = place.open(100_000)
        numbers.append(journal.open_generation(0, b"zero"))
        journal.append_steps(numbers[-1], 0, [record(0, b"%d" % run), record(1)], None)
        journal.append_event(numbers[-1], 1, "mixture", b"%d" % run)
        assert journal.steps_after(numbers[-1], 0) == [record(0, b"%d" % run), record(1)]
        assert [event.body for event in journal.events(numbers[-1])] == [b"%d" % run]
        journal.close()
    assert numbers == [1, 2, 3]


def test_the_last_few_generations_are_kept(journal):
    for _ in range(GENERATIONS_KEPT + 2):
        generation = journal.open_generation(0, b"zero")
        journal.append_steps(generation, 0, [record(0)], None)
    assert journal.last_generation() == generation
    kept = [number for number in range(1, generation + 1) if journal.steps_after(number, 0)]
    assert kept == list(range(3, generation + 1))
    assert [
        number for number in range(1, generation + 1) if journal.last_snapshot(number, 9)
    ] == kept


def test_a_step_is_written_once(journal):
    generation = journal.open_generation(0, b"zero")
    journal.append_steps(generation, 0, [record(0)], None)
    with pytest.raises(ResourceError, match="journal"):
        journal.append_steps(generation, 0, [record(1), record(0)], None)
    assert journal.steps_after(generation, 0) == [record(0)]


def test_steps_that_nobody_received_are_dropped_with_later_snapshots(journal):
    generation = journal.open_generation(0, b"zero", known_events=4)
    journal.append_steps(generation, 0, [record(0), record(1), record(2)], (3, b"three"))
    journal.drop_steps(generation, 2)
    assert [step.step for step in journal.steps_after(generation, 0)] == [0, 1]
    assert journal.last_snapshot(generation, 9) == (0, b"zero")
    assert journal.first_snapshot(generation) == 0
