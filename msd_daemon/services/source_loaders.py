"""A generation's source loaders: opened, targeted, moved, opened again after deaths."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from federation.messages import JobOpened
from federation.model.job import ResolvedJob
from msd_client.contract.position import KEY_MAX
from msd_daemon.core.budget import PoolSums, source_step_bytes
from msd_daemon.core.partition_moves import Move
from msd_daemon.core.readahead import LoaderState, ReadAhead
from msd_daemon.core.shadows import Reach, Shadow
from msd_daemon.core.shared_steps import Moved, SharedSteps
from msd_daemon.core.steps import StepsState
from msd_daemon.core.warm_pool import WarmPool
from msd_daemon.services.carried_reads import CarriedReads
from msd_daemon.services.partition_moves import Deals, PartitionMoves
from msd_daemon.services.worker_events import ShadowChunk
from msd_daemon.services.worker_set import WorkerSet
from msd_daemon.workers.messages import Grant

log = logging.getLogger(__name__)


class Reading(NamedTuple):
    """Who reads a source on this node."""

    workers: tuple[int, ...]
    """Of each partition, of those that this node's first part is dealt to; none where it is not open."""
    own_share: float
    """Which share of the source that is, of 1."""
    is_parked: bool
    """They keep nothing open for now."""
    blocks: int
    """Of a window, as far as it was told: further partitions would have none. 0: not known."""
    is_moving: bool = False
    """Former loaders of it read up to a watermark, or have chunks there that nobody drew yet."""


