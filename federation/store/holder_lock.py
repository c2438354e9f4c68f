"""Tells whether the planner that holds a term on this host still lives: the kernel says so.

Term N's holder locks byte N of a file (an open file description lock, Linux's own, which ends with
its process however that ends). A free byte means that nobody holds the term any more. A stopped
process keeps its lock: such a one is found out by its silence.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class HolderLock:
    """The locks of one planner.

    Args:
        path: The file; made where there is none.

    Raises:
        OSError: It can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held: int | None = None

    def hold(self, term: int) -> None:
        """Hold a term's byte, and no other one."""
        self.release()
        if self._set(fcntl.F_WRLCK, term):
            self._held = term

    def is_free(self, term: int) -> bool:
        """Return True where no living process, this one included, holds a term's byte."""
        if term == self._held:
            return False
        if not self._set(fcntl.F_WRLCK, term):
            return False
        self._set(fcntl.F_UNLCK, term)
        return True

    def release(self) -> None:
        """Let go of the byte that is held."""
        if self._held is not None:
            self._set(fcntl.F_UNLCK, self._held)
            self._held = None

    def close(self) -> None:
        """Let go, and close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._held = -1, None

    def _set(self, kind: int, byte: int) -> bool:
        """Return True where the lock was set; False where another one stands in its way."""
        order = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, order)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
