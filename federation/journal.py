"""The journal of one job: snapshots, a small difference per step, events (DESIGN.md section 4).

SQLite in WAL mode with synchronous=FULL; a commit per planning call, before any of its plans leaves
the planner. State bytes are opaque here.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from federation.journal_events import EventRecord, EventsTable, add_columns
from federation.journal_files import READ_ERRORS, check_whole, damaged, journal_error, move_aside
from federation.retention import STEPS_KEPT
from msd_client.contract.errors import (
    JournalDamagedError,
    JournalUnavailableError,
    MsdError,
    NotFoundError,
    ResourceError,
)

SCHEMA_VERSION = 2
SNAPSHOT_EVERY_STEPS = 256
GENERATIONS_KEPT = 8
VACUUM_PAGES = 256

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
  generation INTEGER NOT NULL, step INTEGER NOT NULL, term INTEGER NOT NULL,
  delta BLOB NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (generation, step));
CREATE TABLE IF NOT EXISTS snapshots (
  generation INTEGER NOT NULL, step INTEGER NOT NULL, state BLOB NOT NULL,
  PRIMARY KEY (generation, step));
CREATE TABLE IF NOT EXISTS generations (
  generation INTEGER PRIMARY KEY, known_events INTEGER NOT NULL,
  first_step INTEGER NOT NULL, mesh BLOB NOT NULL, job_digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (digest TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (
  number INTEGER PRIMARY KEY, generation INTEGER NOT NULL, step INTEGER NOT NULL,
  kind TEXT NOT NULL, body BLOB NOT NULL);
"""


class StepRecord(NamedTuple):
    """What the journal keeps of a step."""

    step: int
    delta: bytes
    digest: str


class GenerationRecord(NamedTuple):
    """What a generation was planned from: enough to plan its steps again."""

    number: int
    known_events: int
    """Events that its first state knew of."""
    first_step: int
    mesh: bytes
    """msgpack of {mesh: [[axis, size], ...]}."""
    job: bytes
    """msgpack of the resolved job."""


