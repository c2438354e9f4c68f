"""`msdctl cluster`: the nodes of this daemon's cluster, who leads, who loads what, what happened."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import format_size, format_table, json_option, print_json

EVENTS_SHOWN = 12


@click.command(
    name="cluster", short_help="Show the nodes of the cluster, terms, partitions, traffic."
)
@socket_option
@json_option
def command(socket_path: Path | None, as_json: bool) -> None:
    """Show the nodes of the cluster, who leads, who loads which source, traffic, and what happened."""
    status = call(socket_path, "cluster")
    if as_json:
        print_json("cluster", status)
    else:
        click.echo(cluster_text(status))


def cluster_text(status: dict[str, Any]) -> str:
    """Return the planner's answer for people."""
    parts = [f"term {status['term']}, this node: {status['node']}"]
    parts += [
        f"planner {planner['endpoint']}: {planner['refusal']}"
        for planner in status["planners"]
        if planner["refusal"]
    ]
    rows = [
        [
            node["node"],
            _state(node),
            node["loader_workers"],
            format_size(node.get("received_bytes", 0)),
            format_size(node.get("sent_bytes", 0)),
            format_size(node.get("control_bytes_in", 0) + node.get("control_bytes_out", 0)),
            node["exchange"],
        ]
        for node in status["nodes"]
    ]
    header = ("node", "state", "workers", "received", "sent", "control", "exchange")
    parts.append(format_table(header, rows))
    parts += map(_job_text, status["jobs"])
    events = status["events"][-EVENTS_SHOWN:]
    parts += [f"{time.strftime('%H:%M:%S', time.localtime(at))}  {what}" for at, what in events]
    return "\n".join(parts)


def _state(node: dict[str, Any]) -> str:
    if node["silent_s"]:
        return f"silent {node['silent_s']:.0f} s"
    peers = node.get("silent_peers", [])
    if peers:
        return f"no link to {', '.join(peers[:3])}"
    return "drained" if node["is_drained"] else "up"


def _job_text(job: dict[str, Any]) -> str:
    lines = [f"job {job['name']} ({job['job']}): {job['state']}, generation {job['generation']}"]
    if job["awaited_ranks"]:
        lines.append(f"  waits for ranks {job['awaited_ranks']}")
    loads: dict[str, list[str]] = {}
    for source, nodes in job["owners"].items():
        for node in dict.fromkeys(nodes):
            loads.setdefault(node, []).append(source)
    for node in job["nodes"]:
        own = loads.get(node["node"], [])
        shown = ", ".join(own[:8]) + (f" and {len(own) - 8} more" if len(own) > 8 else "")
        lines.append(
            f"  {node['node']}: {len(node['ranks'])} ranks, released step {node['released_step']}, "
            f"loads {shown or 'nothing'}"
        )
    return "\n".join(lines)
