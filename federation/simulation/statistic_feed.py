"""Feeds a planner with records drawn from length statistics, as loaders would send them.

A source is one window of blocks; what a block holds is a function of (seed, source, epoch, block), so
a simulation is the same however it is fed. Nothing is kept but the statistics and a counter a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from federation.model.chunk import ChunkMeta
from federation.model.job import ResolvedJob, Shard, ShuffleRule, SourceSpec
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, Starved, StepPlanner
from federation.planning.strategies import Strategy
from federation.simulation.length_statistics import SourceLengths, merged_marks
from msd_client.contract.errors import ConfigError
from msd_client.contract.position import BLOCK_MAX, pack_block_key, unpack_block_key

Int64Array = npt.NDArray[np.int64]

BLOCK_RECORDS = 4096
FED_BLOCKS_MAX = 1 << 16
"""Blocks fed for one step; a mixture that asks for more of one source asks for nonsense."""


def simulated_job(job: ResolvedJob) -> ResolvedJob:
    """Return a job whose sources lie as the feed tells them: one window, blocks of equal size.

    Error policies are off: the statistics say how many records are faulty, not how densely they lie.
    """
    return replace(job, sources=tuple(_one_window(source) for source in job.sources))


def _one_window(source: SourceSpec) -> SourceSpec:
    return replace(
        source,
        order_class="seekable",
        shards=(Shard("", 0, "0" * 32),),
        shuffle=ShuffleRule(),
        on_error=replace(source.on_error, policy="quarantine"),
    )


class StatisticFeed:
    """Loaders of a simulated job's sources."""

    def __init__(self, statistics: Sequence[SourceLengths], seed: int) -> None:
        """Stand at the beginning of every source.

        Raises:
            ConfigError: A source has more records than a window has places.
        """
        self._statistics = statistics
        self._seed = seed
        self._next = [(0, 0)] * len(statistics)
        """Epoch and block that each source sends next."""
        for number, source in enumerate(statistics):
            if self._blocks(number) > BLOCK_MAX:
                raise ConfigError(
                    f"source number {number} has {source.records} records, at most "
                    f"{BLOCK_MAX * BLOCK_RECORDS} can be simulated",
                    seen=source.records,
                    limit=BLOCK_MAX * BLOCK_RECORDS,
                )

    def next_step(self, planner: StepPlanner, strategy: Strategy | None = None) -> StepPlan | Ended:
        """Plan the next step, feeding whatever it starves for.

        Args:
            planner: Of the simulated job.
            strategy: Of this step; None: the planner's.

        Raises:
            DataError: See `StepPlanner.plan_step`.
        """
        fed = 0
        while True:
            outcome = planner.plan_step(strategy)
            if not isinstance(outcome, Starved):
                return outcome
            self.feed(planner, outcome)
            fed += len(outcome.sources)
            assert fed < FED_BLOCKS_MAX, "a step draws more blocks than any step holds"

    def feed(self, planner: StepPlanner, starved: Starved) -> None:
        """Add the next block of each source that a planner starves for."""
        for source, (block_key, _) in zip(starved.sources, starved.positions, strict=True):
            place = unpack_block_key(block_key)
            self._next[source] = max(self._next[source], (place.epoch, place.block))
            planner.add_chunk(self.next_block(source))

    def next_block(self, source: int) -> ChunkMeta:
        """Return the next block of a source, its last one followed by the first of the next epoch."""
        epoch, block = self._next[source]
        statistics = self._statistics[source]
        blocks = self._blocks(source)
        self._next[source] = (epoch, block + 1) if block + 1 < blocks else (epoch + 1, 0)
        count = min(BLOCK_RECORDS, statistics.records - block * BLOCK_RECORDS)
        rng = np.random.default_rng((self._seed, source, epoch, block))
        starts = statistics.group_starts
        if len(starts) == len(statistics.lengths):
            picks = rng.integers(0, len(statistics.lengths), count)
        else:
            picks = _whole_groups(starts, len(statistics.lengths), count, rng)
        return ChunkMeta(
            source,
            pack_block_key(epoch, 0, block),
            0,
            statistics.lengths[picks].astype(np.int32),
            statistics.status[picks],
            is_block_end=True,
            window_blocks=blocks,
            marks=None if statistics.marks is None else merged_marks(statistics.marks, picks),
        )

    def _blocks(self, source: int) -> int:
        return -(-self._statistics[source].records // BLOCK_RECORDS)


def _whole_groups(
    starts: Int64Array, records: int, count: int, rng: np.random.Generator
) -> Int64Array:
    """Pick so many records, group by group; the last group may be cut. Shape (count,)."""
    sizes = np.diff(np.append(starts, records))
    groups = rng.integers(0, len(starts), count)
    taken = sizes[groups]
    inside = np.arange(int(taken.sum())) - np.repeat(np.cumsum(taken) - taken, taken)
    picks: Int64Array = (np.repeat(starts[groups], taken) + inside)[:count]
    return picks
