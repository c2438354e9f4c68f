"""Files that verbs write: whole and on the disk, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from msd_client.contract.errors import UsageError


def check_writable(path: Path) -> None:
    """Look, before the work begins, whether its file can be written; nothing is left behind.

    Raises:
        UsageError: It can't be.
    """
    if path.is_dir():
        raise UsageError(f"{path} can't be written: it is a directory")
    try:
        if _is_special(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        temporary = _beside(path)
        with temporary.open("wb"):
            pass
        temporary.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_output(path: Path, content: bytes) -> None:
    """Write what a verb was asked for, as `write_whole` does; into a pipe or a device, straight.

    Raises:
        UsageError: It can't be written; nothing is left of it.
    """
    try:
        if _is_special(path):
            path.write_bytes(content)
        else:
            write_whole(path, content)
    except OSError as error:
        raise _unwritable(path, error) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, sync it, and put it there.

    Raises:
        OSError: It can't be written; nothing is left of it.
    """
    temporary = _beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _is_special(path: Path) -> bool:
    """Tell whether a path is a terminal, /dev/null or a pipe: nothing may take its place."""
    return path.exists() and not path.is_file()


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} can't be written: {error.strerror or error}")
