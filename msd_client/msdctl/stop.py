"""`msdctl stop`: end a job, or with `--daemon` the daemon itself."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import json_option, print_json


@click.command(name="stop", short_help="End a job, or the daemon.")
@click.argument("job", required=False)
@click.option("--daemon", "is_daemon", is_flag=True, help="Drain all jobs and end the daemon.")
@socket_option
@json_option
def command(job: str | None, is_daemon: bool, socket_path: Path | None, as_json: bool) -> None:
    """End the job JOB: its ranks get SessionClosedError, its memory is given back.

    With --daemon and no JOB, drain all jobs and end the daemon of this node.
    """
    if (job is None) != is_daemon:
        raise click.UsageError("give either a JOB or --daemon")
    answer = call(socket_path, "shutdown") if job is None else call(socket_path, "stop", job=job)
    if as_json:
        print_json("stop", answer)
    elif job is None:
        click.echo("the daemon drains and ends")
    else:
        note = f" {answer['note']}" if answer.get("note") else ""
        click.echo(f"job {job}: {answer['state']}{note}")