class SourceLoaders:
    """Orders to the loader workers of one generation, and what is out with them."""

    def __init__(
        self,
        job: ResolvedJob,
        generation: int,
        *,
        workers: WorkerSet,
        warm: WarmPool,
        readahead: ReadAhead,
        steps: StepsState,
        opened: JobOpened,
        sums: PoolSums,
        loaders_of: dict[int, list[int]],
        owners: SharedSteps | None = None,
        deals: Deals | None = None,
    ) -> None:
        self._owners = owners
        """In a cluster: what this node loads."""
        self.shares = list(opened.shares)
        """Of each source in the mixture: the largest now or soon."""
        self._opened_by: dict[int, dict[int, list[int]]] = {0: loaders_of}
        """Loaders of each open source, by the change that made it this node's."""
        self._job = job
        self._generation = generation
        self._workers = workers
        self._warm = warm
        self._pool = warm.pool
        self._readahead = readahead
        self._steps = steps
        self._sums = sums
        self._moves = PartitionMoves(
            job,
            workers=workers,
            readahead=readahead,
            pool=warm.pool,
            deals={} if deals is None else deals,
            owners=owners,
            shares=lambda source: self.shares[source],
        )
        self._ahead: dict[int, int] = {}
        """Blocks that the loaders of a source fetch ahead of need, where they do."""
        self._loader_ids = itertools.count()
        self.carried = CarriedReads(
            job,
            generation,
            workers=workers,
            readahead=readahead,
            pool=warm.pool,
            steps=steps,
            owners=owners,
            open_source=self.open_source,
            first_loader=self._first_loader,
        )
        """What the state carried, and what is carried now."""

    def working(self) -> set[int]:
        """Return the loader workers that were told to read or copy something and have not answered."""
        return self._readahead.granted_workers() | self.carried.working()

    def awaited(self) -> set[int]:
        """Return those of them whose answer the draw, or a planned step, waits for."""
        return self._readahead.granted_workers(starved_only=True) | self.carried.fetching()

    def grant_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        """A piece came back unused: too small for the next record, or there is none."""
        self._pool.returned(grant.offset_bytes)
        if needed_bytes and self.carried.needs_more(grant.task, needed_bytes):
            return
        is_current = self._readahead.grant_ended(grant.loader, grant.task, needed_bytes)
        if is_current and is_dry:
            self._readahead.has_no_more(grant.loader)

    def open_source(self, source: int, at: tuple[int, int] | None = None) -> None:
        """Open a source's loaders at its cursor, unless they are open.

        Args:
            source: Its number.
            at: (block key, index) where they begin; None: where the generation did, or behind what
                lies here still.
        """
        opened = self.opened_by(self._issue(source))
        if source in opened:
            return
        spec = self._job.sources[source]
        partitions = self._moves.partitions(source)
        if not partitions:
            return  # other nodes load it
        parts = [(it.part, it.parts) for it in partitions]
        numbers = [next(self._loader_ids) for _ in parts]
        if at is None:
            positions = self._warm.claim(source, numbers, parts)
        else:
            positions = [at] * len(parts)
            for number, own in zip(numbers, parts, strict=True):
                self._pool.loader_opened(number, source, own, at)
        loaders = []
        for number, new, position in zip(numbers, partitions, positions, strict=True):
            state = LoaderState(number, new.worker, source, new.part, new.parts, *position)
            self._open_loader(state)
            loaders.append(state)
        opened[source] = [loader.loader for loader in loaders]
        chunk_bytes = self._chunk_bytes(source)
        self._readahead.add_source(source, 1, loaders, chunk_bytes)
        if spec.is_critical:
            for state in loaders:
                self._add_shadow(state, chunk_bytes)

    def _chunk_bytes(self, source: int) -> int:
        has_media = self._job.sources[source].has_media
        return self._sums.media_chunk_bytes if has_media else self._sums.chunk_bytes

    def take_sources(
        self,
        moved: Moved,
        cursors: Sequence[Sequence[int]],
        carried: Sequence[Sequence[int]],
    ) -> None:
        """Load sources that other nodes loaded before.

        Args:
            moved: What this node gained.
            cursors: [block_key, index] of each source of the job.
            carried: What is carried there: [source, block_key, index, offset, length].
        """
        for source in sorted(moved.gained):
            if self.shares[source] > 0:
                block_key, index = cursors[source]
                self.open_source(source, (block_key, index))
        self.retarget()
        self.carried.wish([it for it in carried if it[0] in moved.gained], moved.issue)

    def opened_by(self, issue: int) -> dict[int, list[int]]:
        """Return the loaders of the sources that are this node's by a change, by source."""
        return self._opened_by.setdefault(issue, {})

    def _issue(self, source: int) -> int:
        return 0 if self._owners is None else self._owners.issue_of(source)

    def _first_loader(self, source: int) -> LoaderState:
        """Return a loader of a source, open in its process unless that is being replaced."""
        state = self._readahead.loaders[self.opened_by(self._issue(source))[source][0]]
        if state.is_parked and not self._readahead.is_away(state.worker):
            state.is_parked = False
            self._open_loader(state)
        return state

    def close_sources(self, sources: Iterable[int], before_issue: int) -> None:
        """Nothing here needs these sources any more as they were dealt before a change."""
        opened = [own for issue, own in self._opened_by.items() if issue < before_issue]
        for own, source in itertools.product(opened, sources):
            for loader in own.pop(source, ()):
                self._close(loader)

    def _add_shadow(self, state: LoaderState, chunk_bytes: int) -> None:
        shadows, worker = self._readahead.shadows, state.worker
        place = (state.next_block_key, state.next_index)
        budget_bytes = self._sums.source_shadow_bytes // state.parts
        shadows.add(state.loader, worker, place, chunk_bytes=chunk_bytes, budget_bytes=budget_bytes)
        if self._workers.has_shadow(worker):
            self._open_shadow(shadows.opened(state.loader))

    def shadow_came(self, worker: int) -> None:
        """A process stands behind a loader worker: it reads what critical sources that one has."""
        for shadow in self._readahead.shadows.process_came(worker):
            self._open_shadow(shadow)

    def _open_shadow(self, shadow: Shadow[Any]) -> None:
        state = self._readahead.loaders[shadow.loader]
        self._workers.open_shadow(state.worker, _opening(state, *shadow.position.place))

    def _open_loader(self, state: LoaderState) -> None:
        """Open it, unless its worker is being replaced: then it is once that one is back."""
        if self._readahead.is_away(state.worker):
            return
        order = _opening(state, state.next_block_key, state.next_index)
        self._workers.open_loader(state.worker, order)
        blocks = self._ahead.get(state.source_index, 0)
        if blocks:
            self._workers.fetch_ahead(state.worker, state.loader, blocks)

    def open_parked(self, loader: int) -> None:
        """A loader that had nothing open is to read."""
        self._open_loader(self._readahead.loaders[loader])

    def reading(self, source: int) -> Reading:
        """Return who reads a source here."""
        opened = self.opened_by(self._issue(source)).get(source, ())
        states = [self._readahead.loaders[number] for number in opened]
        is_moving = any(state.until is not None for state in states)
        states = [state for state in states if state.until is None]
        owned, parts = ([0], 1) if self._owners is None else self._owners.parts(source)
        if not states or not owned:
            return Reading((), 0.0, is_parked=False, blocks=0, is_moving=is_moving)
        first = sorted((it for it in states if it.part % parts == owned[0]), key=lambda it: it.part)
        is_parked = all(state.is_parked for state in states)
        blocks = max(state.window_blocks for state in states)
        workers = tuple(state.worker for state in first)
        return Reading(workers, len(owned) / parts, is_parked, blocks, is_moving)

    def fetch_ahead(self, source: int, blocks: int) -> None:
        """Have a source's loaders, those that come later too, fetch so many blocks ahead of need."""
        self._ahead[source] = blocks
        for number in self.opened_by(self._issue(source)).get(source, ()):
            state = self._readahead.loaders[number]
            if not state.is_parked and not self._readahead.is_away(state.worker):
                self._workers.fetch_ahead(state.worker, number, blocks)

    def park(self, sources: Iterable[int]) -> None:
        """Have sources that nobody needs for now keep nothing open."""
        for source in sources:
            if self._job.sources[source].is_critical:
                continue  # its shadow is to be there at once
            for state in self._readahead.park(source, self.carried.loaders()):
                self._workers.close_loader(state.worker, state.loader)

    # -- moves -----------------------------------------------------------------------------------

    def deal(self, source: int, workers: Sequence[int]) -> bool:
        """Have a source read by these workers, a partition each, from the next watermark on.

        Return False where that can't be said yet: nothing came of the source so far.
        """
        opened = self.opened_by(self._issue(source)).get(source)
        before = self._moves.deals.get(source)
        self._moves.deal(source, workers)
        if opened is None:
            return True
        move = self._moves.plan(source, opened)
        if move is None:
            if before is None:
                del self._moves.deals[source]
            else:
                self._moves.deals[source] = before
            return False
        if move.leaving:
            self._carry_out(source, opened, move)
        return True

    def _carry_out(self, source: int, opened: list[int], move: Move) -> None:
        self._moves.leave(move)
        for state in move.leaving:
            shadow = self._readahead.shadows.of(state.loader)
            if shadow is not None and shadow.is_open:
                self._workers.stop_shadow(state.worker, state.loader, move.watermark)
        is_parked = all(state.is_parked for state in move.leaving)
        begin = (move.watermark, 0)
        coming = []
        for own in move.coming:
            number = next(self._loader_ids)
            self._pool.loader_opened(number, source, (own.part, own.parts), begin)
            state = LoaderState(number, own.worker, source, own.part, own.parts, *begin)
            state.is_parked, state.window_blocks = is_parked, move.window_blocks
            if not is_parked:
                self._open_loader(state)
            coming.append(state)
        opened[:0] = [state.loader for state in coming]
        target_bytes = self._readahead.target_bytes(source)
        self._readahead.add_source(source, target_bytes, coming)
        if self._job.sources[source].is_critical:
            for state in coming:
                self._add_shadow(state, self._chunk_bytes(source))
        log.debug(
            "source %s: %d partitions from block %#x on by workers %s",
            self._job.sources[source].name, len(move.coming), move.watermark,
            [own.worker for own in move.coming],
        )  # fmt: skip

    def close_finished(self) -> None:
        """Let loaders go that came to their watermark and of which everything is drawn."""
        for state in self._moves.finished(self.carried.loaders):
            for own in self._opened_by.values():
                if state.loader in own.get(state.source_index, ()):
                    own[state.source_index].remove(state.loader)
            self._close(state.loader)

    def _close(self, loader: int) -> None:
        state = self._readahead.remove_loader(loader)
        self._pool.loader_closed(loader)
        if not state.is_parked and not self._readahead.is_away(state.worker):
            self._workers.close_loader(state.worker, loader)

    @property
    def moves(self) -> PartitionMoves:
        """Who reads what here."""
        return self._moves

    def retarget(self) -> None:
        """Set how far each open source reads ahead, by its share."""
        # A planning call never finds a source short in steady state.
        lead = self._sums.planned_steps + 2
        step_bytes = source_step_bytes(self._job)
        for source in {source for own in self._opened_by.values() for source in own}:
            own_share = self.shares[source]
            if self._owners is not None:
                owned, parts = self._owners.parts(source)
                own_share *= len(owned) / parts
            target = int(own_share * step_bytes[source] * lead) + 1 if own_share > 0 else 0
            self._readahead.add_source(source, target, [])

    def worker_lost(self, worker: int, fenced_pid: int | None = None) -> list[str]:
        """A loader worker is gone: take back what it had. Return the sources that it read.

        Args:
            worker: Its number.
            fenced_pid: Of a process that may not have ended yet: what it may still write into is
                anybody's once `fenced_ended` is told of it.
        """
        give_back = self._taker_back(fenced_pid)
        lost = self._readahead.worker_lost(worker, give_back)
        self.carried.worker_lost(worker, give_back, may_write=fenced_pid is not None)
        return sorted({self._job.sources[state.source_index].name for state in lost})

    def fenced_ended(self, pid: int) -> None:
        """A process that was sent away is gone: what it had is anybody's."""
        for offset_bytes in self._readahead.leases.ended(pid):
            self._pool.returned(offset_bytes)
        self._readahead.changed()

    def worker_back(self, worker: int) -> None:
        """A loader worker was replaced: its sources go on behind what was published."""
        self._readahead.worker_back(worker)
        for state in self._readahead.loaders.values():
            if state.worker != worker or state.is_parked:
                continue
            if not state.is_promoted:
                self._open_loader(state)
            elif state.must_seek:
                self._workers.seek(worker, self._readahead.sought(state.loader))
            state.is_promoted = False
        self.carried.worker_back(worker)

    def promote(self, worker: int) -> list[ShadowChunk]:
        """Have the process that stood behind a lost worker take over its critical sources.

        Return the chunks that it had ready, in order, to be published now.
        """
        ready: list[ShadowChunk] = []
        for state in self._readahead.loaders.values():
            if state.worker == worker:
                ready += [chunk.notice for chunk in self._readahead.promote(state.loader)]
        return ready

    def shadow_lost(self, worker: int, fenced_pid: int | None = None) -> None:
        """The process behind a loader worker is gone; see worker_lost."""
        self._readahead.shadows.process_gone(worker, self._taker_back(fenced_pid))

    def _taker_back(self, fenced_pid: int | None) -> Callable[[int], object]:
        """Return what takes back the pieces of a process by their offsets."""
        if fenced_pid is None:
            return self._pool.returned
        return partial(self._readahead.leases.condemn, fenced_pid)

    def shadow_ready(self, chunk: ShadowChunk) -> None:
        """A shadow has a chunk ready."""
        notice = chunk.notice
        end = notice.first_index + len(notice.lengths)
        self._readahead.shadows.came(
            notice.loader, notice.task, notice.offset_bytes, notice.used_bytes,
            (notice.block_key, notice.first_index),
            Reach(notice.block_key, end, notice.is_block_end, notice.is_lane_end), chunk,
        )  # fmt: skip

    def shadow_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        """A shadow's piece came back unused."""
        self._readahead.shadows.came_back(
            grant.loader, grant.task, grant.offset_bytes, needed_bytes=needed_bytes, is_dry=is_dry
        )

    def order_shadows(self) -> None:
        """Have shadows read on, in the room that is left."""
        for order in self._readahead.next_shadow_orders():
            worker = self._readahead.loaders[order.loader].worker
            self._workers.order_shadow(worker, order, self._generation)


def _opening(state: LoaderState, block_key: int, index: int) -> dict[str, int]:
    return {
        "loader": state.loader,
        "source": state.source_index,
        "part": state.part,
        "parts": state.parts,
        "block_key": block_key,
        "index": index,
        "until": KEY_MAX if state.until is None else state.until,
    }
