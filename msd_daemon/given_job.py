"""A job as functions for notebooks take it: a file, a dict, or resolved already."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from federation.model.job import ResolvedJob
from msd_client.contract.errors import ConfigError, UsageError

GivenJob = str | os.PathLike[str] | Mapping[str, Any] | ResolvedJob


def given_job(job: GivenJob, base_dir: str | os.PathLike[str] | None, what: str) -> ResolvedJob:
    """Return a job resolved.

    Args:
        job: Path of a job file, a job as a dict, or a resolved job.
        base_dir: Folder that relative paths start from; None takes that of the job file, or the
            current one.
        what: The function that was called, for its error.

    Raises:
        ConfigError: The job is refused, all faults are listed, or its file can't be read.
        UsageError: It is no job at all.
    """
    if isinstance(job, ResolvedJob):
        return job
    from msd_daemon.config.resolve import resolve_job

    if isinstance(job, Mapping):
        return resolve_job(job, Path(base_dir or Path.cwd()), str(job.get("name", "job")))
    if not isinstance(job, (str, os.PathLike)) or not isinstance(os.fspath(job), str):
        raise UsageError(
            f"{what}: job is a {type(job).__name__}: pass the path of a job file, or a dict"
        )
    path = Path(job)
    folder = Path(base_dir) if base_dir is not None else path.resolve().parent
    return resolve_job(_read_job_file(path), folder, path.stem)


def _read_job_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"job file {path} can't be read: {error.strerror or error}") from error
    except ValueError as error:  # no UTF-8, or a path with a zero byte
        raise ConfigError(f"job file {path} can't be read: {error}") from error
