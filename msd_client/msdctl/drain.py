"""`msdctl drain`: have a node of the cluster load nothing any more; its ranks read on."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import json_option, print_json, say


@click.command(name="drain", short_help="Have a node of the cluster load nothing any more.")
@click.argument("node")
@click.option("--undo", is_flag=True, help="Let it load again.")
@socket_option
@json_option
def command(node: str, undo: bool, socket_path: Path | None, as_json: bool) -> None:
    """Have a node of the cluster load nothing any more: other nodes take its sources over.

    The stream stays the same, and the ranks of the node read on. It stays drained until --undo, over
    restarts of the planner, too.
    """
    status = call(socket_path, "drain", node=node, drained=not undo)
    if as_json:
        print_json("drain", {"node": node, "drained": not undo, "nodes": status["nodes"]})
    else:
        say(f"node {node} {'loads again' if undo else 'is drained'}")
        if status["nodes"] and all(row["is_drained"] for row in status["nodes"]):
            names = ", ".join(row["node"] for row in status["nodes"])
            say(
                f"warning: all nodes that load are drained ({names}): rather than stop, each goes on to load "
                "a part; undo one of them with --undo, or start another node"
            )
