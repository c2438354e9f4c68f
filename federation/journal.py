"""The journal of one job: snapshots, a small difference per step, events (DESIGN.md section 4).

SQLite in WAL mode with synchronous=FULL; a commit per planning call, before any of its plans leaves
the planner. One writer holds the file's lock. State bytes are opaque here.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from msd_client.contract.errors import ResourceError

SCHEMA_VERSION = 2
SNAPSHOT_EVERY_STEPS = 256
STEPS_KEPT = 100_000
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


class EventRecord(NamedTuple):
    """A journalled event, in force from `step` on."""

    number: int
    step: int
    kind: str
    body: bytes


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
    """One open journal file. Blocking; used by the planner process alone."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA cache_size=-512")
            self._db.executescript(_TABLES)
            self._db.execute(
                "INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),)
            )
            (version,) = self._db.execute("SELECT value FROM meta WHERE key='schema'").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise ResourceError(
                f"journal {path} can't be opened: {error}; check the disk, or move the file away to "
                "start a new one (trainers' saved states stay valid)",
                path=str(path),
            ) from error
        if version != str(SCHEMA_VERSION):
            self._db.close()
            raise ResourceError(
                f"journal {path} has schema {version}, this planner writes {SCHEMA_VERSION}: "
                "move the file away",
                path=str(path),
            )
        self._path = path

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
        (unused,) = self._db.execute("PRAGMA freelist_count").fetchone()
        if unused > VACUUM_PAGES:
            self._db.execute("VACUUM")  # of what former runs left
        with self._transaction():
            generation = self.last_generation() + 1
            for table in ("steps", "snapshots", "generations"):
                self._db.execute(
                    f"DELETE FROM {table} WHERE generation <= ?",  # noqa: S608 - our own names
                    (generation - GENERATIONS_KEPT,),
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
                self._db.execute(
                    "DELETE FROM steps WHERE generation = ? AND step < ?",
                    (generation, snapshot[0] - STEPS_KEPT),
                )

    def append_event(self, generation: int, step: int, kind: str, body: bytes) -> int:
        """Make an event durable and return its number."""
        with self._transaction():
            cursor = self._db.execute(
                "INSERT INTO events (generation, step, kind, body) VALUES (?, ?, ?, ?)",
                (generation, step, kind, body),
            )
        number = cursor.lastrowid
        assert number is not None
        return number

    def events(self, generation: int) -> list[EventRecord]:
        """Return the events of a generation, oldest first."""
        rows = self._db.execute(
            "SELECT number, step, kind, body FROM events WHERE generation = ? ORDER BY number",
            (generation,),
        )
        return [EventRecord(*row) for row in rows]

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

    def first_event_number(self, generation: int) -> int:
        """Return how many events the state knew with which a generation began."""
        row = self._db.execute(
            "SELECT known_events FROM generations WHERE generation = ?", (generation,)
        ).fetchone()
        return 0 if row is None else int(row[0])

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

    def last_generation(self) -> int:
        """Return the newest generation, 0 where there is none."""
        (number,) = self._db.execute("SELECT max(generation) FROM snapshots").fetchone()
        return int(number or 0)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db, self._path)


class _Transaction:
    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None:
            self._db.execute("COMMIT")
            return
        self._db.execute("ROLLBACK")
        if isinstance(error, sqlite3.Error):
            raise ResourceError(
                f"journal {self._path}: {error}; free disk space, then restart the job",
                path=str(self._path),
            ) from error


def find_job(folder: Path, digest: str) -> bytes | None:
    """Return the resolved job of a digest that some journal below a folder keeps, None for none.

    Args:
        folder: Holds folders of jobs.
        digest: Of the job.

    Returns:
        msgpack of the job.
    """
    for path in sorted(folder.glob("*/journal.db")):
        with (
            contextlib.suppress(sqlite3.Error, zlib.error, OSError),
            contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db,
        ):
            row = db.execute("SELECT body FROM jobs WHERE digest = ?", (digest,)).fetchone()
            if row is not None:
                return zlib.decompress(row[0])
    return None
