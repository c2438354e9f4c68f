"""The fork server: a process without threads that forks children on request.

The daemon forks the first one before it has a loop or a ZeroMQ context. A fork server can fork
another that imports heavy libraries first (its children then share those pages), loader workers,
data constructors and the planner. Children die with their fork server (PR_SET_PDEATHSIG), and the
fork server leaves when the daemon's end of its link closes; so nothing outlives the daemon.

Requests (frames, msgpack bodies): FORK {id, role, preload, rights}, one descriptor: the child's link.
Answers: FORKED {id, pid}, EXITED {pid, status}, status as os.waitstatus_to_exitcode gives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum

from msd_client.contract.codec import pack, unpack_map
from msd_daemon.workers.frame_link import FrameLink, LinkClosed
from msd_daemon.workers.process_name import set_process_name

PR_SET_PDEATHSIG = 1


class ToForkServer(IntEnum):
    """Orders to a fork server."""

    FORK = 1


class FromForkServer(IntEnum):
    """Answers of a fork server."""

    FORKED = 1
    EXITED = 2


def _run_loader(sock: socket.socket) -> None:
    from msd_daemon.workers.loader_main import run

    run(sock)


def _run_constructor(sock: socket.socket) -> None:
    from msd_daemon.workers.constructor_main import run

    run(sock)


def _run_exchange(sock: socket.socket) -> None:
    from msd_daemon.workers.exchange_main import run

    run(sock)


def _run_planner(sock: socket.socket) -> None:
    from federation.planner_service import run

    run(sock)


def _run_fork_server(sock: socket.socket) -> None:
    ForkServer(sock).serve()


ROLES: dict[str, Callable[[socket.socket], None]] = {
    "loader": _run_loader,
    "shadow": _run_loader,
    "spare": _run_loader,
    "constructor": _run_constructor,
    "exchange": _run_exchange,
    "planner": _run_planner,
    "fork_server": _run_fork_server,
}


def fork_first_server(close_fds: tuple[int, ...] = ()) -> tuple[socket.socket, int]:
    """Fork the first fork server from a process without threads; return its link and pid.

    Call it before any event loop, ZeroMQ context or thread exists. `close_fds` are the daemon's
    alone: a copy of its lock in a child would outlive a killed daemon.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        for fd in close_fds:
            os.close(fd)
        _become("fork_server", theirs, parent)
    theirs.close()
    return ours, pid


def _become(role: str, sock: socket.socket, parent: int, rights: list[int] | None = None) -> None:
    """Turn a freshly forked process into `role` and never return.

    Args:
        role: Of ROLES.
        sock: Its link.
        parent: Whose death is its own.
        rights: uid and groups of the user whom it becomes first, the first group his own.
    """
    status = 1
    try:
        if rights is not None:
            from msd_daemon.workers.rights import Rights

            Rights(rights[0], rights[1], tuple(rights[1:])).take()
        _die_with(parent)  # behind the change of uid, which forgets it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        set_process_name(f"msd-{role}")
        rest_collector()
        ROLES[role](sock)
        status = 0
    except LinkClosed:
        status = 0
    except BaseException:  # noqa: BLE001 - the child's main: report and leave
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def rest_collector() -> None:
    """Let the cyclic collector rest: these processes make many objects and hardly any cycle.

    What exists now is never looked at again (a forked child keeps sharing it), and a collection
    comes every 50,000 objects instead of every 700.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _die_with(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


class ForkServer:
    """Serves one link: forks on request, reaps, reports."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._link = FrameLink(sock)
        self._children: set[int] = set()

    def serve(self) -> None:
        """Serve until the daemon's end closes; then end the children.

        Raises:
            LinkClosed: The link closed (after the children were ended).
        """
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        poller = select.poll()
        for fd in (self._sock.fileno(), read_fd):
            poller.register(fd, select.POLLIN)
        try:
            while True:
                readable = [fd for fd, _ in poller.poll()]
                if read_fd in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(read_fd, 4096)
                    self._reap()
                while self._link.pending():
                    self._handle(*self._link.receive())
        finally:
            for pid in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _handle(self, kind: int, body: bytes, fds: list[int]) -> None:
        assert kind == ToForkServer.FORK
        request = unpack_map(body)
        for module in request.get("preload", []):
            importlib.import_module(module)
        child_sock = socket.socket(fileno=fds[0])
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._sock.close()
            _become(request["role"], child_sock, parent, request.get("rights"))
        child_sock.close()
        self._children.add(pid)
        self._link.send(FromForkServer.FORKED, pack({"id": request["id"], "pid": pid}))

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._children.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            self._link.send(FromForkServer.EXITED, pack({"pid": pid, "status": code}))
