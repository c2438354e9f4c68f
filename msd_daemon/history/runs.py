"""The journal of a run: found by the job's name below a daemon's state folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from federation.journal_reader import JournalReader
from msd_client.contract.errors import MsdError, NotFoundError
from msd_daemon.services.job_folder import JobFolder, known_folders, named_folders

INDEX_DIR = "index"
"""Folder of the state folder."""


class RunFolder(NamedTuple):
    """Where a run's files lie."""

    name: str
    """Of the job."""
    digest: str
    """Of the job that it was last planned from."""
    folder: JobFolder
    state_dir: Path
    others: tuple[RunFolder, ...] = ()
    """Other folders of the name, which ran before; newest first."""

    @property
    def identity(self) -> str:
        """The folder's name."""
        return self.folder.path.name

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


def find_run(job: str, state_dir: Path) -> RunFolder:
    """Return the run of a job that began last, running or over; `others` are its former ones.

    Args:
        job: Its name, its folder's, or at least 6 first digits of its digest.
        state_dir: The daemon's.

    Raises:
        NotFoundError: There is none; the jobs that are there are named.
    """
    named = named_folders(state_dir, job)
    matching = [known for known in named if known.folder.journal.is_file()]
    if named and not matching:
        raise NotFoundError(
            f"job {job!r} is known here and has no journal here: its ranks have yet to start, or this "
            "is a node of a cluster, whose planner keeps it: run this on the planner's machine with "
            "--state-dir, the folder that its SQLite store lies in (by default its state folder)",
            job=job,
        )
    if not matching:
        names = {known.name for known in known_folders(state_dir) if known.folder.journal.is_file()}
        raise NotFoundError(
            f"no run of job {job!r} is below {state_dir / 'jobs'} (there: "
            f"{', '.join(sorted(names)) or 'none'}): name one of these, or give --state-dir, the "
            "folder of the daemon that ran it",
            job=job,
        )
    runs = [RunFolder(known.name, known.digest, known.folder, state_dir) for known in matching]
    return runs[0]._replace(others=tuple(runs[1:]))


@contextmanager
def naming_others(run: RunFolder) -> Iterator[None]:
    """Return a context whose NotFoundError of a step says which other folder of the job keeps it.

    A job that was edited goes on in a folder of its own, so its older steps lie in another.
    """
    try:
        yield
    except NotFoundError as error:
        step = error.attributes.get("step")
        if not isinstance(step, int):
            raise
        keeping = [other.identity for other in run.others if _keeps(other, step)]
        if not keeping:
            raise
        raise NotFoundError(
            f"{error.message}; the job ran in other folders too, and step {step} is kept in "
            f"{', '.join(keeping)}: give one of these instead of the name",
            **error.attributes,
            folders=", ".join(keeping),
        ) from error


def _keeps(run: RunFolder, step: int) -> bool:
    try:
        with JournalReader(run.journal) as reader:
            reader.holding(step)
    except MsdError:
        return False
    return True
