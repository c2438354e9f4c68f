"""Journals that were cut, changed or replaced; disks that are full."""

from __future__ import annotations

import random
import shutil
import sqlite3

import pytest

from federation.journal import Journal, StepRecord, open_journal, replace_damaged
from federation.journal_files import DAMAGED_KEPT
from federation.journal_place import LocalPlace
from federation.replay import restore_state
from msd_client.contract.errors import (
    JournalDamagedError,
    JournalUnavailableError,
    ResourceError,
)
from tests.support.plan_stores import KnownPlace
from tests.unit.federation.test_replay import planned_journal

STEPS = 40


def record(step, size=900):
    return StepRecord(step, random.Random(step).randbytes(size), f"{step:064x}")


def written(path, steps=STEPS):
    """Write a journal, and return it still open: all of it lies in the write-ahead log."""
    journal = Journal(path)
    journal._db.execute("PRAGMA wal_autocheckpoint=0")
    generation = journal.open_generation(0, b"zero" * 100)
    for step in range(steps):
        journal.append_steps(generation, 1, [record(step)], None)
    return journal


@pytest.fixture
def at_rest(tmp_path):
    path = tmp_path / "journal.db"
    journal = written(path)
    journal.append_event(1, 7, "skip", b"body", 1)
    journal.close()
    return path


def aside(path):
    names = [other.name for other in path.parent.iterdir()]
    return sorted(name for name in names if ".damaged-" in name and name[-1].isdigit())


def test_a_log_cut_at_any_byte_gives_a_committed_prefix(tmp_path):
    source = tmp_path / "source" / "journal.db"
    journal = written(source)
    whole = source.with_name("journal.db-wal").read_bytes()
    rng = random.Random(4)
    seen = set()
    for number, size in enumerate([0, len(whole), *(rng.randrange(len(whole)) for _ in range(60))]):
        folder = tmp_path / f"cut{number}"
        folder.mkdir()
        shutil.copy(source, folder / "journal.db")
        (folder / "journal.db-wal").write_bytes(whole[:size])
        cut = open_journal(folder / "journal.db")
        steps = [step.step for step in cut.steps_after(1, 0)]
        assert steps == list(range(len(steps)))
        assert all(step == record(step.step) for step in cut.steps_after(1, 0))
        assert not aside(folder / "journal.db")
        seen.add(len(steps))
        generation = cut.open_generation(len(steps), b"next")  # and it is written on
        cut.append_steps(generation, 1, [record(len(steps))], None)
        cut.close()
    assert {0, STEPS} <= seen
    assert len(seen) > 10
    journal.close()


def test_a_log_with_flipped_bytes_gives_a_committed_prefix(tmp_path):
    source = tmp_path / "source" / "journal.db"
    journal = written(source)
    whole = bytearray(source.with_name("journal.db-wal").read_bytes())
    whole[len(whole) // 2] ^= 0x40
    folder = tmp_path / "flipped"
    folder.mkdir()
    shutil.copy(source, folder / "journal.db")
    (folder / "journal.db-wal").write_bytes(whole)
    cut = open_journal(folder / "journal.db")
    steps = cut.steps_after(1, 0)
    assert 0 < len(steps) < STEPS
    assert steps == [record(step) for step in range(len(steps))]
    cut.close()
    journal.close()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.95])
def test_a_file_that_was_cut_is_named_and_moved_aside(at_rest, share, caplog):
    data = at_rest.read_bytes()
    at_rest.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(JournalDamagedError, match=r"journal\.db is damaged: ") as caught:
        Journal(at_rest)
    assert caught.value.attributes["path"] == str(at_rest)
    assert at_rest.stat().st_size == int(len(data) * share)
    journal = open_journal(at_rest)
    assert journal.last_generation() == 0
    journal.close()
    assert aside(at_rest) == ["journal.db.damaged-1"]
    assert "moved to journal.db.damaged-1, a new journal begins" in caplog.text


@pytest.mark.parametrize("what", ["text", "zeros", "folder", "other database", "old schema"])
def test_what_is_no_journal_is_moved_aside(at_rest, what):
    at_rest.unlink()
    if what == "text":
        at_rest.write_text("step 1: all well\n" * 400)
    elif what == "zeros":
        at_rest.write_bytes(bytes(20_000))
    elif what == "folder":
        (at_rest / "inside").mkdir(parents=True)
    elif what == "other database":
        db = sqlite3.connect(at_rest)
        db.execute("CREATE TABLE music (title TEXT)")
        db.close()
    else:
        db = sqlite3.connect(at_rest)
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)")
        db.execute("INSERT INTO meta VALUES ('schema', '1')")
        db.commit()
        db.close()
    with pytest.raises(JournalDamagedError):
        Journal(at_rest)
    journal = open_journal(at_rest)
    assert journal.open_generation(3, b"three") == 1
    journal.close()
    assert aside(at_rest) == ["journal.db.damaged-1"]


def test_few_damaged_journals_are_kept(at_rest):
    for number in range(DAMAGED_KEPT + 3):
        at_rest.write_text(f"damage {number}, long enough to be no empty file")
        open_journal(at_rest).close()
    kept = aside(at_rest)
    assert kept == [f"journal.db.damaged-{number}" for number in (4, 5, 6)]
    assert "damage 5" in (at_rest.parent / kept[-1]).read_text()


