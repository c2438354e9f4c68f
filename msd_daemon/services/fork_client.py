"""The daemon's hold on a fork server: asks for children, learns of their ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import ForkServerLostError
from msd_daemon.services.link import ChildLink
from msd_daemon.workers.rights import Rights
from msd_daemon.workers.spawn import FromForkServer, ToForkServer


@dataclass
class Child:
    """A forked child: its role, pid, and the daemon's end of its link."""

    role: str
    pid: int
    sock: socket.socket
    status: int | None = None
    """Exit code once it ended (negative: signal)."""


class ForkClient:
    """One fork server.

    Args:
        sock: The link to it.
        on_exit: Called when a child of it was reaped.
        on_lost: Called once the server itself ended, after its children were reported.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_exit: Callable[[Child], None],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._on_lost = on_lost
        self._ids = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[Child], str, socket.socket]] = {}
        self._children: dict[int, Child] = {}
        self._on_exit = on_exit
        self._link = ChildLink(sock, self._frame, self._closed)

    async def fork(
        self, role: str, *, preload: tuple[str, ...] = (), rights: Rights | None = None
    ) -> Child:
        """Fork a child in a role and return it with the daemon's end of its link.

        Args:
            role: Of workers/spawn.py.
            preload: Modules that the fork server imports first.
            rights: Of the user whom the child becomes; None: as its fork server.

        Raises:
            ForkServerLostError: The fork server died, or was closed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        number = next(self._ids)
        future: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (future, role, ours)
        order = {"id": number, "role": role, "preload": list(preload)}
        if rights is not None:
            order["rights"] = [rights.uid, *rights.groups]
        body = pack(order)
        self._link.send(ToForkServer.FORK, body, (theirs.detach(),))
        if not self._link.is_open:
            if self._waiting.pop(number, None) is not None:
                ours.close()
            raise ForkServerLostError(
                f"fork server is gone, no {role} can be started: connect again, a job that begins "
                "has another; where none can, restart msd-daemon"
            )
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().sock.close()  # it came too late for who wanted it, and leaves by itself
            raise

    def kill(self, child: Child) -> None:
        """Kill a child; its end arrives by `on_exit`."""
        if child.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)

    @property
    def pids(self) -> list[int]:
        """Pids of living children."""
        return list(self._children)

    def close(self) -> None:
        """Let the fork server end; its children go with it."""
        self._link.close()
        self._give_up(ForkServerLostError("the fork server was closed: it starts nobody any more"))

    def _frame(self, kind: int, body: bytes) -> None:
        message = unpack_map(body)
        if kind == FromForkServer.FORKED:
            # Known before its parent goes on: its end may be the very next frame.
            future, role, sock = self._waiting.pop(message["id"])
            made = self._children[message["pid"]] = Child(role, message["pid"], sock)
            if future.cancelled():
                sock.close()  # nobody wants it: it leaves by itself
            else:
                future.set_result(made)
            return
        child = self._children.pop(message["pid"], None)
        if child is not None:
            child.status = message["status"]
            self._on_exit(child)

    def _closed(self) -> None:
        self._give_up(ForkServerLostError("fork server ended: restart msd-daemon"))
        for child in list(self._children.values()):
            child.status = -int(signal.SIGKILL)
            self._on_exit(child)
        self._children.clear()
        if self._on_lost is not None:
            self._on_lost()

    def _give_up(self, error: ForkServerLostError) -> None:
        """Tell those who wait for a child that none comes: nobody else has their end of its link."""
        for future, _, sock in self._waiting.values():
            sock.close()
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
