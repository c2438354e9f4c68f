"""A trainer's connection to its node's daemon: requests, announcements, releases, deadlines.

One blocking SEQPACKET socket, used by the thread that iterates; releases may come from finalizers
in any thread and only append and send without waiting. Nothing forks, nothing polls.
"""

from __future__ import annotations

import array
import contextlib
import copy
import itertools
import logging
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from msd_client.contract.errors import (
    DaemonUnavailableError,
    DeadlineError,
    MsdError,
    ProtocolError,
    SessionClosedError,
    decode_error,
)
from msd_client.contract.local_messages import (
    EVENT,
    PACKET_BYTES_MAX,
    PROTOCOL_VERSION,
    READY,
    RELEASE,
    ControlMessage,
    PacketJoiner,
    RingEvent,
    check_version,
    encode_control,
)

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
EXPLAIN_TIMEOUT_S = 2.0
WAIT_TOLD_S = 0.1
"""A wait that lasts so long is told to the daemon, for the scaler and `msdctl why`."""
TIMEVAL = struct.Struct("@ll")
ANCILLARY_BYTES = socket.CMSG_SPACE(8 * 4)
"""Room for eight descriptors."""


class Session:
    """One connection. Use it from one thread; `release` may be called from any.

    Args:
        socket_path: The daemon's Unix socket.
        role: `trainer` or `control`.
        hello_s: How long a daemon that is there may take to answer; one that stands still for longer
            than CONNECT_TIMEOUT_S is told of in the log.

    Raises:
        DaemonUnavailableError: Nothing answers there.
        DeadlineError: A daemon is there and does not answer.
        VersionMismatchError: The daemon is more than one minor version away.
    """

    def __init__(self, socket_path: Path, role: str, *, hello_s: float = CONNECT_TIMEOUT_S) -> None:
        self.socket_path = socket_path
        self._sock = _connect(socket_path, hello_s)
        self._sock.setblocking(True)  # waits end by SO_RCVTIMEO; everything else is MSG_DONTWAIT
        self._buffer = bytearray(PACKET_BYTES_MAX + 1)
        self._view = memoryview(self._buffer)
        self._joiner = PacketJoiner()
        self._requests = itertools.count(1)
        self._replies: dict[int, ControlMessage] = {}
        self._unsent: deque[bytes] = deque()
        self._failure: MsdError | None = None
        """Never raised itself: a raised error holds the frames of the trainer, their views and all,
        and finalizers of slots hold this session for as long as a view lives."""
        self._pid = os.getpid()
        self._held_at_close: set[tuple[int, int]] = set()
        self.is_open = True
        self.generation = 0
        """Generation that the owner reads; unasked messages of older ones are dropped."""
        self.ready: deque[RingEvent] = deque()
        """Announced slots that were not opened yet, in order."""
        self.taken = 0
        """Batches of this generation that the owner was given: the sequence that it asks for next."""
        self.waited_ns: dict[int, int] = {}
        """What was waited for batches that are out, by sequence: told where they are given back."""
        self.notes: deque[dict[str, Any]] = deque()
        """Unasked messages that the owner has not taken yet."""
        try:
            self._greet(role, hello_s)
        except BaseException:
            self._sock.close()
            raise

    def _greet(self, role: str, hello_s: float) -> None:
        number = self._ask("hello", version=list(PROTOCOL_VERSION), role=role, pid=os.getpid())
        try:
            hello = self._answer(number, "hello", min(hello_s, CONNECT_TIMEOUT_S))
        except DeadlineError:
            if hello_s <= CONNECT_TIMEOUT_S:
                raise
            log.warning(
                "the daemon at %s does not answer: waiting for it, %g s at most",
                self.socket_path,
                hello_s,
            )
            hello = self._answer(number, "hello", hello_s - CONNECT_TIMEOUT_S)
        check_version(hello.body["ok"].get("version"), who=f"the daemon at {self.socket_path}")

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    def request(self, verb: str, timeout_s: float, **fields: Any) -> ControlMessage:
        """Send a request and wait for its answer.

        Raises:
            MsdError: What the daemon answered, or `DeadlineError`, `DaemonUnavailableError`.
        """
        return self._answer(self._ask(verb, **fields), verb, timeout_s)

    def _ask(self, verb: str, **fields: Any) -> int:
        number = next(self._requests)
        self._send_control({"id": number, "verb": verb, **fields})
        return number

    def _answer(self, number: int, verb: str, timeout_s: float) -> ControlMessage:
        deadline = time.monotonic() + timeout_s
        while number not in self._replies:
            if not self._pump(deadline - time.monotonic()):
                raise DeadlineError(
                    f"the daemon at {self.socket_path} did not answer {verb!r} within {timeout_s:g} s: "
                    "see `msdctl status`",
                    verb=verb,
                    timeout_s=timeout_s,
                )
        reply = self._replies.pop(number)
        error = reply.body.get("error")
        if error is not None:
            for fd in reply.fds:
                os.close(fd)
            raise decode_error(error["code"], error["message"], error["attributes"])
        return reply

    def check_process(self) -> None:
        """Refuse a forked child: what it took would be missing to its parent.

        Raises:
            SessionClosedError: This process is not the one that connected.
        """
        if os.getpid() != self._pid:
            raise SessionClosedError(
                "a forked child may not use its parent's loader: connect there"
            )

    def wait(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Take in messages until `is_done()`; on the deadline ask the daemon why.

        A wait that lasts is told to the daemon, once: it sees full slots and empty ones, and not
        whether a rank that holds one asks for the next.

        Raises:
            DeadlineError: Says what was being waited for, and what the daemon says of it.
            MsdError: The job failed or was stopped.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        tell_at = min(began + WAIT_TOLD_S, deadline)
        while not is_done():
            self.raise_failure()
            if self._pump(tell_at - time.monotonic()):
                continue
            if tell_at < deadline:
                tell_at = deadline
                self.notify(
                    "waiting",
                    generation=self.generation,
                    told_after_s=WAIT_TOLD_S,
                    taken=self.taken,
                )
                continue
            raise DeadlineError(
                f"waited {timeout_s:g} s for {what}: {self._explain()}", timeout_s=timeout_s
            )

    def take_in(self) -> None:
        """Take in whatever already arrived, without waiting."""
        while self._pump(0.0):
            pass

    def raise_failure(self) -> None:
        """Raise the error that ended this session, if one did."""
        if self._failure is not None:
            raise copy.copy(self._failure)

    def fail(self, error: MsdError) -> None:
        """End the session with an error; later calls raise it."""
        if self._failure is None:
            self._failure = copy.copy(error)

    def clear_failure(self) -> None:
        """Forget a failure: a new generation is starting."""
        self._failure = None

    def release(self, slot: int, sequence: int, generation: int) -> None:
        """Tell the daemon that no view of a slot is left. Never waits; any thread; finalizers."""
        if os.getpid() != self._pid or not (self.is_open or self._held_at_close):
            return
        waited_ns = self.waited_ns.pop(sequence, 0)
        packet = RingEvent(RELEASE, slot, sequence, generation, self.taken, waited_ns).encode()
        try:
            self._sock.send(packet, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._unsent.append(packet)
        except OSError:
            pass  # the daemon is gone; its end of file is read by the iterating thread
        if not self.is_open:
            self._held_at_close.discard((slot, sequence))
            if not self._held_at_close:
                self._sock.close()

    def notify(self, verb: str, **fields: Any) -> bool:
        """Send a message that nobody answers; never waits, never raises. From the owner's thread.

        Returns:
            False where it was dropped: the daemon is gone, or does not read fast enough.
        """
        if os.getpid() != self._pid or not self.is_open:
            return False
        (packet,) = encode_control({"id": 0, "verb": verb, **fields})
        try:
            self._sock.send(packet, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def close(self, held: Collection[tuple[int, int]] = ()) -> None:
        """Say goodbye; the socket closes once no view of a slot is left.

        Args:
            held: (slot, sequence) of slots that live views still hold: they are released one by one
                as before, so that nobody writes under a view.
        """
        if not self.is_open:
            return
        self.is_open = False
        if os.getpid() == self._pid:
            self._held_at_close = set(held)
            with contextlib.suppress(OSError):
                for packet in encode_control(
                    {"id": 0, "verb": "bye", "held": [list(h) for h in held]}
                ):
                    self._sock.send(packet, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        if not self._held_at_close:
            self._sock.close()

    def _send_control(self, message: dict[str, Any]) -> None:
        if not self.is_open:
            raise SessionClosedError("this loader is closed: connect again")
        self.check_process()
        self.raise_failure()
        try:
            for packet in encode_control(message):
                self._send_all(packet)
        except OSError as error:
            raise self._lost() from error

    def _send_all(self, packet: bytes) -> None:
        while True:
            try:
                self._sock.send(packet, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                writable = select.poll()
                writable.register(self._sock.fileno(), select.POLLOUT)
                writable.poll(1000)

    def _pump(self, timeout_s: float) -> bool:
        """Take in one packet; False where none came before the timeout."""
        self.check_process()
        while self._unsent:
            packet = self._unsent.popleft()
            with contextlib.suppress(OSError):
                self._send_all(packet)
        try:
            size, ancillary = self._receive(timeout_s)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost() from error
        if not size:
            raise self._lost()
        if size == EVENT.size and not ancillary and self._buffer[0] == READY:
            # The way of nearly every packet, kept short: a rank was just woken up for it.
            self.ready.append(RingEvent(*EVENT.unpack_from(self._buffer)))
            return True
        try:
            packet = bytes(self._view[:size])
            messages = self._joiner.feed(packet, _descriptors(ancillary) if ancillary else None)
        except ProtocolError as error:
            self.fail(error)
            raise
        for message in messages:
            if isinstance(message, ControlMessage):
                self._sort_in(message)
            elif message.kind == READY:
                self.ready.append(message)
        return True

    def _receive(self, timeout_s: float) -> tuple[int, list[tuple[int, int, bytes]]]:
        """Receive a packet into the buffer: the one call between a wake-up and the announcement.

        Raises:
            BlockingIOError: None came before the timeout.
        """
        buffers = [self._buffer]
        try:
            found = self._sock.recvmsg_into(buffers, ANCILLARY_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if timeout_s <= 0:
                raise
            whole_s = int(timeout_s)
            timeout = TIMEVAL.pack(whole_s, max(int((timeout_s - whole_s) * 1e6), 1))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            found = self._sock.recvmsg_into(buffers, ANCILLARY_BYTES)
        return found[0], found[1]

    def _sort_in(self, message: ControlMessage) -> None:
        body = message.body
        if body.get("generation", self.generation) < self.generation:
            return  # of a generation that this reader left
        if "note" not in body:
            self._replies[body.get("id", 0)] = message
            return
        if body["note"] == "failed":
            error = body["error"]
            self.fail(decode_error(error["code"], error["message"], error["attributes"]))
            return
        self.notes.append(body)

    def _lost(self) -> MsdError:
        error = copy.copy(self._failure) or DaemonUnavailableError(
            f"the daemon at {self.socket_path} went away: state_dict() still works; save it, see "
            "`msdctl doctor`, and connect again",
            socket=str(self.socket_path),
        )
        self.fail(error)
        return error

    def _explain(self) -> str:
        try:
            answer = self.request("explain", EXPLAIN_TIMEOUT_S).body["ok"]
            return str(answer.get("text", "the daemon does not know"))
        except MsdError as error:
            return f"the daemon does not answer ({error})"


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _connect(socket_path: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout_s)
    try:
        sock.connect(str(socket_path))
    except OSError as error:
        sock.close()
        raise DaemonUnavailableError(
            f"no daemon answers at {socket_path} ({error.strerror or error}): start one with "
            '`msd-daemon`, or connect(daemon="auto")',
            socket=str(socket_path),
        ) from error
    _OPEN_SOCKETS.add(sock)
    return sock


_OPEN_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """A trainer's forked helpers must not keep connections open after its death."""
    for inherited in list(_OPEN_SOCKETS):
        if inherited.fileno() >= 0:
            os.close(inherited.detach())


os.register_at_fork(after_in_child=_close_in_child)
