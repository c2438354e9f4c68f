"""Options of verbs that work in a state folder: whose, and which run's of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from msd_client.contract.errors import AvailabilityError
from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import say
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.history.runs import RunFolder, find_run
from msd_daemon.verbs.local_stores import configure_local_stores


def run_options(function: Any) -> Any:
    """Add `--state-dir` and `--socket` as `state_dir` and `socket_path`."""
    option = click.option(
        "--state-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="State folder of the daemon; default: that of the daemon that answers, else of this "
        "node's configuration.",
    )
    return option(socket_option(function))


def chosen_state_dir(
    state_dir: Path | None, socket_path: Path | None, config: DaemonConfig
) -> Path:
    """Return the folder that the options name: itself, the answering daemon's, the configured one.

    Raises:
        AvailabilityError: No daemon answers at the socket that was named.
    """
    if state_dir is not None:
        return state_dir
    try:
        return Path(call(socket_path, "status")["daemon"]["state_dir"])
    except AvailabilityError:
        if socket_path is not None:
            raise
        return config.state_dir


def run_of(job: str, state_dir: Path | None, socket_path: Path | None) -> RunFolder:
    """Set this process's stores and return the run of a job that began last; tell of others.

    Raises:
        NotFoundError: There is none.
    """
    config = configure_local_stores()
    run = find_run(job, chosen_state_dir(state_dir, socket_path, config))
    if run.others:
        former = ", ".join(other.identity for other in run.others)
        say(
            f"job {job} ran in {len(run.others) + 1} folders: this is {run.identity}, which began last; "
            f"give {former} instead of the name for what is there"
        )
    return run
