"""A user's transform from its source text, as a job would run it."""

from __future__ import annotations

import os
import select
import sys
import textwrap
from pathlib import Path

from federation.model.recipe import UserCall
from federation.user_copy import CALL_FILE, FILES_FOLDER, CallCopy, list_files

GONE_S_MAX = 60.0


def user_call(
    folder: Path, source: str, name: str = "fn", *, python: str = sys.executable, **options: object
) -> UserCall:
    """Return the call of a function of a module with this text."""
    files = folder / FILES_FOLDER
    files.mkdir(parents=True, exist_ok=True)
    (files / "mine.py").write_text(textwrap.dedent(source), encoding="utf-8")
    copy = CallCopy(f"mine:{name}", options, (".",), list_files(files))
    (folder / CALL_FILE).write_bytes(copy.text())
    return UserCall(copy.call, python, str(folder), copy.digest())


def wait_gone(pidfds: list[int]) -> None:
    """Wait until processes have ended, and close what holds them.

    Raises:
        TimeoutError: One is still there.
    """
    for fd in pidfds:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(GONE_S_MAX * 1000):
            raise TimeoutError("a process outlives its worker")
        os.close(fd)
