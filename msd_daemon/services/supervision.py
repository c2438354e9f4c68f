"""Watches the workers of one job: who is late, and who has grown too large.

Looks come with the daemon's tick. Nothing here replaces anybody: findings go to the owner.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from federation.model.job import ResolvedJob
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.lateness import STUCK_STATES, Lateness
from msd_daemon.core.watermark import Watermark
from msd_daemon.services.generation import Generation
from msd_daemon.services.processes import activity, private_bytes
from msd_daemon.services.worker import Worker
from msd_daemon.services.worker_set import WorkerSet
from msd_daemon.shm.mark_page import Mark, MarkState

USER_START_S = 120.0
"""A user's process may take so long to import what it imports (transforms.user_process)."""
USER_TRIES = 2
"""A call of the user's code that dies is made once more."""


class Late(NamedTuple):
    """A worker that does nothing although it has work."""

    worker: Worker
    still_s: float
    what: str
    """What it seems to be at, for people."""


@dataclass
class Large:
    """A loader worker above its mark."""

    number: int
    private_bytes: int


class Supervision:
    """Of one job."""

    def __init__(self, job: ResolvedJob, config: DaemonConfig) -> None:
        self._late_s = config.late_s
        self._store_s = max(config.late_s, config.stores.deadline_s)
        self._user_s = max(config.late_s, USER_TRIES * job.limits.sample_s + USER_START_S)
        self._lateness = Lateness()
        self.watermark = Watermark(config.worker_memory_bytes)

    def late(self, workers: WorkerSet, generation: Generation, now_ns: int) -> list[Late]:
        """Return the workers whose stall is due a consequence; each stall once."""
        found = []
        awaited = generation.awaited_workers()
        for worker in workers.all():
            if not worker.is_able or worker.role == "spare":
                continue
            number = worker.number
            if worker.role == "loader":
                is_busy, is_awaited = generation.is_worker_busy(number), number in awaited
            elif worker.role == "shadow":
                is_busy, is_awaited = generation.is_shadow_busy(number), True
            else:
                is_busy, is_awaited = worker.building > 0, True
            late = self._look(worker, now_ns, is_busy=is_busy, is_awaited=is_awaited)
            if late is not None:
                found.append(late)
        return found

    def _look(self, worker: Worker, now_ns: int, *, is_busy: bool, is_awaited: bool) -> Late | None:
        pid = worker.child.pid
        did = activity(pid)
        if did is None:
            return None
        mark = None if worker.page is None else worker.page.mark()
        signs = (worker.heard, did[1:], None if mark is None else (mark.sequence, mark.state))
        still_s = self._lateness.look(pid, signs, now_ns, is_busy=is_busy)
        if not is_awaited or still_s < self._patience_s(did.state, mark):
            return None
        if not self._lateness.tell(pid):
            return None
        return Late(worker, still_s, _named(did.state))

    def _patience_s(self, state: str, mark: Mark | None) -> float:
        """Return how long a worker may stand still: others have limits of their own."""
        if state in STUCK_STATES:
            return self._late_s
        if mark is not None and mark.state in (MarkState.RECORD, MarkState.WINDOW):
            return float("inf")  # limits.sample_s is the watchdog's
        if mark is not None and mark.state == MarkState.AWAY:
            return self._user_s
        return self._store_s

    def large(self, workers: WorkerSet) -> list[Large]:
        """Return the loader workers that are to be replaced for their size."""
        now_s = time.monotonic()
        sizes = [(w.number, private_bytes(w.child.pid)) for w in workers.loaders if w.is_able]
        return [
            Large(number, size)
            for number, size in sizes
            if self.watermark.is_due(number, size, now_s)
        ]

    def forget(self, pid: int) -> None:
        """A worker ended, or is nobody's concern any more."""
        self._lateness.forget(pid)


def _named(state: str) -> str:
    if state in "Tt":
        return "it is stopped by a signal or a debugger"
    if state == "D":
        return "it is stuck in a call of the kernel (a disk, a network file system?)"
    return "it waits for something"
