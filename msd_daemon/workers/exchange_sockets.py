"""The ZeroMQ sockets of an exchange process, with their options in one place."""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from federation.exchange_messages import FRAME_BYTES_MAX, REQUEST_BYTES_MAX
from federation.secure_sockets import (
    CurveKeys,
    prepare_cluster_socket,
    secure_client,
    secure_server,
)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "msd-exchange"
BACKLOG = 128

_MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_FAULTS = {
    zmq.EVENT_DISCONNECTED: "the link is lost",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refuses this node's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "its key is not the one that is known, or it is no exchange",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it broke the handshake off",
}


class LinkEvent(NamedTuple):
    """A link came up, or why it is down."""

    is_up: bool
    reason: str


def _prepare(sock: zmq.Socket[bytes], endpoint: str) -> None:
    prepare_cluster_socket(sock, frame_bytes_max=FRAME_BYTES_MAX)
    if endpoint.count(":") > 2:
        sock.setsockopt(zmq.IPV6, 1)


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], listen: str, keys: CurveKeys | None
) -> zmq.Socket[bytes]:
    """Return the socket that peers ask.

    Raises:
        zmq.ZMQError: The endpoint cannot be bound.
    """
    sock = context.socket(zmq.ROUTER)
    _prepare(sock, listen)
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    sock.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
    sock.setsockopt(zmq.BACKLOG, BACKLOG)
    if keys is not None:
        secure_server(sock, keys, ZAP_DOMAIN)
    try:
        sock.bind(listen)
    except zmq.ZMQError:
        sock.close()
        raise
    return sock


def is_readable(sock: zmq.Socket[bytes]) -> bool:
    """Return whether a message is there; an exception for none would cost more than most messages."""
    events = sock.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def bind_zap(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return the socket on which the library asks whose keys are listed (RFC 27)."""
    sock = context.socket(zmq.REP)
    sock.setsockopt(zmq.LINGER, 0)
    sock.bind(ZAP_ENDPOINT)
    return sock


def answer_zap(frames: list[bytes], is_listed: bool) -> list[bytes]:
    """Return the reply to a question of the library's.

    Args:
        frames: Version, request, domain, address, identity, mechanism, then credentials.
        is_listed: Whether the key is one of a peer's.
    """
    version, request = frames[:2]
    if not is_listed:
        return [version, request, b"400", b"key is not listed", b"", b""]
    return [version, request, b"200", b"OK", zap_key(frames), b""]


def zap_key(frames: list[bytes]) -> bytes:
    """Return the client's public key as Z85, empty where it is no CURVE client of this domain."""
    is_sound = (
        len(frames) == 7
        and frames[2] == ZAP_DOMAIN.encode()
        and frames[5] == b"CURVE"
        and len(frames[6]) == 32
    )
    return z85.encode(frames[6]) if is_sound else b""


class PeerSocket:
    """The socket that asks one peer, and what becomes of its link.

    Args:
        endpoint: Of the peer's exchange.
        public_key: Of the peer, Z85; None without keys.
        keys: This node's.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        public_key: bytes | None,
        keys: CurveKeys | None,
    ) -> None:
        self.endpoint = endpoint
        self.public_key = public_key
        self.sock = context.socket(zmq.DEALER)
        _prepare(self.sock, endpoint)
        # What is asked for while no link stands would come late: it is asked for again.
        self.sock.setsockopt(zmq.IMMEDIATE, 1)
        if keys is not None and public_key is not None:
            secure_client(self.sock, keys, public_key)
        self.monitor = self.sock.get_monitor_socket(_MONITORED)
        self.sock.connect(endpoint)

    def events(self) -> list[LinkEvent]:
        """Return what became of the link since the last call."""
        events = []
        while self.monitor.poll(0):
            number = recv_monitor_message(self.monitor)["event"]
            if number == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                events.append(LinkEvent(True, ""))
            elif number in _FAULTS:
                events.append(LinkEvent(False, _FAULTS[zmq.Event(number)]))
        return events

    def close(self) -> None:
        """Close the link; what is under way is lost."""
        self.sock.disable_monitor()
        self.monitor.close(0)
        self.sock.close(0)
