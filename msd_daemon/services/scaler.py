"""Has a job's loader workers follow its mixture: looks, asks federation.planning.scaling, carries out.

Looks twice a second while a generation runs. Workers are started and sent away in the background,
partitions change hands at watermarks (services/partition_moves.py); nobody waits for either.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from federation.model.job import ResolvedJob
from federation.planning.mixture_ahead import MixtureAhead
from federation.planning.scaling import (
    SAMPLES_KNOWN,
    WORKER,
    Decision,
    Scaling,
    ScalingRule,
    SourceView,
)
from msd_client.contract.errors import ConfigError, MsdError, NotFoundError
from msd_client.contract.state import DELIVERED_TOKENS, SKIPPED_TOKENS, StreamState
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.consumption import Consumption
from msd_daemon.core.loader_costs import LoaderCosts, SourceCost
from msd_daemon.services.generation import Generation
from msd_daemon.services.worker_set import WorkerSet

log = logging.getLogger(__name__)

LOOK_S = 0.5
LOOK_AHEAD_S = 12.0
"""Longer than it takes to start a worker, to open sources there and to read a first chunk of each."""
LOOK_AHEAD_STEPS = (16, 4096)
"""Least and most."""
REASONS_KEPT = 32
SHARE_CHANGE = 0.02
"""A share that differs by less of what it was is not told on."""


class ScalerOwner(Protocol):
    """Whose workers are scaled."""

    generation: Generation | None

    @property
    def is_over(self) -> bool:
        """True where nobody is to be served any more."""
        ...


class Scaler:
    """Of one job.

    Args:
        owner: The job's session.
        job: The job.
        config: The daemon's.
        workers: The job's, started.
        costs: Of its sources.
        do_soon: Runs work that a new generation waits for.
    """

    def __init__(
        self,
        owner: ScalerOwner,
        job: ResolvedJob,
        config: DaemonConfig,
        workers: WorkerSet,
        costs: LoaderCosts,
        do_soon: Callable[[Coroutine[Any, Any, object]], None],
    ) -> None:
        self._owner = owner
        self._job = job
        self._workers = workers
        self._costs = costs
        self._do_soon = do_soon
        self._is_on = config.scaling
        self._config_max = max(config.loader_workers_max, config.loader_workers)
        self.workers_max = self._config_max
        rule = ScalingRule(min(config.loader_workers_min, config.loader_workers), self.workers_max)
        self._scaling = Scaling(rule, len(job.sources))
        self._ahead = MixtureAhead(job.mixture, [source.name for source in job.sources])
        self._pins: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Partitions of a source, and the workers where those were named."""
        self._depths: dict[int, int] = {}
        self._consumption = Consumption()
        self._generation: Generation | None = None
        self._tokens_before = 0
        self._told_shares: list[float] = []
        self._views: list[SourceView] = []
        self._decision: Decision | None = None
        self._growing = False
        self._reasons: deque[dict[str, Any]] = deque(maxlen=REASONS_KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self._look_later()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._look_later()
        generation = self._owner.generation
        if generation is None or self._owner.is_over:
            return
        self.look(generation, time.monotonic_ns())

    def look(self, generation: Generation, now_ns: int) -> None:
        """Decide, and have it carried out."""
        if generation is not self._generation:
            self._begin(generation)
        totals = generation.totals
        step_tokens = totals.tokens // max(totals.steps, 1)
        released = max(generation.steps.released_step + 1 - generation.opened.step, 0)
        self._consumption.look(released, now_ns)
        shares = totals.wanted or list(generation.opened.shares)
        ahead = self._look_ahead(generation, shares, step_tokens)
        self._tell_shares(generation, ahead)
        if not self._is_on and not self._pins:
            return
        tokens_s = self._consumption.steps_s * step_tokens
        self._views = self._view(generation, shares, ahead, tokens_s)
        decision = self._scaling.decide(
            self._views,
            workers=len(self._workers.loaders),
            is_hungry=generation.is_hungry,
            now_ns=now_ns,
        )
        self._carry_out(generation, decision)

    def _begin(self, generation: Generation) -> None:
        self._generation = generation
        self._consumption.restart()
        self._told_shares = []
        self._depths.clear()
        state = StreamState.decode(generation.state_bytes)
        placed = state.progress[DELIVERED_TOKENS].sum() + state.dropped[SKIPPED_TOKENS].sum()
        self._tokens_before = int(placed)

    # -- what is to be seen ----------------------------------------------------------------------

    def _look_ahead(
        self, generation: Generation, shares: Sequence[float], step_tokens: int
    ) -> list[float]:
        """Return the largest share of each source now or soon."""
        steps = int(self._consumption.steps_s * LOOK_AHEAD_S)
        steps = min(max(steps, LOOK_AHEAD_STEPS[0]), LOOK_AHEAD_STEPS[1])
        plan_step = generation.next_plan_step + generation.totals.skipped_steps
        changes, _ = generation.waiting_events(plan_step)
        found = self._ahead.shares(
            shares,
            step=plan_step,
            tokens=self._tokens_before + generation.totals.tokens,
            steps=steps,
            step_tokens=step_tokens,
            changes=changes,
        )
        return [float(share) for share in found]

    def _tell_shares(self, generation: Generation, ahead: list[float]) -> None:
        """Have sources opened and read ahead by what they soon need."""
        told = self._told_shares
        is_news = not told or any(
            abs(new - old) > SHARE_CHANGE * max(new, old) or (new > 0) != (old > 0)
            for new, old in zip(ahead, told, strict=True)
        )
        if is_news:
            self._told_shares = ahead
            generation.read_by(ahead)

    def _view(
        self,
        generation: Generation,
        shares: Sequence[float],
        ahead: Sequence[float],
        tokens_s: float,
    ) -> list[SourceView]:
        costs = self._costs.all()
        now_tokens, ahead_tokens = self._token_shares(costs, shares, ahead)
        awaited = generation.awaited_sources if generation.is_hungry else frozenset()
        views = []
        for source, (spec, cost) in enumerate(zip(self._job.sources, costs, strict=True)):
            read = generation.reading(source)
            loads = [
                int(tokens_s * share * read.own_share * cost_ns * WORKER / 1e9)
                for share in (now_tokens[source], ahead_tokens[source])
                for cost_ns in (cost.work_ns_per_token, cost.wait_ns_per_token)
            ]
            pin = self._pins.get(source)
            most = spec.lane_count if spec.order_class == "streaming" else read.blocks
            views.append(
                SourceView(
                    loads[0],
                    loads[1],
                    loads[2],
                    loads[3],
                    read.workers,
                    most or self.workers_max,
                    None if pin is None else pin[0],
                    () if pin is None else pin[1],
                    read.is_parked,
                    self._depths.get(source, 0),
                    cost.samples >= SAMPLES_KNOWN,
                    self._is_measured(source),
                    source in awaited,
                    all(generation.is_worker_busy(worker) for worker in read.workers),
                )
            )
        return views

    def _is_measured(self, source: int) -> bool:
        """Return True where chunks of this run, and steps of the ranks, tell of a source's load."""
        return self._costs.counted(source)[0] >= SAMPLES_KNOWN and self._consumption.steps_s > 0

    def _token_shares(
        self, costs: Sequence[SourceCost], shares: Sequence[float], ahead: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Return shares of tokens, whatever the mixture's unit counts."""
        if self._job.mixture.unit != "samples":
            return list(shares), list(ahead)
        known = [cost.tokens_per_sample for cost in costs if cost.samples]
        usual = sum(known) / len(known) if known else 1.0
        lengths = [cost.tokens_per_sample if cost.samples else usual for cost in costs]
        total = sum(s * n for s, n in zip(shares, lengths, strict=True)) or 1.0
        return (
            [s * n / total for s, n in zip(shares, lengths, strict=True)],
            [s * n / total for s, n in zip(ahead, lengths, strict=True)],
        )

    # -- what is to be done ----------------------------------------------------------------------

    def _carry_out(self, generation: Generation, decision: Decision) -> None:
        self._decision = decision
        for deal in decision.deals:
            before = self._views[deal.source].workers
            if not self._is_on and deal.source not in self._pins:
                continue
            if generation.deal_source(deal.source, deal.workers):
                self._note(self._job.sources[deal.source].name, before, deal.workers, deal.reason)
            else:
                self._scaling.refused(deal.source)
        if not self._is_on:
            return
        for depth in decision.depths:
            self._depths[depth.source] = depth.blocks
            generation.fetch_ahead(depth.source, depth.blocks)
            name = self._job.sources[depth.source].name
            log.info("source %s: %d blocks ahead: %s", name, depth.blocks, depth.reason)
        if decision.parked:
            generation.park_sources(decision.parked)
        self._set_workers(generation, decision.workers, decision.workers_reason)

    def _note(self, source: str, before: Sequence[int], after: Sequence[int], reason: str) -> None:
        log.info(
            "job %s: source %s: read by loaders %s instead of %s: %s",
            self._job.name, source, list(after), list(before), reason,
        )  # fmt: skip
        entry = {"source": source, "before": list(before), "after": list(after), "reason": reason}
        self._reasons.append(entry | {"time": time.time()})

    def _set_workers(self, generation: Generation, wanted: int, reason: str) -> None:
        count = len(self._workers.loaders)
        if wanted > count and not self._growing:
            self._growing = True
            log.info("job %s: %d loaders instead of %d: %s", self._job.name, wanted, count, reason)
            self._do_soon(self._grow(wanted))
        elif wanted < count and generation.may_leave(count - 1):
            log.info("job %s: loader %d leaves: %s", self._job.name, count - 1, reason)
            self._workers.drop_loader()

    async def _grow(self, wanted: int) -> None:
        try:
            while len(self._workers.loaders) < wanted and not self._owner.is_over:
                await self._workers.add_loader()
        except (MsdError, TimeoutError, OSError) as error:
            if not self._owner.is_over:  # else it ended while one was being started
                log.warning("job %s: no further loader could be started: %s", self._job.name, error)
        finally:
            self._growing = False

    # -- operators -------------------------------------------------------------------------------

    def pin(
        self, source_name: str, partitions: int | None, loaders: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Have a source read in so many partitions whatever it costs; None: as the scaler finds.

        Args:
            source_name: The source.
            partitions: How many.
            loaders: The loader worker of each; none: where there is room.

        Raises:
            NotFoundError: The job has no such source.
            ConfigError: There may not be so many.
        """
        names = [source.name for source in self._job.sources]
        if source_name not in names:
            raise NotFoundError(
                f"job {self._job.name!r} has no source {source_name!r}: {', '.join(names)}"
            )
        source = names.index(source_name)
        if partitions is None:
            self._pins.pop(source, None)
        else:
            self._check_pin(source, partitions, loaders)
            self._pins[source] = (partitions, tuple(loaders))
        generation = self._owner.generation
        if generation is not None and not self._owner.is_over:
            self.look(generation, time.monotonic_ns())
        return {
            "job": self._job.name,
            "source": source_name,
            "partitions": partitions,
            "is_pending": self._pending(source) is not None,
        }

    def _pending(self, source: int) -> int | None:
        """Return in how many partitions a source will be read once its move is done; None: no move.

        A move is under way while its former loaders have something left, and where an operator's is
        yet to begin: nothing came of the source so far, or workers are missing.
        """
        generation = self._owner.generation
        if generation is None or self._owner.is_over:
            return None
        read, pin = generation.reading(source), self._pins.get(source)
        if pin is not None and read.workers:
            is_done = len(read.workers) == pin[0] and pin[1] in ((), read.workers)
            return None if is_done and not read.is_moving else pin[0]
        return len(read.workers) if read.is_moving else None

    def allow(self, loaders_max: int) -> dict[str, Any]:
        """Have no more loader workers than this from now on, fewer than the daemon's own limit.

        Raises:
            ConfigError: It is above that limit, or none.
        """
        if not 1 <= loaders_max <= self._config_max:
            raise ConfigError(
                f"scale: at most {loaders_max} loader workers: write 1 to {self._config_max} "
                "(workers.loader_workers_max in daemon.toml)"
            )
        low = min(self._scaling.rule.workers_min, loaders_max)
        self.workers_max = loaders_max
        self._scaling.rule = replace(self._scaling.rule, workers_min=low, workers_max=loaders_max)
        return {"job": self._job.name, "loaders_max": loaders_max}

    def _check_pin(self, source: int, partitions: int, loaders: Sequence[int]) -> None:
        spec = self._job.sources[source]
        limit, why = self.workers_max, "workers.loader_workers_max in daemon.toml"
        if spec.order_class == "streaming" and spec.lane_count < limit:
            limit, why = (
                spec.lane_count,
                "its shuffle.interleave: a streamed shard is read in one go",
            )
        if not 1 <= partitions <= limit:
            raise ConfigError(
                f"scale: source {spec.name!r} can't be read in {partitions} partitions: 1 to {limit} "
                f"({why}), or auto"
            )
        count = len(self._workers.loaders)
        is_known = all(0 <= number < count for number in loaders)
        if loaders and (len(set(loaders)) != partitions or not is_known):
            raise ConfigError(
                f"scale: source {spec.name!r}: loaders {list(loaders)} for {partitions} partitions: "
                f"name one of 0 to {count - 1} for each"
            )

    @property
    def steps_s(self) -> float:
        """Steps a second that the ranks take, as far as it was seen."""
        return self._consumption.steps_s

    def status(self) -> dict[str, Any]:
        """Return what the scaler sees and did last, for msdctl."""
        decision = self._decision
        needs = self._scaling.needs()
        sources = [
            {
                "name": spec.name,
                "load": round(needs[number] / WORKER, 3),
                "load_ahead": round((view.work_ahead + view.wait_ahead) / WORKER, 3),
                "loaders": list(view.workers),
                "partitions": len(view.workers),
                "partitions_pending": self._pending(number),
                "pinned": view.pinned,
                "is_parked": view.is_parked,
                "blocks_ahead": view.depth,
            }
            for number, (spec, view) in enumerate(zip(self._job.sources, self._views, strict=False))
        ]
        return {
            "is_on": self._is_on,
            "loaders": len(self._workers.loaders),
            "loaders_wanted": len(self._workers.loaders) if decision is None else decision.workers,
            "loaders_max": self.workers_max,
            "reason": "" if decision is None else decision.workers_reason,
            "steps_per_s": round(self._consumption.steps_s, 3),
            "moves": 0 if self._generation is None else self._generation.moves_total,
            "sources": sources,
            "last": list(self._reasons),
        }
