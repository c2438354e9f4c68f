"""Who is too long at a record, and what a death says of one."""

from __future__ import annotations

import signal

import pytest

from msd_daemon.core.suspects import MET_MAX, Blame, Suspects, cause_of
from msd_daemon.core.watchdog import Finding, Watchdog
from msd_daemon.shm.mark_page import Mark, MarkState

S = 1_000_000_000


def mark(sequence=1, state=MarkState.RECORD, place=5, source=0, shard=0):
    return Mark(sequence, state, source, shard, 0, place, place, 1, "")


def findings(watchdog, looks, pid=7):
    """Return what looks at (seconds, mark, is_stopped) find."""
    return [
        watchdog.look(pid, seen, int(at * S), is_stopped=is_stopped).name
        for at, seen, is_stopped in looks
    ]


def test_a_record_over_its_time_is_asked_for_its_stack_and_killed_at_the_next_look():
    looks = [(at, mark(), False) for at in range(6)]
    assert findings(Watchdog(3.0), looks) == ["FINE", "FINE", "FINE", "ASK", "KILL", "KILL"]


def test_the_next_record_has_a_time_of_its_own():
    looks = [(at, mark(at // 3), False) for at in range(12)]
    assert findings(Watchdog(3.0), looks) == ["FINE"] * 12


def test_one_that_ends_between_the_stack_and_the_next_look_lives():
    looks = [(0, mark(), False), (2, mark(), False), (3, mark(2), False), (4, None, False)]
    assert findings(Watchdog(2.0), looks) == ["FINE", "ASK", "FINE", "FINE"]


def test_the_users_code_and_idleness_do_not_count():
    away = mark(state=MarkState.AWAY)
    looks = [(0, mark(), False), *((at, away, False) for at in range(1, 9)), (9, mark(), False)]
    assert findings(Watchdog(2.0), [*looks, (10, mark(), False)]) == ["FINE"] * 11
    assert findings(Watchdog(2.0), [(at, None, False) for at in range(9)]) == ["FINE"] * 9
    reading = mark(state=MarkState.READING)
    assert findings(Watchdog(2.0), [(at, reading, False) for at in range(9)]) == ["FINE"] * 9


def test_a_daemon_that_stood_still_kills_nobody_for_that():
    # An hour between two looks counts as one look's time: then the worker has to go on being slow.
    looks = [(0, mark(), False), (3600, mark(), False), (3601, mark(), False)]
    assert findings(Watchdog(60.0), looks) == ["FINE"] * 3


def test_a_worker_that_somebody_stopped_is_not_slow():
    looks = [(at, mark(), at > 0) for at in range(99)]
    assert findings(Watchdog(3.0), looks) == ["FINE"] * 99


def test_workers_are_watched_apart():
    watchdog = Watchdog(2.0)
    assert findings(watchdog, [(0, mark(), False), (2, mark(), False)], 1) == ["FINE", "ASK"]
    assert findings(watchdog, [(0, mark(), False), (1, mark(), False)], 2) == ["FINE", "FINE"]
    watchdog.forget(1)
    assert watchdog.look(1, mark(), 3 * S, is_stopped=False) is Finding.FINE


@pytest.mark.parametrize(
    ("status", "is_over_time", "cause"),
    [
        (-signal.SIGSEGV, False, "crash"),
        (-signal.SIGABRT, False, "crash"),
        (-signal.SIGBUS, False, "crash"),
        (1, False, "crash"),
        (-signal.SIGKILL, False, "outside"),
        (-signal.SIGTERM, False, "outside"),
        (0, False, "outside"),
        (-signal.SIGKILL, True, "time"),
    ],
)
def test_what_ended_a_worker(status, is_over_time, cause):
    assert cause_of(status, is_over_time=is_over_time) == cause


@pytest.mark.parametrize("cause", ["crash", "time"])
def test_a_crash_or_a_limit_is_the_records(cause):
    assert Suspects().died(mark(), cause) is Blame.RECORD


def test_a_signal_from_outside_has_to_come_twice():
    suspects = Suspects()
    assert suspects.died(mark(1), "outside") is Blame.NONE
    assert suspects.died(mark(2, place=6), "outside") is Blame.NONE
    assert suspects.died(mark(3, shard=1), "outside") is Blame.NONE
    assert suspects.died(mark(4, source=1), "outside") is Blame.NONE
    assert suspects.died(mark(5), "outside") is Blame.RECORD


def test_nobody_and_several_are_not_to_blame():
    suspects = Suspects()
    for cause in ("crash", "time", "outside"):
        assert suspects.died(None, cause) is Blame.NONE
        assert suspects.died(mark(state=MarkState.READING), cause) is Blame.NONE
        assert suspects.died(mark(state=MarkState.WINDOW), cause) is Blame.NARROW
    # While the user's code is asked, a worker's own crash is nobody's: it has to come twice.
    assert suspects.died(mark(state=MarkState.AWAY), "crash") is Blame.NONE
    assert suspects.died(mark(state=MarkState.AWAY), "crash") is Blame.RECORD


def test_what_is_remembered_is_bounded():
    suspects = Suspects()
    for place in range(MET_MAX + 1):
        assert suspects.died(mark(place=place), "outside") is Blame.NONE
    assert suspects.died(mark(place=0), "outside") is Blame.NONE
    assert suspects.died(mark(place=MET_MAX), "outside") is Blame.RECORD
