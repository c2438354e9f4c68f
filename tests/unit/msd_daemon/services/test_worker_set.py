"""A worker's replacement that dies as it becomes ready."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from federation.model.job import BatchRule
from msd_client.contract.codec import pack
from msd_client.contract.errors import WorkerLostError
from msd_daemon.services.fork_client import Child
from msd_daemon.services.worker_set import WorkerSet
from msd_daemon.stores.options import StoreOptions
from msd_daemon.workers.frame_link import HEAD
from msd_daemon.workers.messages import GRANT, FromConstructor, FromLoader, Grant
from tests.support.metadata import make_job, make_spec


class Forks:
    """Gives children that are ready at once."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []

    async def fork(
        self, role: str, *, preload: tuple[str, ...] = (), rights: object = None
    ) -> Child:
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


class LoaderForks(Forks):
    """Gives loader workers that are ready at once; `theirs` is what each says."""

    async def fork(
        self, role: str, *, preload: tuple[str, ...] = (), rights: object = None
    ) -> Child:
        ours, theirs = socket.socketpair()
        body = pack({"pid": 1})
        theirs.sendall(HEAD.pack(len(body), FromLoader.READY, 0) + body)
        self.ends += [ours, theirs]
        return Child(role, 1000 + len(self.ends), ours)


class LoaderEvents(Events):
    def __init__(self) -> None:
        super().__init__()
        self.returned: list[Grant] = []
        self.shadows_returned: list[Grant] = []
        self.ended: list[int] = []

    def quarantine_orders(self) -> list[dict[str, Any]]:
        return []

    def grant_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        self.returned.append(grant)

    def shadow_returned(self, grant: Grant, *, needed_bytes: int, is_dry: bool) -> None:
        self.shadows_returned.append(grant)

    def fenced_ended(self, pid: int) -> None:
        self.ended.append(pid)


@pytest.fixture
async def loaders(tmp_path, workers):
    made, _ = workers
    forks, events = LoaderForks(), LoaderEvents()
    made._events = made._words._events = events
    made._loader_forks = forks
    made.loaders.append(await made._start_loader(0))
    await made.loaders[0].is_ready
    yield made, events, forks
    made._loader_forks = None
    for worker in [*made.loaders, *made.spares, *made.leaving, *made.shadows.values()]:
        worker.link.close()
    for end in forks.ends:
        end.close()


def say(forks: LoaderForks, worker: int, kind: FromLoader, body: bytes) -> None:
    forks.ends[2 * worker + 1].sendall(HEAD.pack(len(body), kind, 0) + body)


GRANT_BACK = Grant(1, 2, 3, 4096, 8192)


async def spoken() -> None:
    """Let the loop read what was said."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_what_a_fenced_worker_said_before_counts_and_what_it_says_later_does_not(loaders):
    made, events, forks = loaders
    say(forks, 0, FromLoader.DRY, GRANT.pack(*GRANT_BACK))
    old = made.fence("loader", 0)
    assert events.returned == [GRANT_BACK]
    say(forks, 0, FromLoader.DRY, GRANT.pack(*GRANT_BACK))
    await spoken()
    assert events.returned == [GRANT_BACK]
    assert made.refused_total == 1
    old.child.status = -9
    made.child_ended(old.child)
    assert events.ended == [old.child.pid]
    assert events.lost == []  # nobody is to replace it again
    await made.until_left()


async def test_a_spare_takes_the_place_and_its_answers_are_the_loaders(loaders):
    made, events, forks = loaders
    await made.add_spare()
    (spare,) = made.spares
    made.fence("loader", 0)
    assert await made.replace("loader", 0) == "spare"
    assert made.loaders == [spare]
    assert (spare.role, spare.number, made.spares) == ("loader", 0, [])
    say(forks, 1, FromLoader.DRY, GRANT.pack(*GRANT_BACK))
    await spoken()
    assert events.returned == [GRANT_BACK]


async def test_a_shadow_is_made_of_a_spare_and_heard_apart_until_it_takes_over(loaders):
    made, events, forks = loaders
    await made.add_spare()
    await made.add_shadow(0)
    assert made.spares == []
    say(forks, 1, FromLoader.DRY, GRANT.pack(*GRANT_BACK))
    await spoken()
    assert (events.returned, events.shadows_returned) == ([], [GRANT_BACK])
    shadow = made.take_standby(0, is_shadow=True)
    assert made.loaders == [shadow]
    assert made.shadows == {}
    say(forks, 1, FromLoader.DRY, GRANT.pack(*GRANT_BACK))
    await spoken()
    assert events.returned == [GRANT_BACK]


async def test_a_dead_spare_is_not_taken_and_leaves_the_list(loaders):
    made, events, _ = loaders
    await made.add_spare()
    (spare,) = made.spares
    spare.child.status = -9
    assert made.take_standby(0) is None
    made.child_ended(spare.child)
    assert made.spares == []
    assert events.lost == [spare.child.pid]


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
