"""Trainer ranks arranged by mesh axes: who consumes which data-parallel group, on which node.

Pure: built from axis sizes and the node of each rank. Ranks are numbered row-major with the last axis
fastest, as torch's DeviceMesh numbers them. What all ranks are asked of is worked out once, in whole
columns, so that a tree of many thousand ranks answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule
from msd_client.contract.batch_spec import Stage
from msd_client.contract.context_parallel import check_layout
from msd_client.contract.errors import MeshMismatchError, NotFoundError

Int64Array = npt.NDArray[np.int64]

AXES = ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
DP_AXES = ("dp", "dp_replicate", "dp_shard")
"""Axes along which ranks consume different rows; along all others they share theirs."""
STAGES: tuple[Stage, ...] = get_args(Stage)
"""Kinds of pipeline stages in their order along pp; `all` where there is no pipeline."""
_NEAREST_COUNT = 4


class RingPlace(NamedTuple):
    """Ranks that read the same slots: those of one DP group and one kind of pipeline stage."""

    ring: int
    group: int
    stage: Stage
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ClientPlaceTree:
    """The mesh of one job's trainer; a leaf is a rank.

    An expert-parallel group that is laid over data-parallel ranks is not an axis of its own; an
    `ep` axis that is named has ranks that share the rows of their group, as `tp` has.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    """Node of each rank; empty = all on node 0."""

    @staticmethod
    def from_mesh(mesh: Mapping[str, int], nodes: Sequence[int] = ()) -> ClientPlaceTree:
        """Return the tree of a mesh given as axis sizes in order, slowest axis first.

        Args:
            mesh: Size of each axis; an empty one is a single rank.
            nodes: Node of each rank, or nothing for a single node.

        Raises:
            MeshMismatchError: An axis is unknown, a size is no positive integer, or `nodes` does
                not name one node per rank.
        """
        for axis, size in mesh.items():
            if axis not in AXES:
                raise MeshMismatchError(
                    f"mesh axis {axis!r} is unknown; msd knows {', '.join(AXES)}", axis=axis
                )
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshMismatchError(
                    f"mesh axis {axis} has size {size!r}; it must be an integer of at least 1",
                    axis=axis,
                )
        if any(node < 0 for node in nodes):
            raise MeshMismatchError(f"nodes are numbered from 0, {min(nodes)} is named")
        tree = ClientPlaceTree(tuple(mesh), tuple(mesh.values()), tuple(nodes))
        if nodes and len(nodes) != tree.rank_count:
            raise MeshMismatchError(
                f"{len(nodes)} nodes are named for {tree.rank_count} ranks",
                seen=len(nodes),
                limit=tree.rank_count,
            )
        return tree

    @property
    def rank_count(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.sizes)

    @property
    def dp_count(self) -> int:
        """Number of data-parallel groups: the product of the dp axes."""
        pairs = zip(self.axes, self.sizes, strict=True)
        return math.prod(size for axis, size in pairs if axis in DP_AXES)

    @cached_property
    def coordinates(self) -> Int64Array:
        """Index of every rank along each axis, in the mesh's order. Shape (axes, ranks)."""
        found = np.unravel_index(np.arange(self.rank_count), self.sizes or (1,))
        return np.array(found[: len(self.sizes)], np.int64).reshape(-1, self.rank_count)

    @cached_property
    def dp_groups(self) -> Int64Array:
        """Data-parallel group of every rank, dp axes row-major in the mesh's order. Shape (ranks,)."""
        groups = np.zeros(self.rank_count, np.int64)
        for axis, size, places in zip(self.axes, self.sizes, self.coordinates, strict=True):
            if axis in DP_AXES:
                groups = groups * size + places
        return groups

    @cached_property
    def group_ranks(self) -> Int64Array:
        """Ranks that consume each group's rows, ascending. Shape (dp, ranks / dp)."""
        order = np.argsort(self.dp_groups, kind="stable")
        return order.reshape(self.dp_count, -1).astype(np.int64)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return a rank's index along each axis.

        Raises:
            NotFoundError: The mesh has no such rank.
        """
        self._check_rank(rank)
        return dict(zip(self.axes, self.coordinates[:, rank].tolist(), strict=True))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.rank_count:
            raise NotFoundError(
                f"rank {rank} is not in the mesh of {self.rank_count} ranks ({self.describe()})",
                rank=rank,
                limit=self.rank_count,
            )

    def dp_group(self, rank: int) -> int:
        """Return the data-parallel group of a rank, dp axes row-major in the mesh's order.

        Raises:
            NotFoundError: The mesh has no such rank.
        """
        self._check_rank(rank)
        return int(self.dp_groups[rank])

    def ranks_of_dp_group(self, group: int) -> tuple[int, ...]:
        """Return the ranks that consume a group's rows, ascending.

        Raises:
            NotFoundError: The mesh has no such group.
        """
        self._check_group(group)
        return tuple(self.group_ranks[group].tolist())

    def _check_group(self, group: int) -> None:
        if not 0 <= group < self.dp_count:
            raise NotFoundError(
                f"data-parallel group {group} is not among the {self.dp_count} of "
                f"{self.describe()}",
                group=group,
                limit=self.dp_count,
            )

    @property
    def cp_count(self) -> int:
        """Context-parallel ranks that share a row; 1 without such an axis."""
        return self._size("cp")

    @property
    def stage_count(self) -> int:
        """Stages of the pipeline; 1 without such an axis."""
        return self._size("pp")

    def _size(self, axis: str) -> int:
        return dict(zip(self.axes, self.sizes, strict=True)).get(axis, 1)

    def _places_along(self, axis: str) -> Int64Array:
        """Return every rank's index along an axis, 0 without such an axis. Shape (ranks,)."""
        if axis not in self.axes:
            return np.zeros(self.rank_count, np.int64)
        places: Int64Array = self.coordinates[self.axes.index(axis)]
        return places

    @property
    def node_count(self) -> int:
        """One more than the highest node's number."""
        return max(self.nodes, default=0) + 1

    @cached_property
    def rank_nodes(self) -> Int64Array:
        """Node of every rank. Shape (ranks,)."""
        return np.array(self.nodes or (0,) * self.rank_count, np.int64)

    @cached_property
    def reads(self) -> Int64Array:
        """1 where a node has ranks that read a group's rows: all but middle stages. Shape (dp, nodes)."""
        is_reader = self.stage_numbers != STAGES.index("middle")
        found = np.zeros((self.dp_count, self.node_count), np.int64)
        found[self.dp_groups[is_reader], self.rank_nodes[is_reader]] = 1
        return found

    def cp_rank(self, rank: int) -> int:
        """Return a rank's index along cp, 0 without such an axis.

        Raises:
            NotFoundError: The mesh has no such rank.
        """
        self._check_rank(rank)
        return int(self._places_along("cp")[rank])

    @cached_property
    def stage_numbers(self) -> Int64Array:
        """Kind of every rank's pipeline stage, as a place in STAGES. Shape (ranks,)."""
        last = self.stage_count - 1
        if not last:
            return np.full(self.rank_count, STAGES.index("all"))
        places = self._places_along("pp")
        kinds = np.full(self.rank_count, STAGES.index("middle"))
        kinds[places == 0] = STAGES.index("first")
        kinds[places == last] = STAGES.index("last")
        return kinds

    def stage(self, rank: int) -> Stage:
        """Return which fields a rank's pipeline stage reads.

        Raises:
            NotFoundError: The mesh has no such rank.
        """
        self._check_rank(rank)
        return STAGES[int(self.stage_numbers[rank])]

    def rings(self) -> tuple[RingPlace, ...]:
        """Return the rings of the mesh: by DP group, then first, middle and last stage."""
        keys = self.dp_groups * len(STAGES) + self.stage_numbers
        order = np.argsort(keys, kind="stable")
        found, starts = np.unique(keys[order], return_index=True)
        return tuple(
            RingPlace(ring, key // len(STAGES), STAGES[key % len(STAGES)], tuple(ranks.tolist()))
            for ring, (key, ranks) in enumerate(
                zip(found.tolist(), np.split(order, starts[1:]), strict=True)
            )
        )

    def check_batch(self, batch: BatchRule) -> None:
        """Refuse a mesh that does not fit a batch at some step of the run.

        Raises:
            MeshMismatchError: Rows do not divide, or rows cannot be dealt to context-parallel ranks,
                or the model's own shift of aligned labels would run over the edges of slices.
        """
        if batch.labels == "aligned" and self.cp_count > 1:
            raise MeshMismatchError(
                f"labels: aligned leaves the shift to the model, which sees slices of rows with cp "
                f"{self.cp_count}: its shift would cross their edges; use labels: shifted",
                cp=self.cp_count,
            )
        for rows in () if batch.is_varlen else batch.rows_values:
            self.microbatch_count(replace(batch, rows=rows))
        for row_tokens in batch.row_tokens_values:
            check_layout(
                batch.cp_layout,
                self.cp_count,
                row_tokens=row_tokens,
                segment_multiple=batch.segment_multiple,
                length_key=batch.length_key,
            )

    def first_ranks(self, axis: str) -> tuple[int, ...]:
        """Return the ranks with index 0 along an axis: those that read under `broadcast_at`.

        Raises:
            MeshMismatchError: The mesh has no such axis.
        """
        if axis not in self.axes:
            raise MeshMismatchError(
                f"the mesh {self.describe()} has no axis {axis!r} to broadcast at", axis=axis
            )
        return tuple(np.flatnonzero(self._places_along(axis) == 0).tolist())

    def nodes_of_dp_group(self, group: int) -> tuple[int, ...]:
        """Return the nodes that host a rank of the group, ascending.

        Raises:
            NotFoundError: The mesh has no such group.
        """
        self._check_group(group)
        return tuple(np.flatnonzero(self.hosts[:, group]).tolist())

    @cached_property
    def hosts(self) -> npt.NDArray[np.bool_]:
        """True where a node hosts a rank of a group. Shape (nodes, dp), nodes numbered up to the last."""
        found = np.zeros((self.node_count, self.dp_count), bool)
        found[self.rank_nodes, self.dp_groups] = True
        return found

    @cached_property
    def first_stage_nodes(self) -> frozenset[int]:
        """Nodes that host a rank of a first pipeline stage; without a pipeline, all with ranks."""
        readers = [ring.ranks for ring in self.rings() if ring.stage in ("all", "first")]
        return frozenset(int(self.rank_nodes[rank]) for ranks in readers for rank in ranks)

    def groups_of_node(self, node: int) -> tuple[int, ...]:
        """Return the data-parallel groups that have a rank on a node, ascending; none elsewhere."""
        if not 0 <= node < len(self.hosts):
            return ()
        return tuple(np.flatnonzero(self.hosts[node]).tolist())

    def describe(self) -> str:
        """Return the mesh for people: `dp 2 * tp 2`."""
        pairs = zip(self.axes, self.sizes, strict=True)
        return " * ".join(f"{axis} {size}" for axis, size in pairs) or "1 rank"

    def microbatch_count(self, batch: BatchRule) -> int:
        """Return the microbatches of a step on each group: rows / (dp * microbatch_rows).

        Of a varlen batch the fewest that hold `step_tokens`; each step's plan says how many it has.

        Raises:
            MeshMismatchError: The rows do not divide; the nearest dp that fit are named.
        """
        rows, microbatch_rows, dp = batch.rows, batch.microbatch_rows, self.dp_count
        if batch.is_varlen:
            return -(-batch.step_tokens // (dp * batch.row_tokens))
        if rows % (dp * microbatch_rows) == 0:
            return rows // (dp * microbatch_rows)
        fitting = [
            count
            for count in range(1, rows // microbatch_rows + 1)
            if rows % (count * microbatch_rows) == 0
        ]
        nearest = sorted(sorted(fitting, key=lambda count: abs(count - dp))[:_NEAREST_COUNT])
        remedy = (
            f"dp {', '.join(map(str, nearest))} would fit"
            if nearest
            else "no dp fits: change microbatch_rows to a divisor of rows"
        )
        raise MeshMismatchError(
            f"batch.rows {rows} is not a multiple of dp {dp} * microbatch_rows {microbatch_rows} "
            f"= {dp * microbatch_rows} (mesh {self.describe()}); {remedy}",
            rows=rows,
            dp=dp,
            microbatch_rows=microbatch_rows,
        )
