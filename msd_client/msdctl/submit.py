"""`msdctl submit`: give a job to the daemon, which resolves it and gets its sources ready."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.daemon_call import call, parsed, socket_option
from msd_client.msdctl.job_argument import parse_mesh, read_job
from msd_client.msdctl.output import json_option, print_json


@click.command(name="submit", short_help="Give a job to the daemon.")
@click.argument("job")
@click.option("--mesh", help="Also check that this mesh fits, as dp=2,tp=2.")
@socket_option
@json_option
def command(job: str, mesh: str | None, socket_path: Path | None, as_json: bool) -> None:
    """Give the job file JOB to the daemon of this node."""
    written = read_job(job)
    fields = written._asdict()
    if mesh is not None:
        fields["mesh"] = parsed(parse_mesh, mesh, "--mesh")
    answer = call(socket_path, "submit", **fields)
    if as_json:
        print_json("submit", answer)
    else:
        click.echo(f"{answer.get('job', written.name)} {answer.get('digest', '')}".rstrip())
