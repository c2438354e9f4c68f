"""Plans many steps of a job from length statistics and says what a trainer would see of them.

The planner is the real one: mixture, ends and repetition, packing, costs, balance. What is drawn is
a sample of what the source holds, so figures are predictions, the better the more records they rest on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.dgraph import DGraph
from federation.planning.hybrid import encoder_sums
from federation.planning.planner import Ended, StepPlanner
from federation.planning.step_change import first_state
from federation.planning.strategies import Strategy, WatchedStrategy, find_strategy
from federation.simulation.length_statistics import SourceLengths
from federation.simulation.statistic_feed import StatisticFeed, simulated_job
from msd_client.contract.state import DELIVERED_TOKENS, RECORD_ORDER

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_QUANTILES = (0.5, 0.99, 1.0)


@dataclass(frozen=True, eq=False)
class Prediction:
    """What the steps of a simulated run are like; T steps, S sources."""

    sources: tuple[str, ...]
    unit: str
    ending: str
    """Why the stream ended before the last step that was asked for; empty where it did not."""
    imbalance: Float64Array
    """Cost of the slowest rank over the mean, of each step; 1 is even. Shape (T,)."""
    speedup_over_native: Float64Array
    """Predicted time of the step in native order over that of its plan (planning.step_time).
    Shape (T,)."""
    encoder_imbalance: Float64Array
    """Slowest group's encoders over the mean, summed over microbatches; 1 where no media are encoded.
    Shape (T,)."""
    has_encoders: bool
    """True where some step has media that the job's model encodes."""
    padding: Float64Array
    """Share of the cells without a token. Shape (T,)."""
    valid_tokens: Int64Array
    """Shape (T,)."""
    microbatches: Int64Array
    """Of each rank. Shape (T,)."""
    carried_tokens: Int64Array
    """Drawn tokens that wait for a later step. Shape (T,)."""
    crossing_bytes: Int64Array
    """Token ids and media between nodes. Shape (T,)."""
    wanted: Float64Array
    """Wanted shares. Shape (T, S)."""
    drawn_tokens: Int64Array
    """Shape (T, S)."""
    drawn_samples: Int64Array
    placed_tokens: Int64Array
    """Of the whole run. Shape (S,)."""
    epochs: Float64Array
    """How often each source was gone through at the end. Shape (S,)."""

    @property
    def steps(self) -> int:
        """Steps that were planned."""
        return len(self.imbalance)

    @property
    def realised(self) -> Float64Array:
        """Shares of the whole run's draw in tokens and in samples. Shape (2, S)."""
        sums = np.stack((self.drawn_tokens.sum(axis=0), self.drawn_samples.sum(axis=0)))
        shares: Float64Array = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
        return shares

    def plain(self) -> dict[str, Any]:
        """Return the figures as plain maps and numbers, for JSON."""
        tokens, samples = self.realised
        wanted = self.wanted.mean(axis=0) if self.steps else np.zeros(len(self.sources))
        columns = (
            ("imbalance", self.imbalance),
            ("speedup_over_native", self.speedup_over_native),
            *([("encoder_imbalance", self.encoder_imbalance)] if self.has_encoders else []),
            ("padding", self.padding),
            ("microbatches", self.microbatches),
            ("valid_tokens", self.valid_tokens),
            ("carried_tokens", self.carried_tokens),
            ("crossing_bytes", self.crossing_bytes),
        )
        return {
            "steps": self.steps,
            "ending": self.ending,
            "unit": self.unit,
            **{name: _summary(values) for name, values in columns},
            "sources": [
                {
                    "name": name,
                    "wanted": float(wanted[place]),
                    "token_share": float(tokens[place]),
                    "sample_share": float(samples[place]),
                    "placed_tokens": int(self.placed_tokens[place]),
                    "epochs": float(self.epochs[place]),
                }
                for place, name in enumerate(self.sources)
            ],
        }


