"""A planner to try strategies with, from lengths alone: for notebooks.

sandbox = Sandbox({"web": lengths, "code": lengths}, rows=512, row_tokens=8192, mesh={"dp": 64})
graph = sandbox.graph()  # the next step; any chain of verbs can be tried on it
graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model).balance("greedy")
graph.plan()
sandbox.run("balanced", steps=100)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from federation.model.cost import CostSpec
from federation.model.job import (
    BatchRule,
    MixturePoint,
    MixtureSchedule,
    ResolvedJob,
    SourceSpec,
    TokenizerSpec,
    Unit,
    varlen_rows,
)
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.balance import Objective
from federation.planning.dgraph import DGraph
from federation.planning.planner import Ended, StepPlanner
from federation.planning.strategies import Strategy, find_strategy
from federation.simulation.length_statistics import SourceLengths
from federation.simulation.simulation import Prediction, first_state, simulate
from federation.simulation.statistic_feed import StatisticFeed, simulated_job
from msd_client.contract.errors import ConfigError


class Sandbox:
    """Steps of made-up records, planned by any strategy; pure, alike for a seed on every machine."""

    def __init__(
        self,
        lengths: Mapping[str, npt.ArrayLike | SourceLengths],
        *,
        row_tokens: int,
        rows: int = 0,
        step_tokens: int = 0,
        mesh: Mapping[str, int] | None = None,
        nodes: Sequence[int] = (),
        cost: CostSpec | None = None,
        weights: Mapping[str, float] | None = None,
        unit: Unit = "tokens",
        objective: Objective = "step",
        seed: int = 0,
        **batch: Any,
    ) -> None:
        """Stand before the first step.

        Args:
            lengths: Tokens of records by source, drawn with replacement; SourceLengths also say how
                many records the source has.
            row_tokens: Tokens of a row; of varlen steps places of a microbatch.
            rows: Rows of a step.
            step_tokens: Of varlen steps, in place of rows.
            mesh: Sizes of the axes; None: a single rank.
            nodes: Node of each rank; empty: one node.
            cost: What segments cost; None: each token the same.
            weights: Of the sources; None: all weigh the same.
            unit: What shares are shares of.
            objective: What built-in strategies even out.
            seed: Of the records and their order.
            batch: Further fields of BatchRule, such as `microbatch_rows` or `packing`.

        Raises:
            ConfigError: Lengths, weights or sizes do not fit.
            MeshMismatchError: The mesh does not fit the rows.
        """
        if bool(rows) == bool(step_tokens):
            raise ConfigError(
                f"a sandbox has rows ({rows}) or step_tokens ({step_tokens}), not both: give one"
            )
        if step_tokens:
            rows = varlen_rows(step_tokens, row_tokens)
            batch |= {"packing": "varlen", "step_tokens": step_tokens}
        self.job = ResolvedJob(
            "sandbox",
            seed,
            tuple(
                SourceSpec(name, "lengths", "none", "seekable", (), "0" * 32) for name in lengths
            ),
            TokenizerSpec("none"),
            BatchRule(rows, row_tokens, **batch),
            MixtureSchedule(unit, (MixturePoint(0, dict(weights or dict.fromkeys(lengths, 1.0))),)),
            cost=cost or CostSpec(),
            balance_objective=objective,
        )
        self.tree = ClientPlaceTree.from_mesh(mesh or {}, nodes)
        self._statistics = [
            known if isinstance(known, SourceLengths) else SourceLengths.of(known)
            for known in lengths.values()
        ]
        job = simulated_job(self.job)
        self._planner = StepPlanner(job, self.tree, first_state(job))
        self._feed = StatisticFeed(self._statistics, seed)

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._planner.state().step

    def graph(self) -> DGraph:
        """Return the next step's graph to try verbs on; nothing is taken, so there may be many."""
        return self._planner.step_graph(lambda starved: self._feed.feed(self._planner, starved))

    def next_step(self, strategy: str | Strategy = "balanced") -> StepPlan:
        """Plan the next step by a strategy and go on to the one behind it.

        Raises:
            ConfigError: No strategy has that name.
        """
        outcome = self._feed.next_step(self._planner, _strategy(strategy))
        assert not isinstance(outcome, Ended), "a sandbox's sources are repeated without an end"
        return outcome

    def run(self, strategy: str | Strategy = "balanced", steps: int = 100) -> Prediction:
        """Return what the first steps are like under a strategy, whatever was planned here before.

        Raises:
            ConfigError: No strategy has that name.
        """
        return simulate(self.job, self.tree, self._statistics, steps, strategy=_strategy(strategy))


def _strategy(given: str | Strategy) -> Strategy:
    return find_strategy(given) if isinstance(given, str) else given
