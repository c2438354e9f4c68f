"""One planned step as people look at it: sources, rows, what is carried, groups and their ranks.

Made from the plan and the mesh alone; `msdctl graph` draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.place_tree import STAGES, ClientPlaceTree
from federation.model.plan import StepPlan

Int64Array = npt.NDArray[np.int64]
_LENGTH = 4
"""Row of a delta's carried fragments that holds their tokens."""


@dataclass(frozen=True)
class SourceFlow:
    """What one source gives to a step; tokens."""

    name: str
    wanted: float
    """Share of the mixture, 0 to 1."""
    drawn: int
    placed: int
    """In rows of this step, drawn now or before."""
    carried: int
    """Drawn now, for a later step."""


@dataclass(frozen=True)
class GroupPlace:
    """A data-parallel group on one node."""

    node: int
    group: int
    ranks: tuple[tuple[str, tuple[int, ...]], ...]
    """Ranks on that node by kind of pipeline stage."""


@dataclass(frozen=True, eq=False)
class StepView:
    """A step and its place tree."""

    step: int
    chain: str
    """The verbs of its strategy."""
    mesh: str
    unit: str
    rows: int
    row_tokens: int
    fill_ratio: float
    imbalance: float
    encoder_imbalance: float | None
    """None of jobs whose media are encoded with their text."""
    moved_segments: int
    """Segments of which another group encodes media."""
    valid_tokens: int
    sources: tuple[SourceFlow, ...]
    carried_tokens: int
    """In the pool behind the step."""
    from_pool_tokens: int
    """Placed now, drawn before."""
    cell_costs: Int64Array
    """Integer cost of what each group computes in each microbatch. Shape (dp, microbatches)."""
    cell_tokens: Int64Array
    cell_segments: Int64Array
    places: tuple[GroupPlace, ...]
    """By node, then group."""

    def plain(self) -> dict[str, Any]:
        """Return the view as plain maps, lists and numbers, for JSON."""
        names = ("step", "chain", "mesh", "unit", "rows", "row_tokens", "fill_ratio", "imbalance",
                 "encoder_imbalance", "moved_segments", "valid_tokens", "carried_tokens", "from_pool_tokens")  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "sources": [vars(source) for source in self.sources],
            "groups": [
                {
                    "group": group,
                    "costs": self.cell_costs[group].tolist(),
                    "tokens": self.cell_tokens[group].tolist(),
                    "segments": self.cell_segments[group].tolist(),
                }
                for group in range(len(self.cell_costs))
            ],
            "places": [
                {"node": place.node, "group": place.group, "ranks": dict(place.ranks)}
                for place in self.places
            ],
        }


def view_step(
    plan: StepPlan,
    tree: ClientPlaceTree,
    names: Sequence[str],
    row_costs: Int64Array,
    chain: str,
) -> StepView:
    """Return a planned step as people look at it.

    Args:
        plan: The step.
        tree: The mesh it was planned for.
        names: Of the sources, in the job's order.
        row_costs: Cost of each canonical row. Shape (R,).
        chain: The verbs that made it (`DGraph.chain`).
    """
    joined = plan.delta.carried_in
    carried = np.bincount(joined[0], weights=joined[_LENGTH], minlength=len(names)).astype(np.int64)
    cell = plan.row_dp.astype(np.int64) * plan.microbatch_count + plan.row_microbatch
    shape = (plan.dp_count, plan.microbatch_count)

    def by_cell(rows: npt.NDArray[Any], weights: npt.NDArray[Any] | None) -> Int64Array:
        counts = np.zeros(shape[0] * shape[1], np.int64)
        np.add.at(counts, rows, 1 if weights is None else weights)
        return counts.reshape(shape)

    flows = zip(
        names,
        plan.wanted_shares.tolist(),
        plan.drawn_tokens.tolist(),
        plan.placed_tokens.tolist(),
        carried.tolist(),
        strict=True,
    )
    drawn_now = int(plan.drawn_tokens.sum() - carried.sum())
    return StepView(
        step=plan.step,
        chain=chain,
        mesh=tree.describe(),
        unit=plan.unit,
        rows=plan.rows,
        row_tokens=plan.row_tokens,
        fill_ratio=plan.fill_ratio,
        imbalance=plan.imbalance,
        encoder_imbalance=plan.encoder_imbalance,
        moved_segments=_moved_segments(plan),
        valid_tokens=plan.valid_tokens,
        sources=tuple(SourceFlow(*flow) for flow in flows),
        carried_tokens=plan.carried_tokens,
        from_pool_tokens=int(plan.placed_tokens.sum()) - drawn_now,
        cell_costs=by_cell(cell, row_costs),
        cell_tokens=by_cell(cell[plan.row], plan.length),
        cell_segments=by_cell(cell[plan.row], None),
        places=_places(tree),
    )


def _moved_segments(plan: StepPlan) -> int:
    if plan.encode_dp is None:
        return 0
    is_away = (plan.encode_dp >= 0) & (plan.encode_dp != plan.row_dp[plan.row])
    return int(np.count_nonzero(is_away.any(axis=0)))


def _places(tree: ClientPlaceTree) -> tuple[GroupPlace, ...]:
    keys = (tree.rank_nodes * tree.dp_count + tree.dp_groups) * len(STAGES) + tree.stage_numbers
    order = np.argsort(keys, kind="stable")
    found: dict[tuple[int, int], list[tuple[str, tuple[int, ...]]]] = {}
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    for ranks in np.split(order, starts[1:]):
        place, stage = divmod(int(keys[ranks[0]]), len(STAGES))
        node_group = divmod(place, tree.dp_count)
        found.setdefault(node_group, []).append((STAGES[stage], tuple(ranks.tolist())))
    return tuple(GroupPlace(node, group, tuple(own)) for (node, group), own in found.items())
