"""The planner's process on this node: started when a job needs it, replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import Protocol

from federation.messages import Envelope
from federation.planner_link import PlannerLink
from msd_client.contract.codec import pack
from msd_client.contract.errors import PlannerUnavailableError, ProtocolError
from msd_daemon.core.lateness import STUCK_STATES, Lateness
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.services.processes import activity

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
TRIES = 3
"""One that is killed while it starts costs one of these, not a rank's join."""
DEATHS_MAX = 100
"""In the life of one daemon; a planner that dies at once must not loop for ever."""


class PlannerOwner(Protocol):
    """What the process asks of the daemon."""

    @property
    def needs_planner(self) -> bool:
        """True where jobs would stand still without one."""
        ...

    def planner_envelope(self, envelope: Envelope) -> None:
        """Take what the planner sent."""

    async def planner_replaced(self, link: PlannerLink) -> None:
        """Have the jobs go on with another planner."""

    def planner_missing(self, reason: str) -> None:
        """No planner comes up any more."""


class PlannerProcess:
    """Owns the process and the link to it.

    Args:
        owner: The daemon.
        forks: Its fork server.
        runtime_dir: Folder of the endpoint.
    """

    def __init__(self, owner: PlannerOwner, forks: ForkClient, runtime_dir: Path) -> None:
        self._owner = owner
        self._forks = forks
        self._runtime_dir = runtime_dir
        self._link: PlannerLink | None = None
        self._child: Child | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._term = 0
        self._deaths = 0
        self._lateness = Lateness()
        self._still_s = 0.0

    @property
    def pid(self) -> int | None:
        """Process id, None where none runs."""
        return None if self._child is None else self._child.pid

    def watch(self, now_ns: int, late_s: float) -> None:
        """Log a planner that stands still, and how long it did: it is waited for.

        Steps that are planned are served meanwhile, and it knows nothing of the time that it missed.
        A second planner beside it could not be told from it by those who have no lease of it.
        """
        pid = self.pid
        did = None if pid is None else activity(pid)
        if pid is None or did is None:
            return
        is_stuck = did.state in STUCK_STATES
        had_told = self._lateness.was_told(pid)
        still_s = self._lateness.look(pid, did[1:], now_ns, is_busy=is_stuck)
        if is_stuck:
            self._still_s = still_s
            if still_s >= late_s and self._lateness.tell(pid):
                log.warning(
                    "the planner (pid %d) does nothing for %.1f s, stopped or stuck: it is waited for, "
                    "planned steps are served",
                    pid, still_s,
                )  # fmt: skip
        elif had_told:
            log.warning("the planner (pid %d) goes on after %.1f s", pid, self._still_s)

    async def ready(self) -> PlannerLink:
        """Return the link to a planner, started where none runs.

        Raises:
            PlannerUnavailableError: None came up.
        """
        while self._link is None:  # one may end while its start is told of
            if self._starting is None:
                self._starting = asyncio.get_running_loop().create_task(self._start())
                self._starting.add_done_callback(self._started)
            await asyncio.shield(self._starting)
        return self._link

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # whoever waits for it has it too

    async def _start(self) -> None:
        """Start a planner; one that dies on the way costs one try."""
        for left in reversed(range(TRIES)):
            try:
                await self._try()
                return
            except PlannerUnavailableError as error:
                if not left:
                    raise
                log.warning("%s; trying again", error.message)

    async def _try(self) -> None:
        self._term += 1
        endpoint = f"ipc://{self._endpoint}"
        child = await self._forks.fork("planner")
        loop = asyncio.get_running_loop()
        child.sock.setblocking(False)
        order = pack({"endpoint": endpoint, "term": self._term})
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await loop.sock_sendall(child.sock, len(order).to_bytes(4, "little") + order)
                answer = await loop.sock_recv(child.sock, 1)
        except (TimeoutError, OSError) as error:
            self._forks.kill(child)
            child.sock.close()
            raise PlannerUnavailableError(
                f"the planner did not start ({error!r}): see the daemon's log"
            ) from error
        if answer != b"r" or child.status is not None:
            child.sock.close()
            raise PlannerUnavailableError("the planner ended while starting: see the daemon's log")
        self._child = child
        self._link = PlannerLink(
            endpoint, f"node-{os.getpid()}".encode(), self._owner.planner_envelope
        )
        self._reading = loop.create_task(self._read(self._link))

    async def _read(self, link: PlannerLink) -> None:
        try:
            await link.run()
        except ProtocolError as error:
            self._lost(error.message)

    @property
    def _endpoint(self) -> Path:
        return self._runtime_dir / f"planner-{os.getpid()}-{self._term}.sock"

    def child_ended(self, child: Child) -> bool:
        """Take the end of a child; False where it is not the planner."""
        if child is not self._child:
            return False
        self._lost(f"process {child.pid} ended with status {child.status}")
        return True

    def _lost(self, reason: str) -> None:
        """Start another planner; it replays the journals while ranks live on planned steps."""
        if self._child is not None and self._child.status is None:
            self._forks.kill(self._child)  # two must not write one journal
        self._let_go()
        if not self._owner.needs_planner:
            return
        log.warning("the planner is gone (%s): starting another", reason)
        if self._replacing is not None:
            self._replacing.cancel()  # it waited for the planner that just ended
        self._replacing = asyncio.get_running_loop().create_task(self._replace(reason))

    async def _replace(self, reason: str) -> None:
        cause: BaseException | None = None
        while self._deaths < DEATHS_MAX:
            self._deaths += 1
            try:
                link = await self.ready()
            except PlannerUnavailableError as error:
                cause = error
                continue
            await self._owner.planner_replaced(link)
            return
        self._owner.planner_missing(f"{reason}; {self._deaths} planners ended: {cause}")

    def _let_go(self) -> None:
        if self._link is not None:
            self._link.close()
            with contextlib.suppress(FileNotFoundError):
                self._endpoint.unlink()  # it was killed, and could not
        if self._reading is not None:
            self._reading.cancel()
        if self._child is not None:
            self._child.sock.close()
        self._link = self._reading = self._child = None

    def close(self) -> None:
        """End the planner with its link."""
        self._let_go()
