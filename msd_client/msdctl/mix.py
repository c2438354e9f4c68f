"""`msdctl mix JOB web=4,code=2 --at 5000`: short for `msdctl mixture set`."""

from __future__ import annotations

import click

from msd_client.msdctl.mixture import change

command = click.Command(
    "mix",
    callback=change.callback,
    params=change.params,
    help=change.help,
    short_help="Change the weights of a job, at a stated step.",
)
