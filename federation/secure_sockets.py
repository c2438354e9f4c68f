"""Options of sockets between nodes: limits, heartbeats, and CURVE where keys are given.

Used by the control wire and by the exchange: a listening socket names a ZAP domain, so that the
authenticator of its context (federation.authenticator) decides who comes in; a connecting one pins
the key of whom it connects to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import zmq

from federation.addresses import Endpoint
from msd_client.contract.errors import ConfigError

ZAP_DOMAIN = "msd"
HANDSHAKE_MS = 3_000
HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 5_000
CONNECT_TIMEOUT_MS = 2_000
CURVE_BYTES = 64
"""What CURVE adds to a frame (33 bytes: command, nonce, tag, flags), with room to spare."""
RECONNECT_MS = 100
RECONNECT_MAX_MS = 2_000


class CurveKeys(NamedTuple):
    """A CURVE25519 key pair, each as 40 bytes of Z85."""

    public: bytes
    secret: bytes


def prepare_cluster_socket(sock: zmq.Socket[Any], *, frame_bytes_max: int) -> None:
    """Set what every socket between nodes has: limits, heartbeats, time-outs.

    Args:
        sock: Before it is bound or connected.
        frame_bytes_max: A peer that sends a larger frame is disconnected; it is never stored.
    """
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max + CURVE_BYTES)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    sock.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)


def secure_server(sock: zmq.Socket[Any], own: CurveKeys, domain: str = ZAP_DOMAIN) -> None:
    """Make a socket, before it is bound, take CURVE peers that its domain's authenticator knows."""
    sock.setsockopt_string(zmq.ZAP_DOMAIN, domain)
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, own.public)


def secure_client(sock: zmq.Socket[Any], own: CurveKeys, server_public: bytes) -> None:
    """Make a socket, before it is connected, speak CURVE with the holder of that key only."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, own.public)


def check_plain(endpoint: Endpoint, key: str) -> None:
    """Check that an endpoint needs no keys: only this machine reaches it.

    Raises:
        ConfigError: It is reached from other machines.
    """
    if not endpoint.is_loopback:
        raise ConfigError(
            f"{key}: {endpoint} is reached from other machines and no keys are given: run `msdctl keys "
            "generate NAME` for each node and planner, and set federation.keys_dir; without keys "
            "only 127.0.0.1, [::1] and ipc:// are used",
            endpoint=str(endpoint),
        )
