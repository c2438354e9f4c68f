"""The mesh of verbs that plan without a trainer, and which node each of its ranks runs on."""

from __future__ import annotations

from typing import Any

import click

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from msd_client.msdctl.daemon_call import parsed
from msd_client.msdctl.job_argument import parse_mesh

NODE_RANKS = 8


def node_ranks_option(function: Any) -> Any:
    """Add `--node-ranks` to a verb as the argument `node_ranks`."""
    return click.option(
        "--node-ranks",
        type=click.IntRange(min=1),
        default=NODE_RANKS,
        show_default=True,
        help="Ranks of a node; rank r runs on node r // N.",
    )(function)


def mesh_on_nodes(job: ResolvedJob, mesh: str, node_ranks: int) -> ClientPlaceTree:
    """Return a mesh whose nodes have so many ranks each, the last one maybe fewer.

    Args:
        job: The job that it has to fit.
        mesh: As it was written: `dp=1024,pp=4`.
        node_ranks: Ranks of a node.

    Raises:
        click.BadParameter: The text is no mesh.
        MeshMismatchError: It does not fit the job.
    """
    axes = parsed(parse_mesh, mesh, "--mesh")
    ranks = ClientPlaceTree.from_mesh(axes).rank_count
    tree = ClientPlaceTree.from_mesh(axes, [rank // node_ranks for rank in range(ranks)])
    tree.check_batch(job.batch)
    return tree
