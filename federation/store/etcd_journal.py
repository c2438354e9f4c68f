"""A journal in etcd: `Journal` itself over a local file, each transaction of which goes to etcd first.

The file is a working copy, made anew from etcd whenever it is opened and written without syncs; its
rules, queries and retention are those of every journal. Temporary triggers note the rows that a
transaction touches; before it commits they are written to etcd, fenced, all or none. So what is in
the file is durable in etcd, and nothing else is.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from federation.journal import SCHEMA_VERSION, Journal
from federation.journal_files import READ_ERRORS, damaged, journal_error
from federation.store.etcd_client import EtcdClient
from federation.store.etcd_writer import Change, Delete, EtcdWriter, Put, Term
from msd_client.contract.codec import pack, unpack
from msd_client.contract.errors import (
    JournalDamagedError,
    JournalUnavailableError,
    LeadershipLostError,
    MsdError,
    PlanStoreError,
    ProtocolError,
    ResourceError,
)

log = logging.getLogger(__name__)

STEPS_KEPT_MAX = 8192
"""Of a generation in etcd, whose room is small; rewinds reach as far."""
BYTES_KEPT_MAX = 192 << 20
"""Of a journal's states and differences, before compression; etcd's quota is 2 GiB by default."""
ROW_BYTES_MAX = 256 << 20


class _Table(NamedTuple):
    """A table and how its rows are named."""

    name: str
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    is_numbered: bool = True
    """Its keys are numbers, 0 or more; else one text."""

    def row_name(self, keys: Iterable[Any]) -> str:
        """Return the name of a row: names stand in the order of keys."""
        shown = (f"{key:016x}" if self.is_numbered else str(key) for key in keys)
        return "/".join((self.name, *shown))


_TABLES = (
    _Table("meta", ("key",), ("key", "value"), is_numbered=False),
    _Table("jobs", ("digest",), ("digest", "body"), is_numbered=False),
    _Table(
        "generations",
        ("generation",),
        ("generation", "known_events", "first_step", "mesh", "job_digest"),
    ),
    _Table("snapshots", ("generation", "step"), ("generation", "step", "state")),
    _Table("steps", ("generation", "step"), ("generation", "step", "term", "delta", "digest")),
    _Table(
        "events",
        ("number",),
        (
            "number", "generation", "step", "kind", "body", "event_number", "dropped_by", "checksum",
        ),
    ),
)  # fmt: skip
_BY_NAME = {table.name: table for table in _TABLES}


class EtcdJournal(Journal):
    """A `Journal` that is durable in etcd.

    Args:
        path: Of the working copy, which is made anew.
        writer: To the journal's names in etcd.
        steps_kept: As `Journal`; at most STEPS_KEPT_MAX are.

    Raises:
        JournalDamagedError: What is in etcd is not what was written.
        JournalUnavailableError: etcd does not answer, or the working copy can't be made.
        LeadershipLostError: Another planner leads.
        ResourceError: It is of another schema.
    """

    def __init__(self, path: Path, writer: EtcdWriter, *, steps_kept: int) -> None:
        self._writer = writer
        self._is_ahead = False
        """True where etcd has what this transaction wrote, and its copy not yet."""
        _remove_copy(path)
        super().__init__(path, steps_kept=min(steps_kept, STEPS_KEPT_MAX))
        try:
            self._fill()
            self._note_changes()
            with self._transaction():  # the first one also writes what every journal begins with
                self._db.execute("INSERT OR IGNORE INTO changes SELECT 'meta', key, 0 FROM meta")
        except READ_ERRORS as error:
            self._db.close()
            raise journal_error(path, error) from error
        except BaseException:
            self._db.close()
            raise

    def _fill(self) -> None:
        """Read the journal from etcd, once what a planner before this one began there is finished."""
        self._db.execute("PRAGMA synchronous=OFF")
        with _told(self.path):
            self._writer.recover()
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM meta")
            for name, value in self._writer.names():
                self._insert(name, value)
        found = self.meta("schema")
        if found is not None and found != str(SCHEMA_VERSION):
            raise ResourceError(
                f"journal {self.path.parent.name} in etcd has schema {found}, this planner writes "
                f"{SCHEMA_VERSION}: use the release that wrote it, or another prefix of the store",
            )
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))
        self._db.execute("COMMIT")

    def _insert(self, name: str, value: bytes) -> None:
        table = _BY_NAME.get(name.partition("/")[0])
        try:
            row = unpack(value, bytes_max=ROW_BYTES_MAX)
            if table is None or not isinstance(row, list):
                raise ProtocolError("it is no row of a journal")
            keys = row[: len(table.keys)]
            if table.row_name(keys) != name:
                raise ProtocolError(f"its row says {keys}")
            marks = ", ".join("?" * len(table.columns))
            columns = ", ".join(table.columns)
            self._db.execute(f"INSERT INTO {table.name} ({columns}) VALUES ({marks})", row)  # noqa: S608
        except (MsdError, ValueError, TypeError, sqlite3.Error) as error:
            raise damaged(self.path, f"{name} in etcd: {error}") from error

    def _note_changes(self) -> None:
        """Have the file say, by itself, which rows a transaction touches."""
        self._db.execute("PRAGMA temp_store=MEMORY")
        self._db.execute("CREATE TEMP TABLE changes (name TEXT, a, b, PRIMARY KEY (name, a, b))")
        for table in _TABLES:
            for verb, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
                keys = [f"{row}.{key}" for key in table.keys]
                second = keys[1] if len(keys) > 1 else "0"
                note = f"INSERT OR IGNORE INTO changes VALUES ('{table.name}', {keys[0]}, {second})"  # noqa: S608
                self._db.execute(
                    f"CREATE TEMP TRIGGER noted_{table.name}_{verb} AFTER {verb} "
                    f"ON main.{table.name} BEGIN {note}; END"
                )

    def _began(self) -> None:
        self._is_ahead = False

    def _committing(self) -> None:
        """Write to etcd what this transaction touched."""
        changes = [change for table in _TABLES for change in self._changes_of(table)]
        self._db.execute("DELETE FROM changes")
        if changes:
            with _told(self.path):
                self._writer.write(changes)
            self._is_ahead = True

    def _commit_failed(self, error: ResourceError) -> MsdError:
        """A planner that lacks what is durable must not go on from what it knows."""
        if not self._is_ahead:
            return error
        return LeadershipLostError(
            f"{error.message}: what was written is durable in etcd, and this planner's copy lacks it: "
            "it stands by from here on",
            path=str(self.path),
        )

    def _changes_of(self, table: _Table) -> Iterator[Change]:
        columns = ", ".join(f"t.{column}" for column in table.columns)
        second = f"t.{table.keys[1]}" if len(table.keys) > 1 else "0"
        rows = self._db.execute(
            f"SELECT c.a, c.b, t.{table.keys[0]} IS NOT NULL, {columns} FROM changes c "  # noqa: S608
            f"LEFT JOIN {table.name} t ON t.{table.keys[0]} = c.a AND {second} = c.b "
            "WHERE c.name = ? ORDER BY c.a, c.b",
            (table.name,),
        )
        gone: list[tuple[Any, ...]] = []
        for first, other, is_there, *values in rows.fetchall():
            keys = (first, other)[: len(table.keys)]
            if not is_there:
                gone.append(keys)
                continue
            # What is replaced may have been longer; steps and events are written once.
            is_new = table.name in ("steps", "events", "meta")
            yield Put(table.row_name(keys), pack(values), is_new)
        yield from self._deletions(table, gone)

    def _deletions(self, table: _Table, gone: list[tuple[Any, ...]]) -> Iterator[Delete]:
        """Yield deletions of rows, one for each run of them that no other row lies between."""
        run: list[tuple[Any, ...]] = []
        for keys in gone:
            if run and self._is_any_between(table, run[-1], keys):
                yield Delete(table.row_name(run[0]), table.row_name(run[-1]))
                run = []
            run.append(keys)
        if run:
            yield Delete(table.row_name(run[0]), table.row_name(run[-1]))

    def _is_any_between(self, table: _Table, first: tuple[Any, ...], last: tuple[Any, ...]) -> bool:
        keys = ", ".join(table.keys)
        marks = ", ".join("?" * len(table.keys))
        found = self._db.execute(
            f"SELECT 1 FROM {table.name} WHERE ({keys}) > ({marks}) AND ({keys}) < ({marks}) LIMIT 1",  # noqa: S608
            (*first, *last),
        ).fetchone()
        return found is not None

    def _shorten(self, generation: int, step: int) -> None:
        """As `Journal`; beyond that the oldest steps go until what is kept fits etcd's room."""
        super()._shorten(generation, step)
        while self._kept_bytes() > BYTES_KEPT_MAX:
            (oldest,) = self._db.execute("SELECT min(generation) FROM snapshots").fetchone()
            if oldest < generation:
                for table in ("steps", "snapshots", "generations"):
                    self._db.execute(f"DELETE FROM {table} WHERE generation = ?", (oldest,))  # noqa: S608
                continue
            rows = self._db.execute(
                "SELECT step FROM snapshots WHERE generation = ? ORDER BY step LIMIT 3",
                (generation,),
            ).fetchall()
            if len(rows) < 3:
                return
            super()._shorten(generation, rows[1][0])

    def _kept_bytes(self) -> int:
        (kept_bytes,) = self._db.execute(
            "SELECT (SELECT total(length(delta)) FROM steps) "
            "+ (SELECT total(length(state)) FROM snapshots)"
        ).fetchone()
        return int(kept_bytes)

    def disown_events(self) -> None:
        """Take events as a journal's that begins anew: of no generation of its own."""
        with self._transaction():
            self._db.execute("DELETE FROM events WHERE event_number = 0")
            self._db.execute("UPDATE events SET generation = 0")

    def _give_back_room(self) -> None:
        """The copy is made anew anyway."""

    def close(self) -> None:
        """Close the working copy."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        self.is_closed = True


class EtcdPlace:
    """A journal in etcd.

    Args:
        client: Of the calling thread.
        term: That writes.
        prefix: Of its keys.
        path: Of the working copy.
        begun: Called before a journal that may be a new one is opened.
    """

    def __init__(
        self,
        client: EtcdClient,
        term: Term,
        prefix: str,
        path: Path,
        begun: Callable[[], None],
    ) -> None:
        self._client = client
        self._begun = begun
        self._term = term
        self._prefix = prefix
        self._path = path

    def open(self, steps_kept: int) -> EtcdJournal:
        return EtcdJournal(self._path, self._writer(), steps_kept=steps_kept)

    def open_or_begin(self, steps_kept: int) -> EtcdJournal:
        with _told(self._path):
            self._begun()
        try:
            return self.open(steps_kept)
        except JournalDamagedError as error:
            return self._begin_anew(steps_kept, error)

    def replace(self, journal: Journal, error: JournalDamagedError) -> Journal:
        journal.close()
        if isinstance(error.__cause__, READ_ERRORS):
            log.warning("%s; the copy is made anew from etcd", error.message)
            return self.open_or_begin(journal.steps_kept)
        return self._begin_anew(journal.steps_kept, error)

    def _begin_anew(self, steps_kept: int, error: JournalDamagedError) -> EtcdJournal:
        """Let go of what is in etcd, but for the events where these can be read."""
        log.warning("%s; what is in etcd is let go of, a new journal begins", error.message)
        self._let_go(table.name for table in _TABLES if table.name != "events")
        try:
            journal = self.open(steps_kept)
        except JournalDamagedError as again:
            log.warning("%s; events are let go of, too", again.message)
            self._let_go(["events"])
            journal = self.open(steps_kept)
        try:
            journal.disown_events()
        except BaseException:
            journal.close()
            raise
        return journal

    def _let_go(self, tables: Iterable[str]) -> None:
        with _told(self._path):
            self._writer().write([Delete(f"{table}/", f"{table}/~") for table in tables])

    def _writer(self) -> EtcdWriter:
        return EtcdWriter(self._client, self._term, self._prefix, f"journal {self._prefix}")


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Return a context in which what the store says is told as what journals say."""
    try:
        yield
    except PlanStoreError as error:
        # The cause says, as with files, whether waiting may help.
        raise JournalUnavailableError(error.message, path=str(path)) from error.__cause__


def _remove_copy(path: Path) -> None:
    try:
        for suffix in ("", "-wal", "-shm", "-journal"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise journal_error(path, error) from error
