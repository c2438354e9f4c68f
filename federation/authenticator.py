"""Decides who may connect: ZAP handler and gate of one ZeroMQ context, in a thread of its own.

A peer comes in with a key that is listed; everybody else gets nothing. The thread also watches the
connections of guarded sockets: of those that have not shown a key yet only so many are kept, and the
oldest one of the address that has most of them is closed, so that a flood from one place takes no
descriptors and keeps nobody else out. A key that connects again and again is slowed down.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from federation.secure_sockets import HANDSHAKE_MS, ZAP_DOMAIN

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
PENDING_MAX = 256
"""Connections that have not said anything with a key yet: a handshake takes a few round trips."""
PENDING_FAIR = 8
"""So many an address may always have: nodes that all start at once are no flood."""
PENDING_NS = (HANDSHAKE_MS + 500) * 1_000_000
"""After so long ZeroMQ has closed a connection, or it has shown its key."""
KEY_BURST = 32
KEY_REFILL_NS = 250_000_000
"""A key may connect 32 times at once and then four times a second; a flapping link needs less."""
KEYS_TRACKED_MAX = 4_096
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def close_connection(fd: int, address: str | None = None) -> None:
    """End a TCP connection that ZeroMQ holds; its I/O thread then drops it.

    Args:
        fd: Of its socket; one that is another's meanwhile is left alone.
        address: Of the peer, where known.
    """
    with contextlib.suppress(OSError):
        copy = socket.socket(fileno=os.dup(fd))
        with copy:
            if address is None or copy.getpeername()[0] == address:
                copy.shutdown(socket.SHUT_RDWR)


class _Tokens:
    """How often a key may connect."""

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[int, int]] = {}

    def take(self, key: bytes, now_ns: int) -> bool:
        tokens, since_ns = self._kept.get(key, (KEY_BURST, now_ns))
        gained = (now_ns - since_ns) // KEY_REFILL_NS
        tokens = min(KEY_BURST, tokens + gained)
        since_ns += gained * KEY_REFILL_NS
        if len(self._kept) >= KEYS_TRACKED_MAX:
            self._kept.clear()
        self._kept[key] = (max(0, tokens - 1), since_ns)
        return tokens > 0


class Authenticator:
    """Answers the ZAP requests of a context; made before its first secured socket is bound."""

    def __init__(self, context: zmq.Context[Any], node_of: Callable[[bytes], str | None]) -> None:
        """Begin.

        Args:
            context: One authenticator for each.
            node_of: Called by the thread with a peer's public key, as Z85; None: not listed.
        """
        self.counts: Counter[str] = Counter()
        """Accepted, slowed, refused and closed connections, and events of guarded sockets by name."""
        self._node_of = node_of
        self._tokens = _Tokens()
        self._pending: dict[int, tuple[str, int]] = {}
        """Descriptor to address and time of acceptance, oldest first."""
        self._handler = context.socket(zmq.REP)
        self._handler.setsockopt(zmq.LINGER, 0)
        self._handler.bind(ZAP_ENDPOINT)
        name = f"inproc://msd-authenticator-{id(self)}"
        self._orders_in = context.socket(zmq.PAIR)
        self._orders_in.bind(name)
        self._orders = context.socket(zmq.PAIR)
        self._orders.connect(name)
        self._monitors: list[zmq.Socket[bytes]] = []
        self._new_monitors: list[zmq.Socket[bytes]] = []
        self._thread = threading.Thread(target=self._run, name="authenticator", daemon=True)
        self._thread.start()

    def guard(self, sock: zmq.Socket[Any]) -> None:
        """Watch the connections that a socket accepts, from before it is bound on."""
        self._new_monitors.append(sock.get_monitor_socket(_EVENTS))
        self._orders.send(b"monitor")

    def admitted(self, fd: int) -> None:
        """A message with a listed key came over this connection: it is no part of a flood.

        May be called by any thread.
        """
        self._pending.pop(fd, None)

    @property
    def pending_count(self) -> int:
        """Connections that have not said anything with a key yet."""
        return len(self._pending)

    def close(self) -> None:
        """End the thread; the guarded sockets may be closed after."""
        self._orders.send(b"stop")
        self._thread.join()
        self._orders.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._orders_in, zmq.POLLIN)
        poller.register(self._handler, zmq.POLLIN)
        is_over = False
        while not is_over:
            for sock, _ in poller.poll():
                if sock is self._handler:
                    self._answer()
                elif sock is self._orders_in:
                    is_over = self._orders_in.recv() == b"stop"
                    while self._new_monitors:
                        self._monitors.append(self._new_monitors.pop())
                        poller.register(self._monitors[-1], zmq.POLLIN)
                else:
                    self._watch(sock)
        for sock in (self._handler, self._orders_in, *self._monitors):
            sock.close(linger=0)

    def _answer(self) -> None:
        """Answer one ZAP request (RFC 27)."""
        version, request, *rest = self._handler.recv_multipart()
        code, text, user = b"400", b"not listed", b""
        domain, address, _, mechanism, raw_key = [*rest, b"", b"", b"", b"", b""][:5]
        if version == b"1.0" and mechanism == b"CURVE" and domain == ZAP_DOMAIN.encode():
            key = z85.encode(raw_key) if len(raw_key) == 32 else b""
            node = self._node_of(key)
            if node is not None and not self._tokens.take(key, time.monotonic_ns()):
                code, text = b"300", b"connects too often"
                log.warning("node %s connects too often, from %s", node, address.decode())
            elif node is not None:
                code, text, user = b"200", b"OK", key
        outcome = {b"200": "accepted", b"300": "slowed", b"400": "refused"}[code]
        self.counts[outcome] += 1
        if code == b"400":
            log.warning("refused a connection from %s: its key is not listed", address.decode())
        self._handler.send_multipart([version, request, code, text, user, b""])

    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        event = parse_monitor_message(monitor.recv_multipart())
        kind, fd = event["event"], event["value"]
        self.counts[(zmq.Event(kind).name or str(kind)).lower()] += 1
        if kind == zmq.EVENT_ACCEPTED:
            self._accepted(fd)
        elif kind in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            self._pending.pop(fd, None)

    def _accepted(self, fd: int) -> None:
        self._pending.pop(fd, None)
        now_ns = time.monotonic_ns()
        try:
            with socket.socket(fileno=os.dup(fd)) as copy:
                self._pending[fd] = (str(copy.getpeername()[0]), now_ns)
        except (OSError, IndexError):
            return  # gone already
        if len(self._pending) <= PENDING_MAX:
            return
        pending = list(self._pending.items())
        for other, (_, since_ns) in pending:
            if now_ns - since_ns < PENDING_NS:
                break
            self._pending.pop(other, None)
        ((worst, count),) = Counter(address for _, (address, _) in pending).most_common(1)
        if len(self._pending) <= PENDING_MAX or count <= PENDING_FAIR:
            return
        oldest = next(other for other, (address, _) in pending if address == worst)
        if self._pending.pop(oldest, None) is not None:
            self.counts["closed"] += 1
            close_connection(oldest, worst)
