"""`msdctl submit`: give a job to the daemon, which resolves it and gets its sources ready."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.job_argument import read_job
from msd_client.msdctl.output import json_option, print_json


@click.command(name="submit", short_help="Give a job to the daemon.")
@click.argument("job")
@click.option("--resolved", is_flag=True, help="Print resolved.yaml: every default written out.")
@socket_option
@json_option
def command(job: str, resolved: bool, socket_path: Path | None, as_json: bool) -> None:
    """Give the job file JOB to the daemon of this node; ranks may then connect by its name."""
    answer = call(socket_path, "submit", **read_job(job)._asdict())
    if resolved:
        click.echo(answer["resolved_yaml"], nl=False)
    elif as_json:
        print_json("submit", {key: answer[key] for key in ("name", "digest")})
    else:
        click.echo(f"{answer['name']} {answer['digest']}")
