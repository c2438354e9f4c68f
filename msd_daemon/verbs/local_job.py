"""The job of a verb that works without a daemon, resolved as the daemon of this node would do it."""

from __future__ import annotations

from pathlib import Path

from federation.model.job import ResolvedJob
from msd_client.msdctl.job_argument import read_job
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.config.resolve import resolve_job
from msd_daemon.verbs.local_stores import configure_local_stores


def resolve_local_job(path: str) -> tuple[ResolvedJob, DaemonConfig]:
    """Set this process's stores and return a job file's resolved job, and the daemon's configuration.

    Copies of the user's code and lists lie where the daemon keeps its own.

    Raises:
        ConfigError: The daemon's configuration is faulty.
        JobError: The job is faulty, or there is no such file.
    """
    config = configure_local_stores()
    written = read_job(path)
    job = resolve_job(written.text, Path(written.base_dir), written.name, config.content_dir)
    return job, config
