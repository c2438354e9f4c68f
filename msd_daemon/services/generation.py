"""One generation of a job: a continuous run from a given state (DESIGN.md section 7).

Joins the pure cores (pool, read-ahead, steps, rings) to the wires: planner messages, worker answers
and reader events come in, orders and announcements go out. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from federation.cluster_messages import OwnersChanged
from federation.messages import (
    CalibrationState,
    Envelope,
    JobEnded,
    JobFailed,
    JobOpened,
    JournalStalled,
    MixtureChanged,
    PlansMade,
    SkipAccepted,
    SourcesStarved,
    StepsSkipped,
    StreamRewound,
    decode_parts,
)
from federation.model.job import ResolvedJob
from federation.model.owners import Owners
from federation.model.plan import StepPlan
from federation.model.skipped import SkippedSteps
from msd_client.contract.errors import BudgetError, MsdError, decode_error
from msd_client.contract.local_messages import RingEvent
from msd_client.contract.state import StreamState
from msd_daemon.core.budget import PoolSums
from msd_daemon.core.chunk_media import ChunkMedia
from msd_daemon.core.rank_waits import RankWaits
from msd_daemon.core.readahead import GrantOrder, OpenOrder, Order, ReadAhead
from msd_daemon.core.shared_steps import SharedSteps
from msd_daemon.core.slots import Publication
from msd_daemon.core.starved_time import StarvedTime
from msd_daemon.core.step_trace import StepTrace
from msd_daemon.core.steps import RingOfGroup, StepsState
from msd_daemon.core.warm_pool import WarmPool
from msd_daemon.services.announcer import Announcer, PendingChanges, Readers
from msd_daemon.services.exchange_port import ExchangePort
from msd_daemon.services.parcels import Parcels
from msd_daemon.services.partition_moves import Deals
from msd_daemon.services.planner_feed import PlannerFeed, PlannerSender
from msd_daemon.services.rings import Ring
from msd_daemon.services.source_loaders import Reading, SourceLoaders
from msd_daemon.services.totals import Reads, SourceTotals, Totals
from msd_daemon.services.worker_events import ShadowChunk
from msd_daemon.services.worker_set import WorkerSet
from msd_daemon.workers.messages import ChunkNotice, Grant

log = logging.getLogger(__name__)

FAULTS_LOGGED_MAX = 200
"""Different faults of a generation that are logged; all are counted."""
BUILDS_PER_CONSTRUCTOR = 4
"""A constructor never waits for the daemon, and never sits on more than it can fill soon."""


class ClusterPart(NamedTuple):
    """This node's part of a generation that has others, too."""

    job: str
    """Identity of the job in the cluster."""
    nodes: tuple[str, ...]
    """Names of the generation's nodes."""
    node: int
    """This one's place among them."""
    owners: Owners
    exchange: ExchangePort


class GenerationOwner(Readers, PlannerSender, Protocol):
    """What a generation asks of its session."""

    def failed(self, error: MsdError) -> None:
        """The generation can't go on."""


@dataclass
class StartTimes:
    """Of a generation, on the monotonic clock."""

    joined_ns: int
    """When the last rank joined; of one that ranks begin that stayed, when they asked for it."""
    asked_ns: int
    """When the last rank that it needed had asked for it."""
    first_batch_ns: int = 0
    """When every rank had its first batch; 0 before."""

    def until_first_batch_ms(self) -> tuple[float | None, float | None]:
        """Return the time from the last join, and from the last asking, to the first batch."""
        if not self.first_batch_ns:
            return None, None
        joined_ns, asked_ns = (
            self.first_batch_ns - self.joined_ns,
            self.first_batch_ns - self.asked_ns,
        )
        return joined_ns / 1e6, asked_ns / 1e6


