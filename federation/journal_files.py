"""What can be wrong with a journal's file: which errors mean damage, and where damaged ones go."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import sqlite3
from pathlib import Path

from msd_client.contract.errors import (
    JournalDamagedError,
    JournalUnavailableError,
    ResourceError,
)

log = logging.getLogger(__name__)

READ_ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)
"""What looking at a journal raises; the last one for text whose bytes were changed."""
DAMAGED_KEPT = 3
"""Damaged journals that lie beside the one in use."""
CHECKED_BYTES_MAX = 512 << 20
"""Files up to this are checked whole when opened: 50 ms a 100 MB, measured."""

_SIDE_FILES = ("-wal", "-shm")
_DAMAGE_CODES = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,  # a table that was there is gone: our own statements are right
)
_LATER_CODES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOLFS,
)
"""It may go another time, once somebody made room or mended rights."""
_PASSING_CODES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
)
_PASSING_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def journal_error(path: Path, error: BaseException) -> ResourceError:
    """Return the typed error of what SQLite or the system says of a journal."""
    code = getattr(error, "sqlite_errorcode", None)
    name = getattr(error, "sqlite_errorname", None)
    if path.is_dir():
        return damaged(path, "a folder lies in its place")
    is_undecodable = isinstance(error, UnicodeDecodeError) or (
        code is None and isinstance(error, sqlite3.OperationalError)
    )
    if is_undecodable or code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return damaged(path, str(error))
    if code is not None and code & 0xFF in _DAMAGE_CODES:
        return damaged(path, str(error))
    if isinstance(error, OSError) or (code is not None and code & 0xFF in _LATER_CODES):
        return JournalUnavailableError(
            f"journal {path}: {error}{f' ({name})' if name else ''}: make room on its disk, or give "
            "the daemon's user the right to write there; trainers' saved states stay valid",
            path=str(path),
        )
    return ResourceError(f"journal {path}: {error}: restart the job", path=str(path))


def may_pass(error: JournalUnavailableError) -> bool:
    """Tell whether waiting may help: for room, yes; rights have to be mended by somebody."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in _PASSING_ERRORS
    code = getattr(cause, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _PASSING_CODES


def damaged(path: Path, what: str) -> JournalDamagedError:
    """Return the error of a damaged journal."""
    return JournalDamagedError(
        f"journal {path} is damaged: {what}; move it away to start a new one (trainers' saved "
        "states stay valid)",
        path=str(path),
    )


def check_whole(db: sqlite3.Connection, path: Path) -> None:
    """Look through a file that is not too large for it.

    Raises:
        JournalDamagedError: Its pages do not fit together.
    """
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
    if pages * page_bytes > CHECKED_BYTES_MAX:
        return
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise damaged(path, str(verdict).replace("\n", " "))


def move_aside(path: Path, error: ResourceError) -> Path:
    """Move a damaged journal to `NAME.damaged-N` and say so; the oldest of many are removed.

    Raises:
        JournalUnavailableError: It can't be moved.
    """
    prefix = f"{path.name}.damaged-"
    try:
        there = {
            int(other.name[len(prefix) :]): other
            for other in path.parent.iterdir()
            if other.name.startswith(prefix) and other.name[len(prefix) :].isdigit()
        }
        target = path.with_name(f"{prefix}{max(there, default=0) + 1}")
        path.rename(target)
        for suffix in _SIDE_FILES:
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).rename(target.with_name(target.name + suffix))
    except OSError as cause:
        raise JournalUnavailableError(
            f"{error.message}; it can't be moved aside ({cause.strerror or cause})", path=str(path)
        ) from cause
    log.warning("%s: moved to %s, a new journal begins", error.message, target.name)
    for number in sorted(there)[: -(DAMAGED_KEPT - 1)]:
        _remove(there[number])
    return target


def _remove(path: Path) -> None:
    for name in (path, *(path.with_name(path.name + suffix) for suffix in _SIDE_FILES)):
        with contextlib.suppress(OSError):
            if name.is_dir():
                shutil.rmtree(name)
            else:
                name.unlink()
