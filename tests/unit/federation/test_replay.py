"""States restored from journals, and what of them is kept."""

from __future__ import annotations

import pytest

from federation.journal import SNAPSHOT_EVERY_STEPS, Journal, StepRecord
from federation.journal_events import EventRecord
from federation.model.job import BatchRule
from federation.replay import events_unknown_to, holding_generation, restore_state
from msd_client.contract.errors import NotFoundError, StateMismatchError
from msd_client.contract.state import StreamState
from tests.support.metadata import Feed, make_job, make_spec, random_corpus, start


@pytest.fixture
def known(places, tmp_path):
    return places.make(tmp_path)


def planned_journal(known, steps, *, steps_kept=8_000, skip=None):
    """Return a journal of a small job's steps, and the states before each of them."""
    spec = make_spec("a", 3)
    job = make_job([spec], BatchRule(2, 16))
    planner = start(job)
    if skip is not None:
        planner.skip_steps(*skip)
    feed = Feed(planner, [random_corpus(spec, 3, lambda rng: rng.randint(1, 9), 3, 12)])
    journal = known.place.open(steps_kept)
    states = {0: planner.state().encode()}
    generation = journal.open_generation(0, states[0])
    for step in range(steps):
        plan = feed.step()
        states[step + 1] = planner.state().encode()
        is_due = (step + 1) % SNAPSHOT_EVERY_STEPS == 0
        journal.append_steps(
            generation,
            1,
            [StepRecord(step, plan.delta.encode(), plan.stream_digest)],
            (step + 1, states[step + 1]) if is_due else None,
        )
    return journal, states


def test_any_kept_step_is_restored_from_a_snapshot_near_it(known):
    journal, states = planned_journal(known, 700, skip=(255, 259))
    for step in (0, 1, 255, 256, 257, 511, 512, 699, 700):
        assert restore_state(journal, step).encode() == states[step]
        snapshot = journal.last_snapshot(1, step)
        assert step - snapshot[0] < SNAPSHOT_EVERY_STEPS
    with pytest.raises(
        NotFoundError, match="does not hold step 701: it holds generation 1 0 to 700"
    ):
        restore_state(journal, 701)
    journal.close()
    read = Journal(known.path, is_read_only=True)
    assert restore_state(read, 300).encode() == states[300]
    read.close()


def test_what_is_kept_is_bounded_and_begins_with_a_snapshot(known):
    journal, states = planned_journal(known, 1400, steps_kept=300)
    kept = [step.step for step in journal.steps_after(1, 0)]
    assert kept[0] % SNAPSHOT_EVERY_STEPS == 0
    assert 300 <= 1400 - kept[0] <= 300 + 2 * SNAPSHOT_EVERY_STEPS
    (snapshots,) = journal._db.execute("SELECT count(*) FROM snapshots").fetchone()
    assert snapshots <= 4
    assert restore_state(journal, kept[0]).encode() == states[kept[0]]
    with pytest.raises(NotFoundError, match=f"generation 1 {kept[0]} to 1400"):
        restore_state(journal, kept[0] - 1)
    journal.close()


def test_the_newest_generation_that_holds_a_step_has_it(known):
    journal, states = planned_journal(known, 20)
    second = journal.open_generation(10, states[10])
    assert holding_generation(journal, 10) == second
    assert holding_generation(journal, 11) == 1
    deltas = journal.steps_between(1, 10, 15)
    journal.append_steps(second, 2, deltas, None)
    assert [holding_generation(journal, step) for step in (9, 10, 15, 16, 20)] == [1, 2, 2, 1, 1]
    assert restore_state(journal, 12, 1).encode() == restore_state(journal, 12).encode()
    journal.close()


def test_events_are_known_by_their_numbers_over_generations_and_journals(known):
    journal, _ = planned_journal(known, 3)
    # A journal that was begun from a state with five events behind it: another cluster's.
    generation = journal.open_generation(3, b"s", known_events=5)
    for number, step in ((6, 10), (7, 20)):
        journal.append_event(generation, step, "mixture", b"%d" % number, number)
    journal.append_event(generation, 9, "calibration", b"c")
    assert [event.event_number for event in journal.events_table.after(5)] == [6, 7]
    assert [event.event_number for event in journal.events_table.after(6)] == [7]
    assert journal.events_table.last_number() == 7
    with journal.transaction():
        assert journal.events_table.drop("me", after_step=10, kinds=("mixture",)) == 1
    assert [event.step for event in journal.events_table.after(0)] == [10]
    assert journal.events_table.last_number() == 7  # a number is never given twice
    assert len(journal.events(generation)) == 3
    with journal.transaction():
        assert journal.events_table.end_stream() == 1
    assert journal.events_table.last_number() == 0
    journal.close()


def test_events_are_let_go_once_every_kept_state_knows_them(known, monkeypatch):
    monkeypatch.setattr("federation.journal_events.EVENTS_KEPT", 10)
    journal, states = planned_journal(known, 1)
    with journal.transaction():
        for number in range(1, 41):
            journal.events_table.append(1, number, "hook", b"", number)
    journal.open_generation(1, states[1], 35)
    assert len(journal.events_table.after(0)) == 40  # the first generation's state knows of none
    for _ in range(8):
        generation = journal.open_generation(1, states[1], 35)
        journal.append_steps(generation, 1, [StepRecord(1, b"d", "")], None)
    journal.open_generation(1, states[1], 35)
    left = journal.events_table.after(0)
    assert [event.event_number for event in left] == list(range(31, 41))
    assert isinstance(left[0], EventRecord)
    state = StreamState.decode(states[1])
    with pytest.raises(StateMismatchError, match="those up to 30 are not kept"):
        events_unknown_to(journal, state)
    journal.close()


def test_runs_that_end_before_their_first_step_push_no_steps_out(known):
    journal, states = planned_journal(known, 9)
    numbers = [journal.open_generation(4, states[4]) for _ in range(30)]
    assert numbers == list(range(2, 32))
    assert [number for number, _ in journal.generations()] == [31, 1]
    assert restore_state(journal, 9).encode() == states[9]
    journal.close()