class Generation:
    """A running generation. Made once all ranks have started; closed by its session."""

    def __init__(
        self,
        owner: GenerationOwner,
        job: ResolvedJob,
        number: int,
        *,
        workers: WorkerSet,
        warm: WarmPool,
        sums: PoolSums,
        rings: dict[int, Ring],
        opened: JobOpened,
        state_bytes: bytes,
        times: StartTimes,
        cluster: ClusterPart | None = None,
        deals: Deals | None = None,
    ) -> None:
        self.number = number
        self.times = times
        self._unserved = {n for n, ring in rings.items() if ring.state.readers}
        self.reads = Reads()
        self.waits = RankWaits()
        self.starved_time = StarvedTime()
        self.published_ns: dict[int, int] = {}
        """When a ring's last slot was published."""
        self.begun_ns = time.monotonic_ns()
        self.planned_steps = sums.planned_steps
        self.last_plan: StepPlan | None = None
        self.trace: StepTrace | None = None
        """What msdctl trace wants to know; None: nobody asks."""
        self.state_bytes = state_bytes
        """Where it began."""
        self.opened = opened
        self.rings = rings
        self.pool = pool = warm.pool
        self.warm = warm
        self.totals = Totals(
            sources=[SourceTotals() for _ in job.sources],
            dropped=opened.dropped,
            cursors=[(key, index) for key, index in opened.cursors],
            endings=tuple(source.ending for source in job.sources),
        )
        self.end_reason: str | None = None
        self._owner = owner
        self._job = job
        self._workers = workers
        self.readahead = ReadAhead(pool, sums.chunk_bytes)
        loaders_of: dict[int, list[int]] = {}
        self.shared = None
        """What other nodes give and get; None on a single host."""
        if cluster is not None:
            self.shared = SharedSteps(pool, cluster.owners, cluster.node)
        self.steps = StepsState(
            pool,
            first_step=opened.step,
            microbatch_rows=job.batch.microbatch_rows,
            rings={
                n: RingOfGroup(r.plan.place.group, r.state, r.plan.place.stage in ("all", "first"))
                for n, r in rings.items()
            },
            loaders_of=loaders_of,
            shared=self.shared,
        )
        self._parcels: Parcels | None = None
        if cluster is not None and self.shared is not None:
            self._parcels = Parcels(
                cluster.exchange,
                self,
                (cluster.job, number),
                cluster.nodes,
                self.shared,
                pool=pool,
                steps=self.steps,
                readahead=self.readahead,
            )
        self._loaders = SourceLoaders(
            job,
            number,
            workers=workers,
            warm=warm,
            readahead=self.readahead,
            steps=self.steps,
            opened=opened,
            sums=sums,
            loaders_of=loaders_of,
            owners=self.shared,
            deals=deals,
        )
        self._feed = PlannerFeed(
            owner,
            job,
            first_step=opened.step,
            # The planner plans half a horizon at a time.
            released_every_steps=max(1, sums.planned_steps // 2),
            kept_steps=0 if cluster is None else 2 * sums.planned_steps,
        )
        self._starved: tuple[int, ...] = ()
        self._pending_end: JobEnded | JobFailed | None = None
        self.mixture_known_from = 0
        """First step behind which states know of the last accepted event."""
        self._begun: set[int] = set()
        """Ranks that began to read. A ring may expect others: their slots wait for them."""
        self._is_over = False
        self._is_closed = False
        self.reports_total = 0
        self.calibration: dict[str, Any] | None = None
        """What the planner said last of its fits; None where the job asks for none."""
        self._faults_logged: set[str] = set()
        weights = [source.loss_weight for source in job.sources] if job.has_loss_weights else []
        pending = PendingChanges(StreamState.decode(state_bytes))
        pending.begin(opened)
        self._announcer = Announcer(owner, number, pending, weights, is_alone=cluster is None)
        self.journal_stalled = ""
        """Why plans wait for the journal; empty where they do not."""

    # -- start -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open the sources in use behind what is here, fetch what the state carried, grant."""
        for source in self.opened.active:
            self._loaders.open_source(source)
        self._loaders.retarget()
        self._loaders.carried.wish(self.opened.carried)
        self.warm.release_unclaimed()
        for meta in self.warm.metas():
            self._feed.chunk_came(meta)
        self._settle()

    # -- workers' answers ------------------------------------------------------------------------

    def chunk_published(self, notice: ChunkNotice) -> None:
        """Register a chunk and tell the planner of it.

        One that comes after the end was read already: the next generation may find it.
        """
        if notice.generation != self.number:
            return
        self.reads.count(notice)
        if self.trace is not None:
            self.trace.chunk_came(
                notice.loader,
                notice.task,
                len(notice.lengths),
                notice.used_bytes,
                time.monotonic_ns(),
            )
        if notice.is_fetched:
            self._loaders.carried.fetched(notice)
            self._settle()
            return
        if not self.readahead.grant_ended(notice.loader, notice.task):
            self.pool.returned(notice.offset_bytes)
            self._settle()
            return
        self._publish(notice)
        self._settle()

    def _publish(self, notice: ChunkNotice) -> None:
        if self.readahead.loaders[notice.loader].is_beyond(notice.block_key):
            self.pool.returned(notice.offset_bytes)  # begun before it knew where others go on
            self.readahead.has_no_more(notice.loader)
            return
        self.readahead.fed(notice.source_index)
        end = notice.first_index + len(notice.lengths)
        self.readahead.took(
            notice.loader, notice.block_key, end,
            is_block_end=notice.is_block_end, is_lane_end=notice.is_lane_end,
            window_blocks=notice.window_blocks,
        )  # fmt: skip
        self.pool.published(
            notice.offset_bytes,
            notice.used_bytes,
            loader=notice.loader,
            source_index=notice.source_index,
            block_key=notice.block_key,
            first_index=notice.first_index,
            records=len(notice.lengths),
            media=ChunkMedia.of(notice.marks, self._job.media),
            meta=(meta := notice.meta),
        )
        self._feed.chunk_came(meta)
        if (
            notice.fault
            and len(self._faults_logged) < FAULTS_LOGGED_MAX
            and (notice.fault not in self._faults_logged)
        ):
            self._faults_logged.add(notice.fault)
            log.warning("source %s: %s", self._job.sources[notice.source_index].name, notice.fault)

    def shadow_ready(self, chunk: ShadowChunk) -> None:
        """A shadow has a chunk ready."""
        if chunk.notice.generation == self.number:
            self._loaders.shadow_ready(chunk)
            self._settle()

    def shadow_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        """A shadow's piece came back unused."""
        if grant.generation == self.number:
            self._loaders.shadow_returned(grant, needed_bytes=needed_bytes, is_dry=is_dry)
            self._settle()

    def grant_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        """A piece came back unused."""
        if grant.generation != self.number or self._is_closed:
            return
        self._loaders.grant_returned(grant, needed_bytes=needed_bytes, is_dry=is_dry)
        if needed_bytes > self.pool.allocator.capacity_bytes // 2 and not self._is_over:
            self._is_over = True
            self._owner.failed(self._too_large(grant.loader, needed_bytes))
            return
        self._settle()

    def _too_large(self, loader: int, needed_bytes: int) -> BudgetError:
        state = self.readahead.loaders.get(loader)
        name = "?" if state is None else self._job.sources[state.source_index].name
        capacity = self.pool.allocator.capacity_bytes
        return BudgetError(
            f"source {name!r} holds a record whose tokens take {needed_bytes} bytes, more than half "
            f"of the pool of {capacity}: set memory.pool_bytes to {3 * needed_bytes} or more, or the "
            "source's record_bytes_max lower (such records are then dropped and counted)",
            source=name,
            needed_bytes=needed_bytes,
            available_bytes=capacity // 2,
        )

    def copied(self, task: int) -> None:
        """Carried fragments lie in chunks of their own now."""
        if self._is_closed:
            return
        self._loaders.carried.copied(task)
        self._settle()

    # -- the planner's messages ------------------------------------------------------------------

    def planner_message(self, envelope: Envelope) -> None:
        """Take a planner's message of this generation."""
        match envelope.message:
            case PlansMade():
                self._plans_made(envelope.message, envelope.frames)
            case SourcesStarved():
                self._starved = tuple(envelope.message.sources)
                self.starved_time.draw_lacks(self._starved, time.monotonic_ns())
                for source in envelope.message.sources:
                    self._loaders.open_source(source)
                self.readahead.starved(envelope.message.sources)
                self._settle()
            case MixtureChanged():
                self._mixture_changed(envelope.message)
            case SkipAccepted():
                self._skip_accepted(envelope.message)
            case StepsSkipped():
                skipped = SkippedSteps.decode(envelope.message.plan_step, envelope.frames)
                self.steps.steps_skipped(skipped)
                self._settle()
            case JournalStalled():
                self.journal_stalled = envelope.message.reason
            case StreamRewound():
                pass  # its session tells the ranks
            case CalibrationState():
                self.calibration = envelope.message.status
            case JobEnded() | JobFailed():
                self._pending_end = envelope.message
                self._announce_end()
            case _:
                log.error("planner sent %s", type(envelope.message).__name__)

    def _plans_made(self, message: PlansMade, frames: tuple[bytes, ...]) -> None:
        states = dict(message.states)
        for plan, exports in decode_parts(message, frames):
            if plan.step < self.next_plan_step:
                self.steps.plan_again(plan, exports)  # another planner, or other owners
                continue
            first_sequence = self.steps.plan_arrived(plan, exports)
            self._announcer.plan_arrived(plan, states.get(plan.step, b""), first_sequence)
            self.totals.count(plan)
            self.last_plan = plan
            if self.trace is not None:
                self.trace.planned(plan.step, 1, time.monotonic_ns())
            self._feed.plan_came(plan)
        self._starved = ()
        self.starved_time.draw_lacks((), time.monotonic_ns())
        self._settle()

    def waiting_events(self, plan_step: int) -> tuple[list[tuple[int, list[int]]], list[list[int]]]:
        """Return mixture changes and skips that take effect at or behind a plan step."""
        return self._announcer.waiting(plan_step)

    def _mixture_changed(self, message: MixtureChanged) -> None:
        if message.error is not None:
            return
        self.mixture_known_from = self._announcer.mixture_accepted(
            message.plan_step, message.integer_shares, message.next_step
        )
        self._take_shares(message.shares)
        self._settle()

    def _skip_accepted(self, message: SkipAccepted) -> None:
        if message.error is None:
            self.mixture_known_from = self._announcer.skip_accepted(
                message.first, message.end, message.next_step
            )

    def _take_shares(self, shares: list[float]) -> None:
        """Read ahead by other shares of the sources."""
        self._loaders.shares = list(shares)
        for source, share in enumerate(shares):
            if share > 0:
                self._loaders.open_source(source)
        self._loaders.retarget()

    # -- slots -----------------------------------------------------------------------------------

    def slot_filled(
        self, ring: int, slot: int, sequence: int, generation: int, payload_bytes: int
    ) -> None:
        """Announce and publish what became ready."""
        if generation != self.number or self._is_closed:
            return
        now_ns = time.monotonic_ns()
        ready = self.steps.filled(ring, slot, sequence, payload_bytes, now_ns)
        self.readahead.room_came_free()
        state = self.rings[ring].state
        readers = state.readers
        if ready:
            self.published_ns[ring] = now_ns
            self.waits.served(readers)
        if self.trace is not None:
            self._trace_fill(self.trace, ring, sequence, payload_bytes, ready, now_ns)
        self._announcer.publish(readers & self._begun, ready)
        if self._unserved and ready:
            self._served(ring, now_ns)
        if not readers and ready:
            # Nobody of this ring reads: its slots go round for the other rings' sake.
            self._released(state.free_unread())
        self._settle()

    def _trace_fill(
        self,
        trace: StepTrace,
        ring: int,
        sequence: int,
        payload_bytes: int,
        ready: Sequence[Publication],
        now_ns: int,
    ) -> None:
        trace.filled(ring, sequence, payload_bytes, now_ns)
        for publication in ready:
            trace.published(ring, publication.sequence, now_ns)
        state = self.rings[ring].state.statistics()
        trace.counted(f"ready slots of ring {ring}", state.published_count, now_ns)
        trace.counted("free chunk memory", self.pool.statistics().free_bytes, now_ns)

    def released(self, rank: int, ring: int, event: RingEvent) -> None:
        """A rank let go of a slot."""
        if event.generation != self.number or ring not in self.rings:
            return
        state = self.rings[ring].state
        now_ns = time.monotonic_ns()
        self.waits.released(rank, event.aux, now_ns)
        state.given(rank, max(event.payload_bytes, event.sequence + 1))
        if self.trace is not None:
            self.trace.released(rank, ring, event.sequence, event.aux, now_ns)
        if state.released(event.slot, event.sequence, rank):
            self._released([event.sequence])
            self._settle()
        elif state.is_retaining:
            self._settle()

    def rank_waits(self, rank: int, ring: int, since_ns: int, taken: int) -> None:
        """A rank says that it has waited since then, and how many batches it was given before."""
        self.waits.waits(rank, since_ns)
        if ring in self.rings:
            self.rings[ring].state.given(rank, taken)

    def reported(self, rank: int, step: int, nanoseconds: int) -> None:
        """A rank says how long it took for a step: the planner is told, where the job calibrates."""
        if self._job.calibration is None or self._is_over:
            return
        self.reports_total += 1
        self._feed.step_seconds(step, rank, nanoseconds)

    def _served(self, ring: int, now_ns: int) -> None:
        """The first batch of a ring is there; with that of the last ring all ranks have one."""
        self._unserved.discard(ring)
        if not self._unserved:
            self.times.first_batch_ns = now_ns
            log.info(
                "job %s: generation %d: first batch %.0f ms after the last rank joined, %.0f ms after "
                "all asked for it; %s",
                self._job.name, self.number, *self.times.until_first_batch_ms(), self._warm_text(),
            )  # fmt: skip

    def _warm_text(self) -> str:
        warm = self.warm.statistics
        if not warm.chunks and not warm.carried:
            return "all read anew"
        return (
            f"{warm.records} records ({warm.used_bytes} bytes) and {warm.carried} carried lay here"
        )

    def awaits(self, rank: int, ring: int) -> bool:
        """True where a rank has not begun to read and may: its ring expects it, or retains slots.

        Of a cluster's job a node has the rings of the ranks that were placed there; others come to
        take part in the next generation.
        """
        if ring not in self.rings:
            return False
        state = self.rings[ring].state
        return rank not in self._begun and (state.is_retaining or rank in state.readers)

    def reader_begins(self, rank: int, ring: int) -> list[Publication]:
        """A rank begins to read; return what it has to be told of, by `catch_up`.

        Raises:
            InvalidTransitionError: A middle stage came so late that the beginning is gone.
        """
        state = self.rings[ring].state
        owed = state.owed_by(rank) if rank in state.readers else state.reader_joins(rank)
        self._begun.add(rank)
        return owed

    def catch_up(self, rank: int, owed: list[Publication]) -> None:
        """Tell a rank, which knows its ring by now, of what was published before it began."""
        self._announcer.publish([rank], owed)
        if self.end_reason is not None and isinstance(self._pending_end, JobEnded):
            self._announcer.ended([rank], self._pending_end)

    def reader_leaves(self, rank: int, ring: int, held: list[tuple[int, int]]) -> None:
        """A rank reads no more, but views of its keep some slots."""
        self._begun.discard(rank)
        if ring not in self.rings:
            return
        freed = self.rings[ring].state.reader_leaves(rank, held)
        if freed:
            self._released(freed)
        self._settle()

    def reader_lost(self, rank: int, ring: int) -> None:
        """A rank is gone: its claims end, the others go on."""
        self._begun.discard(rank)
        if ring not in self.rings:
            return
        freed = self.rings[ring].state.reader_lost(rank)
        if freed:
            self._released(freed)
        self._settle()

    # -- deaths ----------------------------------------------------------------------------------

    def constructor_lost(self, constructor: int) -> None:
        """A constructor died: its slots are free again, its microbatches are built again."""
        for ring in self.rings.values():
            ring.state.constructor_lost(constructor)

    def constructor_back(self) -> None:
        """A constructor was replaced and has its rings."""
        self._settle()

    def loader_worker_lost(self, worker: int, fenced_pid: int | None = None) -> list[str]:
        """A loader worker is gone: take back what it had. Return the sources that it read.

        Args:
            worker: Its number.
            fenced_pid: Of a process that was sent away and may not have ended.
        """
        sources = self._loaders.worker_lost(worker, fenced_pid)
        self._settle()
        return sources

    def fenced_ended(self, pid: int) -> None:
        """A process that was sent away is gone: nobody writes in its name any more."""
        self._loaders.fenced_ended(pid)
        self._settle()

    def awaited_workers(self) -> set[int]:
        """Return the loader workers that a rank waits for, or will as soon as its slots are read."""
        return self._loaders.awaited()

    def is_worker_busy(self, worker: int) -> bool:
        """True where a loader worker has yet to answer something."""
        return worker in self._loaders.working()

    def is_shadow_busy(self, worker: int) -> bool:
        """True where the process behind a loader worker has yet to answer something."""
        return worker in self.readahead.shadows.granted_workers

    def deal_source(self, source: int, workers: Sequence[int]) -> bool:
        """Have a source read by these workers, a partition each, from a watermark on.

        Return False where nothing came of it so far, so that nobody knows a watermark.
        """
        is_done = self._loaders.deal(source, workers)
        self._settle()
        return is_done

    # -- scaling ---------------------------------------------------------------------------------

    @property
    def is_hungry(self) -> bool:
        """True where a rank waits for its next batch, and records have yet to be read for that.

        Slots that it was given are no batch that it could go on with: a training loop holds its last
        one while it asks for the next.
        """
        if not self.times.first_batch_ns:
            return False
        if not self._starved and self.steps.missing() is None:
            return False
        return any(
            state.was_given_all(rank) and (not state.held_by(rank) or self.waits.is_waiting(rank))
            for state in (ring.state for ring in self.rings.values())
            for rank in state.readers
        )

    @property
    def starved_sources(self) -> frozenset[int]:
        """Sources whose next records the planner waits for."""
        return frozenset(self._starved)

    @property
    def awaited_sources(self) -> frozenset[int]:
        """Sources whose next records the planner, or a planned step, waits for."""
        missing = self.steps.missing()
        return frozenset(self._starved) | ({missing[0]} if missing else frozenset())

    @property
    def moves_total(self) -> int:
        """How often partitions of a source changed hands."""
        return self._loaders.moves.moves_total

    def reading(self, source: int) -> Reading:
        """Return who reads a source here."""
        return self._loaders.reading(source)

    def read_by(self, shares: list[float]) -> None:
        """Have sources opened, and read ahead, by the largest share of each now or soon."""
        self._take_shares(shares)
        self._settle()

    def fetch_ahead(self, source: int, blocks: int) -> None:
        """Have a source's loaders fetch so many blocks ahead of need."""
        self._loaders.fetch_ahead(source, blocks)

    def park_sources(self, sources: Iterable[int]) -> None:
        """Have sources that nobody needs for now keep nothing open."""
        self._loaders.park(sources)

    def may_leave(self, worker: int) -> bool:
        """Return True where a loader worker has nothing to read, nor anything to answer."""
        readahead = self.readahead
        return (
            not self.is_worker_busy(worker)
            and not readahead.is_away(worker)
            and all(state.worker != worker for state in readahead.loaders.values())
        )

    def drain_worker(self, worker: int) -> None:
        """Order nothing more of a loader worker."""
        self.readahead.drain(worker)

    def shadow_takes_over(self, worker: int) -> list[ShadowChunk]:
        """Publish what stood ready behind a lost worker; return the chunks."""
        ready = self._loaders.promote(worker)
        for chunk in ready:
            self._publish(chunk.notice)
        self._settle()
        return ready

    def shadow_came(self, worker: int) -> None:
        """A process stands behind a loader worker."""
        self._loaders.shadow_came(worker)
        self._settle()

    def shadow_lost(self, worker: int, fenced_pid: int | None = None) -> None:
        """The process behind a loader worker is gone, or was sent away and has not ended yet."""
        self._loaders.shadow_lost(worker, fenced_pid)
        self._settle()

    def loader_worker_back(self, worker: int) -> None:
        """A loader worker was replaced: its sources go on behind what was published."""
        self._loaders.worker_back(worker)
        self._settle()

    def planner_away(self) -> None:
        """Another planner is to replay the journal."""
        self._feed.planner_away()

    def planner_back(self, opened: JobOpened) -> None:
        """A new planner replayed the journal: tell it of all that is read and not drawn."""
        if self._is_over:
            return
        self._feed.planner_back(self.steps.released_step, opened.cursors)
        if self._announcer.planner_replayed(opened):
            self._take_shares(opened.shares)
        self._settle()

    @property
    def next_plan_step(self) -> int:
        """Step of the next plan that is to arrive."""
        return self.opened.step + self.totals.steps

    def _released(self, sequences: list[int]) -> None:
        step = self.steps.slot_freed(sequences)
        if step is not None:
            if self.trace is not None:
                self.trace.steps_released(self.steps.released_step, time.monotonic_ns())
            self._feed.released(step)
            self._announce_end()

    def leave_after(self) -> int:
        """Return the step behind which all ranks can leave together: none was told of a later one."""
        last = self._announcer.last_step
        return self.opened.step - 1 if last is None else last

    def _announce_end(self) -> None:
        """Tell ranks of the end, or of the fault that the draw reached, behind the last step."""
        if self._pending_end is None or self.end_reason is not None or not self._is_all_published():
            return
        if isinstance(self._pending_end, JobFailed):
            error = decode_error(**self._pending_end.error)
            self.end_reason = error.message
            self._owner.failed(error)
            return
        self.end_reason = self._pending_end.reason
        readers = {rank for ring in self.rings.values() for rank in ring.state.readers}
        self._announcer.ended(readers & self._begun, self._pending_end)

    def _is_all_published(self) -> bool:
        assert self._pending_end is not None
        if self._pending_end.next_step <= self.steps.first_step:
            return True  # it stopped at once; plans that are there are not waited for
        total = self.steps.sequences
        return all(r.state.statistics().published_total >= total for r in self.rings.values())

    # -- moving on -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Let everything move that can: waiting plans, builds, copies, grants."""
        if self._is_over:
            return
        if self.steps.settle_waiting():
            self.readahead.changed()
        missing = self.steps.missing()
        lacking = None if missing is None else missing[0]
        now_ns = time.monotonic_ns()
        self.starved_time.plan_lacks(lacking, now_ns)
        if self.trace is not None:
            self.trace.lacks(self.starved_time.now, now_ns)
        if missing is not None:
            self.readahead.starved([missing[0]])  # it was revoked after the planner knew of it
        if self._parcels is not None:
            self._parcels.settle()
            self._released([])
        self._order_builds()
        if self._pending_end is not None:
            self._announce_end()
        self._loaders.close_finished()
        self._loaders.carried.order_copies()
        try:
            self._loaders.carried.order_fetches()
        except BudgetError as error:
            self._is_over = True
            self._owner.failed(error)
            return
        if self._loaders.carried.is_fetching:
            return  # no step can do without what the state carried: it gets its room first
        self.carry_out(self.readahead.next_orders())
        self._loaders.order_shadows()

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Tell loader workers what to read."""
        for order in orders:
            worker = self.readahead.loaders[order.loader].worker
            if isinstance(order, GrantOrder):
                if self.trace is not None:
                    source = self.readahead.loaders[order.loader].source_index
                    self.trace.granted(
                        order.loader, order.task, worker, source, time.monotonic_ns()
                    )
                self._workers.grant(worker, order, self.number)
            elif isinstance(order, OpenOrder):
                self._loaders.open_parked(order.loader)
            else:
                self._workers.seek(worker, order)

    # -- other nodes -----------------------------------------------------------------------------

    @property
    def parcels(self) -> Parcels | None:
        """Samples that cross nodes; None on a single host."""
        return self._parcels

    def owners_changed(self, message: OwnersChanged) -> None:
        """Other nodes load from a step on."""
        shared, parcels = self.shared, self._parcels
        assert shared is not None and parcels is not None
        lanes = [source.lane_count for source in self._job.sources]
        owners = Owners.decode(message.owners, lanes, len(parcels.nodes))
        gone = shared.nodes_gone(message.gone)
        if gone:
            parcels.nodes_gone(gone)
        moved = shared.change(owners, message.from_step)
        self.steps.owners_changed(
            moved,
            message.from_step,
            self.next_plan_step,
            self._loaders.opened_by(moved.issue),
            lambda: self._loaders.close_sources(moved.lost, moved.issue),
        )
        if moved.gained:
            self._loaders.take_sources(moved, message.cursors, message.carried)
        self._settle()

    def parcels_moved(self) -> None:
        """See ParcelOwner."""
        self._settle()

    def parcel_failed(self, error: MsdError) -> None:
        """See ParcelOwner."""
        if not self._is_over:
            self._is_over = True
            self._owner.failed(error)

    def _order_builds(self) -> None:
        for constructor in self._workers.constructors:
            if not constructor.is_serving or constructor.child.status is not None:
                continue
            room = BUILDS_PER_CONSTRUCTOR - constructor.building
            if room <= 0:
                continue
            for order in self.steps.next_builds(constructor.number, room):
                if self.trace is not None:
                    self.trace.build_ordered(
                        order.ring,
                        order.sequence,
                        constructor.number,
                        order.step,
                        time.monotonic_ns(),
                    )
                self._workers.build(constructor.number, order, self.number)

    @property
    def begun_readers(self) -> frozenset[int]:
        """Ranks that began to read."""
        return frozenset(self._begun)

    def explain(self, number: int) -> str:
        """Return what a waiting rank of a ring is waiting for, one line for people."""
        if number not in self.rings:
            return f"stage join: generation {self.number} has no such rank here, the next one will"
        ring = self.rings[number].state
        statistics = ring.statistics()
        if self.journal_stalled:
            return f"stage planner: no plan leaves before it is durable: {self.journal_stalled}"
        if self._starved:
            names = ", ".join(self._job.sources[s].name for s in self._starved)
            return f"stage loader: the planner waits for records of source {names}"
        missing = self.steps.missing()
        if missing is not None:
            return f"stage loader: source {self._job.sources[missing[0]].name} is read again"
        debt = ring.oldest_debt()
        idle = [r for other in self.rings.values() for r in other.state.readers - self._begun]
        if idle and not statistics.published_count:
            return f"stage start: ranks {sorted(idle)[:16]} have joined and not begun to iterate"
        if debt is not None and not statistics.free_count:
            return f"stage ring: no slot is free, rank {debt.reader} holds {debt.held_count} and releases last"
        if statistics.filling_count:
            return "stage constructor: a slot is being filled"
        full = [r for r in self.rings.values() if not r.state.has_free()]
        if full and (debt := full[0].state.oldest_debt()) is not None:
            return (
                f"stage ring: rank {debt.reader} of DP group {full[0].plan.place.group} holds all {debt.held_count} slots, and "
                "the planner is as far ahead as it may be"
            )
        return "stage planner: no plan arrived yet"

    def close(self) -> None:
        """Stop ordering, drop segments; the session resets the workers. The pool stays."""
        self._is_over = self._is_closed = True
        if self.trace is not None:
            self.trace.end()
        self._feed.close()
        for ring in self.rings.values():
            ring.segment.close()
