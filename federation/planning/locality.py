"""Fewest bytes across nodes among placements of like cost.

What lies where is given as the bytes of each row on each node: told from the partition rule, by which
a source's blocks are dealt to nodes in turn (`producer_nodes`), or by the caller. A rank whose row lies elsewhere gets
it over the network. Two changes save bytes and cost nothing: ranks trade all their rows (any rank can
take any share), and rows of equal cost trade places. With a tolerance rows of nearly equal cost do
too, as long as the objective stays within it. Ties by rank and row number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.model.place_tree import ClientPlaceTree
from federation.planning.balance import PPM, BalanceRule, Placement, cell_costs, objective_of
from msd_client.contract.position import BLOCK_BITS

Int64Array = npt.NDArray[np.int64]

_DISTANCE_MAX = 16
"""Rows trade places with those up to so many places further on by falling cost."""


def crossing_bytes(placement: Placement, local_bytes: Int64Array, reads: Int64Array) -> int:
    """Return the bytes that cross nodes: of each row, for each node that reads it, what lies elsewhere.

    Args:
        placement: Where rows go.
        local_bytes: Bytes of each row on each node; each byte lies on one. Shape (R, nodes).
        reads: 1 where a node has ranks that read a group's rows. Shape (dp, nodes).
    """
    reading = reads[placement.dp]
    return int(
        (local_bytes.sum(axis=1) * reading.sum(axis=1)).sum() - (local_bytes * reading).sum()
    )


def producer_nodes(block_key: Int64Array, tree: ClientPlaceTree) -> Int64Array:
    """Return the node whose loaders read each block: of the nodes with ranks, in turn. Shape (n,).

    Args:
        block_key: Block keys (msd_client.contract.position). Shape (n,).
        tree: The mesh, with its nodes.
    """
    nodes = np.flatnonzero(tree.hosts.any(axis=1))
    found: Int64Array = nodes[(block_key & ((1 << BLOCK_BITS) - 1)) % len(nodes)]
    return found


def bytes_by_node(
    segment_bytes: Int64Array,
    segment_row: Int64Array,
    segment_node: Int64Array,
    row_count: int,
    node_count: int,
) -> Int64Array:
    """Return the bytes of each row on each node. Shape (R, nodes).

    Args:
        segment_bytes: Of each segment. Shape (n,).
        segment_row: Its row. Shape (n,).
        segment_node: The node whose loader has it. Shape (n,).
        row_count: Rows.
        node_count: Nodes.
    """
    found = np.zeros(row_count * node_count, np.int64)
    np.add.at(found, segment_row * node_count + segment_node, segment_bytes)
    return found.reshape(row_count, node_count)


def place_locally(
    costs: Int64Array,
    placement: Placement,
    local_bytes: Int64Array,
    reads: Int64Array,
    rule: BalanceRule,
) -> Placement:
    """Return a placement that moves no more bytes, its objective within the rule's tolerance.

    Args:
        costs: Of each row. Shape (R,).
        placement: As it was balanced.
        local_bytes: Bytes of each row on each node. Shape (R, nodes).
        reads: 1 where a node has ranks that read a group's rows. Shape (dp, nodes).
        rule: Its objective, stages and tolerance.
    """
    # Groups that the same nodes read are one kind: where a row of theirs goes makes no difference.
    kinds, kind_of = np.unique(reads, axis=0, return_inverse=True)
    kind_of = kind_of.reshape(-1)
    if len(kinds) == 1:
        return placement
    nearby = local_bytes @ kinds.T - local_bytes.sum(axis=1)[:, None] * kinds.sum(axis=1)
    found = _trade_shares(placement, nearby, kind_of)
    return _trade_rows(costs, found, nearby, kind_of, rule)


def _trade_shares(placement: Placement, nearby: Int64Array, kind_of: Int64Array) -> Placement:
    """Give ranks' shares to ranks of the kind that saves most, best share first."""
    dp_count = len(kind_of)
    gains = np.zeros((dp_count, nearby.shape[1]), np.int64)
    np.add.at(gains, placement.dp, nearby)
    room = np.bincount(kind_of).tolist()
    kind_of_share = np.full(dp_count, -1)
    order = np.argsort(-gains.ravel(), kind="stable")
    for share, kind in zip(*(part.tolist() for part in np.divmod(order, len(room))), strict=True):
        if kind_of_share[share] < 0 and room[kind]:
            kind_of_share[share] = kind
            room[kind] -= 1
    shares = np.arange(dp_count)
    if gains[shares, kind_of_share].sum() <= gains[shares, kind_of].sum():
        return placement
    rank_of = np.empty(dp_count, np.int64)
    rank_of[np.argsort(kind_of_share, kind="stable")] = np.argsort(kind_of, kind="stable")
    return placement._replace(dp=rank_of[placement.dp])


def _trade_rows(
    costs: Int64Array,
    placement: Placement,
    nearby: Int64Array,
    kind_of: Int64Array,
    rule: BalanceRule,
) -> Placement:
    dp_count = len(kind_of)
    before = objective_of(costs, placement, dp_count, rule.objective, rule.stages)
    limit = before + before * rule.tolerance_ppm // PPM
    columns = [column.copy() for column in placement]
    dp, microbatch, slot = columns
    cells = cell_costs(costs, placement, dp_count)
    loads = cells.sum(axis=1)
    cell_most = cells.max(axis=0) if rule.objective == "microbatch" else None
    load_most = int(loads.max()) + int(loads.max()) * rule.tolerance_ppm // PPM
    order = np.lexsort((np.arange(len(costs)), -costs))
    equal_only = rule.objective == "pipeline" or not rule.tolerance_ppm
    for distance in range(1, min(_DISTANCE_MAX, len(order) - 1) + 1):
        first, second = order[:-distance], order[distance:]
        gains = _gains(nearby, kind_of, dp, first, second)
        gains[(gains > 0) & (costs[first] != costs[second]) & equal_only] = 0
        for place in np.argsort(-gains, kind="stable")[: np.count_nonzero(gains > 0)].tolist():
            a, b = int(first[place]), int(second[place])
            if (
                _gains(nearby, kind_of, dp, first[place : place + 1], second[place : place + 1])
                <= 0
            ):
                continue
            change = int(costs[a] - costs[b])  # the rank of b gets it
            if change and loads[dp[b]] + change > load_most:
                continue
            cell = int(cells[dp[b], microbatch[b]]) + change
            if change and cell_most is not None and cell > cell_most[microbatch[b]]:
                continue
            for row, sign in ((a, -1), (b, 1)):
                loads[dp[row]] += sign * change
                cells[dp[row], microbatch[row]] += sign * change
            for column in columns:
                column[a], column[b] = column[b], column[a]
    found = Placement(dp, microbatch, slot)
    after = objective_of(costs, found, dp_count, rule.objective, rule.stages)
    return found if after <= limit else placement


def _gains(
    nearby: Int64Array, kind_of: Int64Array, dp: Int64Array, first: Int64Array, second: Int64Array
) -> Int64Array:
    """Return the bytes that are saved where each of the first rows trades with each second."""
    here, there = kind_of[dp[first]], kind_of[dp[second]]
    after = nearby[first, there] + nearby[second, here]
    gains: Int64Array = after - nearby[first, here] - nearby[second, there]
    return gains
