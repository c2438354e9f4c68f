"""What workers say, decoded and handed to the owner of the job's workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from msd_client.contract.codec import unpack_map
from msd_client.contract.errors import decode_error
from msd_daemon.services.worker import Worker
from msd_daemon.services.worker_events import ShadowChunk, WorkerEvents
from msd_daemon.workers.bad_notice import BadNotice, decode_bad
from msd_daemon.workers.messages import (
    FILLED,
    GRANT,
    ChunkNotice,
    FromConstructor,
    FromLoader,
    Grant,
    decode_chunk,
)

log = logging.getLogger(__name__)

OnFrame = Callable[[int, bytes], None]
"""Takes the kind of a frame and its body."""


class WorkerWords:
    """Hears all workers of a job.

    Args:
        events: Told of what they say.
        kill: Ends a worker that cannot go on and is not needed.
    """

    def __init__(self, events: WorkerEvents, kill: Callable[[Worker], None]) -> None:
        self._events = events
        self._kill = kill
        self.refused_total = 0
        """Words of fenced workers that nobody took."""

    def hear(self, worker: Worker) -> OnFrame:
        """Return what takes the frames of a worker of any role."""
        take = self._of_constructor if worker.role == "constructor" else self._of_loader

        def on_frame(kind: int, body: bytes) -> None:
            worker.heard += 1
            if worker.is_fenced:
                self.refused_total += 1
            else:
                take(worker, kind, body)

        return on_frame

    def _of_loader(self, worker: Worker, kind: int, body: bytes) -> None:
        match FromLoader(kind):
            case FromLoader.CHUNK:
                self._chunk(worker, decode_chunk(body))
            case FromLoader.BAD:
                self._bad(worker, decode_bad(unpack_map(body, bytes_max=len(body))))
            case FromLoader.LOST:
                self._events.shard_lost(unpack_map(body))
            case FromLoader.TOO_SMALL:
                grant = Grant(*GRANT.unpack(body))
                self._returned(worker, grant, needed_bytes=grant.size_bytes, is_dry=False)
            case FromLoader.DRY:
                grant = Grant(*GRANT.unpack(body))
                self._returned(worker, grant, needed_bytes=0, is_dry=True)
            case FromLoader.READY:
                self._loader_ready(worker, unpack_map(body))
            case FromLoader.FAILED:
                self._loader_failed(worker, unpack_map(body))
            case FromLoader.RESET_DONE:
                _settle(worker.is_reset, None)
            case FromLoader.STATISTICS:
                _settle(worker.statistics, unpack_map(body))

    def _chunk(self, worker: Worker, notice: ChunkNotice) -> None:
        if worker.role == "shadow":
            bad, worker.bad = worker.bad, None
            self._events.shadow_ready(ShadowChunk(notice, bad))
        else:
            self._events.chunk_published(notice)

    def _bad(self, worker: Worker, notice: BadNotice) -> None:
        if worker.role == "shadow":
            worker.bad = notice
        else:
            self._events.bad_records(notice)

    def _returned(self, worker: Worker, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        if worker.role == "shadow":
            self._events.shadow_returned(grant, needed_bytes=needed_bytes, is_dry=is_dry)
        else:
            self._events.grant_returned(grant, needed_bytes=needed_bytes, is_dry=is_dry)

    def _loader_ready(self, worker: Worker, message: dict[str, Any]) -> None:
        if "copied" in message:
            self._events.copied(message["copied"])
        else:
            _settle(worker.is_ready, None)

    def _loader_failed(self, worker: Worker, message: dict[str, Any]) -> None:
        error = decode_error(**message["error"])
        if message["loader"] < 0 and not worker.is_ready.done():
            worker.is_ready.set_exception(error)
            return
        if worker.role == "shadow":  # the active loader will tell the same where it comes there
            log.warning("shadow of loader worker %d: %s", worker.number, error.message)
            self._kill(worker)
            return
        self._events.loader_failed(error)

    def _of_constructor(self, worker: Worker, kind: int, body: bytes) -> None:
        match FromConstructor(kind):
            case FromConstructor.FILLED:
                worker.building -= 1
                ring, slot, sequence, generation, payload_bytes, _ = FILLED.unpack(body)
                self._events.slot_filled(ring, slot, sequence, generation, payload_bytes)
            case FromConstructor.READY:
                _settle(worker.is_ready, None)
            case FromConstructor.FAILED:
                worker.building -= 1
                error = decode_error(**unpack_map(body)["error"])
                self._events.build_failed(error)
            case FromConstructor.DROPPED:
                _settle(worker.is_reset, None)


def _settle(future: asyncio.Future[Any] | None, value: object) -> None:
    if future is not None and not future.done():
        future.set_result(value)