def _summary(values: npt.NDArray[Any]) -> dict[str, float]:
    if not len(values):
        return {}
    names = ("p50", "p99", "max")
    found = dict(zip(names, np.quantile(values, _QUANTILES).tolist(), strict=True))
    return {"mean": float(values.mean())} | found


class _Columns:
    """Figures of the steps so far."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, float, float, int, int, int, int]] = []
        self._loads: list[tuple[int, float]] = []
        self._wanted: list[Float64Array] = []
        self._tokens: list[Int64Array] = []
        self._samples: list[Int64Array] = []

    def add(self, plan: StepPlan, graph: DGraph) -> None:
        self._loads.append(encoder_sums(graph.encoder_loads()))
        self._lines.append(
            (
                plan.imbalance,
                graph.speedup_over_native(),
                1.0 - plan.fill_ratio,
                plan.valid_tokens,
                plan.microbatch_count,
                plan.carried_tokens,
                graph.crossing_bytes(),
            )
        )
        self._wanted.append(plan.wanted_shares)
        self._tokens.append(plan.drawn_tokens)
        self._samples.append(plan.drawn_samples)

    def prediction(
        self, job: ResolvedJob, statistics: Sequence[SourceLengths], planner: StepPlanner, end: str
    ) -> Prediction:
        count = len(job.sources)
        imbalance, speedup, padding, *counts = np.array(self._lines, np.float64).reshape(-1, 7).T
        most, mean = np.array(self._loads, np.float64).reshape(-1, 2).T
        valid_tokens, microbatches, carried_tokens, crossing = np.array(counts).astype(np.int64)
        progress = planner.state().progress
        records = np.array([source.records for source in statistics])
        return Prediction(
            sources=tuple(source.name for source in job.sources),
            unit=job.mixture.unit,
            ending=end,
            imbalance=imbalance,
            speedup_over_native=speedup,
            encoder_imbalance=np.divide(most, mean, out=np.ones_like(most), where=mean > 0),
            has_encoders=bool((mean > 0).any()),
            padding=padding,
            valid_tokens=valid_tokens,
            microbatches=microbatches,
            carried_tokens=carried_tokens,
            crossing_bytes=crossing,
            wanted=np.array(self._wanted).reshape(-1, count),
            drawn_tokens=np.array(self._tokens, np.int64).reshape(-1, count),
            drawn_samples=np.array(self._samples, np.int64).reshape(-1, count),
            placed_tokens=progress[DELIVERED_TOKENS],
            epochs=progress[RECORD_ORDER] / records,
        )


def simulate(
    job: ResolvedJob,
    tree: ClientPlaceTree,
    statistics: Sequence[SourceLengths],
    steps: int,
    on_plan: Callable[[StepPlan], None] | None = None,
    strategy: Strategy | None = None,
) -> Prediction:
    """Plan the first steps of a job from statistics of its sources.

    Args:
        job: The resolved job; its shards are not touched.
        tree: The mesh, with the node of each rank.
        statistics: One for each source.
        steps: Most steps.
        on_plan: Sees each plan, for progress or for looking at one.
        strategy: In place of the built-in one that the job names.

    Raises:
        ConfigError: Mesh, mixture or strategy do not fit.
        DataError: A source ends that may not.
    """
    simulated = simulated_job(job)
    watched = WatchedStrategy(strategy or find_strategy(job.strategy))
    planner = StepPlanner(simulated, tree, first_state(simulated), watched)
    feed = StatisticFeed(statistics, job.seed)
    columns = _Columns()
    ending = ""
    for _ in range(steps):
        outcome = feed.next_step(planner)
        if isinstance(outcome, Ended):
            ending = outcome.reason
            break
        assert watched.graph is not None
        columns.add(outcome, watched.graph)
        if on_plan is not None:
            on_plan(outcome)
    return columns.prediction(job, statistics, planner, ending)
