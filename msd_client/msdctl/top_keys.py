"""Keys of a terminal, one at a time and without waiting for a line."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "pageup",
    b"\x1b[6~": "pagedown",
    b"\x1b": "escape",
    b"\t": "tab",
}


@contextlib.contextmanager
def raw_keys() -> Iterator[None]:
    """Let keys come one by one from standard input, which is a terminal; it is as before afterwards."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def next_key(until_s: float) -> str | None:
    """Return the next key that comes before a monotonic time, None where none does.

    A character, or a name of `TopState.press`; end of file is `q`.
    """
    fd = sys.stdin.fileno()
    if not select.select([fd], [], [], max(until_s - time.monotonic(), 0.0))[0]:
        return None
    data = os.read(fd, 16)
    if not data:
        return "q"
    return _SEQUENCES.get(data) or data[:1].decode("latin-1")
