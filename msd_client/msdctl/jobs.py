"""`msdctl jobs`: the jobs of this node, one line each."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import format_table, json_option, print_json


@click.command(name="jobs", short_help="List the jobs of this node.")
@socket_option
@json_option
def command(socket_path: Path | None, as_json: bool) -> None:
    """List the jobs of this node."""
    jobs = call(socket_path, "jobs").get("jobs", [])
    if as_json:
        print_json("jobs", {"jobs": jobs})
    elif jobs:
        keys = ("name", "id", "state", "ranks", "uid", "digest")
        click.echo(format_table(keys, [[job.get(key, "-") for key in keys] for job in jobs]))
    else:
        click.echo("no jobs")
