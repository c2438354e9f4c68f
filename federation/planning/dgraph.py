"""The samples of one step on their way from buffers to ranks, and the verbs that move them.

    graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model).balance("greedy", "step")

A strategy chains verbs; `plan()` then compiles what they declared, in the fixed order draw, pack,
freeze, cost, balance, place. What the step holds is frozen by the draw and the job's packing rule
before cost is looked at, so no strategy can change it (DESIGN.md section 5).
"""

from __future__ import annotations

from dataclasses import replace
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
)
from federation.planning.costs import bounded_cost
from federation.planning.delay import Delay
from federation.planning.extra_rows import NO_EXTRA_ROWS, ExtraRows
from federation.planning.graph_compile import Declared, GraphPlan, StepCompiler
from federation.planning.packing import pack
from federation.planning.step_pool import Packed, Pool
from federation.planning.step_time import model_loads, predicted_time
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
        token_bytes: Int64Array | None = None,
        unit_bytes: tuple[int, ...] = (),
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
            token_bytes: Bytes of an id, for locality; None: 4. Shape (S,).
            unit_bytes: Bytes of a unit of each of the extras' modalities; empty: 0.
        """
        self.schedule = schedule
        self.cost_model = cost_model
        self.objective = objective
        self._sampler = sampler
        self._tree = tree
        self._rule = rule
        self._extras = extras
        self._compiler = StepCompiler(
            tree,
            rule,
            extras,
            cost_model,
            source_ids,
            is_trained,
            np.full(len(source_ids), 4) if token_bytes is None else token_bytes,
            unit_bytes or (0,) * len(extras.modalities),
        )
        self._declared = Declared()
        self._delay: Delay | None = None
        self._pool: Pool | None = None
        self._packed: Packed | None = None
        self._is_distributed = False
        self._made: GraphPlan | None = None
        self._verbs: list[str] = []

    @property
    def chain(self) -> str:
        """The verbs that were called, as `mix(schedule) -> distribute(dp) -> ...`."""
        return " -> ".join(self._verbs)

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
        self._note("delay", f"over_tokens={over_tokens}", f"steps={steps}")
        return self

    def mix(self, schedule: MixtureTimeline) -> DGraph:
        """Draw the step's fragments by a schedule and pack them into rows; freezes the step.

        Raises:
            UsageError: The step is mixed already, or that is no schedule.
        """
        if self._pool is not None:
            raise UsageError("a strategy mixes once: the step is frozen by its first mix()")
        if not isinstance(schedule, MixtureTimeline):
            raise UsageError(
                f"mix({schedule!r}) takes a schedule of the job's sources; write mix(graph.schedule)"
            )
        self._pool = self._sampler.draw(schedule, self._delay)
        self._packed = pack(self._pool, self._rule)
        self._note("mix", "schedule" if schedule is self.schedule else "another schedule")
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
            self._declared.group_size = group_size
        self._is_distributed = True
        self._note("distribute", axis, *([f"group_size={group_size}"] if group_size else []))
        return self

    def cost(self, model: CostSpec) -> DGraph:
        """Weigh rows by a model."""
        names = ((self.cost_model, "cost_model"), (self.cost_model.backbone, "cost_model.backbone"))
        self._note("cost", next((name for known, name in names if model == known), "another model"))
        rule = self._rule
        self._declared.cost = bounded_cost(
            model, rule.rows, rule.row_tokens, self._extras.row_units
        )
        return self

    def balance(
        self,
        method: str,
        objective: str = "step",
        *,
        min_gain: float = 0.0,
        tolerance: float = 0.001,
        is_local: bool = False,
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
            is_local: Among placements of like cost take that with the fewest bytes across nodes,
                where blocks of sources are dealt to nodes in turn.
            local_bytes: The same by other bytes of each row on each node, of steps with rows.
                Shape (R, nodes).

        Raises:
            ConfigError: Method or objective are unknown, or a share is not between 0 and 1.
            UsageError: `local_bytes` has another shape, or the step has no rows yet.
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
        if local_bytes is not None and self._rule.is_varlen:
            raise UsageError(
                "balance: a varlen step has no rows before it is placed; write is_local=True"
            )
        if local_bytes is not None and local_bytes.shape != (self._rule.rows, nodes):
            raise UsageError(
                f"balance: local_bytes has shape {local_bytes.shape}, the step's rows and the mesh's "
                f"nodes need {(self._rule.rows, nodes)}"
            )
        self._declared.local_bytes, self._declared.is_local = local_bytes, is_local
        self._declared.balance = None
        if method != "none":
            self._declared.balance = BalanceRule(
                "karmarkar_karp" if method == "karmarkar_karp" else "greedy",
                OBJECTIVES[OBJECTIVES.index(objective)],
                min_gain_ppm=round(min_gain * PPM),
                tolerance_ppm=round(tolerance * PPM),
                stages=self._tree.stage_count,
            )
        self._note(
            "balance",
            method,
            objective,
            *([f"min_gain={min_gain:g}"] if min_gain else []),
            *(["is_local"] if is_local else []),
            *(["local_bytes"] if local_bytes is not None else []),
        )
        return self

    def shuffle(self, key: int) -> DGraph:
        """Deal rows in an order that `key` alone sets, in place of the packed one; balance wins.

        Raises:
            UsageError: The key is no integer from 0 to 2**63 - 1.
        """
        is_key = isinstance(key, (int, np.integer)) and not isinstance(key, bool)
        if not is_key or not 0 <= key < 1 << 63:
            raise UsageError(f"shuffle({key!r}): write an integer from 0 to 2**63 - 1, as the step")
        self._declared.shuffle_key = key
        self._note("shuffle", str(key))
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
        self._declared.is_hybrid = True
        self._note("hybrid")
        return self

    def broadcast_at(self, axis: str) -> DGraph:
        """Let only the first rank of an axis read; its peers get batches from the trainer.

        Raises:
            MeshMismatchError: The mesh has no such axis.
        """
        self._tree.first_ranks(axis)
        self._declared.broadcast_axes.append(axis)
        self._note("broadcast_at", axis)
        return self

    def plan(self) -> GraphPlan:
        """Compile what the verbs declared and check its invariants.

        Raises:
            UsageError: The strategy neither mixed nor distributed.
        """
        if self._pool is None or self._packed is None or not self._is_distributed:
            raise UsageError("a strategy has to call mix() and distribute()")
        self._made = self._compiler.compile(self._pool, self._packed, self._declared)
        return self._made

    def speedup_over_native(self) -> float:
        """Return how much longer the step takes in native order: predicted times, see step_time.

        Native order fills ranks and microbatches with what is packed as it comes; media are encoded
        with their text.

        Raises:
            UsageError: Nothing was planned yet.
        """
        made = self._planned("speedup_over_native")
        assert self._pool is not None and self._packed is not None
        native = self._compiler.compile(self._pool, self._packed, Declared())
        times = [self._time(one) for one in (replace(native, encode_dp=None), made)]
        return times[0] / times[1] if times[1] else 1.0

    def crossing_bytes(self) -> int:
        """Return the bytes of token ids and media that cross nodes, blocks dealt to nodes in turn.

        A row goes once to each other node whose ranks read it.

        Raises:
            UsageError: Nothing was planned yet.
        """
        return self._compiler.crossing_bytes(self._planned("crossing_bytes"))

    def encoder_loads(self) -> Int64Array:
        """Return what encoders cost each group in each microbatch. Shape (modalities, dp, M).

        Raises:
            UsageError: Nothing was planned yet.
        """
        made = self._planned("encoder_loads")
        return model_loads(made, self.cost_model, self._extras, self._tree.dp_count)

    def _planned(self, name: str) -> GraphPlan:
        if self._made is None:
            raise UsageError(f"{name}() comes after plan()")
        return self._made

    def _time(self, made: GraphPlan) -> int:
        tree = self._tree
        return predicted_time(made, self.cost_model, self._extras, tree.dp_count, tree.stage_count)

    def _note(self, verb: str, *arguments: str) -> None:
        self._verbs.append(f"{verb}({', '.join(arguments)})")

    def states(self) -> npt.NDArray[np.uint8]:
        """Return the SampleState of each fragment of the step's pool. Shape (f,).

        Raises:
            UsageError: Nothing was mixed yet.
        """
        if self._pool is None or self._packed is None:
            raise UsageError("states() comes after mix()")
        reached = SampleState.PACKED if self._made is None else SampleState.PLACED
        states = np.where(self._packed.placed, reached, SampleState.DRAWN)
        return states.astype(np.uint8)

    def lineage(self, row: int) -> list[tuple[int, int, int, int, int]]:
        """Return what a canonical row holds: (source, block_key, index, offset, length) in order.

        A varlen step gets its rows by `plan()`; before that row 0 has all it holds.

        Raises:
            UsageError: Nothing was mixed yet.
        """
        held = self._packed if self._made is None else self._made.packed
        if held is None:
            raise UsageError("lineage() comes after mix()")
        columns = held.segments[:, held.row == row]
        return [tuple(segment) for segment in columns.T.tolist()]
