"""Processes of a job that wait for the death of others: spares, and the shadows' own.

Kept up in the background, never while anybody waits: a spare is set up (libraries, tokenizer) and
opens nothing; a shadow process stands behind each loader worker that reads a critical source.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Protocol

from msd_client.contract.errors import ForkServerLostError, MsdError, WorkerLostError
from msd_daemon.core.deaths import BackOff
from msd_daemon.services.generation import Generation
from msd_daemon.services.worker_set import WorkerSet

log = logging.getLogger(__name__)

QUIET_S = 1.0
"""Behind a death: what took the dead one's place needs the CPU more than who will stand by next."""


class StandbyOwner(Protocol):
    """Whose workers they stand behind."""

    @property
    def generation(self) -> Generation | None:
        """The one that runs."""
        ...

    @property
    def is_over(self) -> bool:
        """True where nobody is to be served any more."""
        ...


class Standby:
    """Of one job.

    Args:
        owner: The job's session.
        workers: Its workers.
        spares: How many are to wait.
    """

    def __init__(self, owner: StandbyOwner, workers: WorkerSet, spares: int) -> None:
        self._owner = owner
        self._workers = workers
        self._spares = spares
        self._task: asyncio.Task[None] | None = None
        self._back_off = BackOff()
        self._not_before_s = 0.0
        self._told: str = ""

    def fill(self) -> None:
        """Start what is missing, in the background; idempotent."""
        is_busy = self._task is not None and not self._task.done()
        if is_busy or self._owner.is_over or time.monotonic() < self._not_before_s:
            return
        if self._missing_shadows() or len(self._workers.spares) < self._spares:
            self._task = asyncio.get_running_loop().create_task(self._fill())

    def used(self) -> None:
        """A worker died, and what stood by may have its place: another is started a little later."""
        self._wait(QUIET_S)

    def _wait(self, delay_s: float) -> None:
        self._not_before_s = time.monotonic() + delay_s
        asyncio.get_running_loop().call_later(delay_s, self.fill)

    def lost(self, role: str) -> None:
        """One of them ended: the next one waits the longer the more often that is so."""
        self._wait(self._back_off.delay_s(role, time.monotonic()))

    async def settled(self) -> None:
        """Return once nothing is being started."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def close(self) -> None:
        """Start nothing more."""
        if self._task is not None:
            self._task.cancel()

    def _missing_shadows(self) -> list[int]:
        generation = self._owner.generation
        if generation is None:
            return []
        wanted = generation.readahead.shadows.workers
        return sorted(wanted - self._workers.shadows.keys())

    async def _fill(self) -> None:
        with contextlib.suppress(ForkServerLostError):  # the job is told of that elsewhere
            try:
                for number in self._missing_shadows():
                    await self._workers.add_shadow(number)
                    generation = self._owner.generation
                    if generation is not None and self._workers.has_shadow(number):
                        generation.shadow_came(number)
                while len(self._workers.spares) < self._spares and not self._owner.is_over:
                    await self._workers.add_spare()
            except WorkerLostError:
                return  # its end was heard of, and `lost` has the next one started
            except (MsdError, TimeoutError, OSError) as error:
                if str(error) != self._told:
                    self._told = str(error)
                    log.warning("no spare worker could be started: %s", error)
                self.lost("standby")
