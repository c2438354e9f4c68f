"""A program in a terminal of a test's own: what it shows, what is typed."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msd_daemon.descriptors import is_readable


class Screen:
    """A terminal with a program in it.

    Attributes:
        process: The program.
        inner: The program's end of the terminal.
    """

    def __init__(self, terminal: int, inner: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.inner = inner
        self._terminal = terminal
        self._text = ""

    def types(self, keys: str) -> None:
        """Type keys."""
        os.write(self._terminal, keys.encode())

    def until(self, text: str, timeout_s: float = 30.0) -> None:
        """Read until a text comes; what was read up to then is not looked at again."""
        deadline = time.monotonic() + timeout_s
        while text not in self._text:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {text!r} in {self._text[-2000:]!r}"
            if is_readable(self._terminal, left_s):
                self._text += os.read(self._terminal, 65536).decode(errors="replace")
        self._text = self._text.partition(text)[2]


@contextlib.contextmanager
def on_screen(
    command: Sequence[str], cwd: Path, environ: Mapping[str, str], *, columns: int = 200
) -> Iterator[Screen]:
    """Run a program in a terminal of 40 lines; whoever is left is killed."""
    terminal, inner = pty.openpty()
    termios.tcsetwinsize(inner, (40, columns))
    try:
        process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True, cwd=cwd,
            env={**environ, "TERM": "xterm-256color"},
        )  # fmt: skip
        try:
            yield Screen(terminal, inner, process)
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(terminal)
        os.close(inner)
