"""The samples of one step on their way from buffers to ranks, and the verbs that move them.

    graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model).balance("greedy", "step")

A strategy chains verbs; `plan()` then compiles what they declared, in the fixed order draw, pack,
freeze, cost, balance, place. What the step holds is frozen by the draw and the job's packing rule
before cost is looked at, so no strategy can change it (DESIGN.md section 5).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from federation.model.cost import CostSpec
from federation.model.job import BatchRule
from federation.model.mixture import MixtureTimeline
from federation.model.place_tree import ClientPlaceTree
from federation.planning.balance import (
    METHODS,
    OBJECTIVES,
    PPM,
    BalanceRule,
    Placement,
    place_balanced,
    place_in_turn,
    shuffled,
)
from federation.planning.costs import bounded_cost, encoder_costs, row_costs, segment_costs
from federation.planning.delay import Delay
from federation.planning.extra_rows import NO_EXTRA_ROWS, ExtraRows
from federation.planning.hybrid import media_costs, place_media, stay_home
from federation.planning.locality import place_locally
from federation.planning.packing import pack
from federation.planning.step_pool import (
    BLOCK_KEY,
    INDEX,
    LENGTH,
    OFFSET,
    SOURCE,
    Packed,
    Pool,
)
from federation.planning.varlen import place_segments
from msd_client.contract.errors import ConfigError, MeshMismatchError, UsageError

Int64Array = npt.NDArray[np.int64]


class SampleState(IntEnum):
    """Where a fragment of the graph stands; buffered ones are not in it yet."""

    BUFFERED = 0
    DRAWN = 1
    """Drawn for this step or an earlier one; carried on if the step leaves it so."""
    PACKED = 2
    PLACED = 3
    DELIVERED = 4
    """Released by every rank; set where releases are counted."""


class Sampler(Protocol):
    """Role: draws the fragments of the step, by the schedule."""

    def draw(self, schedule: MixtureTimeline, delay: Delay | None = None) -> Pool:
        """Return the pool of the step that is planned next; what `delay` holds back is marked."""
        ...


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


class DGraph:
    """One step's samples with state and lineage; made per step, verbs return the graph."""

    def __init__(
        self,
        sampler: Sampler,
        tree: ClientPlaceTree,
        rule: BatchRule,
        *,
        schedule: MixtureTimeline,
        cost_model: CostSpec,
        objective: str,
        source_ids: Int64Array,
        is_trained: npt.NDArray[np.bool_] | None = None,
        extras: ExtraRows = NO_EXTRA_ROWS,
    ) -> None:
        """Hold what a strategy may ask for.

        Args:
            sampler: Draws.
            tree: The mesh.
            rule: Batch and packing of the step.
            schedule: The job's mixture, for `mix`.
            cost_model: The job's cost, for `cost`.
            objective: The job's objective, for `balance`.
            source_ids: 64 bits of each source's name. Shape (S,).
            is_trained: False for sources whose labels weigh nothing; None = all do. Shape (S,).
            extras: Extra rows of the pool's fragments.
        """
        self.schedule = schedule
        self.cost_model = cost_model
        self.objective = objective
        self._sampler = sampler
        self._tree = tree
        self._rule = rule
        self._source_ids = source_ids
        self._is_trained = is_trained
        self._extras = extras
        self._delay: Delay | None = None
        self._is_shuffled = False
        self._shuffle_key = 0
        self._pool: Pool | None = None
        self._packed: Packed | None = None
        self._rows: Packed | None = None
        self._cost = CostSpec()
        self._balance: BalanceRule | None = None
        self._local_bytes: Int64Array | None = None
        self._group_size = 0
        self._is_distributed = False
        self._is_hybrid = False
        self._broadcast_axes: list[str] = []
        self._placement: Placement | None = None

    @property
    def row_tokens(self) -> int:
        """Tokens of a row of this step."""
        return self._rule.row_tokens

    def delay(self, over_tokens: int, steps: int) -> DGraph:
        """Let documents of more than so many tokens wait for each `steps`-th step, before `mix()`.

        They wait fewer than `steps` steps; those steps hold the others alone. What is longer than a
        row is cut and does not wait. The carried pool stays below one step's tokens.

        Raises:
            UsageError: The step is mixed already, or the job's packing or masks do not fit.
            ConfigError: A number is below 1.
        """
        if self._pool is not None:
            raise UsageError("delay() comes before mix()")
        if self._rule.packing != "best_fit" or self._extras.count:
            raise UsageError(
                "delay() is for jobs with packing best_fit, without masks, media, groups or transforms "
                "that make several samples"
            )
        if over_tokens < 1 or steps < 1:
            raise ConfigError(
                f"delay: {over_tokens} tokens, {steps} steps: write 1 or more of each"
            )
        self._delay = Delay(over_tokens, steps)
        return self

    def mix(self, schedule: MixtureTimeline) -> DGraph:
        """Draw the step's fragments by a schedule and pack them into rows; freezes the step."""
        if self._pool is not None:
            raise UsageError("a strategy mixes once: the step is frozen by its first mix()")
        self._pool = self._sampler.draw(schedule, self._delay)
        self._packed = pack(self._pool, self._rule)
        return self

    def distribute(self, axis: str, group_size: int | None = None) -> DGraph:
        """Deal rows to buckets along `dp`, `cp` or `world`.

        Ranks along cp read slices of their group's rows, so the buckets are data-parallel groups
        all the same; `world` is for meshes where each rank is a group of its own.

        Args:
            axis: The axis.
            group_size: Buckets that share a first, coarse deal; it must divide their number.

        Raises:
            UsageError: Nothing was mixed yet.
            MeshMismatchError: The mesh has no such axis, or the group size does not fit.
        """
        if self._pool is None:
            raise UsageError("distribute() comes after mix()")
        dp_count = self._tree.dp_count
        if axis == "world" and self._tree.rank_count != dp_count:
            raise MeshMismatchError(
                f"distribute('world') needs every rank to take rows of its own, the mesh "
                f"{self._tree.describe()} has {dp_count} groups for {self._tree.rank_count} "
                "ranks; use 'dp'"
            )
        if axis not in ("dp", "world") and axis not in self._tree.axes:
            raise MeshMismatchError(
                f"the mesh {self._tree.describe()} has no axis {axis!r} to distribute along",
                axis=axis,
            )
        if group_size is not None:
            if group_size < 1 or dp_count % group_size:
                raise MeshMismatchError(
                    f"group_size {group_size} does not divide the {dp_count} groups",
                    seen=group_size,
                    limit=dp_count,
                )
            self._group_size = group_size
        self._is_distributed = True
        return self

    def cost(self, model: CostSpec) -> DGraph:
        """Weigh rows by a model."""
        rule = self._rule
        self._cost = bounded_cost(model, rule.rows, rule.row_tokens, self._extras.row_units)
        return self

    def balance(
        self,
        method: str,
        objective: str = "step",
        *,
        min_gain: float = 0.0,
        tolerance: float = 0.001,
        local_bytes: Int64Array | None = None,
    ) -> DGraph:
        """Even out the cost of the buckets; a step holds what it held.

        Args:
            method: `greedy` (LPT in rounds and an exchange pass), `karmarkar_karp` (evener for few
                rows a rank, for up to some hundred ranks) or `none`.
            objective: `step`: the slowest rank's sum; `microbatch`: the sum over microbatches of the
                slowest rank; `pipeline`: the slowest rank's time under one forward, one backward,
                with as many stages as the mesh's pp axis has.
            min_gain: Rows stay in turn where the objective gains a smaller share than this. 0 to 1.
            tolerance: Share that the objective may lose to save bytes across nodes. 0 to 1.
            local_bytes: Bytes of each row that lie on each node: among placements of like cost that
                with the fewest bytes across nodes is taken. None: not looked at. Shape (R, nodes).

        Raises:
            ConfigError: Method or objective are unknown, or a share is not between 0 and 1.
            UsageError: `local_bytes` has another shape.
        """
        for value, known in ((method, METHODS), (objective, OBJECTIVES)):
            if value not in known:
                raise ConfigError(f"balance: {value!r} is none of {', '.join(known)}")
        for name, share in (("min_gain", min_gain), ("tolerance", tolerance)):
            if not 0 <= share <= 1:
                raise ConfigError(
                    f"balance: {name} {share!r} is no share; write a number from 0 to 1",
                    seen=share,
                    limit=1,
                )
        nodes = self._tree.node_count
        if local_bytes is not None and local_bytes.shape != (self._rule.rows, nodes):
            raise UsageError(
                f"balance: local_bytes has shape {local_bytes.shape}, the step's rows and the mesh's "
                f"nodes need {(self._rule.rows, nodes)}"
            )
        self._local_bytes = local_bytes
        self._balance = None
        if method != "none":
            self._balance = BalanceRule(
                "karmarkar_karp" if method == "karmarkar_karp" else "greedy",
                OBJECTIVES[OBJECTIVES.index(objective)],
                min_gain_ppm=round(min_gain * PPM),
                tolerance_ppm=round(tolerance * PPM),
                stages=self._tree.stage_count,
            )
        return self

    def shuffle(self, key: int) -> DGraph:
        """Deal rows in an order that `key` alone sets, in place of the packed one; balance wins."""
        self._is_shuffled, self._shuffle_key = True, key
        return self

    def hybrid(self) -> DGraph:
        """Even out the encoders' cost too: media may be encoded by another group than their text's.

        Raises:
            ConfigError: The job's batches have no room for the routes of embeddings.
        """
        if self._rule.encode != "any":
            raise ConfigError(
                "hybrid: the job's media are encoded with their text; write batch.encode: any"
            )
        self._is_hybrid = True
        return self

    def broadcast_at(self, axis: str) -> DGraph:
        """Let only the first rank of an axis read; its peers get batches from the trainer.

        Raises:
            MeshMismatchError: The mesh has no such axis.
        """
        self._tree.first_ranks(axis)
        self._broadcast_axes.append(axis)
        return self

    def plan(self) -> GraphPlan:
        """Compile what the verbs declared and check its invariants.

        Raises:
            UsageError: The strategy neither mixed nor distributed.
        """
        if self._pool is None or self._packed is None or not self._is_distributed:
            raise UsageError("a strategy has to call mix() and distribute()")
        membership = self._membership(self._packed)
        packed, placement, costs = self._placed(self._packed)
        self._check_rows(packed, len(placement.dp))
        self._rows, self._placement = packed, placement
        rank_costs = (
            costs[np.argsort(placement.dp, kind="stable")]
            .reshape(self._tree.dp_count, -1)
            .sum(axis=1)
        )
        valid = self._segment_valid(packed)
        row_valid = np.zeros(len(placement.dp), np.int64)
        starts = packed.row_starts
        if len(starts):
            row_valid[packed.row[starts]] = np.add.reduceat(valid, starts)
        return GraphPlan(
            packed,
            placement,
            row_valid,
            valid,
            rank_costs,
            membership,
            tuple(self._broadcast_axes),
            self._pool.is_last,
            self._place_media(packed, placement),
        )

    def _placed(self, packed: Packed) -> tuple[Packed, Placement, Int64Array]:
        """Return the step with its rows, where each goes, and the cost of each row."""
        rule = self._rule
        if not rule.is_varlen:
            costs = self._row_costs(packed, rule.rows)
            return packed, self._place(costs), costs
        packed, placement = place_segments(
            packed,
            self._segment_costs(packed),
            rule,
            self._tree.dp_count,
            is_balanced=self._balance is not None,
            units_max=self._extras.units_max,
            follow=self._extras.follow(packed.extras) if self._extras.has_groups else None,
        )
        return packed, placement, self._row_costs(packed, len(placement.dp))

    def _segment_costs(self, packed: Packed) -> Int64Array:
        found = segment_costs(self._cost, packed.segments[LENGTH])
        units = self._extras.units_by_modality(packed.extras)
        for encoder in self._cost.encoders:
            if encoder.modality in units:
                found += encoder_costs(encoder, units[encoder.modality])
        return found

    def _row_costs(self, packed: Packed, row_count: int) -> Int64Array:
        lengths, starts = packed.segments[LENGTH], packed.row_starts
        units = self._extras.units_by_modality(packed.extras)
        return row_costs(self._cost, lengths, starts, packed.row[starts], row_count, units)

    def _place(self, costs: Int64Array) -> Placement:
        dp_count, rule = self._tree.dp_count, self._rule
        if self._balance is None:
            placement = place_in_turn(rule.rows, dp_count, rule.microbatch_rows)
            return shuffled(placement, self._shuffle_key) if self._is_shuffled else placement
        balance = replace(self._balance, group_size=self._group_size)
        placement = place_balanced(costs, dp_count, rule.microbatch_rows, balance)
        if self._local_bytes is None:
            return placement
        return place_locally(costs, placement, self._local_bytes, self._tree.reads(), balance)

    def states(self) -> npt.NDArray[np.uint8]:
        """Return the SampleState of each fragment of the step's pool. Shape (f,).

        Raises:
            UsageError: Nothing was mixed yet.
        """
        if self._pool is None or self._packed is None:
            raise UsageError("states() comes after mix()")
        reached = SampleState.PACKED if self._placement is None else SampleState.PLACED
        states = np.where(self._packed.placed, reached, SampleState.DRAWN)
        return states.astype(np.uint8)

    def lineage(self, row: int) -> list[tuple[int, int, int, int, int]]:
        """Return what a canonical row holds: (source, block_key, index, offset, length) in order.

        A varlen step gets its rows by `plan()`; before that row 0 has all it holds.

        Raises:
            UsageError: Nothing was mixed yet.
        """
        held = self._rows or self._packed
        if held is None:
            raise UsageError("lineage() comes after mix()")
        columns = held.segments[:, held.row == row]
        return [tuple(segment) for segment in columns.T.tolist()]

    def _place_media(self, packed: Packed, placement: Placement) -> Int64Array | None:
        rule, extras = self._rule, self._extras
        if rule.encode != "any" or not extras.modalities:
            return None
        units, home = extras.units(packed.extras), placement.dp[packed.row]
        if not self._is_hybrid:
            return stay_home(units, home)
        return place_media(
            media_costs(units, extras.modalities, self.cost_model.encoders),
            units,
            home,
            placement.microbatch[packed.row],
            self._tree.dp_count,
            tuple(most * rule.microbatch_rows for most in extras.units_max),
        )

    def _check_rows(self, packed: Packed, row_count: int) -> None:
        rule, pool = self._rule, self._pool
        assert pool is not None
        is_whole = len(packed.row_starts) == row_count or rule.is_varlen
        assert is_whole or pool.is_last, "only the last step may have empty rows"
        if not len(packed.row):
            return
        assert int(packed.row_sizes.max()) <= rule.row_segments_max, "a row has too many segments"
        # A row's segments follow each other, so its last end bounds all of them.
        ends = packed.column + packed.segments[LENGTH]
        assert int(ends.max()) <= rule.row_tokens, "a row overflows"
        gaps = packed.column[1:] - ends[:-1]
        gaps[packed.row_starts[1:] - 1] = 0
        assert not len(gaps) or int(gaps.min()) >= 0, "segments overlap"
        units = self._extras.units(packed.extras)
        for most, held in zip(self._extras.units_max, units, strict=True):
            row_units = np.add.reduceat(held, packed.row_starts)
            assert int(row_units.max()) <= most, "a row has too many units of media"

    def _segment_valid(self, packed: Packed) -> Int64Array:
        """Return the labels of each segment that count. Shape (n,).

        A label is counted for each trained token but a segment's first. Joined documents have one
        more where they touch, of the later one's first token if it is trained: at the earlier one's
        last token if labels are shifted, else at that token.
        """
        lengths, column = packed.segments[LENGTH], packed.column
        valid: Int64Array = lengths - 1
        first: Int64Array | None = None
        if self._extras.has_trained:
            trained = self._extras.trained(packed.extras)
            first = trained % 2
            valid = trained // 2 - first
        if self._rule.documents == "joined" and len(valid):
            touches = column[1:] == column[:-1] + lengths[:-1]
            if first is not None:
                touches &= first[1:] > 0
            if self._rule.labels == "shifted":
                valid[:-1] += touches
            else:
                valid[1:] += touches
        if self._is_trained is not None:
            valid *= self._is_trained[packed.segments[SOURCE]]
        return valid

    def _membership(self, packed: Packed) -> bytes:
        """Return sha256 over columns: sources by name, so that renumbering them changes nothing."""
        wide = np.stack((self._source_ids[packed.segments[SOURCE]], packed.segments[BLOCK_KEY]))
        narrow = np.concatenate(
            (
                packed.segments[[INDEX, OFFSET, LENGTH]],
                packed.row[None],
                packed.column[None],
            )
        )
        digest = hashlib.sha256(wide.astype("<i8", copy=False).tobytes())
        digest.update(narrow.astype("<i4").tobytes())
        return digest.digest()
