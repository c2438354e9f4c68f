"""`msdctl reload`: have the daemon read its configuration again, as SIGHUP does."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import json_option, print_json

_TEXTS = {
    "now": "in force now",
    "next job": "for jobs that begin from now on",
    "restart": "kept as it was, it needs a restart: systemctl restart msd-daemon",
}


@click.command(name="reload", short_help="Have the daemon read daemon.toml again.")
@socket_option
@json_option
def command(socket_path: Path | None, as_json: bool) -> None:
    """Have the daemon read its configuration again, and say what changed and since when it holds.

    Jobs that run keep what they began with. Faults in the file change nothing (exit code 78).
    """
    answer = call(socket_path, "reload")
    if as_json:
        print_json("reload", answer)
        return
    lines = [
        f"{key}: {_TEXTS.get(effect, effect)}"
        for effect, keys in answer["changed"].items()
        for key in keys
    ]
    click.echo("\n".join(lines) or "nothing changed")
