"""One contract for both stores of planners, against a real SQLite file and a real etcd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from federation.journal import Journal
from federation.store.leadership import Leadership
from federation.store.plan_store import PlanStore
from msd_client.contract.errors import (
    ConfigError,
    JournalUnavailableError,
    LeadershipLostError,
    PlanStoreError,
)
from tests.support.plan_stores import KINDS, LEASE_S, Stores, lead, record, stores

pytestmark = pytest.mark.processes


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    cluster = request.getfixturevalue("etcd") if request.param == "etcd" else None
    with stores(request.param, tmp_path, cluster) as found:
        yield found


def test_one_planner_leads_and_terms_grow(made: Stores) -> None:
    first, second = made.open(), made.open()
    assert first.leader() is None
    term = first.campaign("a", "tcp://a:1")
    assert term is not None
    assert first.term == term > 0
    assert second.campaign("b", "tcp://b:1") is None
    assert first.campaign("a", "tcp://a:1") is None or first.term > term
    leader = second.leader()
    assert leader is not None
    assert leader[1:] == ("a", "tcp://a:1")
    first.resign()
    assert second.leader() is None
    later = second.campaign("b", "tcp://b:1")
    assert later is not None
    assert later > first.term
    assert second.leader() == (later, "b", "tcp://b:1")


def test_a_silent_leader_is_followed_and_all_it_writes_is_refused(made: Stores) -> None:
    old, new = made.open(), made.open()
    lead(old)
    renewal = old.renewal()
    assert renewal.renew()
    old.put("jobs", "job", b"old")
    journal = old.journal("job").open_or_begin(1000)
    generation = journal.open_generation(0, b"zero")
    journal.append_steps(generation, old.term, [record(0)], None)
    kept = journal.append_event(generation, 3, "mixture", b"kept", 1)

    assert lead(new) > old.term  # the lease ran out
    assert not renewal.renew()
    renewal.close()
    taken = new.journal("job").open(1000)
    taken.append_steps(generation, new.term, [record(1)], None)
    for write in (
        lambda: old.put("jobs", "job", b"late"),
        lambda: old.drop("jobs", "job"),
        lambda: journal.append_steps(generation, old.term, [record(1)], (2, b"late")),
        lambda: journal.append_event(generation, 3, "mixture", b"late", 2),
        lambda: journal.drop_steps(generation, 0),
        lambda: journal.open_generation(0, b"late"),
        lambda: old.journal("job").open(1000),
        lambda: old.journal("another").open_or_begin(1000),
    ):
        with pytest.raises(LeadershipLostError):
            write()
    journal.close()
    taken.close()
    assert new.records("jobs") == {"job": b"old"}
    seen = new.journal("job").open(1000)
    assert seen.steps_after(generation, 0) == [record(0), record(1)]
    assert [(it.number, it.body) for it in seen.events(generation)] == [(kept, b"kept")]
    assert seen.last_generation() == generation
    seen.close()


def test_a_leader_that_renews_is_not_followed(made: Stores) -> None:
    first, second = made.open(), made.open()
    leadership = Leadership(first, "a", "tcp://a:1")
    term = leadership.campaign()
    done = threading.Event()
    watcher = threading.Timer(2 * LEASE_S, done.set)
    watcher.start()
    while not done.is_set():
        leadership.look()  # a busy machine may have it doubt for a moment: it does not lose the term
        assert second.campaign("b", "tcp://b:1") is None
    assert leadership.term == term
    leadership.end(is_resigned=True)
    assert second.campaign("b", "tcp://b:1") is not None
    leadership.close()


def test_records_of_any_size_and_name_are_replaced_and_forgotten_one_by_one(made: Stores) -> None:
    store = made.open()
    lead(store)
    large = bytes(range(256)) * (3 << 12) + b"".join(
        number.to_bytes(4, "big") * 3 for number in range(200_000)
    )
    bodies = {"a": large, "a-b": b"1", "a/b": b"2", "a:": b"3", "ü": b"", "a%2Fb": b"4"}
    for name, body in bodies.items():
        store.put("jobs", name, body)
    store.put("nodes", "a", b"node")
    assert store.records("jobs") == dict(sorted(bodies.items()))
    store.put("jobs", "a", b"short now")
    store.drop("jobs", "a/b")
    store.drop("jobs", "nobody")
    bodies["a"] = b"short now"
    del bodies["a/b"]
    assert made.open().records("jobs") == dict(sorted(bodies.items()))
    assert store.records("nodes") == {"a": b"node"}
    with pytest.raises(ConfigError, match="600 bytes in jobs"):
        store.put("jobs", "x" * 600, b"")


def test_a_journal_is_the_same_however_often_another_planner_opens_it(made: Stores) -> None:
    store = made.open()
    lead(store)
    journal = store.journal("job / 1").open_or_begin(512)
    for body in (b"first", b"second"):
        generation = journal.open_generation(0, body, job_digest="d", job=b"j" * 2_000_000)
        for first in range(0, 1024, 128):
            snapshot = (first + 128, body * 300_000) if first % 256 else None
            steps = [record(step, b"%d" % step) for step in range(first, first + 128)]
            journal.append_steps(generation, store.term, steps, snapshot)
        for number in range(1, 131):
            journal.append_event(generation, number, "hook", b"%d" % number, number)
        with journal.transaction():
            journal.events_table.drop("me", after_step=40, kinds=("hook",))
        journal.drop_steps(generation, 1000)

    def seen() -> list[object]:
        generations = journal.generations()
        return [
            generations,
            [journal.generation(number) for number, _ in generations],
            [journal.steps_after(number, 0) for number, _ in generations],
            [journal.last_snapshot(number, step) for number, _ in generations for step in (0, 900)],
            [journal.first_snapshot(number) for number, _ in generations],
            [journal.events(number) for number, _ in generations],
            journal.events_table.after(0),
            journal.events_table.last_number(),
        ]

    before = seen()
    assert len(journal.steps_after(2, 0)) == 1000 - journal.first_snapshot(2)
    journal.close()
    for _ in range(2):
        store.resign()
        store = made.open()
        lead(store)
        journal = store.journal("job / 1").open(512)
        assert seen() == before
        journal.close()
    journal = store.journal("another").open_or_begin(512)
    assert journal.last_generation() == 0
    journal.close()


def test_a_killed_leader_loses_no_step_that_it_said_is_durable(made: Stores) -> None:
    process = made.leader_process()
    process.hear(50)
    process.kill()
    steps = _take_over(made)
    assert steps == list(range(len(steps)))
    assert 0 <= len(steps) - len(process.steps()) <= 1  # one may be durable and unsaid


def test_a_stopped_leader_that_wakes_changes_nothing(made: Stores) -> None:
    process = made.leader_process()
    process.hear(50)
    process.pause()
    # One that was stopped inside of a transaction keeps SQLite's file locked until it goes on.
    steps = _take_over(made, process.go_on)
    process.go_on()
    process.hear_end()
    assert process.said[-1].startswith("lost: ")
    assert _take_over(made) == steps
    assert steps[: len(process.steps())] == process.steps()


def _take_over(made: Stores, unlock: Callable[[], None] | None = None) -> list[int]:
    """Return the steps that are durable once another planner leads."""
    store = made.open()
    try:
        generation, journal = _lead_and_open(store)
    except (JournalUnavailableError, PlanStoreError):
        if unlock is None:
            raise
        unlock()
        generation, journal = _lead_and_open(store)
    steps = [found.step for found in journal.steps_after(generation, 0)]
    journal.close()
    store.resign()
    return steps


def _lead_and_open(store: PlanStore) -> tuple[int, Journal]:
    if not store.term:
        lead(store)
    return int(store.records("jobs")["job"]), store.journal("job").open(1000)
