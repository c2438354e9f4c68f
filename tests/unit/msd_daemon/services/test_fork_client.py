"""Who asked for a child and does not get it, or does not want it any more, leaves no socket behind."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import ForkServerLostError
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.workers.frame_link import FrameLink
from msd_daemon.workers.spawn import FromForkServer


class Server:
    """The fork server's end, played by the test: it forks nobody."""

    def __init__(self, sock: socket.socket) -> None:
        self.link = FrameLink(sock)
        self.ends: list[socket.socket] = []

    def take(self) -> int:
        """Take one order; return its number."""
        _, body, fds = self.link.receive()
        self.ends += [socket.socket(fileno=fd) for fd in fds]
        return int(unpack_map(body)["id"])

    def tell(self, number: int, pid: int) -> None:
        self.link.send(FromForkServer.FORKED, pack({"id": number, "pid": pid}))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Server]]:
    ours, theirs = socket.socketpair()
    server = Server(theirs)
    yield ours, server
    for end in (ours, theirs, *server.ends):
        end.close()


def is_left(end: socket.socket) -> bool:
    """True where the other end is closed."""
    end.settimeout(20)
    return end.recv(1) == b""


async def asked(client: ForkClient, server: Server) -> tuple[asyncio.Task[Child], int]:
    task = asyncio.ensure_future(client.fork("spare"))
    await asyncio.sleep(0)
    return task, await asyncio.to_thread(server.take)


async def test_a_child_comes_with_our_end_of_its_link(ends: tuple[socket.socket, Server]) -> None:
    ours, server = ends
    client = ForkClient(ours, lambda child: None)
    task, number = await asked(client, server)
    server.tell(number, 77)
    child = await task
    assert (child.role, child.pid, child.status) == ("spare", 77, None)
    server.ends[0].sendall(b"x")
    assert child.sock.recv(1) == b"x"
    child.sock.close()
    client.close()


async def test_a_client_that_closes_leaves_nobody_waiting_and_no_socket(
    ends: tuple[socket.socket, Server],
) -> None:
    """Seen: a job that ended while its spare was being forked kept a socket for good."""
    ours, server = ends
    before = len(os.listdir("/proc/self/fd")) - 1  # its own end of the server's link goes, too
    client = ForkClient(ours, lambda child: None)
    waiting, _ = await asked(client, server)
    given_up, _ = await asked(client, server)
    given_up.cancel()
    await asyncio.sleep(0)
    client.close()
    with pytest.raises(ForkServerLostError, match="was closed"):
        await waiting
    assert [is_left(end) for end in server.ends] == [True, True]
    assert len(os.listdir("/proc/self/fd")) == before + len(server.ends)
    with pytest.raises(ForkServerLostError):
        await client.fork("spare")


@pytest.mark.parametrize("is_late", [False, True], ids=["before it came", "as it came"])
async def test_a_child_that_nobody_wants_any_more_is_let_go(
    ends: tuple[socket.socket, Server], is_late: bool
) -> None:
    ours, server = ends
    client = ForkClient(ours, lambda child: None)
    task, number = await asked(client, server)
    if is_late:
        # The frame is read and the future done, but the task has not gone on yet.
        taken = client._frame

        def frame(kind: int, body: bytes) -> None:
            taken(kind, body)
            task.cancel()

        client._link._on_frame = frame
    else:
        task.cancel()
    server.tell(number, 77)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(is_left, server.ends[0])
    assert client.pids == [77], "its end is still heard of"
    client.close()
