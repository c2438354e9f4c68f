"""What a node needs of a plan: the rows of the groups that have a rank there, never the whole plan.

A slice is a plan again, with fewer rows: they are numbered anew in their order, their segments keep
theirs. Counts of the step, digests and the difference of the state stay those of the whole step, so
every node knows what a loss is normalised by, and its trainers what comes next. Where media are encoded
by any group, a slice has the rows of other nodes' groups too whose media its own groups encode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan

Int64Array = npt.NDArray[np.int64]

_SEGMENT_FIELDS = ("source", "block_key", "index", "offset", "length", "column")
_ROW_FIELDS = ("row_dp", "row_microbatch", "row_slot", "row_valid_tokens")


class NodeSlice(NamedTuple):
    """The part of a plan that one node's trainers consume."""

    node: int
    plan: StepPlan


def slice_by_node(plan: StepPlan, tree: ClientPlaceTree) -> Iterator[NodeSlice]:
    """Yield the slice of each node that hosts a rank, by ascending node.

    A group whose ranks lie on several nodes (pipeline stages, context or tensor parallelism) is in
    the slice of each. The work grows with what the slices hold, not with nodes times rows.

    Args:
        plan: The whole step.
        tree: The mesh it was planned for.
    """
    plan = plan.with_encoded_delta()
    rows_by_group = np.argsort(plan.row_dp, kind="stable")
    counts = np.bincount(plan.row_dp, minlength=plan.dp_count)
    ends = np.cumsum(counts)
    # Segments are sorted by row: those of a row lie together.
    bounds = np.searchsorted(plan.row, np.arange(plan.rows + 1))
    for node in range(len(tree.hosts)):
        groups = np.flatnonzero(tree.hosts[node])
        if len(groups):
            rows = rows_by_group[_ranges(ends[groups] - counts[groups], counts[groups])]
            if plan.encode_dp is not None:
                encoded_here = np.isin(plan.encode_dp, groups).any(axis=0)
                rows = np.union1d(rows, plan.row[encoded_here])
            yield NodeSlice(node, _of_rows(plan, np.sort(rows), bounds))


def empty_slice(plan: StepPlan) -> StepPlan:
    """Return the slice of a node without ranks: no row, and all that is told of the whole step."""
    bounds = np.searchsorted(plan.row, np.arange(plan.rows + 1))
    return _of_rows(plan, np.zeros(0, np.int64), bounds)


def _of_rows(plan: StepPlan, rows: Int64Array, bounds: Int64Array) -> StepPlan:
    sizes = bounds[rows + 1] - bounds[rows]
    segments = _ranges(bounds[rows], sizes)
    encode_dp, group_begins = plan.encode_dp, plan.group_begins
    return replace(
        plan,
        encode_dp=None if encode_dp is None else encode_dp[:, segments],
        group_begins=None if group_begins is None else group_begins[segments],
        row=np.repeat(np.arange(len(rows), dtype=np.int32), sizes),
        **{name: getattr(plan, name)[segments] for name in _SEGMENT_FIELDS},
        **{name: getattr(plan, name)[rows] for name in _ROW_FIELDS},
    )


def _ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return the numbers of all ranges, one range behind the other. Shape (sum of counts,)."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    found: Int64Array = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return found
