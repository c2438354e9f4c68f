"""A generation whose journal can't be written, turns out damaged, or is rewound."""

from __future__ import annotations

import pytest

from federation.messages import JournalStalled, PlansMade, SkipAccepted
from federation.model.job import BatchRule
from msd_client.contract.errors import (
    ConfigError,
    JournalUnavailableError,
    StateMismatchError,
)
from tests.support.metadata import initial_state, make_job, make_spec, random_corpus
from tests.support.planned_job import PlannedJob


def a_job(folder, place=None):
    specs = [make_spec("a", 3), make_spec("b", 2)]
    corpora = [random_corpus(spec, 5, lambda rng: rng.randint(1, 20), 3, 12) for spec in specs]
    planned = PlannedJob(folder, make_job(specs, BatchRule(2, 16)), corpora, place)
    planned.begin(initial_state(planned.job))
    return planned


@pytest.fixture
def in_file(tmp_path):
    planned = a_job(tmp_path)
    yield planned
    planned.close()


@pytest.fixture
def planned(places, tmp_path):
    planned = a_job(tmp_path, places.make(tmp_path))
    yield planned
    planned.close()


def plans_told(planned):
    return sum(len(it.headers) for it in planned.told if isinstance(it, PlansMade))


def fill_disk(planned):
    """Leave the journal's file no page to grow by."""
    db = planned.planning._journal.file._db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count={pages}")
    return db


def read_until_stalled(planned):
    while not planned.planning.stalled:
        if planned.plans:
            planned.read()
        else:
            planned.planning.advance()


def test_plans_wait_for_a_full_disk_and_then_go_out_as_they_were(in_file, tmp_path):
    planned = in_file
    db = fill_disk(planned)
    read_until_stalled(planned)
    told = plans_told(planned)
    for _ in range(5):
        planned.planning.advance()
    assert plans_told(planned) == told  # none leaves before it is durable
    stalls = [it.reason for it in planned.told if isinstance(it, JournalStalled)]
    assert len(stalls) == 1
    assert "make room on its disk" in stalls[0]
    before = planned.planning._planner.state().encode()
    db.execute("PRAGMA query_only=1")  # an event is small: the last page may have room for it
    with pytest.raises(JournalUnavailableError):
        planned.change_mixture({"a": 1.0, "b": 3.0}, planned.state.step + 30)
    with pytest.raises(JournalUnavailableError):
        planned.skip(planned.state.step + 30, planned.state.step + 32)
    assert planned.planning._planner.state().encode() == before  # refused, and not in force
    db.execute("PRAGMA query_only=0")
    db.execute("PRAGMA max_page_count=1000000")
    found = [planned.read().stream_digest for _ in range(30)]
    assert planned.last(JournalStalled).reason == ""
    other = PlannedJob(tmp_path / "other", planned.job, planned._corpora)
    other.begin(initial_state(planned.job))
    wanted = [other.read().stream_digest for _ in range(planned.state.step)]
    other.close()
    assert wanted[-30:] == found


def test_a_journal_that_is_damaged_while_it_runs_is_replaced(in_file, caplog):
    planned = in_file
    planned.read()
    planned.skip(30, 33)
    for _ in range(6):
        planned.read()
    planned.planning._journal.file._db.execute("DROP TABLE steps")
    plans = [planned.read().plan_step for _ in range(30)]
    assert plans == [*range(7, 30), *range(33, 40)]
    assert "a new journal begins" in caplog.text
    assert planned.path.with_name("journal.db.damaged-1").exists()
    planned.take_over()  # the new one is as good
    assert planned.read().plan_step == 40
    planned.planning.close()
    planned.begin(initial_state(planned.job))  # begun anew, it is another stream
    assert [planned.read().plan_step for _ in range(33)] == list(range(33))


