"""How many passes of a source a job draws, and how many it may have to read. Pure.

Loaders ask too: nothing else of the planning is imported here.
"""

from __future__ import annotations

from federation.model.job import ResolvedJob


def read_epochs_max(job: ResolvedJob, source: int) -> int | None:
    """Return how many passes of a source may be read, None for no end.

    A wrapped last step may draw from passes behind the last one that counts.
    """
    return None if job.end == "wrap" else epochs_max(job, source)


def epochs_max(job: ResolvedJob, source: int) -> int | None:
    """Return how many passes of a source may be drawn, None for no end."""
    spec = job.sources[source]
    limits = [limit for limit in (spec.max_epochs, job.epochs) if limit is not None]
    if limits:
        return min(limits)
    return None if spec.at_exhaustion == "repeat" else 1
