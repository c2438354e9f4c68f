"""One generation of a job: a continuous run from a given state (DESIGN.md section 7).

Joins the pure cores (pool, read-ahead, steps, rings) to the wires: planner messages, worker answers
and reader events come in, orders and announcements go out. Nothing here waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from federation.messages import (
    Envelope,
    JobEnded,
    JobFailed,
    JobOpened,
    Message,
    MixtureChanged,
    PlansMade,
    SourcesStarved,
    StepReleased,
    encode_chunks,
)
from federation.model.chunk import ChunkMeta
from federation.model.job import ResolvedJob
from federation.model.plan import StepPlan
from msd_client.contract.codec import pack
from msd_client.contract.errors import BudgetError, MsdError, decode_error
from msd_client.contract.local_messages import (
    READY,
    RingEvent,
    encode_control,
    encode_packed,
    encode_ready_with_note,
)
from msd_client.contract.ring_layout import RingLayout
from msd_daemon.core.budget import step_bytes_max
from msd_daemon.core.pool import Piece, PoolState
from msd_daemon.core.readahead import GrantOrder, LoaderState, ReadAhead
from msd_daemon.core.slots import RingState
from msd_daemon.core.steps import CopyWish, StepsState
from msd_daemon.services.worker_set import WorkerSet
from msd_daemon.shm.segment import Segment
from msd_daemon.workers.messages import ChunkNotice, Grant

log = logging.getLogger(__name__)

BUILDS_PER_CONSTRUCTOR = 4
"""A constructor never waits for the daemon, and never sits on more than it can fill soon."""
COPIES_AT_ONCE = 64
COPYING_WORKER = 0
FETCH_HEAD_BYTES = 256
FIRST_FETCH_TASK = 1 << 31
"""Fetches and copies count from here, grants of read-ahead from 0: an answer names the task alone."""
NOTES_KEPT = 128
"""More steps than groups can be apart: a ring has at most 64 slots."""
HEAVY_SHARE = 0.4
"""A source above this share of the mixture is read by every loader worker."""


class GenerationOwner(Protocol):
    """What a generation asks of its session."""

    def send_planner(self, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        """Send to the planner."""

    def send_reader_packet(self, rank: int, packet: bytes) -> None:
        """Send an event to a rank."""

    def send_reader_message(self, rank: int, packets: list[bytes]) -> None:
        """Send an encoded control message to a rank."""

    def failed(self, error: MsdError) -> None:
        """The generation can't go on."""


@dataclass
class Ring:
    """A ring of one DP group with its segment."""

    group: int
    state: RingState
    layout: RingLayout
    segment: Segment


@dataclass
class SourceTotals:
    """Running totals of one source in this generation."""

    drawn_tokens: int = 0
    drawn_samples: int = 0
    placed_tokens: int = 0
    dropped_records: int = 0


@dataclass
class Totals:
    """Running totals for msdctl and for steps' stats."""

    steps: int = 0
    tokens: int = 0
    fill_sum: float = 0.0
    imbalance_sum: float = 0.0
    imbalance_last: float = 1.0
    fill_last: float = 1.0
    wanted: list[float] = field(default_factory=list)
    sources: list[SourceTotals] = field(default_factory=list)
    dropped: list[list[int]] = field(default_factory=list)
    """Since the stream's beginning: by DROPPED_COLUMNS, then source."""


@dataclass(frozen=True)
class _Fetch:
    """Records that a loader was told to read again."""

    source_index: int
    block_key: int
    indices: list[int]
    piece: Piece


