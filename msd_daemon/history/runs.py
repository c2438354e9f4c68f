"""The journal of a run: found by the job's name below a daemon's state folder."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from federation.journal_reader import JournalReader
from msd_client.contract.errors import MsdError, NotFoundError
from msd_daemon.services.job_folder import JobFolder

INDEX_DIR = "index"
"""Folder of the state folder."""
DIGEST_MIN = 8
"""Digits of a digest that name a job."""


class RunFolder(NamedTuple):
    """Where a run's files lie."""

    name: str
    """Of the job."""
    digest: str
    """Of the job that it was last planned from."""
    folder: JobFolder
    state_dir: Path

    @property
    def journal(self) -> Path:
        """Its journal."""
        return self.folder.journal

    @property
    def quarantine(self) -> Path:
        """The records that no worker touches."""
        return self.folder.quarantine

    @property
    def index_dir(self) -> Path | None:
        """Where indexes are kept, None where there are none."""
        folder = self.state_dir / INDEX_DIR
        return folder if folder.is_dir() else None


@dataclass(frozen=True)
class _Found:
    changed: float
    run: RunFolder


def find_run(job: str, state_dir: Path) -> RunFolder:
    """Return the newest run of a job, running or over.

    Args:
        job: Its name, its folder's, or at least 8 first digits of its digest.
        state_dir: The daemon's.

    Raises:
        NotFoundError: There is none; the jobs that are there are named.
    """
    found = list(_runs(state_dir))
    matching = [
        one
        for one in found
        if job in (one.run.name, one.run.folder.path.name)
        or (len(job) >= DIGEST_MIN and one.run.digest.startswith(job))
    ]
    # A pass of validation has a folder of its own, called after its run's.
    names = {one.run.folder.path.name for one in matching}
    matching = [
        one
        for one in matching
        if not any(one.run.folder.path.name.startswith(f"{name}-") for name in names)
    ]
    if not matching:
        known = ", ".join(sorted({one.run.name for one in found})) or "none"
        raise NotFoundError(
            f"no run of job {job!r} is below {state_dir / 'jobs'} (there: {known}): name one of "
            "these, or give --state-dir, the folder of the daemon that ran it",
            job=job,
        )
    return max(matching, key=lambda one: one.changed).run


def _runs(state_dir: Path) -> Iterator[_Found]:
    for journal in sorted((state_dir / "jobs").glob("*/journal.db")):
        try:
            changed = max(
                path.stat().st_mtime
                for path in (journal, journal.with_name("journal.db-wal"))
                if path.exists()
            )
            with JournalReader(journal) as reader:
                name, digest = reader.newest_job()
        except (MsdError, OSError, zlib.error):
            continue  # of another release, of another user, or not begun yet
        folder = JobFolder(state_dir, journal.parent.name)
        yield _Found(changed, RunFolder(name, digest, folder, state_dir))
