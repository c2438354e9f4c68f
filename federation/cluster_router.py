"""The planner's end of the control wire: one ROUTER, a reliable session with each node. Blocking.

Who a peer is comes from its key (ZAP's User-Id); without keys, which is allowed on loopback and
`ipc://` only, from its greeting. A routing id is an address to answer to, never an identity. All
methods belong to one thread.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from federation.addresses import PLANNER_PORT, bind_places, parse_endpoint
from federation.cluster_events import (
    Event,
    Message,
    PeerDown,
    PeerGreeted,
    PeerHeard,
    PeerSilent,
    PeerTraffic,
    PeerUp,
    Readable,
)
from federation.cluster_hello import PlannerHello, decode_node_hello, encode_hello
from federation.connections import WATCH_MS, Connections
from federation.core.packet import Kind, Packet
from federation.core.reliable import (
    Deliver,
    Down,
    Effect,
    Greeted,
    Heard,
    ReliableEnd,
    Silent,
    Transmit,
    Up,
)
from federation.keys import KeyDir
from federation.packets import WIRE_FRAME_BYTES_MAX, decode_packet, encode_packet
from federation.secure_sockets import check_plain, prepare_cluster_socket
from msd_client.contract.errors import ConfigError, ProtocolError, VersionMismatchError

log = logging.getLogger(__name__)

LISTEN_KEY = "planner.listen"
"""Of the configuration, for messages."""
PACKETS_PER_POLL = 2_000
"""Taken in one go: a peer that floods can't keep the owner from its work."""
REFUSALS_KEPT = 1_024
NODES_MAX = 4_096
REFUSE_NS = 1_000_000_000
"""Between two answers to a connection that gets no session."""
PACKETS_QUEUED_MAX = 256
"""In the socket, each way and connection; sessions keep less in flight, so this is the second line."""


@dataclass
class _Peer:
    """What is known of a node."""

    end: ReliableEnd
    route: bytes | None = None
    """Routing id of the connection that its session's packets last came from."""
    is_silent: bool = False
    counts: Counter[str] = field(default_factory=Counter)


