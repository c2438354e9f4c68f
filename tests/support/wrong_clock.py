"""A wall clock that is wrong, for daemons and planners of a test: a preloaded library plays it."""

from __future__ import annotations

from pathlib import Path

from tests.support.bad_disk import compiled

SOURCE = Path(__file__).with_suffix(".c")


class WrongClock:
    """Orders to the library. Use `environ` as the process's.

    Args:
        path: Of the file with its orders.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.environ = {"LD_PRELOAD": str(compiled(SOURCE)), "WRONG_CLOCK": str(path)}

    def set(self, seconds: int) -> None:
        """Be so far ahead from now on; below 0 behind."""
        self._path.write_text(str(seconds))
