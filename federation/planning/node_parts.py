"""A plan taken apart by nodes: the rows that each consumes, and what it has to give to others. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.exports import Export
from federation.model.owners import Owners
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.plan_slice import empty_slice, slice_by_node


class NodePart(NamedTuple):
    """What one node is told of a step."""

    plan: StepPlan
    """With the rows of the groups that have a rank there, none on a node that loads only; of carried
    fragments those leave that it loads."""
    exports: tuple[Export, ...]
    """By ascending consumer: samples of its sources that other nodes' rows need."""


def split_plan(
    plan: StepPlan, tree: ClientPlaceTree, owners: Owners, node_count: int
) -> list[NodePart]:
    """Return each node's part of a plan, by node.

    Args:
        plan: The whole step.
        tree: The mesh, with the node of each rank.
        owners: Who loads what.
        node_count: Nodes of the generation, those without ranks too.
    """
    plan = plan.with_encoded_delta()
    slices: list[StepPlan | None] = [None] * node_count
    exports: list[list[Export]] = [[] for _ in range(node_count)]
    for node, part in slice_by_node(plan, tree):
        slices[node] = part
        for producer, places in producers_of(part, owners, node):
            has_units = node in tree.first_stage_nodes
            exports[producer].append(Export.of_plan(part, places, node, has_units=has_units))
    empty = empty_slice(plan)
    left = plan.carried_out_columns
    left_owner = owners.of(left[0], left[1])
    return [
        NodePart(
            replace(part or empty, carried_out_columns=left[:, left_owner == node]), tuple(own)
        )
        for node, (part, own) in enumerate(zip(slices, exports, strict=True))
    ]


def producers_of(plan: StepPlan, owners: Owners, node: int) -> list[tuple[int, npt.NDArray[Any]]]:
    """Return the other nodes whose samples a slice needs, ascending, with its segments of each.

    Args:
        plan: A node's slice.
        owners: Who loads what.
        node: The slice's.
    """
    owner = owners.of(plan.source, plan.block_key)
    return [
        (producer, np.flatnonzero(owner == producer))
        for producer in np.unique(owner).tolist()
        if producer != node
    ]
