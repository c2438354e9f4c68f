"""A journal in etcd: damage, an etcd without room, and how much is kept."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from federation.journal import Journal
from federation.journal_files import may_pass
from federation.store import etcd_client, etcd_journal, etcd_store
from federation.store.etcd_client import EtcdClient, EtcdError
from federation.store.etcd_store import EtcdStore
from federation.store.open_store import open_store
from msd_client.contract.errors import (
    JournalDamagedError,
    JournalUnavailableError,
    LeadershipLostError,
    PlanStoreError,
)
from tests.support.etcd import EtcdCluster
from tests.support.plan_stores import lead, record, tables_of

pytestmark = pytest.mark.processes


class Case:
    """A store on a prefix of its own, and its keys as they are."""

    def __init__(self, cluster: EtcdCluster, folder: Path) -> None:
        self.prefix = uuid4().hex
        self.folder = folder
        self.cluster = cluster
        self.client = EtcdClient(cluster.endpoints)
        self.store = EtcdStore(cluster.endpoints, self.prefix, folder, lease_s=60)
        lead(self.store)
        self.place = self.store.journal("job")

    @property
    def copy(self) -> Path:
        return self.folder / "jobs" / "job" / "journal.db"

    def key(self, name: str) -> bytes:
        return f"{self.prefix}/journals/job/rows/{name}:".encode()

    def spoil(self, name: str) -> None:
        """Have a row be another than was written."""
        key = self.key(name)
        found = self.client.get(key)
        assert found is not None
        self.client.txn([], [etcd_client.put(key, found.value[:-4])])

    def close(self) -> None:
        self.store.close()
        self.client.close()


@pytest.fixture
def case(etcd: EtcdCluster, tmp_path: Path) -> Iterator[Case]:
    made = Case(etcd, tmp_path)
    yield made
    made.close()


def filled(case: Case) -> Journal:
    journal = case.place.open_or_begin(4096)
    generation = journal.open_generation(0, b"zero")
    journal.append_steps(generation, 1, [record(step) for step in range(300)], (256, b"snapshot"))
    journal.append_event(generation, 5, "mixture", b"weights", 1)
    journal.append_event(generation, 6, "calibration", b"fit")
    return journal


def test_a_row_that_was_changed_is_named_and_a_new_journal_has_the_events(case: Case) -> None:
    filled(case).close()
    name = f"steps/{1:016x}/{7:016x}"
    case.spoil(name)
    with pytest.raises(JournalDamagedError, match=f"{name} is damaged"):
        case.place.open(4096)
    journal = case.place.open_or_begin(4096)
    assert journal.last_generation() == 0
    assert [(it.event_number, it.body) for it in journal.events_table.after(0)] == [(1, b"weights")]
    assert not journal.events(1)  # of the former journal's generations none is this one's
    journal.close()
    case.spoil(f"events/{1:016x}")
    journal = case.place.open_or_begin(4096)
    assert journal.events_table.after(0) == []
    journal.close()
    case.place.open(4096).close()


def test_a_row_that_lies_under_anothers_name_is_refused(case: Case) -> None:
    filled(case).close()
    found = case.client.get(case.key(f"steps/{1:016x}/{7:016x}"))
    assert found is not None
    other = case.key(f"steps/{1:016x}/{8:016x}")
    case.client.txn([], [etcd_client.put(other, found.value)])
    with pytest.raises(JournalDamagedError, match=r"its row says \[1, 7\]"):
        case.place.open(4096)


def test_a_copy_that_is_damaged_is_made_anew_from_etcd(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    journal = filled(case)
    before = tables_of(case.copy)
    journal._db.execute("DROP TABLE steps")
    with pytest.raises(JournalDamagedError) as caught:
        journal.append_steps(1, 1, [record(300)], None)
    again = case.place.replace(journal, caught.value)
    assert tables_of(case.copy) == before
    again.append_steps(1, 1, [record(300)], None)
    again.close()
    assert "the copy is made anew from etcd" in caplog.text


def test_a_planner_whose_copy_lacks_what_is_durable_leads_no_more(case: Case) -> None:
    journal = filled(case)
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises((JournalUnavailableError, LeadershipLostError)):
        journal.append_steps(1, 1, [record(step, bytes(40_000)) for step in range(300, 310)], None)
    left = tables_of(case.copy)
    journal.close()
    case.place.open(4096).close()
    assert tables_of(case.copy) == left  # refused by its copy before etcd was asked


def test_what_another_program_wrote_is_told(case: Case) -> None:
    filled(case).close()
    case.store.resign()
    case.client.txn([], [etcd_client.put(case.store.leader_key, b"somebody's lock")])
    with pytest.raises(PlanStoreError, match="which no planner wrote"):
        case.store.leader()
    with pytest.raises(LeadershipLostError):
        case.place.open(4096)


def test_steps_go_before_etcds_room_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_journal, "BYTES_KEPT_MAX", 600_000)
    journal = case.place.open_or_begin(8192)
    for _ in range(2):
        generation = journal.open_generation(0, b"zero")
        for first in range(0, 2048, 256):
            steps = [record(step, bytes(1000)) for step in range(first, first + 256)]
            journal.append_steps(generation, 1, steps, (first + 256, b"state"))
    assert [number for number, _ in journal.generations()] == [2]
    assert journal.first_snapshot(2) == 1536
    assert [it.step for it in journal.steps_after(2, 0)] == list(range(1536, 2048))
    left = tables_of(case.copy)
    journal.close()
    case.place.open(8192).close()
    assert tables_of(case.copy) == left


def test_journals_of_jobs_that_ended_go_the_oldest_first(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_store, "JOURNALS_KEPT", 2)
    names = [f"job/{number}" for number in range(5)]
    for name in (*names[:4], names[1], names[4]):
        journal = case.store.journal(name).open_or_begin(512)
        journal.open_generation(0, name.encode())
        journal.close()
        if name == names[0]:
            case.store.put("jobs", name, b"it is open")
    begun = {}
    for name in names:
        journal = case.store.journal(name).open(512)
        begun[name] = journal.last_generation()
        journal.close()
    assert begun == {"job/0": 1, "job/1": 2, "job/2": 0, "job/3": 1, "job/4": 1}
    assert case.store.records("jobs") == {names[0]: b"it is open"}


def test_a_leader_compacts_what_was_overwritten_two_compactions_ago(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_store, "COMPACT_NS", 0)
    renewal = case.store.renewal()
    before = case.client.revision()
    case.store.put("jobs", "job", b"1")
    for _ in range(2):
        assert renewal.renew()
    key = case.store.leader_key
    assert case.client.page(key, key + b"0", case.client.revision()).found
    with pytest.raises(EtcdError, match="compacted"):
        case.client.page(key, key + b"0", before - 1)
    renewal.close()


def test_tls_with_etcd_is_checked(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    cluster = EtcdCluster(tmp_path / "etcd", host="[::1]", is_tls=True)
    try:
        cluster.start()
        store = open_store(cluster.url(), tmp_path, tls=cluster.tls)
        assert lead(store) > 0
        store.put("jobs", "job", b"1")
        assert store.records("jobs") == {"job": b"1"}
        store.close()
        mistrusting = open_store(cluster.url(), tmp_path)
        with pytest.raises(PlanStoreError, match="certificate"):
            mistrusting.campaign("a", "tcp://a:1")
        mistrusting.close()
        plain = open_store(cluster.url().replace("etcds", "etcd"), tmp_path)
        with pytest.raises(PlanStoreError, match=r"\]:\d+: Remote end closed connection"):
            plain.campaign("a", "tcp://a:1")
        plain.close()
    finally:
        cluster.close()


def test_an_etcd_without_room_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    cluster = EtcdCluster(tmp_path / "etcd", options=("--quota-backend-bytes", str(4 << 20)))
    try:
        cluster.start()
        case = Case(cluster, tmp_path)
        journal = filled(case)
        fill = case.client
        with pytest.raises(EtcdError) as full:
            for number in range(100):
                fill.txn([], [etcd_client.put(b"fill/%d" % number, bytes(500_000))])
        assert full.value.errno == errno.ENOSPC
        for _ in range(2):
            with pytest.raises(JournalUnavailableError, match="raise its quota") as caught:
                journal.append_steps(1, 1, [record(300)], None)
            assert may_pass(caught.value)
        with pytest.raises(JournalUnavailableError):
            journal.append_event(1, 9, "mixture", b"refused", 2)
        fill.txn([], [etcd_client.delete(b"fill/", b"fill0")])
        fill.compact(fill.revision())
        fill.call("/v3/maintenance/defragment", {})
        for alarm in fill.call("/v3/maintenance/alarm", {})["alarms"]:
            fill.call("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
        journal.append_steps(1, 1, [record(300)], None)
        assert journal.last_step(1) == 300
        assert [it.body for it in journal.events_table.after(0)] == [b"weights"]
        left = tables_of(case.copy)
        journal.close()
        case.place.open(4096).close()
        assert tables_of(case.copy) == left
        case.close()
    finally:
        cluster.close()
