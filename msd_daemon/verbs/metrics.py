"""`msdctl metrics`: what Prometheus would scrape of this node, once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_daemon.observe.metrics import render


@click.command(name="metrics", short_help="Print this node's Prometheus metrics once.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write them there at once, for node_exporter's textfile collector.",
)
@socket_option
def command(out: Path | None, socket_path: Path | None) -> None:
    """Print this node's metrics in Prometheus' text format.

    The dashboard serves the same at /metrics. Names and help texts: docs/observing.md.
    """
    text = render(call(socket_path, "snapshot"))
    if out is None:
        click.echo(text.decode(), nl=False)
        return
    fd, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    with os.fdopen(fd, "wb") as file:
        file.write(text)
    os.chmod(name, 0o644)  # the collector runs as another user
    os.replace(name, out)
