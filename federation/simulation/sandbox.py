"""A planner to try strategies with, from lengths alone: for notebooks.

sandbox = Sandbox({"web": lengths, "code": lengths}, rows=512, row_tokens=8192, mesh={"dp": 64})
graph = sandbox.graph()  # the next step; any chain of verbs can be tried on it
graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model).balance("greedy")
graph.plan()
sandbox.run("balanced", steps=100)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
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
from federation.planning.step_change import first_state
from federation.planning.strategies import Strategy, find_strategy
from federation.simulation.length_statistics import SourceLengths
from federation.simulation.simulation import Prediction, simulate
from federation.simulation.statistic_feed import StatisticFeed, simulated_job
from msd_client.contract.errors import ConfigError, UsageError

ROWS_MAX = 1 << 20
ROW_TOKENS_MAX = 1 << 24
STEP_TOKENS_MAX = 1 << 36
"""Sizes that a job file takes, too."""


class Sandbox:
    """Steps of made-up records, planned by any strategy; pure, alike for a seed on every machine."""

    def __init__(
        self,
        lengths: Mapping[str, npt.ArrayLike | SourceLengths],
        *,
        row_tokens: int,
        rows: int | None = None,
        step_tokens: int | None = None,
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
            row_tokens: Tokens of a row; with `step_tokens` places of a microbatch.
            rows: Rows of a step.
            step_tokens: Tokens of a step, in place of rows: makes varlen steps.
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
        row_tokens = _size("row_tokens", row_tokens, ROW_TOKENS_MAX)
        if rows is not None and step_tokens is None:
            rows = _size("rows", rows, ROWS_MAX)
        elif rows is None and step_tokens is not None:
            step_tokens = _size("step_tokens", step_tokens, STEP_TOKENS_MAX)
            rows = varlen_rows(step_tokens, row_tokens)
            batch |= {"packing": "varlen", "step_tokens": step_tokens}
        else:
            raise ConfigError(
                f"a sandbox has rows ({rows}) or step_tokens ({step_tokens}), not both: give one"
            )
        self._statistics = [_known(name, known) for name, known in _by_source(lengths).items()]
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
            UsageError: A strategy is no function, or returns no graph.
        """
        outcome = self._feed.next_step(self._planner, _strategy(strategy))
        assert not isinstance(outcome, Ended), "a sandbox's sources are repeated without an end"
        return outcome

    def run(self, strategy: str | Strategy = "balanced", steps: int = 100) -> Prediction:
        """Return what the first steps are like under a strategy, whatever was planned here before.

        Raises:
            ConfigError: No strategy has that name.
            UsageError: A strategy is no function, or returns no graph.
        """
        return simulate(self.job, self.tree, self._statistics, steps, strategy=_strategy(strategy))


def _strategy(given: str | Strategy) -> Strategy:
    if isinstance(given, str):
        return find_strategy(given)
    name = getattr(given, "__name__", type(given).__name__)
    if not callable(given):
        raise UsageError(f"strategy is {given!r}: pass a name, or a function of (graph, step)")

    def checked(graph: DGraph, step: int) -> DGraph:
        made: object = given(graph, step)
        if not isinstance(made, DGraph):
            raise UsageError(
                f"strategy {name} returned {made!r:.80} at step {step}: return the graph of its last "
                "verb"
            )
        return made

    return checked


def _size(name: str, given: Any, most: int) -> int:
    is_integer = isinstance(given, Integral) and not isinstance(given, bool)
    if not is_integer or not 1 <= given <= most:
        raise ConfigError(
            f"{name} is {given!r:.80}: write an integer from 1 to {most}", key=name, limit=most
        )
    return int(given)


def _by_source(given: object) -> Mapping[str, npt.ArrayLike | SourceLengths]:
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f'lengths is {given!r:.80}: give lengths by source, like {{"web": [900]}}'
        )
    return given


def _known(name: str, given: npt.ArrayLike | SourceLengths) -> SourceLengths:
    if isinstance(given, SourceLengths):
        return given
    try:
        return SourceLengths.of(given)
    except ConfigError as error:
        raise ConfigError(f"source {name}: {error.message}", source=name) from error
