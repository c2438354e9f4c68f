"""`msdctl dashboard`: the web page of this node's daemon, for as long as the command runs."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import click

from msd_client.contract.paths import default_socket_path
from msd_client.msdctl.daemon_call import call, parsed, socket_option
from msd_client.msdctl.output import json_option, print_json, say
from msd_daemon.config.dashboard_options import parse_listen
from msd_daemon.dashboard.gate import read_token
from msd_daemon.dashboard.main import (
    DashboardRun,
    address_of,
    bind,
    check_libraries,
    check_open,
    new_token,
    serve,
)


@click.command(name="dashboard", short_help="Show the daemon in a web page.")
@click.option(
    "--listen", default="127.0.0.1:0", show_default=True, help="HOST:PORT; 0: any free one."
)
@click.option(
    "--token-file", type=click.Path(path_type=Path, dir_okay=False),
    help="File with the token that visitors need; default: one is made and printed.",
)  # fmt: skip
@click.option(
    "--no-token", is_flag=True, help="Every user of this machine may look; loopback alone."
)
@socket_option
@json_option
def command(
    listen: str, token_file: Path | None, no_token: bool, socket_path: Path | None, as_json: bool
) -> None:
    """Serve the web page of this node's daemon, and its metrics, until Ctrl-C; prints the address.

    The address holds a token, so other users of this machine can't look. A daemon serves the page
    by itself where dashboard.listen in daemon.toml says so.
    """
    if no_token and token_file is not None:
        raise click.UsageError("give --token-file or --no-token, not both")
    host, port = parsed(parse_listen, listen, "--listen")
    path = (socket_path or default_socket_path(os.environ, os.getuid())).absolute()
    check_libraries()
    call(path, "ping")
    token = None if no_token else new_token() if token_file is None else read_token(token_file)
    run = DashboardRun(path, host, port, token)
    check_open(run.host, run.token)
    with bind(host, port) as sock:
        address = address_of(sock, host)
        shown = address if token is None or token_file is not None else f"{address}?token={token}"
        if as_json:
            print_json("dashboard", {"address": shown, "socket": str(path)})
        else:
            click.echo(shown)
            say(f"Ctrl-C ends it; from elsewhere: ssh -L {port or sock.getsockname()[1]}:{host}:"
                f"{sock.getsockname()[1]} {os.uname().nodename}")  # fmt: skip
        asyncio.run(serve(replace(run, port=sock.getsockname()[1]), sock))
