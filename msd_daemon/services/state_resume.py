"""A saved state meets a job that was changed since: the old job is looked up, the state adapted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from federation.model.job import ResolvedJob, decode_job
from msd_client.contract.codec import unpack_map
from msd_client.contract.errors import MsdError
from msd_client.contract.state import StreamState

log = logging.getLogger(__name__)

JOB_BYTES_MAX = 256 << 20


@dataclass(frozen=True)
class Resumed:
    """A state as one of a job that goes on."""

    state: bytes
    changes: list[list[str]]
    """[key, class, text] of each."""
    job: ResolvedJob
    """The given one, or with shards that were appended to its sources."""


class StateResumes:
    """Of one daemon: all ranks of a job bring one state, which is adapted once.

    Args:
        jobs_dir: Folders of jobs, in whose journals a state's own job is looked for.
    """

    def __init__(self, jobs_dir: Path) -> None:
        self._jobs_dir = jobs_dir
        self._last: dict[str, tuple[object, asyncio.Task[Resumed]]] = {}
        """By session: what was asked last."""

    async def resume(
        self, session: str, state: bytes, job: ResolvedJob, accept: tuple[str, ...]
    ) -> Resumed:
        """Return a state as one of a session's job.

        Raises:
            StateMismatchError: As `resume_state`.
        """
        asked = (hashlib.sha256(state).digest(), accept)
        last = self._last.get(session)
        if last is None or last[0] != asked:
            made = asyncio.to_thread(resume_state, state, job, accept, self._jobs_dir)
            last = self._last[session] = (asked, asyncio.ensure_future(made))
        return await asyncio.shield(last[1])

    def forget(self, session: str) -> None:
        """A session is over."""
        self._last.pop(session, None)


def resume_state(
    state: bytes, job: ResolvedJob, accept: tuple[str, ...], jobs_dir: Path
) -> Resumed:
    """Return a state as one of `job`. Blocks; for a thread.

    Args:
        state: Encoded.
        job: The job that is to go on with it.
        accept: Keys of changes that are meant.
        jobs_dir: Folders of jobs, in whose journals the state's own job is looked for.

    Raises:
        StateMismatchError: A change is refused, or the bytes are no state.
    """
    # Few resumes need them: they bring SQLite and the planning along.
    from federation.journal import find_jobs
    from federation.planning.resume import adapt_state

    decoded = StreamState.decode(state)
    old_job: ResolvedJob | None = None
    for body in find_jobs(jobs_dir, decoded.job_digest):
        try:
            found = decode_job(unpack_map(body, bytes_max=JOB_BYTES_MAX))
        except MsdError as error:
            log.warning("the journal's copy of job %s can't be read: %s", decoded.job_digest, error)
            continue
        # Of several names the state may be of any: one that is the job's own is no change.
        old_job = found if old_job is None or found.name == job.name else old_job
        if old_job.name == job.name:
            break
    adapted = adapt_state(decoded, job, accept=accept, old_job=old_job)
    changes = [[change.key, change.change_class, change.text] for change in adapted.changes]
    return Resumed(adapted.state.encode(), changes, adapted.job)
