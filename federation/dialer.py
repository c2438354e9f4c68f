"""Keeps a connecting socket connected with CURVE keys that both ends accept; asyncio.

ZeroMQ never tries again once a server refused a key, and for ever where the server shows another
one than was expected. So each failed handshake is met here: disconnect, wait a little longer each
time, look at the keys' folder, take the next pair of keys that may be meant, connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from federation.addresses import Endpoint, resolve
from federation.keys import KeyDir
from federation.secure_sockets import CurveKeys, secure_client
from msd_client.contract.errors import ConfigError

log = logging.getLogger(__name__)

WAIT_S = 0.25
WAIT_MAX_S = 4.0
WATCH_S = 1.0
_FAILED: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "does not list the key of this node",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "shows another key than the one that is listed for it",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "ended the handshake: it may hold another "
    "key than the one that is listed for it",
}
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
)


class Dialer:
    """Of one DEALER that connects to one named server."""

    def __init__(
        self,
        sock: zmq.asyncio.Socket,
        endpoint: Endpoint,
        server: str,
        keys: KeyDir,
        on_refused: Callable[[str], None],
    ) -> None:
        """Begin to connect at `run`.

        Args:
            sock: Its owner reads it and sends.
            endpoint: Where the server listens.
            server: Its name: one of the keys listed for it has to be its.
            keys: Of this node.
            on_refused: Told why there is no connection.
        """
        self.counts: Counter[str] = Counter()
        """Events of the socket."""
        self._sock = sock
        self._endpoint = endpoint
        self._server = server
        self._keys = keys
        self._on_refused = on_refused
        self._monitor = sock.get_monitor_socket(_EVENTS)
        self._used: tuple[CurveKeys, bytes] | None = None
        self._called: Endpoint | None = None
        self._places: list[Endpoint] = []
        self._attempt = 0
        self._place = 0
        self._failures = 0
        self._failed = asyncio.Event()

    async def run(self, on_shut_out: Callable[[str], None]) -> None:
        """Connect, and again after each failed handshake or change of keys; until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_socket())
            group.create_task(self._dial(on_shut_out))

    def close(self) -> None:
        """Close the monitor, before the socket closes."""
        self._sock.disable_monitor()
        self._monitor.close(linger=0)

    async def _watch_socket(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            kind = event["event"]
            self.counts[(zmq.Event(kind).name or str(kind)).lower()] += 1
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failures = 0
            elif kind == zmq.EVENT_CONNECT_RETRIED:
                self._place += 1
                if len(self._places) > 1 or not self._endpoint.is_address:
                    # Another address of the name may answer, or the name may have moved.
                    self._failed.set()
            elif kind in _FAILED:
                self._failures += 1
                self._attempt += 1
                self._on_refused(f"{self._server} at {self._endpoint} {_FAILED[kind]}")
                self._failed.set()

    async def _dial(self, on_shut_out: Callable[[str], None]) -> None:
        while True:
            if self._failed.is_set():
                self._hang_up()
                await asyncio.sleep(min(WAIT_S * 2 ** min(self._failures, 8), WAIT_MAX_S))
                self._failed.clear()
            self._keys.refresh()
            choices = list(
                itertools.product(self._keys.own_pairs, self._keys.public_keys(self._server))
            )
            if self._used is not None and self._used not in choices:
                self._hang_up()
                on_shut_out(f"a key in use with {self._server} is no longer listed")
            if self._used is None and choices and await self._find():
                self._call(*choices[self._attempt % len(choices)])
            elif not choices:
                self._on_refused(f"no key of {self._server} is listed in {self._keys.path}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._failed.wait()

    async def _find(self) -> bool:
        """Look the server's name up; tell whether there is an address."""
        loop = asyncio.get_running_loop()
        try:
            self._places = await loop.run_in_executor(
                None, resolve, self._endpoint, f"server {self._server}"
            )
        except ConfigError as error:
            self._on_refused(error.message)
            return False
        return True

    def _call(self, own: CurveKeys, server: bytes) -> None:
        place = self._places[self._place % len(self._places)]
        secure_client(self._sock, own, server)
        self._sock.setsockopt(zmq.IPV6, place.is_ipv6)
        self._sock.connect(place.zmq)
        self._used, self._called = (own, server), place

    def _hang_up(self) -> None:
        if self._called is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._sock.disconnect(self._called.zmq)
        self._used = self._called = None
