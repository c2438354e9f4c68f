"""The daemon's Unix socket: who may speak, and which verb goes where.

AF_UNIX SEQPACKET, mode 0660 in a 0750 folder. Peers are known by SO_PEERCRED; the first request is
`hello` with the protocol version.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msd_client.contract.errors import (
    InternalError,
    MsdError,
    PermissionDeniedError,
    ProtocolError,
    encode_error,
)
from msd_client.contract.local_messages import (
    PROTOCOL_VERSION,
    RELEASE,
    ControlMessage,
    RingEvent,
    check_version,
)
from msd_daemon.descriptors import is_readable
from msd_daemon.observe.json_log import caused_by
from msd_daemon.services.link import PacketPeer

log = logging.getLogger(__name__)

BACKLOG = 1024
SO_PEERGROUPS = 59
GROUPS_FEW = 64
GROUPS_MAX = 65536
"""NGROUPS_MAX of Linux."""
DEFERRED = object()
"""Returned by a handler that answers later by itself."""


@dataclass(eq=False)
class Client:
    """One connected peer."""

    pid: int
    uid: int
    gids: tuple[int, ...]
    peer: PacketPeer | None = None
    role: str = ""
    pidfd: int = -1
    is_gone: bool = False

    def answer(self, request: int, body: dict[str, Any]) -> None:
        """Answer a request."""
        if self.peer is not None:
            self.peer.send_control({"id": request, "ok": body})

    def refuse(self, request: int, error: MsdError) -> None:
        """Answer a request with an error."""
        if self.peer is not None:
            self.peer.send_control({"id": request, "error": encode_error(error)})


Handler = Callable[[Client, dict[str, Any]], Awaitable[Any]]


class ClientServer:
    """Accepts clients and dispatches their requests.

    Args:
        path: Socket path; an old socket file there is replaced (the daemon's lock is held).
        is_allowed: Decides by uid and gids.
        handlers: Verb to coroutine; it returns the answer or `DEFERRED`.
        notices: Verb to what takes a message that nobody answers.
        on_release: A trainer released a slot.
        on_leaving: A client says goodbye and still holds (slot, sequence) of its ring; False where
            that does not matter any more.
        on_gone: A client left; the reason is `bye` or what ended it.
    """

    def __init__(
        self,
        path: Path,
        is_allowed: Callable[[int, tuple[int, ...]], bool],
        handlers: dict[str, Handler],
        notices: dict[str, Callable[[Client, dict[str, Any]], None]],
        on_release: Callable[[Client, RingEvent], None],
        on_leaving: Callable[[Client, list[tuple[int, int]]], bool],
        on_gone: Callable[[Client, str], None],
    ) -> None:
        self._path = path
        self._is_allowed = is_allowed
        self._handlers = handlers
        self._notices = notices
        self._on_release = on_release
        self._on_leaving = on_leaving
        self._on_gone = on_gone
        self.clients: set[Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        mask = os.umask(0o117)
        try:
            self._sock.bind(str(path))
        finally:
            os.umask(mask)
        self._sock.listen(BACKLOG)
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.error("accept failed: %s: raise the limit of open files", error)
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, gid = struct.unpack("iII", raw)
        client = Client(pid, uid, (gid, *_peer_groups(sock)))
        if not self._is_allowed(uid, client.gids):
            log.warning("uid %d (pid %d) refused", uid, pid)
            client.peer = PacketPeer(sock, _ignore, _ignore, _ignore)
            error = PermissionDeniedError(
                f"uid {uid} may not use this daemon: ask its owner for access.allow_uids or allow_gids",
                uid=uid,
            )
            client.refuse(1, error)
            client.peer.close()
            return
        client.peer = PacketPeer(
            sock,
            lambda event: self._event(client, event),
            lambda message: self._request(client, message),
            lambda reason: self._gone(client, reason),
        )
        self.clients.add(client)
        if pid:
            # A forked helper of the trainer may keep the socket open after the trainer's death.
            with contextlib.suppress(OSError):
                client.pidfd = os.pidfd_open(pid)
                self._loop.add_reader(client.pidfd, self._pid_ended, client)

    def _pid_ended(self, client: Client) -> None:
        if is_readable(client.pidfd):
            self._gone(client, f"process {client.pid} ended")

    def _event(self, client: Client, event: RingEvent) -> None:
        if event.kind == RELEASE:
            self._on_release(client, event)

    def _request(self, client: Client, message: ControlMessage) -> None:
        body = message.body
        verb, number = body.get("verb"), body.get("id")
        if verb == "bye":
            held = body.get("held") or []
            if not held or not self._on_leaving(client, [(int(h[0]), int(h[1])) for h in held]):
                self._gone(client, "bye")
            return
        if not isinstance(verb, str) or not isinstance(number, int):
            self._gone(client, "a request without verb or id")
            return
        if verb == "hello":
            self._hello(client, number, body)
            return
        if verb in self._notices and client.role:
            self._notice(client, verb, body)
            return
        handler = self._handlers.get(verb)
        if handler is None or not client.role:
            what = (
                f"verb {verb!r} is unknown to this daemon" if client.role else "hello comes first"
            )
            client.refuse(number, ProtocolError(what))
            return
        task = self._loop.create_task(self._serve(client, number, handler, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _notice(self, client: Client, verb: str, body: dict[str, Any]) -> None:
        try:
            self._notices[verb](client, body)
        except (MsdError, LookupError, TypeError, ValueError) as error:
            self._gone(client, f"a malformed {verb}: {error!r}")

    def _hello(self, client: Client, number: int, body: dict[str, Any]) -> None:
        try:
            check_version(body.get("version"), who=f"the client (pid {client.pid})")
        except MsdError as error:
            client.refuse(number, error)
            return
        client.role = str(body.get("role", ""))
        if client.pid == 0 and isinstance(body.get("pid"), int):
            client.pid = body["pid"]  # another pid namespace: for people only
        client.answer(number, {"version": list(PROTOCOL_VERSION), "pid": os.getpid()})

    async def _serve(
        self, client: Client, number: int, handler: Handler, body: dict[str, Any]
    ) -> None:
        try:
            with caused_by(str(body.get("verb"))):
                answer = await handler(client, body)
            if answer is not DEFERRED:
                client.answer(number, answer)
        except MsdError as error:
            client.refuse(number, error)
        except (LookupError, TypeError, ValueError, AttributeError, OSError, TimeoutError) as error:
            log.exception("request %s of pid %d failed", body.get("verb"), client.pid)
            client.refuse(
                number, InternalError(f"{type(error).__name__}: {error}: see the daemon's log")
            )

    def _gone(self, client: Client, reason: str) -> None:
        if client.is_gone:
            return
        client.is_gone = True
        self.clients.discard(client)
        if client.pidfd >= 0:
            self._loop.remove_reader(client.pidfd)
            os.close(client.pidfd)
        assert client.peer is not None
        client.peer.close()
        with caused_by("client_gone"):
            self._on_gone(client, reason)

    def close(self) -> None:
        """Stop accepting, close all clients, remove the socket file."""
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        for client in list(self.clients):
            self._gone(client, "the daemon ends")


def _ignore(_: object) -> None:
    """A refused client has nothing to say."""


def _peer_groups(sock: socket.socket) -> tuple[int, ...]:
    # Not socket.getsockopt, whose answers hold 1024 bytes at most.
    libc = ctypes.CDLL(None)
    count = GROUPS_FEW
    while count <= GROUPS_MAX:
        found = (ctypes.c_uint32 * count)()
        size = ctypes.c_uint32(ctypes.sizeof(found))
        if not libc.getsockopt(
            sock.fileno(), socket.SOL_SOCKET, SO_PEERGROUPS, found, ctypes.byref(size)
        ):
            return tuple(found[: size.value // 4])
        count *= 32
    return ()
