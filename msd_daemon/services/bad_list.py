"""The bad records of a job in a small SQLite file of its folder: what `msdctl bad` lists.

Its key is the position in the source's order, so a record that is read again, after a restore, a
restart or by another worker, is listed once. Of each source the newest LISTED_MAX are kept; those
that made room are counted, and a floor says up to where, so that they are not counted twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msd_daemon.workers.bad_notice import BadNotice

if TYPE_CHECKING:
    import sqlite3

LISTED_MAX = 10_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS bad (
    source TEXT, block_key INTEGER, idx INTEGER, status INTEGER, shard TEXT, place_name TEXT,
    place INTEGER, key TEXT, text TEXT, PRIMARY KEY (source, block_key, idx)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unnamed (
    source TEXT, block_key INTEGER, idx INTEGER, status INTEGER, count INTEGER,
    PRIMARY KEY (source, block_key, idx, status)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS forgotten (
    source TEXT PRIMARY KEY, block_key INTEGER, idx INTEGER, count INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
"""
_COUNT = "SELECT count(*) FROM bad WHERE ? IS NULL OR source = ?"
_PAGE = """SELECT * FROM bad WHERE ? IS NULL OR source = ?
    ORDER BY source, block_key, idx LIMIT ? OFFSET ?"""
_UNLISTED = """SELECT source, sum(count) FROM (
    SELECT source, count FROM forgotten UNION ALL SELECT source, count FROM unnamed)
    WHERE ? IS NULL OR source = ? GROUP BY source"""


class ListedRecord(NamedTuple):
    """A row of the list."""

    source: str
    block_key: int
    block_index: int
    status: int
    shard: str
    place_name: str
    place: int
    key: str
    text: str


class Page(NamedTuple):
    """A part of a list."""

    rows: list[ListedRecord]
    total: int
    """Rows that match, on this page or not."""
    forgotten: dict[str, int]
    """By source: those that are counted but not kept, or were never named."""


class BadList:
    """One file. Every method blocks and opens it anew: call them in a thread.

    Args:
        path: Where it lies; made by the first `write`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, notices: Iterable[tuple[str, BadNotice]], about: dict[str, str]) -> None:
        """Add the records of notices, (source, notice) each, and facts about the job.

        Raises:
            OSError: The file can't be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._opened() as base:
            touched = set()
            for source, notice in notices:
                touched.add(source)
                self._add(base, source, notice)
            for source in sorted(touched):
                _shorten(base, source)
            base.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about.items())

    def read(self, source: str | None, offset: int, limit: int) -> Page:
        """Return a part of the list, sources by name and each in its order.

        Raises:
            OSError: The file can't be read.
        """
        if not self.path.exists():
            return Page([], 0, {})
        with self._opened() as base:
            (total,) = base.execute(_COUNT, [source, source]).fetchone()
            rows = base.execute(_PAGE, [source, source, limit, offset]).fetchall()
            counts = base.execute(_UNLISTED, [source, source]).fetchall()
        return Page([ListedRecord(*row) for row in rows], total, dict(counts))

    def about(self) -> dict[str, str]:
        """Return the facts about the job; none where there is no such file."""
        if not self.path.exists():
            return {}
        with self._opened() as base:
            return dict(base.execute("SELECT name, value FROM about").fetchall())

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        import sqlite3  # few jobs have a bad record: the daemon does without it

        try:
            base = sqlite3.connect(self.path, timeout=30.0)
            try:
                base.executescript(
                    "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + _SCHEMA
                )
                with base:
                    yield base
            finally:
                base.close()
        except sqlite3.Error as error:
            raise OSError(str(error)) from error

    def _add(self, base: sqlite3.Connection, source: str, notice: BadNotice) -> None:
        floor = base.execute(
            "SELECT block_key, idx FROM forgotten WHERE source = ?", [source]
        ).fetchone() or (-1, -1)
        rows: list[tuple[Any, ...]] = [
            (source, notice.block_key, *row)
            for row in notice.rows
            if (notice.block_key, row.block_index) > floor
        ]
        base.executemany("INSERT OR REPLACE INTO bad VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        base.executemany(
            "INSERT OR REPLACE INTO unnamed VALUES (?, ?, ?, ?, ?)",
            [
                (source, notice.block_key, notice.first_index, status, count)
                for status, count in notice.more.items()
            ],
        )


def _shorten(base: sqlite3.Connection, source: str) -> None:
    """Let go of a source's oldest records where it has more than are kept."""
    (count,) = base.execute("SELECT count(*) FROM bad WHERE source = ?", [source]).fetchone()
    excess = count - LISTED_MAX
    if excess <= 0:
        return
    last = base.execute(
        "SELECT block_key, idx FROM bad WHERE source = ? ORDER BY block_key, idx LIMIT 1 OFFSET ?",
        [source, excess - 1],
    ).fetchone()
    base.execute("DELETE FROM bad WHERE source = ? AND (block_key, idx) <= (?, ?)", [source, *last])
    base.execute(
        "INSERT INTO forgotten VALUES (?, ?, ?, ?) ON CONFLICT (source) DO UPDATE SET "
        "block_key = excluded.block_key, idx = excluded.idx, count = count + excluded.count",
        [source, *last, excess],
    )
