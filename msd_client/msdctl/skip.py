"""`msdctl skip JOB --steps 4800:4850`: leave the content of some steps out."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.daemon_call import call, parsed, socket_option
from msd_client.msdctl.job_argument import parse_steps
from msd_client.msdctl.output import json_option, print_json


@click.command(name="skip", short_help="Leave the content of some steps out.")
@click.argument("job")
@click.option("--steps", required=True, help="FIRST:END, plan steps; END is not skipped.")
@socket_option
@json_option
def command(job: str, steps: str, socket_path: Path | None, as_json: bool) -> None:
    """Leave the content of plan steps FIRST to END-1 of JOB out; it is read, counted and dropped.

    All other content stays what it is, and the trainer's step numbers have no gap. The skip is
    journalled before a plan uses it. Steps that are planned already are refused: rewind for those.
    """
    answer = call(socket_path, "skip", job=job, steps=parsed(parse_steps, steps, "--steps"))
    if as_json:
        print_json("skip", answer)
        return
    click.echo(
        f"job {answer['job']}: plan steps {answer['first']} to {answer['end'] - 1} are left out; step "
        f"{answer['step']} holds what comes behind them"
    )
