"""`msdctl status`: the daemon, its workers and memory, and its jobs in detail."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import json_option, print_json
from msd_client.msdctl.status_text import daemon_text, job_text


@click.command(name="status", short_help="Show the daemon and its jobs.")
@click.argument("job", required=False)
@socket_option
@json_option
def command(job: str | None, socket_path: Path | None, as_json: bool) -> None:
    """Show the daemon of this node and its jobs, or JOB alone."""
    answer = call(socket_path, "status", **({} if job is None else {"job": job}))
    if as_json:
        print_json("status", answer)
        return
    parts = [] if job is not None else [daemon_text(answer.get("daemon", {}))]
    parts += [job_text(found) for found in answer.get("jobs", [])]
    click.echo("\n\n".join(parts))
