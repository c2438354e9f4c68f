"""`msdctl doctor`: what of this machine will trouble msd, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.daemon_call import socket_option
from msd_client.msdctl.findings import find_all
from msd_client.msdctl.output import json_option, print_json

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@click.command(name="doctor", short_help="Check this machine; each finding with its remedy.")
@socket_option
@json_option
@click.pass_context
def command(ctx: click.Context, socket_path: Path | None, as_json: bool) -> None:
    """Check shared memory, limits, versions, kernel and leftovers of this machine.

    Exit code 1 if something will not work, else 0.
    """
    findings = find_all(socket_path)
    is_failed = any(finding.level == "fail" for finding in findings)
    if as_json:
        print_json("doctor", {"ok": not is_failed, "findings": [f.as_map() for f in findings]})
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            click.echo(f"{_MARKS[finding.level]}  {finding.name:<{width}}  {finding.value}")
            if finding.remedy:
                click.echo(f"      {'':<{width}}  -> {finding.remedy}")
    ctx.exit(1 if is_failed else 0)
