"""Which loader worker reads which partition of a source here, and how that changes while it runs.

A deal names a worker for each partition of a source. It outlives generations; a source without one
has a single partition on the worker that has least, or one on every worker where it is heavy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from federation.model.job import ResolvedJob
from msd_daemon.core.partition_moves import Move, NewPartition, plan_move
from msd_daemon.core.pool import PoolState
from msd_daemon.core.readahead import LoaderState, ReadAhead
from msd_daemon.core.shared_steps import SharedSteps
from msd_daemon.services.worker_set import WorkerSet

log = logging.getLogger(__name__)

HEAVY_SHARE = 0.4
"""A source above this share of the mixture is read by every loader worker, until its cost is known."""

Deals = dict[int, tuple[int, ...]]
"""By source: the worker of each partition that a node reads."""


class PartitionMoves:
    """Of one generation.

    Args:
        job: The job.
        workers: Its loader workers.
        readahead: Of the generation.
        pool: Of the generation.
        deals: Of the job; changed here.
        owners: In a cluster what this node loads.
        shares: Returns the share of a source in the mixture in force.
    """

    def __init__(
        self,
        job: ResolvedJob,
        *,
        workers: WorkerSet,
        readahead: ReadAhead,
        pool: PoolState,
        deals: Deals,
        owners: SharedSteps | None,
        shares: Callable[[int], float],
    ) -> None:
        self._job = job
        self._workers = workers
        self._readahead = readahead
        self._pool = pool
        self.deals = deals
        self._owners = owners
        self._shares = shares
        self._leaving: set[int] = set()
        """Loaders that read up to a watermark, or have chunks there that nobody drew yet."""
        self.moves_total = 0

    def partitions(self, source: int) -> list[NewPartition]:
        """Return the partitions of a source that this node reads; none where other nodes load it."""
        owned, parts = ([0], 1) if self._owners is None else self._owners.parts(source)
        if not owned:
            return []
        count = len(self._workers.loaders)
        dealt = self.deals.get(source)
        if dealt is None:
            is_heavy = count > 1 and self._shares(source) / parts >= HEAVY_SHARE
            dealt = tuple(range(count)) if is_heavy else (self._lightest_worker(),)
        here = len(dealt)
        spec = self._job.sources[source]
        if spec.order_class == "streaming":
            here = max(min(here, spec.lane_count // parts), 1)
        # Every `parts`-th block is a node's; dealt to its own loaders in turn.
        return [
            NewPartition(own + parts * turn, parts * here, dealt[(turn + number) % here] % count)
            for number, own in enumerate(owned)
            for turn in range(here)
        ]

    def _lightest_worker(self) -> int:
        loads = [0.0] * len(self._workers.loaders)
        for loader in self._readahead.loaders.values():
            share = self._shares(loader.source_index) / loader.parts
            loads[loader.worker] += share + 1e-6
        return loads.index(min(loads))

    def deal(self, source: int, workers: Sequence[int]) -> None:
        """Say who is to read a source here, a worker for each partition."""
        assert workers, f"source {source} is dealt to nobody"
        self.deals[source] = tuple(workers)

    def plan(self, source: int, loaders: Sequence[int]) -> Move | None:
        """Return how the loaders of an open source come to be those of its deal; see plan_move."""
        spec = self._job.sources[source]
        lanes = spec.lane_count if spec.order_class == "streaming" else 0
        states = [self._readahead.loaders[number] for number in loaders]
        return plan_move(states, self.partitions(source), lanes)

    def leave(self, move: Move) -> None:
        """Have those loaders of a move read no further than its watermark."""
        self.moves_total += 1
        for state in move.leaving:
            self._readahead.retire(state.loader, move.watermark)
            self._leaving.add(state.loader)
            if not self._readahead.is_away(state.worker) and not state.is_parked:
                self._workers.stop_loader(state.worker, state.loader, move.watermark)

    def finished(self, needed: Callable[[], set[int]]) -> list[LoaderState]:
        """Return the loaders that came to their watermark and of which everything is drawn.

        Args:
            needed: Returns the loaders that something else waits for.
        """
        if not self._leaving:
            return []
        busy = needed()
        known = self._readahead.loaders
        self._leaving.intersection_update(known)
        found = [
            state
            for state in map(known.__getitem__, sorted(self._leaving))
            if state.is_dry
            and not state.is_granted
            and not self._pool.undrawn_chunks(state.loader)
            and state.loader not in busy
        ]
        self._leaving.difference_update(state.loader for state in found)
        return found

    @property
    def leaving_count(self) -> int:
        """Loaders that are on their way out."""
        return len(self._leaving)
