"""Open files: as many as this process may have, and what can be read of one now."""

from __future__ import annotations

import contextlib
import resource
import select


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one; peers and ranks need one each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_readable(fd: int, timeout_s: float = 0.0) -> bool:
    """Return whether a descriptor can be read, or ended, within a time; of any number, as select() is not."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