class ClusterRouter:
    """Listens for nodes; hands out what they send, and sends what they shall get."""

    def __init__(self, endpoint: str, keys: KeyDir | None = None, *, hello: PlannerHello) -> None:
        """Listen.

        Args:
            endpoint: As federation.addresses has it; port 0 takes any that is free.
            keys: Who may come; None, on loopback only: everybody.
            hello: What nodes are told of this planner.

        Raises:
            ConfigError: Reached from other machines, without keys, or it can't be bound.
        """
        places = bind_places(parse_endpoint(endpoint, LISTEN_KEY, PLANNER_PORT), LISTEN_KEY)
        for place in places:
            if keys is None:
                check_plain(place, LISTEN_KEY)
        self._hello = encode_hello(hello)
        self._incarnation = secrets.randbits(64)
        self._peers: dict[str, _Peer] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._refused_ns: dict[bytes, int] = {}
        self._events: list[Event] = []
        self._due_ns: int | None = None
        self.rejected: Counter[str] = Counter()
        """Packets that were nobody's or not sound, by reason."""
        self._context = zmq.Context(io_threads=1)
        self._sock = self._context.socket(zmq.ROUTER)
        self._prepare()
        self._connections = Connections(self._sock, self._context, keys)
        self._watch_ms = None if keys is None else WATCH_MS
        try:
            self._endpoint = self._connections.bind(places, LISTEN_KEY)
        except ConfigError:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._sock, zmq.POLLIN)

    def _prepare(self) -> None:
        prepare_cluster_socket(self._sock, frame_bytes_max=WIRE_FRAME_BYTES_MAX)
        self._sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._sock.setsockopt(zmq.SNDHWM, PACKETS_QUEUED_MAX)
        self._sock.setsockopt(zmq.RCVHWM, PACKETS_QUEUED_MAX)

    @property
    def endpoint(self) -> str:
        """Where it listens, with the port that was chosen."""
        return self._endpoint.zmq

    def peers(self) -> list[str]:
        """Return the nodes that have a session, silent ones included."""
        return [node for node, peer in self._peers.items() if peer.end.is_open]

    def hellos(self) -> dict[str, dict[str, Any]]:
        """Return the facts that each node with a session gave of itself."""
        return {node: self._facts[node] for node in self.peers() if node in self._facts}

    def traffic(self) -> list[PeerTraffic]:
        """Return what went to and came from every node that ever had a session."""
        found = []
        now_ns = time.monotonic_ns()
        for node, peer in sorted(self._peers.items()):
            statistics, counts = peer.end.statistics(), peer.counts
            if not counts["sessions"]:
                continue
            found.append(
                PeerTraffic(
                    node,
                    peer.end.is_up(now_ns),
                    peer.is_silent,
                    statistics.heard_ns,
                    counts["sessions"],
                    counts["messages_in"],
                    counts["messages_out"],
                    counts["bytes_in"],
                    counts["bytes_out"],
                    statistics.queued_bytes,
                    statistics.resends,
                )
            )
        return found

    def poll(self, timeout_ms: int | None, also: Sequence[int] = ()) -> list[Event]:
        """Wait for events, at most so long; return them in order.

        Args:
            timeout_ms: None waits without end.
            also: Descriptors of the caller; `Readable` tells of them.
        """
        until_ns = None if timeout_ms is None else time.monotonic_ns() + timeout_ms * 1_000_000
        for fd in also:
            self._poller.register(fd, zmq.POLLIN)
        try:
            while True:
                now_ns = time.monotonic_ns()
                self._tick(now_ns)
                self._watch_keys()
                times = [at for at in (until_ns, self._due_ns) if at is not None]
                wait = max(0, (min(times) - now_ns + 999_999) // 1_000_000) if times else None
                if self._watch_ms is not None:
                    wait = self._watch_ms if wait is None else min(wait, self._watch_ms)
                ready = dict(self._poller.poll(0 if self._events else wait))
                if self._sock in ready:
                    self._drain()
                self._events += [Readable(fd) for fd in also if fd in ready]
                if self._events or (until_ns is not None and time.monotonic_ns() >= until_ns):
                    events, self._events = self._events, []
                    return events
        finally:
            for fd in also:
                self._poller.unregister(fd)

    def send(self, node: str, frames: Sequence[bytes]) -> bool:
        """Send a message; False where the node has no session: on `PeerUp` it is told all anew.

        Raises:
            ProtocolError: The message is larger than the contract allows.
        """
        peer = self._peers.get(node)
        if peer is None or not peer.end.is_open:
            return False
        peer.counts["messages_out"] += 1
        effects = peer.end.send(frames, time.monotonic_ns())
        self._carry_out(node, peer, effects, peer.route)
        return peer.end.is_open

    def has_room(self, node: str) -> bool:
        """False where the node takes what it is sent too slowly: hold back what can wait."""
        peer = self._peers.get(node)
        return peer is None or peer.end.has_room

    def set_hello(self, hello: PlannerHello) -> None:
        """Say this of ourselves from now on: to nodes that come, and at once to all that are there."""
        self._hello = encode_hello(hello)
        now_ns = time.monotonic_ns()
        for node, peer in self._peers.items():
            effects = peer.end.set_hello(self._hello, now_ns)
            self._carry_out(node, peer, effects, peer.route)

    def drop(self, node: str, reason: str) -> None:
        """End a node's session: what it has not taken is gone; it may come again."""
        peer = self._peers.get(node)
        if peer is not None:
            effects = peer.end.reset(reason, time.monotonic_ns())
            self._carry_out(node, peer, effects, peer.route)

    def close(self) -> None:
        """Close; acknowledged or not, nothing more is sent."""
        self._connections.close()
        self._sock.close(linger=0)
        self._context.term()

    def _tick(self, now_ns: int) -> None:
        if self._due_ns is None or now_ns < self._due_ns:
            return
        self._due_ns = None
        for node, peer in self._peers.items():
            deadline_ns = peer.end.next_deadline_ns()
            if deadline_ns is not None and now_ns >= deadline_ns:
                self._carry_out(node, peer, peer.end.tick(now_ns), peer.route)
            else:
                self._note_deadline(deadline_ns)

    def _watch_keys(self) -> None:
        for route, reason in (self._connections.watch() or {}).items():
            for node, peer in self._peers.items():
                if peer.route == route:
                    peer.route = None
                    self.drop(node, reason)

    def _note_deadline(self, deadline_ns: int | None) -> None:
        if deadline_ns is not None and (self._due_ns is None or deadline_ns < self._due_ns):
            self._due_ns = deadline_ns

    def _drain(self) -> None:
        for _ in range(PACKETS_PER_POLL):
            try:
                route, *frames = self._sock.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._receive(route.bytes, frames)

    def _receive(self, route: bytes, frames: list[zmq.Frame]) -> None:
        now_ns = time.monotonic_ns()
        node: str | None = None
        try:
            # First of all: what nobody known sent is not even looked at.
            node = self._connections.owner(route, frames[0])
            packet = decode_packet([frame.buffer for frame in frames])
            node = self._identify(node, route, packet)
            if node is not None:
                self._handle(node, route, packet, now_ns)
        except VersionMismatchError as error:
            self._reject(route, "version", error.message, now_ns)
        except ProtocolError as error:
            self._reject(route, "malformed", error.message, now_ns)
            if node in self._peers and self._peers[node].route == route:
                self.drop(node, error.message)

    def _identify(self, node: str | None, route: bytes, packet: Packet) -> str | None:
        """Return the node that a packet is of; None where it has to greet first, and was told so.

        Raises:
            ProtocolError: It is nobody's.
        """
        if node is None:
            node = self._claim(route, packet)
        if node is not None and node not in self._peers:
            if len(self._peers) >= NODES_MAX:
                raise ProtocolError(f"more than {NODES_MAX} nodes")
            end = ReliableEnd(
                self._incarnation, self._hello, is_initiator=False, now_ns=time.monotonic_ns()
            )
            self._peers[node] = _Peer(end)
        return node

    def _claim(self, route: bytes, packet: Packet) -> str | None:
        """Return whose a new connection without a key is: by its greeting, or by its session."""
        if packet.kind is Kind.HELLO:
            node = decode_node_hello(packet.frames[0]).node
        else:
            session = (packet.receiver, packet.sender)
            found = [name for name, peer in self._peers.items() if peer.end.session == session]
            if not found:
                # As a listener that never knew the session: the peer begins anew.
                own = secrets.randbits(63) + 1
                self._transmit(route, Packet(Kind.HELLO, own, packet.sender, frames=(self._hello,)))
                return None
            node = found[0]
        self._connections.claim(route, node)
        return node

    def _handle(self, node: str, route: bytes, packet: Packet, now_ns: int) -> None:
        peer = self._peers[node]
        peer.counts["bytes_in"] += sum(map(len, packet.frames))
        if packet.kind is Kind.HELLO:
            claimed = decode_node_hello(packet.frames[0]).node
            if claimed != node:
                raise ProtocolError(f"{node} greets as {claimed}: its key is another node's")
            if self._is_rival(node, peer, route, packet, now_ns):
                reason = f"node {node} is connected and alive: stop one of the two, or name it anew"
                self._reject(route, "rival", reason, now_ns)
                return
        effects = peer.end.handle(packet, now_ns)
        if peer.end.session == (packet.receiver, packet.sender):
            peer.route = route
        self._carry_out(node, peer, effects, route)

    def _is_rival(self, node: str, peer: _Peer, route: bytes, packet: Packet, now_ns: int) -> bool:
        """Tell whether a greeting is a second process's while the first one lives.

        One that was killed closed its connection, and the probe finds no way to it.
        """
        session = peer.end.session
        if session is None or packet.sender == session[1] or peer.route in (route, None):
            return False
        if not peer.end.is_up(now_ns):
            return False
        self._carry_out(node, peer, peer.end.assure(now_ns), peer.route)
        return peer.route is not None

    def _reject(self, route: bytes, reason: str, text: str, now_ns: int) -> None:
        """Count it, and tell the peer why, now and then."""
        self.rejected[reason] += 1
        if now_ns - self._refused_ns.get(route, -REFUSE_NS) < REFUSE_NS:
            return
        if len(self._refused_ns) >= REFUSALS_KEPT:
            self._refused_ns.clear()
        self._refused_ns[route] = now_ns
        log.warning("refused a peer: %s", text)
        packet = Packet(Kind.REFUSED, 1, 0, frames=(text.encode()[:1024],))
        self._transmit(route, packet)

    def _carry_out(
        self, node: str, peer: _Peer, effects: list[Effect], route: bytes | None
    ) -> None:
        for effect in effects:
            match effect:
                case Transmit(packet):
                    peer.counts["bytes_out"] += sum(map(len, packet.frames))
                    if route is not None and not self._transmit(route, packet):
                        route = None
                        peer.route = None
                case Deliver(frames):
                    peer.counts["messages_in"] += 1
                    self._events.append(Message(node, list(frames)))
                case Up(incarnation, hello):
                    peer.counts["sessions"] += 1
                    peer.is_silent = False
                    facts = self._facts[node] = decode_node_hello(hello).facts
                    self._events.append(PeerUp(node, incarnation, facts))
                case Greeted(hello):
                    self._facts[node] = decode_node_hello(hello).facts
                    self._events.append(PeerGreeted(node, self._facts[node]))
                case Down(reason):
                    peer.is_silent = False
                    self._events.append(PeerDown(node, reason))
                case Silent(for_ns):
                    peer.is_silent = True
                    self._events.append(PeerSilent(node, for_ns / 1e9))
                case Heard():
                    peer.is_silent = False
                    self._events.append(PeerHeard(node))
        self._note_deadline(peer.end.next_deadline_ns())

    def _transmit(self, route: bytes, packet: Packet) -> bool:
        """Send a packet; False where that connection is gone. A full queue drops it: it is resent."""
        try:
            self._sock.send_multipart([route, *encode_packet(packet)], zmq.DONTWAIT)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._connections.forget(route)
            return False
        return True
