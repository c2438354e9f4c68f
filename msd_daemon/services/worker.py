"""A child process of a job as the daemon sees it: loader worker, shadow, spare or constructor."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from msd_client.contract.errors import WorkerLostError
from msd_daemon.services.fork_client import Child
from msd_daemon.services.link import ChildLink
from msd_daemon.services.processes import is_stopped
from msd_daemon.shm.mark_page import MarkPage
from msd_daemon.workers.bad_notice import BadNotice


def new_future() -> asyncio.Future[Any]:
    """Return a future of the running loop."""
    return asyncio.get_running_loop().create_future()


@dataclass
class Worker:
    """A child with its link.

    Roles: loader, constructor; shadow: reads behind the loader of its number; spare: set up, and
    opens nothing before it takes the place of a loader.
    """

    role: str
    number: int
    child: Child
    link: ChildLink | None = None
    is_ready: asyncio.Future[None] = field(default_factory=new_future)
    is_reset: asyncio.Future[None] | None = None
    statistics: asyncio.Future[dict[str, Any]] | None = None
    building: int = 0
    page: MarkPage | None = None
    """Loader workers: says what it works on, readable after its death too."""
    is_serving: bool = True
    """False from a replacement's start until it was given what it needs."""
    is_fenced: bool = False
    """Another has its place: what it still says is refused."""
    bad: BadNotice | None = None
    """Shadows: bad records of the chunk that comes next."""
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once one that was sent away is gone."""
    heard: int = 0
    """Frames that came from it."""

    @property
    def is_able(self) -> bool:
        """True where it is set up and alive."""
        return (
            self.child.status is None
            and self.is_ready.done()
            and not self.is_ready.cancelled()
            and self.is_ready.exception() is None
        )

    @property
    def can_work(self) -> bool:
        """True where it is able and nobody stopped it."""
        return self.is_able and not is_stopped(self.child.pid)

    def tell_of_end(self) -> None:
        """Tell those who wait for a word of it that none will come."""
        error = WorkerLostError(
            f"{self.role} {self.number} (pid {self.child.pid}) ended with status {self.child.status}",
            pid=self.child.pid,
        )
        for future in (self.is_ready, self.is_reset):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # of a spare nobody may be waiting
