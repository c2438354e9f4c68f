"""Error policies: a budget, one bad record, none; and chats without a trained token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import federation.planning.passed_over as passed_over
from federation.model.chunk import ChunkMeta, RecordStatus
from federation.model.job import ErrorPolicy, SourceSpec
from federation.model.recipe import ChatRule, SampleRecipe
from federation.planning.passed_over import ErrorWindow, PassedOver, note_records
from msd_client.contract.errors import CorruptRecordError, ErrorBudgetExceededError

BAD, OK = int(RecordStatus.BAD_SYNTAX), 0
UNTRAINED, FILTERED = int(RecordStatus.UNTRAINED), int(RecordStatus.FILTERED)
SPEC = SourceSpec("s", "jsonl", "none", "seekable", (), "")


def window(policy: str = "skip", *, faults=(), chats=False, **changes) -> ErrorWindow:
    spec = replace(SPEC, on_error=ErrorPolicy(policy, **changes))
    if chats:
        spec = replace(spec, recipe=SampleRecipe(chat=ChatRule()))
    return ErrorWindow(spec, tuple(faults))


def take(errors: ErrorWindow, statuses, order=0):
    """Return (records that may be used, error) of a run."""
    status = np.array(statuses, np.uint8)
    lengths = np.where(status == 0, 5, 0).astype(np.int32)
    meta = ChunkMeta(0, 0, order, lengths, status, False, 0, fault="/d/a: record at row 3: bad")
    return errors.take(meta, 0, status, order)


@pytest.mark.parametrize(
    ("policy", "used", "error"),
    [
        ("fail", 1, CorruptRecordError),
        ("skip", 2, ErrorBudgetExceededError),
        ("quarantine", 5, None),
    ],
)
def test_what_a_bad_record_costs(policy, used, error):
    errors = window(policy, budget_ratio=0.1, window_records=10)
    found, failure = take(errors, [OK, BAD, BAD, OK, BAD])
    assert found == used
    assert (failure is None) if error is None else type(failure) is error


def test_quarantine_has_no_budget_at_all():
    errors = window("quarantine", budget_ratio=0.0, window_records=10)
    statuses = [BAD, BAD, BAD, OK] * 5000
    for order in range(0, len(statuses), 1000):
        assert take(errors, statuses[order : order + 1000], order) == (1000, None)
    assert errors.held_at(20_000) == []


def test_more_bad_records_than_can_be_listed_fail_where_they_stand(monkeypatch):
    monkeypatch.setattr(passed_over, "LISTED_MAX", 4)
    errors = window("quarantine")
    assert take(errors, [BAD, BAD, OK, BAD, BAD], 0) == (5, None)
    # Plain drops are neither good nor bad.
    assert take(errors, [FILTERED, BAD, BAD, OK], 5) == (4, None)
    used, failure = take(errors, [BAD, BAD, BAD, FILTERED, BAD, BAD], 9)
    assert used == 5
    assert isinstance(failure, ErrorBudgetExceededError)
    assert "source s: epoch 0, window 0, block 0, record 14 is bad_syntax" in failure.message
    assert failure.attributes == {"source": "s", "seen": 5, "limit": 4}


def test_runs_without_any_drop_lie_between_and_are_good(monkeypatch):
    monkeypatch.setattr(passed_over, "LISTED_MAX", 4)
    errors = window("quarantine")
    assert take(errors, [BAD] * 4, 0) == (4, None)
    # Records 4 to 9 were all good: nobody asked about them.
    assert take(errors, [BAD] * 4, 10) == (4, None)
    assert take(errors, [BAD], 14)[0] == 0


def test_one_in_a_hundred_chats_may_be_without_a_trained_token():
    errors = window("skip", chats=True, window_records=200)
    assert take(errors, [UNTRAINED, OK, UNTRAINED, OK], 0) == (4, None)
    # The third within the last 200 records is one too many.
    used, failure = take(errors, [OK] * 10 + [UNTRAINED], 100)
    assert used == 10
    assert isinstance(failure, ErrorBudgetExceededError)
    assert "source s: 3 of its last 200 chats have no trained token, 2 (1 %) may" in failure.message


def test_chats_that_left_the_window_are_forgotten():
    errors = window("skip", chats=True, window_records=200)
    for order in range(0, 2000, 100):
        assert take(errors, [UNTRAINED], order) == (1, None)


@pytest.mark.parametrize("policy", ["skip", "quarantine", "fail"])
def test_the_rule_of_chats_holds_whatever_the_policy(policy):
    errors = window(policy, chats=True, budget_ratio=1.0, window_records=100)
    assert take(errors, [UNTRAINED], 0) == (1, None)
    assert take(errors, [OK, UNTRAINED], 1)[0] == 1


def test_records_without_a_trained_token_of_other_sources_are_plain_drops():
    assert take(window("skip", window_records=100), [UNTRAINED] * 50) == (50, None)


def test_the_first_of_two_reasons_to_stop_counts():
    errors = window("fail", chats=True, window_records=100)
    used, failure = take(errors, [UNTRAINED, BAD, UNTRAINED])
    assert (used, type(failure)) == (1, CorruptRecordError)
    errors = window("fail", chats=True, window_records=100)
    used, failure = take(errors, [UNTRAINED, UNTRAINED, BAD])
    assert (used, type(failure)) == (1, ErrorBudgetExceededError)


def test_a_restored_window_knows_both_kinds():
    statuses = [BAD, UNTRAINED, OK, BAD, UNTRAINED, OK]
    first = window("skip", chats=True, budget_ratio=0.02, window_records=200)
    assert take(first, statuses) == (6, None)
    notes = PassedOver()
    dropped = [number for number, status in enumerate(statuses) if status]
    orders = np.array(dropped, np.int64)
    notes.add(note_records(orders, np.array([statuses[n] for n in dropped], np.uint8)))
    counts, passed = notes.settle(6, 0)
    assert passed == [0, ~1, 3, ~4]
    assert int(counts.sum()) == 4
    first.passed(passed)
    held = first.held_at(6)
    assert held == [0, 3, ~1, ~4]
    again = window("skip", chats=True, budget_ratio=0.02, window_records=200, faults=held)
    assert again.held_at(6) == held
    outcomes = [take(one, [BAD, OK, UNTRAINED, OK], 6) for one in (first, again)]
    assert [used for used, _ in outcomes] == [2, 2]
    assert len({str(failure) for _, failure in outcomes}) == 1
    assert again.held_at(203) == [~4]
