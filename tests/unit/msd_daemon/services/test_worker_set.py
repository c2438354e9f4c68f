"""A worker's replacement that dies as it becomes ready."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from federation.model.job import BatchRule
from msd_client.contract.errors import WorkerLostError
from msd_daemon.services.fork_client import Child
from msd_daemon.services.worker_set import WorkerSet
from msd_daemon.stores.options import StoreOptions
from msd_daemon.workers.frame_link import HEAD
from msd_daemon.workers.messages import FromConstructor
from tests.support.metadata import make_job, make_spec


class Forks:
    """Gives children that are ready at once."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []

    async def fork(self, role: str, *, preload: tuple[str, ...] = ()) -> Child:
        ours, theirs = socket.socketpair()
        theirs.sendall(HEAD.pack(0, FromConstructor.READY, 0))
        self.ends += [ours, theirs]
        return Child(role, 1000 + len(self.ends), ours)

    def kill(self, child: Child) -> None:
        """Nothing runs."""


class Events:
    def __init__(self) -> None:
        self.lost: list[int] = []

    def worker_lost(self, role: str, number: int, pid: int, status: int) -> None:
        self.lost.append(pid)


@pytest.fixture
async def workers(tmp_path):
    forks, events = Forks(), Events()
    memory = os.memfd_create("msd-test")
    pool = SimpleNamespace(nbytes=4096, fd_read_only=memory, fd_read_write=memory)
    made = WorkerSet(forks, events)
    await made.start(
        make_job([make_spec("a")], BatchRule(4, 8)), pool, loaders=0, constructors=1,
        index_dir=tmp_path, stores=StoreOptions(), preload=(),
    )  # fmt: skip
    yield made, events
    made.close()
    os.close(memory)
    for end in forks.ends:
        end.close()


def die(workers: WorkerSet) -> None:
    child = workers.constructors[0].child
    child.status = -9
    workers.child_ended(child)


async def test_a_worker_is_replaced(workers):
    made, events = workers
    die(made)
    await made.replace("constructor", 0)
    assert made.constructors[0].child.status is None
    assert len(events.lost) == 1


async def test_one_that_dies_in_the_turn_in_which_it_is_ready_counts_as_dead(workers):
    made, events = workers
    die(made)
    dead: Any = made.constructors[0]

    def watch() -> None:
        worker = made.constructors[0]
        if worker is not dead and worker.is_ready.done():
            die(made)  # whoever waits for it has yet to go on
        else:
            asyncio.get_running_loop().call_soon(watch)

    asyncio.get_running_loop().call_soon(watch)
    with pytest.raises(WorkerLostError, match="as soon as it was ready"):
        await made.replace("constructor", 0)
    assert len(events.lost) == 2