def test_an_empty_file_is_a_new_journal(at_rest):
    at_rest.write_bytes(b"")
    journal = open_journal(at_rest)
    assert journal.last_generation() == 0
    journal.close()
    assert not aside(at_rest)


def test_flipped_bytes_never_give_another_step_or_event(at_rest):
    data = at_rest.read_bytes()
    good = {step: record(step) for step in range(STEPS)}
    rng = random.Random(9)
    damaged = 0
    for _ in range(40):
        changed = bytearray(data)
        for _ in range(8):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        at_rest.write_bytes(changed)
        try:
            journal = Journal(at_rest)
        except ResourceError:
            damaged += 1
            continue
        try:
            with journal.reading():
                for event in journal.events_table.after(0):
                    assert (event.step, event.kind, event.body) == (7, "skip", b"body")
                for step in journal.steps_after(1, 0):
                    # A difference has a checksum of its own: restore_state looks at it.
                    damaged += step != good.get(step.step)
        except JournalDamagedError:
            damaged += 1
        finally:
            journal.close()
    assert damaged


def test_a_damaged_event_is_named(at_rest):
    db = sqlite3.connect(at_rest)
    db.execute("UPDATE events SET body = ?", (b"BODY",))
    db.commit()
    db.close()
    journal = Journal(at_rest)
    with pytest.raises(JournalDamagedError, match=r"event 1 \(skip at step 7\) is not what was"):
        journal.events_table.after(0)
    journal.close()


def test_a_damaged_step_is_named_and_later_ones_are_restored(tmp_path):
    path = tmp_path / "journal.db"
    journal, states = planned_journal(KnownPlace(LocalPlace(path), path), 300)
    journal._db.execute(
        "UPDATE steps SET delta = substr(delta, 1, length(delta) - 1) WHERE step = 50"
    )
    assert restore_state(journal, 50).encode() == states[50]
    with pytest.raises(JournalDamagedError, match="step 50 of generation 1 is damaged") as caught:
        restore_state(journal, 51)
    assert caught.value.attributes["step"] == 50
    assert restore_state(journal, 280).encode() == states[280]
    journal._db.execute("UPDATE snapshots SET state = zeroblob(500) WHERE step = 256")
    with pytest.raises(JournalDamagedError, match="the snapshot at step 256 is damaged"):
        restore_state(journal, 280)
    journal.close()


def test_a_journal_that_turns_out_damaged_is_replaced_with_its_events(at_rest):
    journal = Journal(at_rest)
    new = replace_damaged(journal, JournalDamagedError("found out while it ran"))
    assert journal.is_closed
    assert [(event.event_number, event.body) for event in new.events_table.after(0)] == [
        (1, b"body")
    ]
    assert new.last_generation() == 0
    new.close()
    assert aside(at_rest) == ["journal.db.damaged-1"]


def test_a_newer_schema_is_refused_and_left_alone(at_rest):
    db = sqlite3.connect(at_rest)
    db.execute("UPDATE meta SET value = '99'")
    db.commit()
    db.close()
    with pytest.raises(ResourceError, match="has schema 99") as caught:
        open_journal(at_rest)
    assert not isinstance(caught.value, JournalDamagedError)
    assert not aside(at_rest)


def test_events_of_a_journal_of_before_are_numbered_as_states_count(tmp_path):
    path = tmp_path / "journal.db"
    journal = Journal(path)
    journal.open_generation(0, b"zero", known_events=4)
    journal.close()
    db = sqlite3.connect(path)
    db.executescript(
        "DROP TABLE events; CREATE TABLE events (number INTEGER PRIMARY KEY, generation INTEGER NOT "
        "NULL, step INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL);"
        "INSERT INTO events (generation, step, kind, body) VALUES (1, 5, 'mixture', x'01'), "
        "(1, 6, 'calibration', x'02'), (1, 7, 'hook', x'03');"
    )
    db.close()
    journal = Journal(path)
    assert [(it.event_number, it.step) for it in journal.events_table.after(0)] == [(5, 5), (6, 7)]
    assert journal.events_table.last_number() == 6
    journal.close()


def test_no_room_is_said_so_and_nothing_of_it_is_written(at_rest):
    journal = Journal(at_rest)
    generation = journal.open_generation(0, b"zero")
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(JournalUnavailableError, match=r"full.*make room on its disk") as caught:
        journal.append_steps(generation, 1, [record(step) for step in range(40)], None)
    assert caught.value.retryable
    assert not journal.steps_after(generation, 0)
    with pytest.raises(JournalUnavailableError):
        journal.append_event(generation, 3, "mixture", bytes(50_000), 2)
    journal._db.execute("PRAGMA max_page_count=100000")
    journal.append_steps(generation, 1, [record(step) for step in range(40)], None)
    assert len(journal.steps_after(generation, 0)) == 40
    journal.close()


def test_a_folder_that_cant_be_made_is_named(tmp_path):
    (tmp_path / "jobs").write_text("a file")
    with pytest.raises(JournalUnavailableError, match="right to write there"):
        open_journal(tmp_path / "jobs" / "a" / "journal.db")