def test_a_rewind_is_refused_beyond_what_is_planned_and_for_skips_before_it(planned):
    for _ in range(5):
        planned.read()
    with pytest.raises(ConfigError, match="a rewind to step 90: the job has planned up to"):
        planned.rewind(90)
    with pytest.raises(ConfigError, match="lies before step 4"):
        planned.rewind(4, (3, 5))
    with pytest.raises(ConfigError, match="would wait to be left out, at most"):
        planned.rewind(4, (5, 50_000))
    planned.rewind(4, (4, 6))
    told = plans_told(planned)
    planned.planning.advance()
    assert plans_told(planned) == told


def test_a_state_of_the_line_that_was_left_is_refused_until_the_rewind_is_taken_back(planned):
    states = [planned.state]
    for _ in range(9):
        planned.read()
        states.append(planned.state)
    planned.rewind(4, (4, 6))
    planned.close()
    with pytest.raises(StateMismatchError, match="rewound to step 4") as caught:
        planned.begin(states[5])
    assert caught.value.attributes["limit"] == 4
    planned.begin(states[4])
    assert [planned.read().plan_step for _ in range(4)] == [6, 7, 8, 9]
    new_line = planned.state
    planned.close()
    planned.begin(new_line)  # it knows of the rewind
    assert planned.read().plan_step == 10


def test_skips_that_are_too_late_or_too_long_are_refused_with_what_is_possible(planned):
    for _ in range(6):
        planned.read()
    with pytest.raises(ConfigError, match="too late, the first possible one is") as caught:
        planned.skip(2, 9)
    limit = int(caught.value.attributes["limit"])
    assert 7 <= limit <= 11
    assert f"write {limit}:" in caught.value.message
    with pytest.raises(ConfigError, match="holds none"):
        planned.skip(19, 19)
    with pytest.raises(ConfigError, match="10001 steps would wait"):
        planned.skip(19, 10_020)
    planned.skip(19, 22)
    planned.skip(30, 32)
    assert planned.last(SkipAccepted).step == 27  # the trainer's number


def test_a_change_at_a_step_of_the_trainer_holds_at_its_content(planned):
    planned.read()
    planned.skip(8, 12)
    assert planned.change_mixture({"a": 1.0, "b": 3.0}, 20) == 24
    plans = {}
    for _ in range(25):
        plan = planned.read()
        plans[plan.step] = plan.wanted_shares.tolist()
    assert plans[19] == [0.5, 0.5]
    assert plans[20] == [0.25, 0.75]


def differing(caplog):
    return [it for it in caplog.records if "comes out otherwise" in it.getMessage()]


def test_steps_behind_an_event_of_their_own_are_not_compared_with_former_ones(planned, caplog):
    states = [planned.state]
    for _ in range(14):
        planned.read()
        states.append(planned.state)
    planned.rewind(4, (6, 8))
    planned.close()
    planned.begin(states[4])
    assert [planned.read().plan_step for _ in range(6)] == [4, 5, 8, 9, 10, 11]
    planned.close()
    planned.begin(initial_state(planned.job))
    for _ in range(2):
        planned.read()
    planned.change_mixture({"a": 1.0, "b": 5.0}, 11)
    planned.skip(9, 10)
    for _ in range(12):
        planned.read()
    assert not differing(caplog)


def test_a_change_that_was_dropped_since_is_no_difference_of_the_content(planned, caplog):
    planned.change_mixture({"a": 1.0, "b": 5.0}, 9)
    while not planned.state.event_number:
        planned.read()
    state = planned.state
    assert state.pending_steps.tolist() == [9]
    for _ in range(10):
        planned.read()
    planned.close()
    planned.begin(state, forget_after=0)
    for _ in range(10):
        planned.read()
    assert planned.state.pending_steps.tolist() == []
    assert not differing(caplog)


@pytest.mark.parametrize("first", [5, 11])
def test_content_that_differs_before_an_event_is_told(planned, caplog, first):
    for _ in range(10):
        planned.read()
    planned.close()
    planned.begin(initial_state(planned.job))
    planned.skip(first, first + 2)
    digests = planned.planning._former_digests
    assert digests.keys() >= set(range(8))
    digests[7] = "00" * 32
    for _ in range(10):
        planned.read()
    assert len(differing(caplog)) == (first > 7)
