"""The store on one host: a SQLite file, and journals beside it. No failover to another machine.

A term is taken from nobody, from one who resigned, from one whose process is gone (the kernel says
so), or from one that said nothing for a lease, by the clock of who watches.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from federation.journal import read_journal
from federation.journal_place import JournalPlace
from federation.store.fenced_journal import FencedPlace, journalled_term
from federation.store.holder_lock import HolderLock
from federation.store.plan_store import (
    LEASE_S,
    Leader,
    LeaseRenewal,
    RecordKind,
    check_record,
    monotonic_ns,
)
from msd_client.contract.errors import ConfigError, LeadershipLostError, MsdError, PlanStoreError
from msd_client.contract.file_systems import NETWORK_FILE_SYSTEMS, file_system_of

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
BUSY_S = 1.0
"""Longest wait for another planner's transaction: a renewal must not take a lease's time."""
JOURNAL_NAME = "journal.db"

_TABLES = """
CREATE TABLE IF NOT EXISTS leader (
  one INTEGER PRIMARY KEY CHECK (one = 1), term INTEGER NOT NULL, name TEXT NOT NULL,
  endpoint TEXT NOT NULL, is_held INTEGER NOT NULL, beat INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS records (
  kind TEXT NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (kind, name));
"""


class _Row(NamedTuple):
    """What stands in the file of the leader."""

    term: int
    name: str
    endpoint: str
    is_held: bool
    beat: int


class SqliteStore:
    """A `PlanStore` in a file.

    Args:
        path: Of the file; journals lie below `jobs` beside it.
        lease_s: Length of a lease.

    Raises:
        ConfigError: The file is on a network file system, whose locks SQLite can't trust.
        PlanStoreError: It can't be opened, is damaged, or of another schema.
    """

    def __init__(self, path: Path, *, lease_s: float = LEASE_S) -> None:
        self._path = path
        self._lease_s = lease_s
        self._term = 0
        self._seen: tuple[int, int] | None = None
        """Term and beat of the leader that was seen last."""
        self._seen_ns = 0
        _refuse_network(path)
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = HolderLock(path.with_name(f"{path.name}.lock"))
        try:
            with self._told():
                self._db = _connected(path)
                self._prepare()
        except BaseException:
            self._lock.close()
            raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise PlanStoreError(
                f"plan store {self._path} has schema {version}, this planner writes "
                f"{SCHEMA_VERSION}: use the release that wrote it, or another file",
                path=str(self._path),
            )
        with self._writing():
            for statement in _TABLES.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    @property
    def lease_s(self) -> float:
        return self._lease_s

    @property
    def term(self) -> int:
        return self._term

    # -- leadership ------------------------------------------------------------------------------

    def campaign(self, name: str, endpoint: str) -> int | None:
        with self._told():
            seen = self._leader_row()  # watching takes no lock that a renewal needs
            if seen is not None and seen.is_held and not self._is_gone(seen):
                return None
        with self._told(), self._writing():
            row = self._leader_row()
            if row != seen:
                return None
            term = 1 + (self._highest_journalled() if row is None else row.term)
            self._db.execute(
                "INSERT OR REPLACE INTO leader VALUES (1, ?, ?, ?, 1, 0)", (term, name, endpoint)
            )
            self._lock.hold(term)
        self._term = term
        return term

    def _is_gone(self, row: _Row) -> bool:
        """Return True where the holder's process ended, or it said nothing for a lease."""
        if self._lock.is_free(row.term):
            return True
        now_ns = monotonic_ns()
        if self._seen != (row.term, row.beat):
            self._seen, self._seen_ns = (row.term, row.beat), now_ns
        return now_ns - self._seen_ns > self._lease_s * 1e9

    def _highest_journalled(self) -> int:
        """Return the highest term in a journal: terms grow on where the store's file was lost."""
        highest = 0
        for path in self._path.parent.glob(f"jobs/*/{JOURNAL_NAME}"):
            with (
                contextlib.suppress(MsdError),
                contextlib.closing(read_journal(path)) as journal,
                journal.reading(),
            ):
                highest = max(highest, journalled_term(journal))
        return highest

    def renewal(self) -> LeaseRenewal:
        with self._told():
            return _SqliteRenewal(self._path, self._term)

    def resign(self) -> None:
        with contextlib.suppress(PlanStoreError), self._told(), self._writing():
            self._db.execute("UPDATE leader SET is_held = 0 WHERE term = ?", (self._term,))
        self._lock.release()

    def leader(self) -> Leader | None:
        with self._told():
            row = self._leader_row()
        return None if row is None or not row.is_held else Leader(row.term, row.name, row.endpoint)

    def _leader_row(self) -> _Row | None:
        found = self._db.execute(
            "SELECT term, name, endpoint, is_held, beat FROM leader"
        ).fetchone()
        if found is None:
            return None
        term, name, endpoint, is_held, beat = found
        return _Row(term, name, endpoint, bool(is_held), beat)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Return a context in which no other planner begins to lead.

        Raises:
            LeadershipLostError: One leads already.
            PlanStoreError: The file can't be used now.
        """
        with self._told(), self._writing():
            row = self._leader_row()
            if row is None or row.term != self._term or not row.is_held:
                raise LeadershipLostError(
                    f"plan store {self._path}: this planner's term {self._term} is over, "
                    f"{'nobody' if row is None else f'{row.name}, term {row.term},'} leads: nothing "
                    "was written; it stands by from here on",
                    seen=self._term,
                    limit=0 if row is None else row.term,
                )
            yield

    # -- records and journals --------------------------------------------------------------------

    def put(self, kind: RecordKind, name: str, body: bytes) -> None:
        check_record(kind, name, body)
        with self.guarded():
            self._db.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (kind, name, body))

    def drop(self, kind: RecordKind, name: str) -> None:
        with self.guarded():
            self._db.execute("DELETE FROM records WHERE kind = ? AND name = ?", (kind, name))

    def records(self, kind: RecordKind) -> dict[str, bytes]:
        with self._told():
            rows = self._db.execute(
                "SELECT name, body FROM records WHERE kind = ? ORDER BY name", (kind,)
            ).fetchall()
        return {name: bytes(body) for name, body in rows}

    def journal(self, job_id: str) -> JournalPlace:
        folder = self._path.parent / "jobs" / quote(job_id, safe="")
        return FencedPlace(folder / JOURNAL_NAME, self)

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _told(self) -> contextlib.AbstractContextManager[None]:
        return _told(self._path)


class _SqliteRenewal:
    """Renews by a number that who watches sees move."""

    def __init__(self, path: Path, term: int) -> None:
        self._path = path
        self._term = term
        self._db = _connected(path)

    def renew(self) -> bool:
        with _told(self._path):
            cursor = self._db.execute(
                "UPDATE leader SET beat = beat + 1 WHERE term = ? AND is_held", (self._term,)
            )
        return cursor.rowcount == 1

    def close(self) -> None:
        self._db.close()


def _connected(path: Path) -> sqlite3.Connection:
    # One thread at a time uses it; it may have been made by another one.
    return sqlite3.connect(path, isolation_level=None, timeout=BUSY_S, check_same_thread=False)


def _refuse_network(path: Path) -> None:
    kind = file_system_of(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            f"plan store {path} is on {kind}, a network file system, where SQLite's locks can't be "
            "trusted: put it on a local disk, or use etcd:// for planners on several machines",
            path=str(path),
            seen=kind,
        )


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Return a context in which what SQLite or the system says is told as a typed error."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            remedy = "it is damaged: move it away, jobs are opened anew by their nodes"
        else:
            remedy = "make room on its disk, or give the planner's user the right to write there"
        raise PlanStoreError(f"plan store {path}: {error}: {remedy}", path=str(path)) from error
