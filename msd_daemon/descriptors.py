"""Room for connections: as many open files as this process may have."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one; peers and ranks need one each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
