"""Whose connection is whose at a listening socket, by keys, and which of them have to go.

With keys a peer is who its key says, looked up for every packet, so that a revoked one gets nothing
from the moment on that the folder says so, and its connections are closed. Without keys, on loopback
only, the owner claims routes by what peers say.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import zmq

from federation.addresses import Endpoint, bind_error, parse_endpoint
from federation.authenticator import Authenticator, close_connection
from federation.keys import KeyDir
from federation.secure_sockets import secure_server
from msd_client.contract.errors import ProtocolError

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16_384
WATCH_MS = 1_000
"""How often the keys' folder is looked at."""


class Connection(NamedTuple):
    """One of a known peer."""

    node: str
    key: bytes = b""
    fd: int = -1
    address: str = ""


class Connections:
    """Of one ROUTER socket."""

    def __init__(self, sock: zmq.Socket[bytes], context: zmq.Context[Any], keys: KeyDir | None):
        self._sock = sock
        self._keys = keys
        self._known: dict[bytes, Connection] = {}
        self._own = None if keys is None else keys.own
        self._bound: list[Endpoint] = []
        self._unbound: list[Endpoint] = []
        self._looked_ns = time.monotonic_ns()
        self.authenticator: Authenticator | None = None
        if keys is not None:
            self.authenticator = Authenticator(context, keys.node_of)
            self.authenticator.guard(sock)
            secure_server(sock, keys.own)

    def bind(self, places: Sequence[Endpoint], key: str) -> Endpoint:
        """Listen at all of these, on one port; return the first with the port that it was given.

        Raises:
            ConfigError: One can't be bound.
        """
        for place in places:
            port = place.port or (self._bound[0].port if self._bound else 0)
            try:
                self._bind(replace(place, port=port))
            except zmq.ZMQError as error:
                raise bind_error(place, error.errno, str(error), key) from error
        return self._bound[0]

    def owner(self, route: bytes, frame: zmq.Frame) -> str | None:
        """Return the node that a frame is of; None: not known yet, the owner has to `claim`.

        Raises:
            ProtocolError: Its key is not, or no longer, listed.
        """
        known = self._known.get(route)
        if self._keys is None:
            return None if known is None else known.node
        if known is None:
            key = str(frame.get("User-Id")).encode()
            fd, address = int(frame.get(zmq.SRCFD)), str(frame.get("Peer-Address"))
            known = Connection("", key, fd, address)
        node = self._keys.node_of(known.key)
        if node is None:
            close_connection(known.fd, known.address)
            raise ProtocolError("its key is no longer listed")
        if node != known.node:
            self._keep(route, known._replace(node=node))
            if self.authenticator is not None:
                self.authenticator.admitted(known.fd)
        return node

    def claim(self, route: bytes, node: str) -> None:
        """Note whose a connection without a key is."""
        self._keep(route, Connection(node))

    def forget(self, route: bytes) -> None:
        """Note that a connection is gone."""
        self._known.pop(route, None)

    def watch(self) -> dict[bytes, str] | None:
        """Look at the keys' folder, now and then; return connections that are closed: route to why.

        None: nothing was due. A key of our own that changed is taken for new connections.
        """
        now_ns = time.monotonic_ns()
        if self._keys is None or now_ns - self._looked_ns < WATCH_MS * 1_000_000:
            return None
        self._looked_ns = now_ns
        is_changed = self._keys.refresh()
        if self._keys.own != self._own or self._unbound:
            self._bind_anew(self._keys)
        closed: dict[bytes, str] = {}
        if not is_changed:
            return closed
        for route, known in list(self._known.items()):
            if self._keys.node_of(known.key) != known.node:
                closed[route] = f"the key of {known.node} is no longer listed"
                del self._known[route]
                close_connection(known.fd, known.address)
        return closed

    def close(self) -> None:
        """End the authenticator, before the socket closes."""
        if self.authenticator is not None:
            self.authenticator.close()

    def _keep(self, route: bytes, known: Connection) -> None:
        if len(self._known) >= CONNECTIONS_MAX:
            # Of those that are gone nobody told; those that live are found again.
            self._known.clear()
        self._known[route] = known

    def _bind_anew(self, keys: KeyDir) -> None:
        """Listen with another key; connections that are there stay."""
        if not self._unbound:
            self._unbound, self._bound = self._bound, []
            for place in self._unbound:
                with contextlib.suppress(zmq.ZMQError):
                    self._sock.unbind(place.zmq)
        self._own = keys.own
        secure_server(self._sock, keys.own)
        try:
            while self._unbound:
                self._bind(self._unbound[0])
                del self._unbound[0]
        except zmq.ZMQError as error:
            log.warning("%s can't be bound again yet: %s", self._unbound[0], error)
            return
        log.info("%s listens with a new key", self._bound[0])

    def _bind(self, place: Endpoint) -> None:
        # With this option an IPv4 address would be bound as a mapped one, which fails where IPv6
        # is off; it holds for the next bind alone.
        self._sock.setsockopt(zmq.IPV6, place.is_ipv6)
        self._sock.bind(place.zmq)
        last = self._sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._bound.append(place if place.port or place.is_ipc else parse_endpoint(last, "listen"))
