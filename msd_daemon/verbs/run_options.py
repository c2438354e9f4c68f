"""Options of verbs that read a run's journal: which run, where its files lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from msd_client.contract.errors import AvailabilityError
from msd_client.msdctl.daemon_call import call, socket_option
from msd_daemon.history.runs import RunFolder, find_run
from msd_daemon.verbs.local_stores import configure_local_stores

_RANGE = re.compile(r"(\d+):(\d+)")


def run_options(function: Any) -> Any:
    """Add `--state-dir` and `--socket` as `state_dir` and `socket_path`."""
    option = click.option(
        "--state-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="State folder of the daemon that ran the job; default: that of the daemon that answers, "
        "else of this node's configuration.",
    )
    return option(socket_option(function))


def run_of(job: str, state_dir: Path | None, socket_path: Path | None) -> RunFolder:
    """Set this process's stores and return the newest run of a job, running or over.

    Raises:
        NotFoundError: There is none.
    """
    config = configure_local_stores()
    if state_dir is None:
        try:
            daemon = call(socket_path, "status")["daemon"]
            state_dir = Path(daemon["state_dir"])
        except AvailabilityError:
            if socket_path is not None:
                raise
            state_dir = config.state_dir
    return find_run(job, state_dir)


def parse_steps(text: str) -> tuple[int, int]:
    """Return `a:b` as (a, b): the steps from a on, b not among them.

    Raises:
        ValueError: Malformed, or empty.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no range of steps; write 100:200 for the steps 100 to 199")
    first, end = int(match[1]), int(match[2])
    if end <= first:
        raise ValueError(f"{text!r} holds no step; write 100:200 for the steps 100 to 199")
    return first, end
