"""The events table of a journal: what was accepted, by number, and what was dropped since.

An event's `event_number` is the one that states count up to, over all generations and clusters: a
state knows of those up to its own. Its `step` is a plan step. Calibration (`event_number` 0) belongs
to its generation alone and is in no state.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from typing import NamedTuple

from msd_client.contract.errors import JournalDamagedError

EVENTS_KEPT = 10_000
"""At least so many of the newest; older ones go once no kept state lacks them."""

ANOTHER_STREAM = "another stream"
"""Marks events of a stream that was begun anew since: its numbers say nothing any more."""

_LET_GO_UP_TO = "events_let_go_up_to"
_ADDED_COLUMNS = {
    "event_number": "INTEGER NOT NULL DEFAULT 0",
    "dropped_by": "TEXT",
    "checksum": "BLOB",
}


class EventRecord(NamedTuple):
    """A journalled event, in force from a plan step on."""

    number: int
    step: int
    kind: str
    body: bytes
    event_number: int = 0
    """As states count; 0 of calibration."""


_COLUMNS = "number, step, kind, body, event_number"


def add_columns(db: sqlite3.Connection) -> None:
    """Add what a journal of an earlier release lacks, and number its events as states do."""
    known = {row[1] for row in db.execute("PRAGMA table_info(events)")}
    missing = [name for name in _ADDED_COLUMNS if name not in known]
    for name in missing:
        db.execute(f"ALTER TABLE events ADD COLUMN {name} {_ADDED_COLUMNS[name]}")
    if "event_number" in missing:
        db.execute(
            "UPDATE events SET event_number = coalesce((SELECT known_events FROM generations g "
            "WHERE g.generation = events.generation), 0) + (SELECT count(*) FROM events e "
            "WHERE e.generation = events.generation AND e.number <= events.number "
            "AND e.kind != 'calibration') WHERE kind != 'calibration'"
        )


class EventsTable:
    """The events of one open journal.

    Args:
        db: The journal's connection; the caller holds transactions.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def append(
        self, generation: int, step: int, kind: str, body: bytes, event_number: int = 0
    ) -> int:
        """Add an event and return its row's number."""
        cursor = self._db.execute(
            "INSERT INTO events (generation, step, kind, body, event_number, checksum) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (generation, step, kind, body, event_number, _checksum(step, kind, body, event_number)),
        )
        number = cursor.lastrowid
        assert number is not None
        return number

    def of_generation(self, generation: int) -> list[EventRecord]:
        """Return the events that were accepted in a generation, oldest first."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM events WHERE generation = ? ORDER BY number",  # noqa: S608
            (generation,),
        )
        return [EventRecord(*row) for row in rows]

    def after(self, event_number: int) -> list[EventRecord]:
        """Return the events, of all generations, that a state does not know and nobody dropped.

        Raises:
            JournalDamagedError: One is not what was written; it is named.
        """
        rows = self._db.execute(
            f"SELECT {_COLUMNS}, checksum FROM events WHERE event_number > ? "  # noqa: S608
            "AND dropped_by IS NULL ORDER BY event_number",
            (event_number,),
        )
        return [_checked(EventRecord(*row[:-1]), row[-1]) for row in rows]

    def waiting_at(
        self, plan_step: int, event_number: int, *, is_dropped: bool
    ) -> list[EventRecord]:
        """Return the events that a state knows and that wait for their steps, oldest first.

        Args:
            plan_step: The state's.
            event_number: Events that it knows of.
            is_dropped: Those that were dropped since, or those that were not.
        """
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM events WHERE event_number BETWEEN 1 AND ? AND step >= ? "  # noqa: S608
            "AND dropped_by IS NOT ? AND (dropped_by IS NOT NULL) = ? ORDER BY event_number",
            (event_number, plan_step, ANOTHER_STREAM, is_dropped),
        )
        return [EventRecord(*row) for row in rows]

    def last_number(self) -> int:
        """Return the highest event number of all, dropped ones included; 0 where there is none."""
        (number,) = self._db.execute(
            "SELECT max(event_number) FROM events WHERE dropped_by IS NOT ?", (ANOTHER_STREAM,)
        ).fetchone()
        return int(number or 0)

    def end_stream(self) -> int:
        """Take all events out of what later states count; return how many were in force."""
        in_force = len(self.after(0))
        self._db.execute("UPDATE events SET dropped_by = ?", (ANOTHER_STREAM,))
        self.forgive_gone()
        return in_force

    def drop(self, reason: str, *, after_step: int = -1, kinds: tuple[str, ...]) -> int:
        """Drop events of these kinds behind a plan step, for later replays; return how many.

        Args:
            reason: Who dropped them, kept with them.
            after_step: Events of later steps alone.
            kinds: Which.
        """
        cursor = self._db.execute(
            "UPDATE events SET dropped_by = ? WHERE event_number > 0 AND dropped_by IS NULL "
            "AND step > ? AND kind IN (SELECT value FROM json_each(?))",
            (reason, after_step, json.dumps(kinds)),
        )
        return cursor.rowcount

    def shorten(self, generations_from: int, known_events: int) -> None:
        """Let go of what no kept state can need.

        Args:
            generations_from: Oldest generation that is kept; calibration of older ones goes.
            known_events: Events that every kept state knows of.
        """
        self._db.execute(
            "DELETE FROM events WHERE event_number = 0 AND generation < ?", (generations_from,)
        )
        (last,) = self._db.execute(
            "SELECT max(event_number) FROM events WHERE event_number <= ? AND dropped_by IS NOT ?",
            (min(known_events, self.last_number() - EVENTS_KEPT), ANOTHER_STREAM),
        ).fetchone()
        if last:
            self._db.execute(
                "DELETE FROM events WHERE event_number > 0 AND event_number <= ?", (last,)
            )
            self._db.execute(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", (_LET_GO_UP_TO, str(last))
            )

    def let_go_up_to(self) -> int:
        """Return the number up to which events are not kept any more, 0 where all are."""
        found = self._db.execute(
            "SELECT value FROM meta WHERE key = ?", (_LET_GO_UP_TO,)
        ).fetchone()
        return 0 if found is None else int(found[0])

    def forgive_gone(self) -> None:
        """Go on from states that lack events which are not kept any more."""
        self._db.execute("DELETE FROM meta WHERE key = ?", (_LET_GO_UP_TO,))


def _checksum(step: int, kind: str, body: bytes, event_number: int) -> bytes:
    head = f"{step} {kind} {event_number} ".encode()
    return hashlib.blake2b(head + body, digest_size=16).digest()


def _checked(event: EventRecord, checksum: bytes | None) -> EventRecord:
    """Return an event; those of an earlier release have no checksum."""
    wanted = _checksum(event.step, event.kind, event.body, event.event_number)
    if checksum is not None and checksum != wanted:
        raise JournalDamagedError(
            f"event {event.event_number} ({event.kind} at step {event.step}) is not what was "
            "journalled: its checksum differs",
            event=event.event_number,
            step=event.step,
        )
    return event
