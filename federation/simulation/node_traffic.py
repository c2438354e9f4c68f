"""Bytes of a plan's samples that have to cross between nodes.

Partitions deal a source's blocks to nodes in turn (DESIGN.md section 4), so block b is read on node
b modulo nodes. A sample goes once to each other node that hosts a rank of its group, however many
ranks there need it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from msd_client.contract.position import BLOCK_BITS

Int64Array = npt.NDArray[np.int64]


def crossing_bytes(plan: StepPlan, tree: ClientPlaceTree, token_bytes: Int64Array) -> int:
    """Return the bytes of token ids that cross between nodes for one step.

    Args:
        plan: The step.
        tree: Its mesh, with nodes.
        token_bytes: Bytes of an id, of each source. Shape (S,).
    """
    hosts = tree.reads()[:, tree.hosts.any(axis=1)]
    nodes = hosts.shape[1]
    if nodes == 1:
        return 0
    group = plan.row_dp[plan.row]
    producer = (plan.block_key & ((1 << BLOCK_BITS) - 1)) % nodes
    copies = hosts.sum(axis=1)[group] - hosts[group, producer]
    sizes = plan.length.astype(np.int64) * token_bytes[plan.source]
    return int((copies * sizes).sum())
