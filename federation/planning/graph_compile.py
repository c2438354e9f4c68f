"""Makes a plan of what a graph's verbs declared: place, encode, count; the step is frozen before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from federation.model.cost import CostSpec
from federation.model.job import BatchRule
from federation.model.place_tree import ClientPlaceTree
from federation.planning.balance import (
    BalanceRule,
    Placement,
    place_balanced,
    place_in_turn,
    shuffled,
)
from federation.planning.costs import row_costs, whole_costs
from federation.planning.extra_rows import ExtraRows
from federation.planning.frozen_rows import check_rows, membership, valid_labels
from federation.planning.hybrid import (
    encoder_loads,
    encoder_sums,
    media_costs,
    place_media,
    stay_home,
)
from federation.planning.locality import (
    bytes_by_node,
    crossing_bytes,
    place_locally,
    producer_nodes,
)
from federation.planning.step_pool import BLOCK_KEY, LENGTH, SOURCE, Packed, Pool
from federation.planning.varlen import place_segments
from federation.planning.varlen_measures import segment_measures

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GraphPlan:
    """A compiled step: frozen rows and where each goes."""

    packed: Packed
    placement: Placement
    row_valid_tokens: Int64Array
    """Shape (R,)."""
    segment_valid_tokens: Int64Array
    """Shape (n,)."""
    rank_costs: Int64Array
    """Shape (dp,)."""
    membership: bytes
    """sha256 over the canonical rows. 32 bytes."""
    broadcast_axes: tuple[str, ...]
    is_last: bool
    """True where the stream ends with this step."""
    encode_dp: Int64Array | None = None
    """Group that encodes the media of each segment, -1 where it has none; None where the job's
    media are encoded with their text. Shape (modalities, n)."""
    encoder_cost: tuple[int, float] = (0, 0.0)
    """Where media may be encoded anywhere: slowest group's encoders and the mean, summed over
    microbatches."""


@dataclass
class Declared:
    """What verbs asked for."""

    cost: CostSpec = field(default_factory=CostSpec)
    balance: BalanceRule | None = None
    local_bytes: Int64Array | None = None
    is_local: bool = False
    group_size: int = 0
    is_hybrid: bool = False
    shuffle_key: int | None = None
    broadcast_axes: list[str] = field(default_factory=list)

    @property
    def balance_rule(self) -> BalanceRule | None:
        """How rows are evened out, None where they are not."""
        balance = self.balance
        return None if balance is None else replace(balance, group_size=self.group_size)


@dataclass(frozen=True, eq=False)
class StepCompiler:
    """Compiles steps of one rule on one mesh."""

    tree: ClientPlaceTree
    rule: BatchRule
    extras: ExtraRows
    cost_model: CostSpec
    """The job's."""
    source_ids: Int64Array
    """64 bits of each source's name. Shape (S,)."""
    is_trained: npt.NDArray[np.bool_] | None
    """False for sources whose labels weigh nothing; None = all do. Shape (S,)."""
    token_bytes: Int64Array
    """Bytes of an id. Shape (S,)."""
    unit_bytes: tuple[int, ...]
    """Of each modality."""

    def compile(self, pool: Pool, packed: Packed, declared: Declared) -> GraphPlan:
        """Return the plan of a packed step; its invariants are checked."""
        rule, extras, tree = self.rule, self.extras, self.tree
        digest = membership(packed, self.source_ids)
        packed, placement, costs = self._placed(packed, declared)
        rows = len(placement.dp)
        check_rows(packed, rule, extras, rows, is_last=pool.is_last)
        rank_costs = (
            costs[np.argsort(placement.dp, kind="stable")].reshape(tree.dp_count, -1).sum(axis=1)
        )
        valid = valid_labels(packed, rule, extras, self.is_trained)
        row_valid = np.zeros(rows, np.int64)
        starts = packed.row_starts
        if len(starts):
            row_valid[packed.row[starts]] = np.add.reduceat(valid, starts)
        return GraphPlan(
            packed,
            placement,
            row_valid,
            valid,
            rank_costs,
            digest,
            tuple(declared.broadcast_axes),
            pool.is_last,
            *self._place_media(packed, placement, is_hybrid=declared.is_hybrid),
        )

    def _placed(self, packed: Packed, declared: Declared) -> tuple[Packed, Placement, Int64Array]:
        """Return the step with its rows, where each goes, and the cost of each row."""
        rule = self.rule
        if not rule.is_varlen:
            costs = self._row_costs(packed, rule.rows, declared.cost)
            placement = self._place(costs, declared)
            return packed, self._nearby(packed, placement, costs, declared), costs
        units = self.extras.units_by_modality(packed.extras)
        packed, placement = place_segments(
            packed,
            whole_costs(declared.cost, packed.segments[LENGTH], units),
            rule,
            self.tree.dp_count,
            segment_measures(packed, rule, self.extras, self.cost_model),
            declared.balance_rule,
            declared.shuffle_key,
            self.extras.follow(packed.extras) if self.extras.has_groups else None,
        )
        costs = self._row_costs(packed, len(placement.dp), declared.cost)
        return packed, self._nearby(packed, placement, costs, declared), costs

    def crossing_bytes(self, made: GraphPlan) -> int:
        """Return the bytes of token ids and media that cross nodes for a plan."""
        rows = len(made.placement.dp)
        local_bytes = self._local_bytes(made.packed, rows)
        return crossing_bytes(made.placement, local_bytes, self.tree.reads)

    def _local_bytes(self, packed: Packed, row_count: int) -> Int64Array:
        """Return the bytes of each row on each node, by the partition rule. Shape (R, nodes)."""
        tree, segments = self.tree, packed.segments
        sizes = segments[LENGTH] * self.token_bytes[segments[SOURCE]]
        for unit_bytes, units in zip(
            self.unit_bytes, self.extras.units(packed.extras), strict=True
        ):
            sizes = sizes + units * unit_bytes
        node = producer_nodes(segments[BLOCK_KEY], tree)
        return bytes_by_node(sizes, packed.row, node, row_count, tree.node_count)

    def _nearby(
        self, packed: Packed, placement: Placement, costs: Int64Array, declared: Declared
    ) -> Placement:
        """Return a placement of like cost with fewer bytes across nodes, where that was asked for."""
        balance, local_bytes = declared.balance_rule, declared.local_bytes
        if balance is not None and declared.is_local:
            local_bytes = self._local_bytes(packed, len(costs))
        if balance is None or local_bytes is None:
            return placement
        return place_locally(costs, placement, local_bytes, self.tree.reads, balance)

    def _row_costs(self, packed: Packed, row_count: int, cost: CostSpec) -> Int64Array:
        lengths, starts = packed.segments[LENGTH], packed.row_starts
        units = self.extras.units_by_modality(packed.extras)
        return row_costs(cost, lengths, starts, packed.row[starts], row_count, units)

    def _place(self, costs: Int64Array, declared: Declared) -> Placement:
        dp_count, rule = self.tree.dp_count, self.rule
        balance = declared.balance_rule
        if balance is None:
            placement = place_in_turn(rule.rows, dp_count, rule.microbatch_rows)
            key = declared.shuffle_key
            return placement if key is None else shuffled(placement, key)
        return place_balanced(costs, dp_count, rule.microbatch_rows, balance)

    def _place_media(
        self, packed: Packed, placement: Placement, *, is_hybrid: bool
    ) -> tuple[Int64Array | None, tuple[int, float]]:
        """Return where media are encoded, and the slowest group's and the mean encoder cost."""
        rule, extras, dp_count = self.rule, self.extras, self.tree.dp_count
        if rule.encode != "any" or not extras.modalities:
            return None, (0, 0.0)
        units, home = extras.units(packed.extras), placement.dp[packed.row]
        costs = media_costs(units, extras.modalities, self.cost_model.encoders)
        microbatch = placement.microbatch[packed.row]
        group = stay_home(units, home)
        if is_hybrid:
            units_max = tuple(most * rule.microbatch_rows for most in extras.units_max)
            group = place_media(costs, units, home, microbatch, dp_count, units_max)
        loads = encoder_loads(costs, group, microbatch, dp_count, placement.microbatches)
        return group, encoder_sums(loads)
