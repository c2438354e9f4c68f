"""The workers of one job and the pool between them: started, given rings, replaced when they die.

What a worker had published outlives it, so the generation goes on behind that with its successor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from federation.model.job import ResolvedJob
from msd_client.contract.errors import ForkServerLostError, MsdError, UsageError, WorkerLostError
from msd_client.contract.state import StreamState
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.deaths import DEATHS_WINDOW_S, BackOff, Deaths
from msd_daemon.core.loader_costs import LoaderCosts
from msd_daemon.core.start_table import StartTable
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.services.generation import Generation
from msd_daemon.services.loader_deaths import LoaderDeaths, Verdict
from msd_daemon.services.partition_moves import Deals
from msd_daemon.services.profile_keeper import ProfileKeeper
from msd_daemon.services.quarantine import Quarantine, QuarantineEntry
from msd_daemon.services.rings import Ring, make_in_thread, make_pool_segment
from msd_daemon.services.scaler import Scaler
from msd_daemon.services.standby import Standby
from msd_daemon.services.supervision import Large, Late, Supervision
from msd_daemon.services.worker import Worker
from msd_daemon.services.worker_events import ShadowChunk
from msd_daemon.services.worker_set import WorkerSet
from msd_daemon.shm.segment import Segment
from msd_daemon.sources.formats import reader_module
from msd_daemon.stores.urls import is_url
from msd_daemon.workers.bad_notice import BadNotice
from msd_daemon.workers.messages import ChunkNotice, Grant
from msd_daemon.workers.rights import Rights

log = logging.getLogger(__name__)

CONSTRUCTORS = 1


class WorkersOwner(Protocol):
    """What the workers ask of their job."""

    generation: Generation | None
    former: Generation | None
    """The one before, while none runs: what is on its way still is read already."""
    state: str

    @property
    def is_over(self) -> bool:
        """True where nobody is to be served any more."""
        ...

    @property
    def mesh(self) -> list[tuple[str, int]]:
        """Axes of the trainer in order, with sizes."""
        ...

    def failed(self, error: MsdError) -> None:
        """The job can't go on."""

    def bad_records(self, notice: BadNotice) -> None:
        """A chunk that comes next holds bad records."""


