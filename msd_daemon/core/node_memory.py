"""Shared memory that a job takes on each node of a cluster, by the sums of a single node. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from federation.model.job import BatchRule, RampPoint, ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from msd_daemon.core.budget import horizon_of, pool_sums
from msd_daemon.core.ring_plan import plan_rings


class NodeMemory(NamedTuple):
    """Of one node; bytes."""

    node: int
    groups: int
    """Data-parallel groups that have a rank there."""
    rings_bytes: int
    pool_bytes: int


def node_memories(
    job: ResolvedJob,
    tree: ClientPlaceTree,
    *,
    horizon_steps: int,
    ring_slots: int | None,
    pool_bytes: int | None,
) -> Iterator[NodeMemory]:
    """Yield what each node that hosts a rank needs.

    A node's pool holds the rows of its groups and one chunk of every source: each source may be read
    there.

    Args:
        job: The resolved job.
        tree: The mesh, with nodes.
        horizon_steps: As the daemon is configured.
        ring_slots: As the daemon is configured.
        pool_bytes: As the daemon is configured; None: derived.

    Raises:
        ConfigError: A slot is too large.
        BudgetError: A given pool can't hold a node's part.
    """
    rings = [
        (plan.place.ranks, plan.layout(1).ring_bytes + plan.spec.scratch_bytes)
        for plan in plan_rings(job, tree, ring_slots)
    ]
    node_of = np.array(tree.nodes or (0,) * tree.rank_count)
    rings_bytes = np.zeros(len(tree.hosts), np.int64)
    for ranks, size in rings:
        rings_bytes[np.unique(node_of[list(ranks)])] += size
    pools: dict[int, int] = {}
    for node, groups in enumerate(tree.hosts.sum(axis=1).tolist()):
        if not groups:
            continue
        if groups not in pools:
            part = replace(job, batch=_part(job.batch, groups, tree.dp_count))
            horizon = horizon_of(part, horizon_steps)
            pools[groups] = pool_sums(part, horizon, len(job.sources), pool_bytes).pool_bytes
        yield NodeMemory(node, groups, int(rings_bytes[node]), pools[groups])


def _part(batch: BatchRule, groups: int, dp_count: int) -> BatchRule:
    """Return the batch of some of the groups alone."""
    return replace(
        batch,
        rows=-(-batch.rows * groups // dp_count),
        rows_ramp=tuple(
            RampPoint(point.start, -(-point.value * groups // dp_count), point.start_unit)
            for point in batch.rows_ramp
        ),
    )
