"""The child processes of one job: loader workers, spares, shadows and data constructors.

Starts them through the fork servers and sends them orders; what they say is `worker_words`. A restart
policy is the owner's: this file only reports ends.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from federation.model.job import ResolvedJob, encode_job
from msd_client.contract.codec import pack
from msd_client.contract.errors import WorkerLostError
from msd_daemon.core.readahead import GrantOrder, SeekOrder
from msd_daemon.core.shadows import ShadowGrant, ShadowSeek
from msd_daemon.core.steps import BuildOrder
from msd_daemon.observe.json_log import caused_by
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.services.link import ChildLink
from msd_daemon.services.worker import Worker, new_future
from msd_daemon.services.worker_events import WorkerEvents
from msd_daemon.services.worker_words import WorkerWords
from msd_daemon.shm.mark_page import MarkPage
from msd_daemon.shm.segment import Segment
from msd_daemon.stores.options import StoreOptions, encode_store_options
from msd_daemon.workers.messages import (
    GRANT,
    TASK_HEAD,
    ToConstructor,
    ToLoader,
)
from msd_daemon.workers.rights import Rights

START_TIMEOUT_S = 120.0
RESET_TIMEOUT_S = 60.0


class WorkerSet:
    """Workers of one job."""

    def __init__(
        self, forks: ForkClient, events: WorkerEvents, rights: Rights | None = None
    ) -> None:
        self._forks = forks
        self._rights = rights
        """Of the job's owner, which loader workers take; None: the daemon's."""
        self._events = events
        self._loader_forks: ForkClient | None = None
        self._loader_server: Child | None = None
        self.loaders: list[Worker] = []
        self.constructors: list[Worker] = []
        self.spares: list[Worker] = []
        self.shadows: dict[int, Worker] = {}
        """By number of the loader worker that they stand behind."""
        self.leaving: list[Worker] = []
        """Sent away and not ended yet."""
        self._words = WorkerWords(events, self.kill)
        self._is_closing = False
        self._pool: Segment | None = None
        self._preload: tuple[str, ...] = ()
        self._loader_order = b""

    async def start(
        self,
        job: ResolvedJob,
        pool: Segment,
        *,
        loaders: int,
        constructors: int,
        index_dir: Path | None,
        stores: StoreOptions,
        preload: tuple[str, ...],
    ) -> None:
        """Start all workers and wait until they are ready.

        Raises:
            WorkerLostError: One died before it was ready.
            MsdError: One reported why it can't work (a tokenizer that does not load).
        """
        server = await self._forks.fork("fork_server", preload=(), rights=self._rights)
        self._loader_server = server
        self._loader_forks = ForkClient(server.sock, self.child_ended)
        self._pool = pool
        self._preload = preload
        self._loader_order = pack(
            {
                "job": encode_job(job),
                "pool_bytes": pool.nbytes,
                "index_dir": "" if index_dir is None else str(index_dir),
                "stores": encode_store_options(stores),
            }
        )
        for number in range(loaders):
            self.loaders.append(await self._start_loader(number))
            self._check_alive(self.loaders[-1])
        for number in range(constructors):
            self.constructors.append(await self._start_constructor(number))
            self._check_alive(self.constructors[-1])
        ready = [worker.is_ready for worker in (*self.loaders, *self.constructors)]
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.gather(*ready)

    @property
    def pool(self) -> Segment:
        """The memory that samples lie in; once started."""
        assert self._pool is not None
        return self._pool

    async def _start_loader(self, number: int, role: str = "loader") -> Worker:
        assert self._loader_forks is not None and self._pool is not None
        child = await self._loader_forks.fork(role, preload=self._preload)
        self._check_open(child)
        page = MarkPage()
        worker = Worker(role, number, child, page=page)
        worker.link = ChildLink(child.sock, self._words.hear(worker), _nothing)
        fds = (os.dup(self._pool.fd_read_write), os.dup(page.fd))
        worker.link.send(ToLoader.SETUP, self._loader_order, fds)
        for order in self._events.quarantine_orders():
            self._send(worker, ToLoader.QUARANTINE, pack(order))
        return worker

    async def _start_constructor(self, number: int) -> Worker:
        assert self._pool is not None
        child = await self._forks.fork("constructor")
        self._check_open(child)
        worker = Worker("constructor", number, child)
        worker.link = ChildLink(child.sock, self._words.hear(worker), _nothing)
        body = pack({"pool_bytes": self._pool.nbytes})
        worker.link.send(ToConstructor.SETUP, body, (os.dup(self._pool.fd_read_only),))
        return worker

    def _check_open(self, child: Child) -> None:
        """Let a worker go that was born while all were sent away.

        Raises:
            WorkerLostError: It was.
        """
        if self._is_closing:
            child.sock.close()
            raise WorkerLostError(
                f"worker {child.pid} was to start as its job ended", pid=child.pid
            )

    async def replace(self, role: str, number: int) -> str:
        """Put a worker in the place of one that ended; return once it is ready, and alive.

        Returns:
            What took the place: `spare` or `new`.

        Raises:
            WorkerLostError: The new one died too, or its fork server is gone.
            MsdError: It reported why it can't work.
        """
        if role == "loader":
            if self.take_standby(number) is not None:
                return "spare"
            self.loaders[number] = worker = await self._start_loader(number)
        else:
            worker = await self._start_constructor(number)
            worker.is_serving = False
            self.constructors[number] = worker
        self._check_alive(worker)
        async with asyncio.timeout(START_TIMEOUT_S):
            await worker.is_ready
        if worker.child.status is not None:  # it died as it became ready: it must get no orders
            raise WorkerLostError(
                f"{role} {number} (pid {worker.child.pid}) ended as soon as it was ready",
                pid=worker.child.pid,
            )
        return "new"

    def take_standby(self, number: int, *, is_shadow: bool = False) -> Worker | None:
        """Put a process that is set up already in a loader's place; None where none is there.

        Args:
            number: The loader's.
            is_shadow: Take the shadow behind it, whose loaders are open; else a spare.
        """
        if is_shadow:
            found = self.shadows.pop(number, None)
            if found is not None and not found.can_work:
                self.shadows[number] = found
                found = None
        else:
            found = next((spare for spare in self.spares if spare.can_work), None)
            if found is not None:
                self.spares.remove(found)
        if found is None:
            return None
        found.number = number
        self._rename(found, "loader")
        self.loaders[number] = found
        if found.bad is not None:  # its chunk comes under the new name
            self._events.bad_records(found.bad)
            found.bad = None
        return found

    async def add_spare(self) -> None:
        """Start a spare; return once it is ready.

        Raises:
            WorkerLostError: It died, or its fork server is gone.
            MsdError: It reported why it can't work.
        """
        worker = await self._start_loader(-1, "spare")
        self.spares.append(worker)
        await self._until_ready(worker)

    async def add_loader(self) -> None:
        """Have one more loader worker, behind the others; return once it is ready.

        Raises:
            WorkerLostError: It died, or its fork server is gone.
            MsdError: It reported why it can't work.
        """
        worker = next((spare for spare in self.spares if spare.can_work), None)
        while worker is None:
            await self.add_spare()
            worker = next((spare for spare in self.spares if spare.can_work), None)
        self.spares.remove(worker)
        worker.number = len(self.loaders)
        self._rename(worker, "loader")
        self.loaders.append(worker)

    def drop_loader(self) -> None:
        """Let the last loader worker leave, and who stands behind it: nothing is open there."""
        number = len(self.loaders) - 1
        assert number > 0, "the first loader worker stays"
        self.retire(number)
        del self.loaders[number]
        if number in self.shadows:
            self.fence("shadow", number)

    async def add_shadow(self, number: int) -> None:
        """Have a process stand behind a loader worker: a spare, or a new one; it has opened nothing.

        Raises:
            WorkerLostError: It died, or its fork server is gone.
            MsdError: It reported why it can't work.
        """
        worker = next((spare for spare in self.spares if spare.can_work), None)
        if worker is None:
            worker = await self._start_loader(number, "shadow")
        else:
            self.spares.remove(worker)
            worker.number = number
            self._rename(worker, "shadow")
        self.shadows[number] = worker
        await self._until_ready(worker)

    async def _until_ready(self, worker: Worker) -> None:
        self._check_alive(worker)
        async with asyncio.timeout(START_TIMEOUT_S):
            await worker.is_ready

    def _rename(self, worker: Worker, role: str) -> None:
        worker.role = role
        self._send(worker, ToLoader.BECOME, role.encode())

    def fence(self, role: str, number: int) -> Worker:
        """Send a loader or shadow away that may not have ended: killed, what it still says refused.

        Its place is empty until another takes it, its end is told by `fenced_ended`.
        """
        worker = self.shadows.pop(number) if role == "shadow" else self.loaders[number]
        if worker.link is not None:
            worker.link.drain_now()  # what it said before was in its right
        worker.is_fenced = True
        self.leaving.append(worker)
        self.kill(worker)
        return worker

    def kill(self, worker: Worker) -> None:
        """Kill a worker; its end arrives as any other's."""
        forks = self._forks if worker.role == "constructor" else self._loader_forks
        if forks is not None:
            forks.kill(worker.child)

    def retire(self, number: int) -> Worker:
        """Let a loader worker that has nothing out leave by itself; its place is empty."""
        worker = self.loaders[number]
        worker.is_fenced = True
        self.leaving.append(worker)
        if worker.link is not None:
            worker.link.close()
        return worker

    async def until_left(self) -> None:
        """Return once every worker that was sent away has ended.

        Raises:
            TimeoutError: One is stuck in the kernel.
        """
        async with asyncio.timeout(RESET_TIMEOUT_S):
            await asyncio.gather(*(worker.has_ended.wait() for worker in self.leaving))

    def _check_alive(self, worker: Worker) -> None:
        """Take note of an end that came before the worker was in our lists."""
        if worker.child.status is not None:
            self.child_ended(worker.child)

    async def revive(self) -> None:
        """Replace the workers that ended while nobody was to be served.

        Raises:
            WorkerLostError: A new one died too, or its fork server is gone.
            MsdError: One reported why it can't work.
        """
        for worker in [*self.loaders, *self.constructors]:
            if worker.child.status is not None or worker.is_fenced:
                await self.replace(worker.role, worker.number)
        for worker in self.constructors:
            worker.is_serving = True

    async def reset(self, generation: int) -> None:
        """Close all source loaders and drop all rings; returns once nothing older is on its way."""
        body = pack({"generation": generation})
        loaders = [*self.loaders, *self.shadows.values()]
        for worker in loaders:
            worker.is_reset = new_future()
            self._send(worker, ToLoader.RESET, body)
        for worker in self.constructors:
            worker.is_reset = new_future()
            worker.building = 0
            self._send(worker, ToConstructor.DROP_RINGS, body)
        waits = [w.is_reset for w in (*loaders, *self.constructors) if w.is_reset is not None]
        async with asyncio.timeout(RESET_TIMEOUT_S):
            await asyncio.gather(*waits)

    def add_ring(
        self, ring: int, segment: Segment, body: dict[str, Any], only: int | None = None
    ) -> None:
        """Give a ring to every constructor, or to one."""
        packed = pack({"ring": ring, "nbytes": segment.nbytes, **body})
        for worker in self.constructors:
            if worker.link is not None and only in (None, worker.number):
                worker.link.send(ToConstructor.RING, packed, (os.dup(segment.fd_read_write),))

    def open_loader(self, worker: int, order: dict[str, Any]) -> None:
        """Open a source loader on a worker."""
        self._send(self.loaders[worker], ToLoader.OPEN, pack(order))

    def close_loader(self, worker: int, loader: int) -> None:
        """Close a source loader, and its shadow, where there is one."""
        body = pack({"loader": loader})
        for reading in (self.loaders[worker], self.shadows.get(worker)):
            if reading is not None:
                self._send(reading, ToLoader.CLOSE, body)

    def stop_loader(self, worker: int, loader: int, until: int) -> None:
        """Have a source loader begin no block at or behind a key."""
        self._send(self.loaders[worker], ToLoader.UNTIL, _until(loader, until))

    def fetch_ahead(self, worker: int, loader: int, blocks: int) -> None:
        """Have a source loader fetch so many of its blocks ahead of need."""
        body = pack({"loader": loader, "blocks": blocks})
        self._send(self.loaders[worker], ToLoader.AHEAD, body)

    def stop_shadow(self, worker: int, loader: int, until: int) -> None:
        """Have a source loader in the shadow of a worker begin no block at or behind a key."""
        if worker in self.shadows:
            self._send(self.shadows[worker], ToLoader.UNTIL, _until(loader, until))

    def open_shadow(self, worker: int, order: dict[str, Any]) -> None:
        """Open a source loader in the shadow of a worker, where there is one."""
        if worker in self.shadows:
            self._send(self.shadows[worker], ToLoader.OPEN, pack(order))

    def has_shadow(self, worker: int) -> bool:
        """True where a process stands behind a loader worker."""
        return worker in self.shadows and self.shadows[worker].is_able

    def count_able(self, role: str) -> int:
        """Return how many workers of a role are set up and alive."""
        return sum(worker.is_able for worker in self.all() if worker.role == role)

    def grant(self, worker: int, order: GrantOrder, generation: int) -> None:
        """Lend a piece to a source loader."""
        _grant(self.loaders[worker], order, generation)

    def seek(self, worker: int, order: SeekOrder) -> None:
        """Send a source loader elsewhere."""
        _seek(self.loaders[worker], order)

    def order_shadow(self, worker: int, order: ShadowGrant | ShadowSeek, generation: int) -> None:
        """Lend a piece to a shadow, or send it elsewhere."""
        shadow = self.shadows.get(worker)
        if shadow is None:
            return
        if isinstance(order, ShadowGrant):
            _grant(shadow, order, generation)
        else:
            _seek(shadow, order)

    def fetch(self, worker: int, order: dict[str, Any]) -> None:
        """Have records read again by position."""
        self._send(self.loaders[worker], ToLoader.FETCH, pack(order))

    def quarantine(self, order: dict[str, Any]) -> None:
        """Tell all loader workers of records that they must not touch."""
        for worker in (*self.loaders, *self.shadows.values(), *self.spares):
            self._send(worker, ToLoader.QUARANTINE, pack(order))
            if worker.link is not None and worker.page is not None:
                worker.link.flush()
                worker.page.tell()  # in the middle of a chunk, too

    def copy(self, worker: int, order: dict[str, Any]) -> None:
        """Have carried fragments copied."""
        self._send(self.loaders[worker], ToLoader.COPY, pack(order))

    def build(self, constructor: int, order: BuildOrder, generation: int) -> None:
        """Have a slot filled."""
        worker = self.constructors[constructor]
        worker.building += 1
        head = TASK_HEAD.pack(
            order.ring,
            order.slot,
            order.sequence,
            generation,
            order.step,
            order.plan_step,
            order.microbatch,
            order.segments,
            order.valid_tokens,
            order.row_tokens,
            order.modalities,
        )
        self._send(worker, ToConstructor.BUILD, head + order.columns)

    async def statistics(self) -> list[dict[str, Any]]:
        """Return every loader worker's numbers by source loader."""
        waits = []
        for worker in self.loaders:
            worker.statistics = new_future()
            self._send(worker, ToLoader.STATISTICS, b"")
            waits.append(worker.statistics)
        async with asyncio.timeout(5.0):
            return list(await asyncio.gather(*waits))

    @property
    def refused_total(self) -> int:
        """Words of fenced workers that nobody took."""
        return self._words.refused_total

    def pids(self) -> list[tuple[str, int]]:
        """Return (role, pid) of living children, fork server included."""
        found = [] if self._loader_server is None else [("fork_server", self._loader_server.pid)]
        return found + [
            (worker.role, worker.child.pid)
            for worker in (*self.all(), *self.leaving)
            if worker.child.status is None
        ]

    def all(self) -> list[Worker]:
        """Return the workers of every role that have a place."""
        return [*self.loaders, *self.shadows.values(), *self.spares, *self.constructors]

    def close(self) -> None:
        """Let all workers go: closing their links ends them, the fork server kills the rest."""
        self._is_closing = True
        for worker in (*self.all(), *self.leaving):
            if worker.link is not None:
                worker.link.close()
            if worker.page is not None:
                worker.page.close()
        if self._loader_forks is not None:
            self._loader_forks.close()
        for worker in (*self.constructors, *self.leaving):
            self.kill(worker)

    def child_ended(self, child: Child) -> None:
        """A fork server reaped one of its children."""
        for worker in list(self.leaving):
            if worker.child is child:
                self._fenced_ended(worker)
                return
        for worker in self.all():
            if worker.child is not child:
                continue
            worker.tell_of_end()
            if worker.link is not None:
                worker.link.drain()
            worker.building = 0
            if not self._is_closing:
                with caused_by("worker_lost"):
                    self._events.worker_lost(
                        worker.role, worker.number, child.pid, child.status or 0
                    )
            if worker.role == "spare":
                self.spares.remove(worker)
            elif worker.role == "shadow":
                del self.shadows[worker.number]
            if worker.page is not None:
                worker.page.close()

    def _fenced_ended(self, worker: Worker) -> None:
        self.leaving.remove(worker)
        worker.has_ended.set()
        worker.tell_of_end()
        if worker.link is not None:
            worker.link.drain()
        if not self._is_closing:
            self._events.fenced_ended(worker.child.pid)
        if worker.page is not None:
            worker.page.close()

    def _send(self, worker: Worker, kind: int, body: bytes) -> None:
        if worker.link is not None:
            worker.link.send(kind, body)


def _grant(worker: Worker, order: GrantOrder | ShadowGrant, generation: int) -> None:
    if worker.link is not None:
        body = GRANT.pack(order.loader, order.task, generation, *order.piece)
        worker.link.send(ToLoader.GRANT, body)


def _seek(worker: Worker, order: SeekOrder | ShadowSeek) -> None:
    body = {"loader": order.loader, "block_key": order.block_key, "index": order.first_index}
    if worker.link is not None:
        worker.link.send(ToLoader.SEEK, pack(body))


def _until(loader: int, block_key: int) -> bytes:
    return pack({"loader": loader, "block_key": block_key})


def _nothing() -> None:
    """The child's end arrives from its fork server, with a status."""