class JobWorkers:
    """Owns worker processes and the pool segment of one job.

    Args:
        owner: The job's session.
        job: The resolved job.
        config: The daemon's.
        forks: The fork server.
        pool_bytes: Size of the pool.
        quarantine: Records that no worker may touch, loaded.
        rights: Of the job's owner, which loader workers take; None: the daemon's.
    """

    def __init__(
        self,
        owner: WorkersOwner,
        job: ResolvedJob,
        config: DaemonConfig,
        forks: ForkClient,
        pool_bytes: int,
        quarantine: Quarantine,
        rights: Rights | None = None,
    ) -> None:
        self._owner = owner
        self._quarantine = quarantine
        self._loader_deaths = LoaderDeaths(job)
        self._job = job
        self._config = config
        self._forks = forks
        self._pool_bytes = pool_bytes
        self._rights = rights
        self._set: WorkerSet | None = None
        self._pool: Segment | None = None
        self._replacing: set[asyncio.Task[object]] = set()
        self._deaths = Deaths()
        self._back_off = BackOff()
        self._standby: Standby | None = None
        self._scaler: Scaler | None = None
        self._supervision = Supervision(job, config)
        self._recycling: dict[int, Generation] = {}
        """Loader workers that finish what they have, and the generation they do it in."""
        self.costs = LoaderCosts(len(job.sources))
        """What reading each source costs, live."""
        self.profiles = ProfileKeeper(job, lambda: owner.mesh, config, self.costs)
        self.deals: Deals = {}
        """Who reads which source, where that was decided."""
        self.late_total = 0
        self.lost_total = 0
        """Loader workers and constructors that ended by themselves, or were sent away as late."""
        self.last_loss = ""
        """What was said of the last one."""
        self.took_over: dict[str, int] = {"shadow": 0, "spare": 0, "new": 0}
        """Loader workers that were replaced, by what took their place."""

    async def ready(self, state: bytes, shared_bytes: int) -> WorkerSet:
        """Return the workers, all alive; the first call starts them.

        Args:
            state: Where the stream goes on.
            shared_bytes: Of the job's pool and rings.

        Raises:
            MsdError: One can't work, or memory is short.
        """
        workers = self._set or await self._start(state, shared_bytes)
        await asyncio.gather(*self._replacing)
        await workers.until_left()  # else one could wake and write into the next generation's pool
        await workers.revive()
        assert self._standby is not None
        await self._standby.settled()
        self._standby.used()  # not now: ranks wait for their first batch
        return workers

    async def _start(self, state: bytes, shared_bytes: int) -> WorkerSet:
        table = await self._plan_start(state, shared_bytes)
        segment = await make_in_thread(
            make_pool_segment, self._pool_bytes, self._config.segment, "pool"
        )
        note_fallback(self._job.name, segment)
        self._pool = segment
        self._set = workers = WorkerSet(self._forks, self, self._rights)
        preload = ["msd_daemon.workers.loader_main", *reader_modules(self._job)]
        if any(is_url(shard.path) for source in self._job.sources for shard in source.shards):
            preload.append("msd_daemon.stores.remote_file")
        try:
            await workers.start(
                self._job,
                segment,
                loaders=self._config.loader_workers if table is None else table.workers,
                constructors=CONSTRUCTORS,
                # Folders of the daemon's are not the user's to write, nor to trust.
                index_dir=None if self._rights else Path(self._config.state_dir) / "index",
                stores=self._config.stores.for_another_user()
                if self._rights
                else self._config.stores,
                preload=tuple(preload),
            )
        except BaseException:
            # The next start makes all of it anew.
            self._set = self._pool = None
            workers.close()
            segment.close()
            raise
        self._standby = Standby(self._owner, workers, self._config.spares)
        self._scaler = Scaler(
            self._owner, self._job, self._config, workers, self.costs, self._do_soon
        )
        if self._config.federation is None:  # of a cluster every node would do it
            self.profiles.probe_unknown(StreamState.decode(state))
        return workers

    async def _plan_start(self, state: bytes, shared_bytes: int) -> StartTable | None:
        """Return how many workers begin by what is known of the sources, and deal those."""
        if self._config.federation is not None:
            await self.profiles.load()  # who loads what is not said yet
            return None
        table = await self.profiles.plan_start(StreamState.decode(state), shared_bytes)
        if table is not None:
            self.deals |= table.deals
        return table

    def give_ring(self, ring: Ring, generation: int, only: int | None = None) -> None:
        """Give a ring to every constructor, or to one."""
        assert self._set is not None
        body = {
            "layout": ring.layout.encode(),
            "spec": ring.plan.spec.encode(),
            "generation": generation,
        }
        self._set.add_ring(ring.plan.place.ring, ring.segment, body, only)

    def all(self) -> list[Worker]:
        """Return all workers, those that stand by too; none before the first generation."""
        return [] if self._set is None else list(self._set.all())

    def scale(self, source: str, partitions: int | None, loaders: Sequence[int]) -> dict[str, Any]:
        """Have a source read in so many partitions; None: as the scaler finds. See Scaler.pin.

        Raises:
            UsageError: No generation began yet.
            NotFoundError: The job has no such source.
            ConfigError: There may not be so many.
        """
        return self._scaler_in_use.pin(source, partitions, loaders)

    def allow_loaders(self, loaders_max: int) -> dict[str, Any]:
        """Have no more loader workers than this from now on. See Scaler.allow.

        Raises:
            UsageError: No generation began yet.
            ConfigError: There may not be so many.
        """
        return self._scaler_in_use.allow(loaders_max)

    @property
    def _scaler_in_use(self) -> Scaler:
        if self._scaler is None:
            raise UsageError(
                f"job {self._job.name!r} reads nothing yet: scale it once its ranks iterate"
            )
        return self._scaler

    def scaling_status(self) -> dict[str, Any] | None:
        """Return what the scaler sees and did last; None before anything is read."""
        return None if self._scaler is None else self._scaler.status()

    def pids(self) -> list[tuple[str, int]]:
        """Return (role, pid) of the living children."""
        found = [] if self._set is None else self._set.pids()
        probe = self.profiles.probe_pid
        return found if probe is None else [*found, ("probe", probe)]

    @property
    def recycled_total(self) -> int:
        """Loader workers that were replaced for their size."""
        return self._supervision.watermark.recycled_total

    def standby_status(self) -> dict[str, Any]:
        """Return who stands by, set up, what stands ready, and who took whose place, for msdctl."""
        generation = self._owner.generation
        shadows = None if generation is None else generation.readahead.shadows
        return {
            "spares": 0 if self._set is None else self._set.count_able("spare"),
            "shadows": 0 if self._set is None else self._set.count_able("shadow"),
            "shadow_bytes": 0 if shadows is None else shadows.ready_bytes,
            "shadow_budget_bytes": 0 if shadows is None else shadows.budget_bytes,
            "took_over": dict(self.took_over),
            "late": self.late_total,
            "recycled": self._supervision.watermark.recycled_total,
            "refused": 0 if self._set is None else self._set.refused_total,
        }

    def close(self) -> None:
        """Let all workers go, and the pool."""
        self.profiles.close()
        if self._standby is not None:
            self._standby.close()
        if self._scaler is not None:
            self._scaler.close()
        if self._set is not None:
            self._set.close()
        if self._pool is not None:
            self._pool.close()

    # -- what workers say ------------------------------------------------------------------------

    def chunk_published(self, notice: ChunkNotice) -> None:
        """See WorkerEvents."""
        self._count(notice)
        generation = self._owner.generation or self._owner.former
        if generation is not None:
            generation.chunk_published(notice)
            self._after_answer()

    def grant_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        """See WorkerEvents."""
        if self._owner.generation is not None:
            self._owner.generation.grant_returned(grant, needed_bytes=needed_bytes, is_dry=is_dry)
            self._after_answer()

    def _after_answer(self) -> None:
        if self._recycling:
            self._recycle_idle()

    def shadow_ready(self, chunk: ShadowChunk) -> None:
        """See WorkerEvents."""
        self._count(chunk.notice)
        if self._owner.generation is not None:
            self._owner.generation.shadow_ready(chunk)

    def _count(self, notice: ChunkNotice) -> None:
        lengths = notice.lengths
        self.costs.add(notice.source_index, len(lengths), int(lengths.sum()), notice.cost)

    def shadow_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        """See WorkerEvents."""
        if self._owner.generation is not None:
            self._owner.generation.shadow_returned(grant, needed_bytes=needed_bytes, is_dry=is_dry)

    def fenced_ended(self, pid: int) -> None:
        """See WorkerEvents."""
        self._supervision.forget(pid)
        if self._owner.generation is not None:
            self._owner.generation.fenced_ended(pid)

    def bad_records(self, notice: BadNotice) -> None:
        """See WorkerEvents."""
        self._owner.bad_records(notice)
        for entry in self._quarantine.new_entries(notice):
            self._settle_soon(entry)

    def shard_lost(self, told: dict[str, Any]) -> None:
        """See WorkerEvents."""
        entry = self._quarantine.loss_entry(told)
        log.warning(
            "job %r: source %s: %s; this is noted", self._job.name, entry.source, entry.text
        )
        self._settle_soon(entry)

    def _settle_soon(self, entry: QuarantineEntry) -> None:
        task = asyncio.get_running_loop().create_task(self._settle(Verdict(entry)))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    def quarantine_orders(self) -> list[dict[str, Any]]:
        """See WorkerEvents."""
        return self._quarantine.orders()

    def loader_failed(self, error: MsdError) -> None:
        """See WorkerEvents."""
        self._owner.failed(error)

    def copied(self, task: int) -> None:
        """See WorkerEvents."""
        if self._owner.generation is not None:
            self._owner.generation.copied(task)
            self._after_answer()

    def slot_filled(
        self, ring: int, slot: int, sequence: int, generation: int, payload_bytes: int
    ) -> None:
        """See WorkerEvents."""
        if self._owner.generation is not None:
            self._owner.generation.slot_filled(ring, slot, sequence, generation, payload_bytes)

    def build_failed(self, error: MsdError) -> None:
        """See WorkerEvents."""
        self._owner.failed(error)

    # -- deaths ----------------------------------------------------------------------------------

    def watch(self, now_ns: int) -> None:
        """Look at every worker: who is too long at a record, late, or too large."""
        if self._set is None or self._standby is None:
            return
        running = self._owner.generation
        steps_s = 0.0 if self._scaler is None else self._scaler.steps_s
        self.profiles.tick(now_ns, steps_s, running is not None and running.is_hungry)
        loaders = [*self._set.loaders, *self._set.shadows.values()]
        self._loader_deaths.watch(loaders, now_ns)
        generation = self._owner.generation
        if generation is not None and not self._owner.is_over:
            for late in self._supervision.late(self._set, generation, now_ns):
                self._send_away(late, generation)
            for large in self._supervision.large(self._set):
                self._begin_recycling(large, generation)
        self._standby.fill()

    def _send_away(self, late: Late, generation: Generation) -> None:
        """Replace a worker that does nothing although ranks wait for it."""
        worker, pid = late.worker, late.worker.child.pid
        assert self._set is not None
        log.error(
            "%s %d (pid %d) of job %r did nothing for %.1f s, %s: it is killed and replaced",
            worker.role, worker.number, pid, self._job.name, late.still_s, late.what,
        )  # fmt: skip
        self.late_total += 1
        self._count_loss(
            f"{worker.role} {worker.number} (pid {pid}) did nothing for {late.still_s:.1f} s"
        )
        if worker.role != "loader":
            self._set.kill(worker)  # what it had is free once it ended
            return
        verdict = self._loader_deaths.acquit(worker)
        self._set.fence("loader", worker.number)
        generation.loader_worker_lost(worker.number, fenced_pid=pid)
        self._recycling.pop(worker.number, None)
        self._replace_soon("loader", worker.number, verdict)

    def _count_loss(self, what: str) -> None:
        self.lost_total += 1
        self.last_loss = what

    def _begin_recycling(self, large: Large, generation: Generation) -> None:
        """Have a worker that grew too large finish what it has; another takes its place then."""
        assert self._set is not None
        number = large.number
        is_awaited = self._config.spares > 0 and not self._set.count_able("spare")
        if number in self._recycling or is_awaited:
            return  # its successor is not there yet
        log.warning(
            "loader %d of job %r has %d MiB of its own, over workers.memory_bytes = %d MiB: another "
            "takes its place",
            number, self._job.name, large.private_bytes >> 20, self._supervision.watermark.bytes_max >> 20,
        )  # fmt: skip
        self._recycling[number] = generation
        generation.drain_worker(number)
        self._recycle_idle()

    def _recycle_idle(self) -> None:
        """Replace those that were to finish and did."""
        generation = self._owner.generation
        for number, drained in list(self._recycling.items()):
            if drained is not generation or self._set is None:
                del self._recycling[number]
            elif not drained.is_worker_busy(number):
                del self._recycling[number]
                worker = self._set.retire(number)
                self._loader_deaths.acquit(worker)
                drained.loader_worker_lost(number)
                wait_s = self._supervision.watermark.recycled(number, time.monotonic())
                log.info("loader %d is left alone for %g s at least", number, wait_s)
                self._replace_soon("loader", number, Verdict(), is_death=False)

    def child_ended(self, child: Child) -> None:
        """A fork server reaped a child that may be ours."""
        if self._set is not None:
            self._set.child_ended(child)

    def worker_lost(self, role: str, number: int, pid: int, status: int) -> None:
        """Replace a worker that ended: what it had published stays, the stream goes on."""
        owner, generation = self._owner, self._owner.generation
        what = f"{role} {number} (pid {pid}) of job {self._job.name!r} ended with status {status}"
        self._supervision.forget(pid)
        if role in ("spare", "shadow"):
            self._standby_lost(role, number, what)
            return
        self._count_loss(what)
        if generation is None or owner.is_over:
            owner.failed(WorkerLostError(f"{what} while the job was {owner.state}", pid=pid))
            return
        sources: list[str] = []
        verdict = Verdict()
        if role == "loader":
            assert self._set is not None
            verdict = self._loader_deaths.judge(self._set.loaders[number])
            self._recycling.pop(number, None)
            sources = generation.loader_worker_lost(number)
        else:
            generation.constructor_lost(number)
        # A record that is out of the way kills nobody again: those are no loop.
        if not verdict.is_settled and self._deaths.is_too_many(time.monotonic()):
            reading = f" It read the sources {', '.join(sources)}." if sources else ""
            reading += f" It was at {verdict.place}." if verdict.place else ""
            owner.failed(
                WorkerLostError(
                    f"{what} (negative: the signal), the {self._deaths.count}th death in "
                    f"{DEATHS_WINDOW_S:g} s.{reading} Connect again with the last state; if it was "
                    "killed for memory, see msdctl doctor",
                    pid=pid,
                    status=status,
                )
            )
            return
        reading = f", sources {', '.join(sources)}" if sources else ""
        log.warning("%s%s: replacing it", what, reading)
        self._replace_soon(role, number, verdict)

    def _standby_lost(self, role: str, number: int, what: str) -> None:
        """A process that waited for another's death died first: nobody misses it yet."""
        assert self._set is not None and self._standby is not None
        log.warning("%s: another will stand by", what)
        generation = self._owner.generation
        if role == "shadow":
            verdict = self._loader_deaths.judge(self._set.shadows[number])
            if generation is not None:
                generation.shadow_lost(number)
            # It is ahead: what killed it would kill the active loader next.
            self._do_soon(self._settle(verdict))
        if not self._owner.is_over:
            self._standby.lost(role)

    def _replace_soon(
        self, role: str, number: int, verdict: Verdict, *, is_death: bool = True
    ) -> None:
        promoted = self._promote(number) if role == "loader" else None
        now_s = time.monotonic()
        delay_s = self._back_off.delay_s((role, number), now_s) if is_death else 0.0
        self._do_soon(self._replace(role, number, verdict, promoted, delay_s))

    def _do_soon(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    def _promote(self, number: int) -> Worker | None:
        """Publish what stood ready behind a lost worker; return the process that takes its place."""
        generation = self._owner.generation
        assert self._set is not None and generation is not None
        promoted = self._set.take_standby(number, is_shadow=True)
        if promoted is None and number in self._set.shadows:
            # It is not able to: stopped, or not set up yet. What it has ready is good all the same.
            shadow = self._set.fence("shadow", number)
            generation.shadow_lost(number, fenced_pid=shadow.child.pid)
        ready = generation.shadow_takes_over(number)
        for chunk in ready:
            if chunk.bad is not None:
                self._owner.bad_records(chunk.bad)
        if promoted is not None:
            records = sum(len(chunk.notice.lengths) for chunk in ready)
            log.warning(
                "loader %d of job %r: its shadow (pid %d) takes over, %d chunks of %d records were ready",
                number, self._job.name, promoted.child.pid, len(ready), records,
            )  # fmt: skip
        return promoted

    async def _settle(self, verdict: Verdict) -> bool:
        """Have what a death told be durable and known to all workers; False where it can't be."""
        assert self._set is not None
        if verdict.narrow is not None:
            mark = verdict.narrow
            self._quarantine.suspect(mark.source, mark.shard, mark.first_place, mark.last_place)
            self._set.quarantine(self._quarantine.order(mark.source))  # spares are set up already
            return True
        if verdict.entry is None:
            return True
        entry: QuarantineEntry = verdict.entry
        try:
            await self._quarantine.add(entry)
        except OSError as error:
            self._owner.failed(
                WorkerLostError(
                    f"a record of source {entry.source} {entry.text}, and that can't be noted in the "
                    f"job's folder: {error}; make room there and connect again"
                )
            )
            return False
        except MsdError as error:
            self._owner.failed(error)
            return False
        self._set.quarantine(self._quarantine.order(self._job.source_index(entry.source)))
        return True

    async def _replace(
        self, role: str, number: int, verdict: Verdict, promoted: Worker | None, delay_s: float
    ) -> None:
        assert self._set is not None and self._standby is not None
        if not await self._settle(verdict):
            return
        if delay_s:
            await asyncio.sleep(delay_s)
        try:
            if promoted is None:
                took = await self._set.replace(role, number)
            elif self._set.loaders[number] is promoted and promoted.is_able:
                took = "shadow"
            else:
                return  # it died too: its own successor is on its way
        except ForkServerLostError as error:
            self._owner.failed(error)
            return
        except WorkerLostError:
            return  # its end was heard of, and the next one is on its way, or they are too many
        except (MsdError, TimeoutError, OSError) as error:
            self._owner.failed(
                WorkerLostError(
                    f"{role} {number} of job {self._job.name!r} has no successor: {error}"
                )
            )
            return
        if role == "loader":
            self.took_over[took] += 1
        log.info("%s %d of job %r has a successor (%s)", role, number, self._job.name, took)
        self._serve(role, number)
        self._standby.used()

    def _serve(self, role: str, number: int) -> None:
        """Give a worker that took another's place what it needs."""
        generation = self._owner.generation
        if generation is None:
            return
        assert self._set is not None
        if role == "loader":
            generation.loader_worker_back(number)
            return
        for ring in generation.rings.values():
            self.give_ring(ring, generation.number, only=number)
        self._set.constructors[number].is_serving = True
        generation.constructor_back()


def note_fallback(job_name: str, segment: Segment) -> None:
    """Log why a segment is not where it was to be."""
    if segment.fallback_reason:
        log.warning("job %s: %s", job_name, segment.fallback_reason)


def reader_modules(job: ResolvedJob) -> list[str]:
    """Return the modules that read a job's sources, so that its workers share their pages.

    Of our own alone: an installed reader may start threads, which no fork server may have.
    """
    return sorted({reader_module(source) for source in job.sources} - {""})
