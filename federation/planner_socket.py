"""A node's socket to one of its planners, and the reliable session on it; asyncio on uvloop.

One never-cancelled task reads; sending never waits: what the socket does not take is sent again by
the session. Time comes from the monotonic clock, and the owner is told the next deadline after
everything that may have moved it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import zmq
import zmq.asyncio

from federation.addresses import PLANNER_PORT, Endpoint, parse_peer
from federation.core.packet import Kind, Packet
from federation.core.reliable import Effect, ReliableEnd, Transmit
from federation.dialer import Dialer
from federation.key_files import check_name
from federation.keys import KeyDir
from federation.packets import WIRE_FRAME_BYTES_MAX, decode_packet, encode_packet
from federation.secure_sockets import prepare_cluster_socket
from msd_client.contract.errors import ProtocolError

log = logging.getLogger(__name__)

PACKETS_QUEUED_MAX = 256
PLANNERS_KEY = "federation.planners"
"""Of the configuration, for messages."""
_NAMED = re.compile(r"(?P<name>[^@/:]+)@(?P<rest>.+)")
DEFAULT_NAME = "planner"
"""Whose key a planner shows that is given by its endpoint alone."""
MISTRUST_NS = 2_000_000_000
"""A planner that broke the protocol is not listened to for so long."""

OnEffect = Callable[["PlannerSocket", Effect], None]


class PlannerPlace(NamedTuple):
    """Which planner is where."""

    name: str
    endpoint: Endpoint


def parse_planner(text: str) -> PlannerPlace:
    """Return name and endpoint of `NAME@ENDPOINT`, or of an endpoint alone.

    Raises:
        ConfigError: One of them is not sound.
    """
    found = _NAMED.fullmatch(text)
    name, rest = (found["name"], found["rest"]) if found else (DEFAULT_NAME, text)
    return PlannerPlace(check_name(name), parse_peer(rest, PLANNERS_KEY, PLANNER_PORT))


class PlannerSocket:
    """Speaks with one planner; effects but `Transmit` go to the owner in order."""

    def __init__(
        self,
        place: PlannerPlace,
        keys: KeyDir | None,
        hello: bytes,
        on_effect: OnEffect,
        on_deadline: Callable[[int], None],
    ) -> None:
        self.name, self.endpoint = place
        self.refusal = ""
        """Why this planner gives no session, in its own words or the socket's."""
        self.malformed = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self._on_effect = on_effect
        self._on_deadline = on_deadline
        self._mistrusted_until_ns = 0
        self.end = ReliableEnd(
            secrets.randbits(64), hello, is_initiator=True, now_ns=time.monotonic_ns()
        )
        self._sock: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        prepare_cluster_socket(self._sock, frame_bytes_max=WIRE_FRAME_BYTES_MAX)
        self._sock.setsockopt(zmq.SNDHWM, PACKETS_QUEUED_MAX)
        self._sock.setsockopt(zmq.RCVHWM, PACKETS_QUEUED_MAX)
        # Without a connection nothing is queued: the session sends again once there is one.
        self._sock.setsockopt(zmq.IMMEDIATE, 1)
        self._dialer: Dialer | None = None
        if keys is None:
            self._sock.setsockopt(zmq.IPV6, self.endpoint.is_ipv6)
            self._sock.connect(self.endpoint.zmq)
        else:
            self._dialer = Dialer(self._sock, self.endpoint, self.name, keys, self._refused)

    async def connect(self) -> None:
        """Keep the socket connected with keys that are accepted; runs until cancelled."""
        if self._dialer is not None:
            await self._dialer.run(self._shut_out)

    def _shut_out(self, reason: str) -> None:
        """The planner's key is no longer listed: nothing of it is taken."""
        self._refused(reason)
        self.carry_out(self.end.reset(reason, time.monotonic_ns()))

    async def read(self) -> None:
        """Take packets until the socket closes; the one task that reads it."""
        while not self._sock.closed:
            try:
                frames = await self._sock.recv_multipart(copy=False)
            except zmq.ZMQError as error:
                if error.errno in (zmq.ENOTSOCK, zmq.ETERM):
                    return
                raise
            self._take([frame.buffer for frame in frames])

    def _take(self, frames: list[memoryview]) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._mistrusted_until_ns:
            return
        try:
            packet = decode_packet(frames)
            if packet.kind is Kind.REFUSED:
                self._refused(packet.frames[0].decode(errors="replace"))
                return
            self.bytes_in += sum(map(len, packet.frames))
            self.carry_out(self.end.handle(packet, now_ns))
        except ProtocolError as error:
            self.malformed += 1
            self._refused(error.message)
            self.mistrust(error.message)

    def mistrust(self, reason: str) -> None:
        """End the session with a peer that broke the protocol, and leave it alone for a while."""
        now_ns = time.monotonic_ns()
        self._mistrusted_until_ns = now_ns + MISTRUST_NS
        self.carry_out(self.end.reset(reason, now_ns))

    def _refused(self, reason: str) -> None:
        if reason != self.refusal:
            log.warning("planner %s: %s", self.endpoint, reason)
        self.refusal = reason

    def carry_out(self, effects: list[Effect]) -> None:
        """Send what is to be sent; tell the owner the rest, and the next deadline."""
        for effect in effects:
            if isinstance(effect, Transmit):
                self._transmit(effect.packet)
            else:
                self._on_effect(self, effect)
        deadline_ns = self.end.next_deadline_ns()
        if deadline_ns is not None:
            self._on_deadline(deadline_ns)

    def _transmit(self, packet: Packet) -> None:
        if self._sock.closed:
            return
        frames = encode_packet(packet)
        # Not waiting, the future is done on return: sent, or refused for want of a connection.
        future = self._sock.send_multipart(frames, flags=zmq.DONTWAIT)
        if isinstance(future, asyncio.Future):
            with contextlib.suppress(zmq.Again):
                future.result()
                self.bytes_out += sum(map(len, packet.frames))

    def close(self) -> None:
        """Close the socket; the reading task ends."""
        if self._dialer is not None:
            self._dialer.close()
        self._sock.close(linger=100)
