"""Waiting for descriptors of any number: `select` takes none above 1023."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Protocol


class HasFileno(Protocol):
    """A socket or a file."""

    def fileno(self) -> int: ...


def readable(files: Sequence[int | HasFileno], timeout_s: float) -> list[int]:
    """Return the descriptors that have something to be read, or have ended, within a time."""
    poller = select.poll()
    for file in files:
        poller.register(file if isinstance(file, int) else file.fileno(), select.POLLIN)
    return [fd for fd, _ in poller.poll(timeout_s * 1000)]