class Generation:
    """A running generation. Made once all ranks have started; closed by its session."""

    def __init__(
        self,
        owner: GenerationOwner,
        job: ResolvedJob,
        number: int,
        *,
        workers: WorkerSet,
        pool: PoolState,
        chunk_bytes: int,
        rings: dict[int, Ring],
        microbatches: int,
        horizon_steps: int,
        opened: JobOpened,
    ) -> None:
        self.number = number
        self.opened = opened
        self.rings = rings
        self.pool = pool
        self.totals = Totals(sources=[SourceTotals() for _ in job.sources], dropped=opened.dropped)
        self.end_reason: str | None = None
        self._owner = owner
        self._job = job
        self._workers = workers
        self._microbatches = microbatches
        self._horizon_steps = horizon_steps
        self._loaders_of: dict[int, list[int]] = {}
        self.readahead = ReadAhead(pool, chunk_bytes)
        self.steps = StepsState(
            pool,
            first_step=opened.step,
            microbatches=microbatches,
            microbatch_rows=job.batch.microbatch_rows,
            rings={group: ring.state for group, ring in rings.items()},
            loaders_of=self._loaders_of,
        )
        self._loader_ids = itertools.count()
        self._tasks = itertools.count(FIRST_FETCH_TASK)
        self._metas: list[ChunkMeta] = []
        self._copies: dict[int, list[tuple[CopyWish, Piece]]] = {}
        self._copying: set[tuple[int, int, int, int]] = set()
        self._shares = list(opened.shares)
        self._starved: tuple[int, ...] = ()
        self._pending_end: JobEnded | JobFailed | None = None
        self._is_over = False
        self._flush_scheduled = False
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_wishes: deque[tuple[int, int, list[int], int]] = deque()
        """Source, block key, indices and bytes of carried records that are to be read again."""
        self._told_released = opened.step - 1
        self._states: dict[int, bytes] = {}
        self._notes: dict[int, bytes] = {}
        """Packed notes of steps that some group has yet to be told of."""

    # -- start -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open the sources in use at their cursors, fetch what the state carried, grant."""
        for source in self.opened.active:
            self._open_source(source)
        self._retarget()
        self._fetch_carried()
        self._settle()

    def _open_source(self, source: int) -> None:
        if source in self._loaders_of:
            return
        spec = self._job.sources[source]
        count = len(self._workers.loaders)
        is_heavy = count > 1 and self._shares[source] >= HEAVY_SHARE
        parts = count if is_heavy else 1
        if spec.order_class == "streaming":
            lanes = (
                min(spec.shuffle.interleave, len(spec.shards)) if spec.shuffle.is_shuffled else 1
            )
            parts = min(parts, lanes)
        block_key, index = self.opened.cursors[source]
        loaders = []
        for part in range(parts):
            number = next(self._loader_ids)
            worker = part if is_heavy else self._lightest_worker()
            state = LoaderState(number, worker, source, part, parts, block_key, index)
            self._open_loader(state)
            loaders.append(state)
        self._loaders_of[source] = [loader.loader for loader in loaders]
        self.readahead.add_source(source, 1, loaders)

    def _open_loader(self, state: LoaderState) -> None:
        self._workers.open_loader(
            state.worker,
            {
                "loader": state.loader,
                "source": state.source_index,
                "part": state.part,
                "parts": state.parts,
                "block_key": state.next_block_key,
                "index": state.next_index,
            },
        )

    def _lightest_worker(self) -> int:
        loads = [0.0] * len(self._workers.loaders)
        for loader in self.readahead.loaders.values():
            share = self._shares[loader.source_index] / len(self._loaders_of[loader.source_index])
            loads[loader.worker] += share + 1e-6
        return loads.index(min(loads))

    def _retarget(self) -> None:
        step_bytes = step_bytes_max(self._job)
        lead = self._horizon_steps + 2  # a planning call never finds a source short in steady state
        for source in self._loaders_of:
            target = int(self._shares[source] * step_bytes * lead) + 1
            self.readahead.add_source(source, target, [])

    def _fetch_carried(self) -> None:
        carried = self.opened.carried
        if not carried:
            return
        keys = [
            (source, block_key, index, offset) for source, block_key, index, offset, _ in carried
        ]
        self.steps.restore_carried(keys, [entry[4] for entry in carried])
        wanted: dict[tuple[int, int], dict[int, int]] = {}
        for source, block_key, index, offset, length in carried:
            tokens = wanted.setdefault((source, block_key), {})
            tokens[index] = max(tokens.get(index, 0), offset + length)
        for (source, block_key), tokens in wanted.items():
            self._open_source(source)
            # At least so much; a record's end is not known before it is read.
            size_bytes = FETCH_HEAD_BYTES + 4 * sum(tokens.values()) + 16 * len(tokens)
            self._fetch_wishes.append((source, block_key, sorted(tokens), size_bytes))

    def _order_fetches(self) -> None:
        """Have carried records read again, as many at once as the pool has room for."""
        while self._fetch_wishes:
            source, block_key, indices, size_bytes = self._fetch_wishes[0]
            piece = self.pool.lend(size_bytes)
            if piece is None:
                if not self._fetches and not self._is_over:
                    self._is_over = True
                    self._owner.failed(
                        BudgetError(
                            f"pool has no {size_bytes} bytes for carried samples of source "
                            f"{self._job.sources[source].name!r}: raise memory.pool_bytes",
                            needed_bytes=size_bytes,
                            available_bytes=self.pool.allocator.largest_free_bytes(),
                        )
                    )
                return
            self._fetch_wishes.popleft()
            self._fetch(source, block_key, indices, piece)

    def _fetch(self, source: int, block_key: int, indices: list[int], piece: Piece) -> None:
        task = next(self._tasks)
        loader = self._loaders_of[source][0]
        order = {
            "loader": loader,
            "task": task,
            "generation": self.number,
            "block_key": block_key,
            "indices": indices,
            "offset": piece.offset_bytes,
            "bytes": piece.size_bytes,
        }
        self._fetches[task] = _Fetch(source, block_key, indices, piece)
        self._workers.fetch(self.readahead.loaders[loader].worker, order)

    # -- workers' answers ------------------------------------------------------------------------

    def chunk_published(self, notice: ChunkNotice) -> None:
        """Register a chunk and tell the planner of it."""
        if notice.generation != self.number:
            return
        if notice.is_fetched:
            self._singles_published(notice)
            return
        if not self.readahead.grant_ended(notice.loader, notice.task):
            self.pool.returned(notice.offset_bytes)
            self._settle()
            return
        self.readahead.fed(notice.source_index)
        end = notice.first_index + len(notice.lengths)
        self.readahead.took(notice.loader, notice.block_key, end)
        chunk = self.pool.published(
            notice.offset_bytes,
            notice.used_bytes,
            loader=notice.loader,
            source_index=notice.source_index,
            block_key=notice.block_key,
            first_index=notice.first_index,
            records=len(notice.lengths),
        )
        chunk.meta = ChunkMeta(
            notice.source_index,
            notice.block_key,
            notice.first_index,
            notice.lengths,
            notice.status,
            notice.is_block_end,
            notice.window_blocks,
            notice.is_lane_end,
            notice.fault,
        )
        self._metas.append(chunk.meta)
        self._schedule_flush()
        if notice.fault:
            log.warning("source %s: %s", self._job.sources[notice.source_index].name, notice.fault)
        self._settle()

    def _singles_published(self, notice: ChunkNotice) -> None:
        self._fetches.pop(notice.task, None)
        assert notice.indices is not None
        self.pool.published_singles(
            notice.offset_bytes,
            notice.used_bytes,
            source_index=notice.source_index,
            block_key=notice.block_key,
            indices=notice.indices.tolist(),
        )
        self.steps.singles_arrived()
        self._settle()

    def grant_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        """A piece came back unused."""
        if grant.generation != self.number:
            return
        self.pool.returned(grant.offset_bytes)
        fetch = self._fetches.pop(grant.task, None) if needed_bytes else None
        if fetch is not None:
            wish = (fetch.source_index, fetch.block_key, fetch.indices, needed_bytes)
            self._fetch_wishes.appendleft(wish)
            self._settle()
            return
        is_current = self.readahead.grant_ended(grant.loader, grant.task, needed_bytes)
        if is_current and is_dry:
            self.readahead.loaders[grant.loader].is_dry = True
        self._settle()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_metas)

    def _flush_metas(self) -> None:
        """Send the metadata of all chunks of one turn of the loop in one message."""
        self._flush_scheduled = False
        if self._metas and not self._is_over:
            message, frames = encode_chunks(self._metas)
            self._metas = []
            self._owner.send_planner(message, frames)

    def copied(self, task: int) -> None:
        """Carried fragments lie in chunks of their own now."""
        for wish, piece in self._copies.pop(task, []):
            self._copying.discard(wish.key)
            if self.steps.is_carried(wish.key):
                self.pool.copied(piece, wish.located, wish.key)
                located = self.pool.locate(*wish.key)
                assert located is not None
                self.steps.copied(wish.key, located)
            else:
                self.pool.returned(piece.offset_bytes)
            self.pool.unpin_carried(wish.located.chunk)
        self._settle()

    # -- the planner's messages ------------------------------------------------------------------

    def planner_message(self, envelope: Envelope) -> None:
        """Take a planner's message of this generation."""
        match envelope.message:
            case PlansMade():
                self._plans_made(envelope.message, envelope.frames)
            case SourcesStarved():
                self._starved = tuple(envelope.message.sources)
                for source in envelope.message.sources:
                    self._open_source(source)
                self.readahead.starved(envelope.message.sources)
                self._settle()
            case MixtureChanged():
                self._mixture_changed(envelope.message)
            case JobEnded() | JobFailed():
                self._pending_end = envelope.message
                self.steps.ended(envelope.message.next_step)
                self._announce_end()
            case _:
                log.error("planner sent %s", type(envelope.message).__name__)

    def _plans_made(self, message: PlansMade, frames: tuple[bytes, ...]) -> None:
        at = 0
        self._states.update((step, state) for step, state in message.states)
        for header, count in zip(message.headers, message.counts, strict=True):
            plan = StepPlan.decode(header, frames[at : at + count])
            at += count
            # Packed now: when its first slot is filled, ranks wait for it.
            self._notes[plan.step] = pack(self._step_note(plan))
            self.steps.plan_arrived(plan)
            self._count(plan)
        self._starved = ()
        self._settle()

    def _mixture_changed(self, message: MixtureChanged) -> None:
        if message.error is not None:
            return
        self._shares = list(message.shares)
        for source, share in enumerate(self._shares):
            if share > 0:
                self._open_source(source)
        self._retarget()
        self._settle()

    def _count(self, plan: StepPlan) -> None:
        totals = self.totals
        totals.steps += 1
        totals.tokens += int(plan.placed_tokens.sum())
        totals.fill_last, totals.imbalance_last = plan.fill_ratio, plan.imbalance
        totals.fill_sum += plan.fill_ratio
        totals.imbalance_sum += plan.imbalance
        totals.wanted = plan.wanted_shares.tolist()
        columns = (plan.drawn_tokens, plan.drawn_samples, plan.placed_tokens, plan.dropped_records)
        for source, values in zip(
            totals.sources, zip(*(c.tolist() for c in columns), strict=True), strict=True
        ):
            source.drawn_tokens += values[0]
            source.drawn_samples += values[1]
            source.placed_tokens += values[2]
            source.dropped_records += values[3]
        if plan.dropped_records.any():
            changed = plan.delta.dropped_changed.tolist()
            for counts, news in zip(totals.dropped, plan.delta.dropped.tolist(), strict=True):
                for number, count in zip(changed, news, strict=True):
                    counts[number] = count

    # -- slots -----------------------------------------------------------------------------------

    def slot_filled(
        self, group: int, slot: int, sequence: int, generation: int, payload_bytes: int
    ) -> None:
        """Announce and publish what became ready."""
        if generation != self.number:
            return
        filled = self.steps.filled(group, slot, sequence, payload_bytes, time.monotonic_ns())
        self.readahead.room_came_free()
        ring = self.rings[group].state
        readers = ring.readers
        steps = iter(filled.new_steps)
        for publication in filled.publications:
            event = RingEvent(
                READY,
                publication.slot,
                publication.sequence,
                self.number,
                publication.payload_bytes,
            )
            if publication.sequence % self._microbatches == 0:
                self._announce(next(steps), event, readers)
                continue
            packet = event.encode()
            for rank in readers:
                self._owner.send_reader_packet(rank, packet)
        if not readers and filled.publications:
            # Nobody of this group is left: its slots go round for the other groups' sake.
            self._released(self.rings[group].state.free_unread())
        self._settle()

    def _announce(self, plan: StepPlan, event: RingEvent, readers: Iterable[int]) -> None:
        """Tell a group of a step and of its first microbatch, in one packet where they fit."""
        note = self._notes[plan.step]
        self._notes.pop(plan.step - NOTES_KEPT, None)
        packet = encode_ready_with_note(event, note)
        if packet is not None:
            for rank in readers:
                self._owner.send_reader_packet(rank, packet)
            return
        packets = [*encode_packed(note), event.encode()]
        for rank in readers:
            self._owner.send_reader_message(rank, packets)

    def _step_note(self, plan: StepPlan) -> dict[str, Any]:
        state = self._states.pop(plan.step, b"")
        return {
            "note": "step",
            "generation": self.number,
            "step": plan.step,
            "plan_step": plan.plan_step,
            "valid_tokens": plan.valid_tokens,
            "valid_segments": plan.valid_segments,
            "microbatches": self._microbatches,
            "delta": b"" if state else plan.delta_bytes,
            "state": state,
            "stats": {
                "imbalance": plan.imbalance,
                "fill": plan.fill_ratio,
                "carried_tokens": plan.carried_tokens,
                "drawn_tokens": plan.drawn_tokens.tolist(),
                "valid_tokens": plan.source_valid_tokens.tolist(),
                "wanted_shares": plan.wanted_shares.tolist(),
                "realised_shares": plan.realised_shares.tolist(),
            },
        }

    def released(self, rank: int, group: int, event: RingEvent) -> None:
        """A rank let go of a slot."""
        if event.generation != self.number:
            return
        if self.rings[group].state.released(event.slot, event.sequence, rank):
            self._released([event.sequence])
            self._settle()

    def reader_leaves(self, rank: int, group: int, held: list[tuple[int, int]]) -> None:
        """A rank reads no more, but views of its keep some slots."""
        freed = self.rings[group].state.reader_leaves(rank, held)
        if freed:
            self._released(freed)
        self._settle()

    def reader_lost(self, rank: int, group: int) -> None:
        """A rank is gone: its claims end, the others go on."""
        freed = self.rings[group].state.reader_lost(rank)
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

    def loader_worker_lost(self, worker: int) -> list[str]:
        """A loader worker died: take back what it had. Return the sources that it read."""
        lost = self.readahead.worker_lost(worker)
        for task, batch in list(self._copies.items()):
            if worker != COPYING_WORKER:
                continue
            del self._copies[task]
            for wish, piece in batch:
                self._copying.discard(wish.key)
                self.pool.returned(piece.offset_bytes)
                self.pool.unpin_carried(wish.located.chunk)
        self._settle()
        return sorted({self._job.sources[state.source_index].name for state in lost})

    def loader_worker_back(self, worker: int) -> None:
        """A loader worker was replaced: its sources go on behind what was published."""
        for state in self.readahead.loaders.values():
            if state.worker == worker:
                self._open_loader(state)
        for task, fetch in list(self._fetches.items()):
            loader = self._loaders_of[fetch.source_index][0]
            if self.readahead.loaders[loader].worker == worker:
                del self._fetches[task]
                self._fetch(fetch.source_index, fetch.block_key, fetch.indices, fetch.piece)
        self.readahead.worker_back(worker)
        self._settle()

    def planner_back(self) -> None:
        """A new planner replayed the journal: tell it of all that is read and not drawn."""
        self._metas = []
        metas = [chunk.meta for chunk in self.pool.undrawn() if chunk.meta is not None]
        if metas:
            message, frames = encode_chunks(metas)
            self._owner.send_planner(message, frames)
        self._told_released = self.steps.released_step
        self._owner.send_planner(StepReleased(self.steps.released_step))

    @property
    def next_plan_step(self) -> int:
        """Step of the next plan that is to arrive."""
        return self.opened.step + self.totals.steps

    def _released(self, sequences: list[int]) -> None:
        step = self.steps.slot_freed(sequences)
        if step is not None:
            # The planner plans half a horizon at a time; words in between would only wake it.
            if step - self._told_released >= max(1, self._horizon_steps // 2):
                self._told_released = step
                self._owner.send_planner(StepReleased(step))
            self._announce_end()

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
        note = {
            "note": "ended",
            "generation": self.number,
            "reason": self._pending_end.reason,
            "step": self._pending_end.next_step,
        }
        packets = list(encode_control(note))
        for ring in self.rings.values():
            for rank in ring.state.readers:
                self._owner.send_reader_message(rank, packets)

    def _is_all_published(self) -> bool:
        assert self._pending_end is not None
        total = (self._pending_end.next_step - self.steps.first_step) * self._microbatches
        return all(r.state.statistics().published_total >= total for r in self.rings.values())

    # -- moving on -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Let everything move that can: waiting plans, builds, copies, grants."""
        if self._is_over:
            return
        if self.steps.settle_waiting():
            self.readahead.changed()
        missing = self.steps.missing()
        if missing is not None:
            self.readahead.starved([missing[0]])  # it was revoked after the planner knew of it
        self._order_builds()
        if self._pending_end is not None:
            self._announce_end()
        self._order_copies()
        self._order_fetches()
        if self._fetch_wishes or self._fetches:
            return  # no step can do without what the state carried: it gets its room first
        for order in self.readahead.next_orders():
            worker = self.readahead.loaders[order.loader].worker
            if isinstance(order, GrantOrder):
                self._workers.grant(worker, order, self.number)
            else:
                self._workers.seek(worker, order)

    def _order_builds(self) -> None:
        for constructor in self._workers.constructors:
            if not constructor.is_serving or constructor.child.status is not None:
                continue
            room = BUILDS_PER_CONSTRUCTOR - constructor.building
            if room <= 0:
                continue
            for order in self.steps.next_builds(constructor.number, room):
                self._workers.build(constructor.number, order, self.number)

    def _order_copies(self) -> None:
        if self.pool.allocator.free_bytes > self.pool.allocator.capacity_bytes // 4:
            return  # nobody needs the room yet
        wishes = [w for w in self.steps.copy_wishes(COPIES_AT_ONCE) if w.key not in self._copying]
        batch: list[tuple[CopyWish, Piece]] = []
        rows = []
        for wish in wishes:
            piece = self.pool.lend(192 + 4 * wish.length)
            if piece is None:
                break
            chunk = wish.located.chunk
            first_token = wish.key[3] - wish.located.base_tokens
            rows.append(
                [
                    chunk.piece.offset_bytes,
                    chunk.piece.size_bytes,
                    wish.located.sample,
                    first_token,
                    wish.length,
                    piece.offset_bytes,
                    piece.size_bytes,
                ]
            )
            batch.append((wish, piece))
            self._copying.add(wish.key)
            # The source chunk must stay until the copy is done, even if the fragment is placed.
            self.pool.pin_carried(chunk)
        if batch:
            task = next(self._tasks)
            self._copies[task] = batch
            self._workers.copy(COPYING_WORKER, {"task": task, "copies": rows})

    def explain(self, group: int) -> str:
        """Return what a waiting rank of a group is waiting for, one line for people."""
        ring = self.rings[group].state
        statistics = ring.statistics()
        if self._starved:
            names = ", ".join(self._job.sources[s].name for s in self._starved)
            return f"stage loader: the planner waits for records of source {names}"
        missing = self.steps.missing()
        if missing is not None:
            return f"stage loader: source {self._job.sources[missing[0]].name} is read again"
        debt = ring.oldest_debt()
        if debt is not None and not statistics.free_count:
            return f"stage ring: no slot is free, rank {debt.reader} holds {debt.held_count} and releases last"
        if statistics.filling_count:
            return "stage constructor: a slot is being filled"
        full = [r for r in self.rings.values() if not r.state.has_free()]
        if full and (debt := full[0].state.oldest_debt()) is not None:
            return (
                f"stage ring: rank {debt.reader} of DP group {full[0].group} holds all {debt.held_count} slots, and "
                "the planner is as far ahead as it may be"
            )
        return "stage planner: no plan arrived yet"

    def close(self) -> None:
        """Stop ordering; the session resets the workers and drops segments."""
        self._is_over = True
        for ring in self.rings.values():
            ring.segment.close()