class Journal:
    """One open journal file. Blocking; the planner process alone writes while the job runs.

    Args:
        path: The file; made where there is none.
        steps_kept: Steps of the running generation that are kept at least, each restored from a
            snapshot at most SNAPSHOT_EVERY_STEPS before it.
        is_read_only: Look at a journal that a planner may have open.

    Raises:
        JournalDamagedError: The file is no journal, or not what was written.
        JournalUnavailableError: No room, no permission, or nothing there to read.
        ResourceError: It is of another schema.
    """

    def __init__(
        self, path: Path, *, steps_kept: int = STEPS_KEPT, is_read_only: bool = False
    ) -> None:
        self.path = path
        self.steps_kept = steps_kept
        self.is_closed = False
        try:
            if is_read_only:
                self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        except READ_ERRORS as error:
            raise journal_error(path, error) from error
        try:
            self._prepare(is_read_only)
        except READ_ERRORS as error:
            self._db.close()
            raise journal_error(path, error) from error
        except ResourceError:
            self._db.close()
            raise
        self.events_table = EventsTable(self._db)

    def _prepare(self, is_read_only: bool) -> None:
        """Check the file and make what is missing."""
        if is_read_only:
            self._check_schema()
            return
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA cache_size=-512")
        check_whole(self._db, self.path)
        if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._check_schema()
        self._db.executescript(_TABLES)
        add_columns(self._db)
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))

    def _check_schema(self) -> None:
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master")}
        found = None
        if "meta" in tables:
            found = self._db.execute("SELECT value FROM meta WHERE key='schema'").fetchone()
        if found is None:
            if "meta" not in tables:
                raise damaged(self.path, "it is another program's database")
            return  # its maker died before the first word of it
        version = str(found[0])
        if version == str(SCHEMA_VERSION):
            return
        if version.isdigit() and int(version) < SCHEMA_VERSION:
            raise damaged(self.path, f"it has schema {version}, which nobody reads any more")
        raise ResourceError(
            f"journal {self.path} has schema {version}, this planner writes {SCHEMA_VERSION}: use "
            "the release that wrote it, or move the file away",
            path=str(self.path),
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context in which what SQLite says is told as a typed error.

        Raises:
            JournalDamagedError: The file is not what it was.
            JournalUnavailableError: It can't be read now.
        """
        try:
            yield
        except READ_ERRORS as error:
            raise journal_error(self.path, error) from error

    def open_generation(
        self,
        step: int,
        state: bytes,
        known_events: int = 0,
        *,
        job_digest: str = "",
        job: bytes = b"",
        mesh: bytes = b"",
    ) -> int:
        """Begin the next generation with its first snapshot and return its number.

        Numbers go on over all runs of the job; the last few generations are kept.

        Args:
            step: First step.
            state: The state before it.
            known_events: Events that this state knows of.
            job_digest: Of the resolved job.
            job: msgpack of it.
            mesh: msgpack of {mesh: [[axis, size], ...]}.
        """
        self._give_back_room()
        with self._transaction():
            generation = self.last_generation() + 1
            self._drop_empty_generations()
            kept = self.generations()[: GENERATIONS_KEPT - 1]
            oldest = kept[-1][0] if kept else generation
            for table in ("steps", "snapshots", "generations"):
                self._db.execute(
                    f"DELETE FROM {table} WHERE generation < ?",  # noqa: S608 - our own names
                    (oldest,),
                )
            (known,) = self._db.execute("SELECT min(known_events) FROM generations").fetchone()
            self.events_table.shorten(
                oldest, known_events if known is None else min(known_events, known)
            )
            self._db.execute("INSERT INTO snapshots VALUES (?, ?, ?)", (generation, step, state))
            self._db.execute(
                "INSERT INTO generations VALUES (?, ?, ?, ?, ?)",
                (generation, known_events, step, mesh, job_digest),
            )
            self._db.execute(
                "INSERT OR IGNORE INTO jobs VALUES (?, ?)", (job_digest, zlib.compress(job, 1))
            )
            self._db.execute(
                "DELETE FROM jobs WHERE digest NOT IN (SELECT job_digest FROM generations)"
            )
        return generation

    def _drop_empty_generations(self) -> None:
        """Forget runs that ended before their first step: a crash loop must not push steps out."""
        for table in ("snapshots", "generations"):
            self._db.execute(
                f"DELETE FROM {table} WHERE generation NOT IN (SELECT generation FROM steps)"  # noqa: S608
            )

    def _give_back_room(self) -> None:
        """Shrink the file by what former runs left, where the disk has room for that."""
        with contextlib.suppress(JournalUnavailableError), self.reading():
            (unused,) = self._db.execute("PRAGMA freelist_count").fetchone()
            if unused > VACUUM_PAGES:
                self._db.execute("VACUUM")

    def append_steps(
        self,
        generation: int,
        term: int,
        steps: Iterable[StepRecord],
        snapshot: tuple[int, bytes] | None,
    ) -> None:
        """Make steps durable in one commit, with a snapshot where one is due."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO steps VALUES (?, ?, ?, ?, ?)",
                [(generation, record.step, term, record.delta, record.digest) for record in steps],
            )
            if snapshot is not None:
                self._db.execute(
                    "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", (generation, *snapshot)
                )
                self._shorten(generation, snapshot[0] - self.steps_kept)

    def _shorten(self, generation: int, step: int) -> None:
        """Let go of a generation's steps before the last snapshot at or before a step."""
        (first,) = self._db.execute(
            "SELECT max(step) FROM snapshots WHERE generation = ? AND step <= ?", (generation, step)
        ).fetchone()
        if first is None:
            return
        for table in ("steps", "snapshots"):
            self._db.execute(
                f"DELETE FROM {table} WHERE generation = ? AND step < ?",  # noqa: S608 - our names
                (generation, first),
            )

    def append_event(
        self, generation: int, step: int, kind: str, body: bytes, event_number: int = 0
    ) -> int:
        """Make an event durable and return its row's number (see federation.journal_events)."""
        with self._transaction():
            return self.events_table.append(generation, step, kind, body, event_number)

    def events(self, generation: int) -> list[EventRecord]:
        """Return the events of a generation, oldest first."""
        return self.events_table.of_generation(generation)

    def last_snapshot(self, generation: int, step: int) -> tuple[int, bytes] | None:
        """Return (step, state) of the newest snapshot of a generation at or before a step."""
        row = self._db.execute(
            "SELECT step, state FROM snapshots WHERE generation = ? AND step <= ? "
            "ORDER BY step DESC LIMIT 1",
            (generation, step),
        ).fetchone()
        return None if row is None else (int(row[0]), bytes(row[1]))

    def generation(self, number: int) -> GenerationRecord | None:
        """Return what a generation was planned from, None where it is not kept."""
        row = self._db.execute(
            "SELECT known_events, first_step, mesh, body FROM generations "
            "JOIN jobs ON digest = job_digest WHERE generation = ?",
            (number,),
        ).fetchone()
        if row is None:
            return None
        return GenerationRecord(number, row[0], row[1], bytes(row[2]), zlib.decompress(row[3]))

    def job(self, digest: str) -> bytes | None:
        """Return msgpack of a resolved job that some kept generation was planned from, None for none."""
        row = self._db.execute("SELECT body FROM jobs WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else zlib.decompress(row[0])

    def generations(self) -> list[tuple[int, int]]:
        """Return (generation, first step) of those that are kept, the newest first."""
        rows = self._db.execute(
            "SELECT generation, first_step FROM generations ORDER BY generation DESC"
        )
        return [(int(number), int(step)) for number, step in rows]

    def first_snapshot(self, generation: int) -> int | None:
        """Return the first step that a generation's snapshots lead to, None where none is kept."""
        (step,) = self._db.execute(
            "SELECT min(step) FROM snapshots WHERE generation = ?", (generation,)
        ).fetchone()
        return None if step is None else int(step)

    def last_step(self, generation: int) -> int | None:
        """Return the last step recorded in a generation, None where there is none."""
        (step,) = self._db.execute(
            "SELECT max(step) FROM steps WHERE generation = ?", (generation,)
        ).fetchone()
        return None if step is None else int(step)

    def drop_steps(self, generation: int, step: int) -> None:
        """Forget the steps from `step` on: nobody received them, they are planned again."""
        with self._transaction():
            self._db.execute(
                "DELETE FROM steps WHERE generation = ? AND step >= ?", (generation, step)
            )
            self._db.execute(
                "DELETE FROM snapshots WHERE generation = ? AND step > ?", (generation, step)
            )

    def steps_after(self, generation: int, step: int) -> list[StepRecord]:
        """Return the recorded steps from `step` on, in order."""
        rows = self._db.execute(
            "SELECT step, delta, digest FROM steps WHERE generation = ? AND step >= ? ORDER BY step",
            (generation, step),
        )
        return [StepRecord(int(number), bytes(delta), digest) for number, delta, digest in rows]

    def steps_between(self, generation: int, first: int, end: int) -> list[StepRecord]:
        """Return the recorded steps from `first` on, before `end`, in order."""
        rows = self._db.execute(
            "SELECT step, delta, digest FROM steps WHERE generation = ? AND step >= ? AND step < ? "
            "ORDER BY step",
            (generation, first, end),
        )
        return [StepRecord(int(number), bytes(delta), digest) for number, delta, digest in rows]

    def last_generation(self) -> int:
        """Return the newest generation, 0 where there is none."""
        (number,) = self._db.execute("SELECT max(generation) FROM snapshots").fetchone()
        return int(number or 0)

    def meta(self, key: str) -> str | None:
        """Return what the file says of itself under a key, None for nothing."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()
        self.is_closed = True

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Return a context whose writes become durable at its end, all or none.

        Raises:
            JournalDamagedError: The file is not what it was.
            JournalUnavailableError: It can't be written now; nothing of it is.
        """
        return self._transaction()

    def _transaction(self) -> _Transaction:
        return _Transaction(self)

    def _began(self) -> None:
        """Refuse a transaction that may not write; a journal that others may write too overrides it."""

    def _committing(self) -> None:
        """Make durable elsewhere what is about to be committed; what raises here takes it back."""

    def _commit_failed(self, error: ResourceError) -> MsdError:
        """Return what is raised where the file did not take what `_committing` made durable."""
        return error


def open_journal(path: Path, *, steps_kept: int = STEPS_KEPT) -> Journal:
    """Open a journal to write; a damaged one is moved aside and a new one begun.

    Raises:
        JournalUnavailableError: It can't be opened or made now.
        ResourceError: It is of another schema.
    """
    try:
        return Journal(path, steps_kept=steps_kept)
    except JournalDamagedError as error:
        move_aside(path, error)
        return Journal(path, steps_kept=steps_kept)


def replace_damaged(
    journal: Journal,
    error: JournalDamagedError,
    reopen: Callable[[int], Journal] | None = None,
) -> Journal:
    """Close a journal that turned out damaged, move it aside and begin a new one.

    Events that can still be read are taken over.

    Args:
        journal: The damaged one.
        error: What was found.
        reopen: Makes the new one, from the steps it keeps; default: a plain `Journal`.

    Raises:
        JournalUnavailableError: That is not possible now.
    """
    try:
        events = journal.events_table.after(0)
    except (*READ_ERRORS, JournalDamagedError):
        events = []
    move_aside(journal.path, error)
    journal.close()
    if reopen is None:
        new = Journal(journal.path, steps_kept=journal.steps_kept)
    else:
        new = reopen(journal.steps_kept)
    with new.transaction():
        for event in events:
            new.events_table.append(0, event.step, event.kind, event.body, event.event_number)
    return new


def read_journal(path: Path) -> Journal:
    """Open a journal to look at.

    Raises:
        NotFoundError: There is none.
        ResourceError: As `Journal`.
    """
    if not path.exists():
        raise NotFoundError(f"there is no journal {path}: the job has not run here", path=str(path))
    return Journal(path, is_read_only=True)


class _Transaction(contextlib.AbstractContextManager[None]):
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._db = journal._db
        self._path = journal.path

    def __enter__(self) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._journal._began()
        except sqlite3.Error as error:
            self._roll_back()
            raise journal_error(self._path, error) from error
        except MsdError:
            self._roll_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None:
            self._commit()
            return
        self._roll_back()
        if isinstance(error, READ_ERRORS):
            raise journal_error(self._path, error) from error

    def _commit(self) -> None:
        try:
            self._journal._committing()
        except sqlite3.Error as error:
            self._roll_back()
            raise journal_error(self._path, error) from error
        except MsdError:
            self._roll_back()
            raise
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise self._journal._commit_failed(journal_error(self._path, error)) from error

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._db.in_transaction:  # SQLite rolls back by itself where the disk is full
                self._db.execute("ROLLBACK")


def find_jobs(folder: Path, digest: str) -> Iterator[bytes]:
    """Yield the resolved jobs of a digest that journals below a folder keep, msgpack each.

    Jobs of one digest differ in what no sample is a function of, their names for one.

    Args:
        folder: Holds folders of jobs.
        digest: Of the job.
    """
    for path in sorted(folder.glob("*/journal.db")):
        with (
            contextlib.suppress(MsdError, zlib.error),
            contextlib.closing(read_journal(path)) as journal,
            journal.reading(),
        ):
            body = journal.job(digest)
            if body is not None:
                yield body
