"""`msdctl schema`: the JSON Schema of a file that people write, for editors."""

from __future__ import annotations

import json

import click


@click.command(name="schema", short_help="Print the JSON Schema of a file that you write.")
@click.argument("kind", type=click.Choice(["job", "daemon", "planner"]), default="job")
def command(kind: str) -> None:
    """Print the JSON Schema of job files (default), of daemon.toml or of planner.toml."""
    if kind == "job":
        from msd_daemon.config.job_file import job_schema as schema
    elif kind == "daemon":
        from msd_daemon.config.daemon_file import daemon_schema as schema
    else:
        from msd_daemon.config.planner_file import planner_schema as schema
    click.echo(json.dumps(schema(), indent=2, ensure_ascii=False))
