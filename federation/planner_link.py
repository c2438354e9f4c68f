"""A node daemon's end of the control wire: one DEALER, one reader task, envelopes in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq
import zmq.asyncio

from federation.messages import Envelope, Message, decode_envelope
from federation.transport import SequenceGuard, prepare_socket
from msd_client.contract.errors import MsdError


class PlannerWire(Protocol):
    """A way to the planner."""

    def send(
        self, job: str, generation: int, message: Message, frames: tuple[bytes, ...] = ()
    ) -> None:
        """Send a message; where no planner lives it is lost, the next one is told all anew."""


class PlannerLink:
    """Sends messages to the planner and hands its envelopes to a callback, in order."""

    def __init__(
        self, endpoint: str, identity: bytes, on_envelope: Callable[[Envelope], None]
    ) -> None:
        self._context = zmq.asyncio.Context.instance()
        self._sock: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        prepare_socket(self._sock)  # type: ignore[arg-type]
        self._sock.setsockopt(zmq.ROUTING_ID, identity)
        self._sock.connect(endpoint)
        self._on_envelope = on_envelope
        self._sequence = 0
        self._term = 0
        self._outbox: list[list[bytes]] = []
        self.error: MsdError | None = None

    @property
    def term(self) -> int:
        """Highest term seen."""
        return self._term

    def send(
        self, job: str, generation: int, message: Message, frames: tuple[bytes, ...] = ()
    ) -> None:
        """Send a message; the socket's own queue takes it at once.

        A closed link swallows it: its planner is gone, and the next one is told everything anew.
        """
        if self._sock.closed:
            return
        envelope = Envelope(job, generation, self._term, self._sequence, message, frames)
        self._sequence += 1
        # A DEALER below its high-water mark takes a message at once; the future is done on return.
        future = self._sock.send_multipart(envelope.encode())
        if isinstance(future, asyncio.Future) and future.done():
            future.result()

    async def run(self) -> None:
        """Read until cancelled; the one task that reads this socket.

        Raises:
            ProtocolError: The planner sent what the contract does not allow.
        """
        guard = SequenceGuard("planner")
        while True:
            frames = await self._sock.recv_multipart(copy=False)
            envelope = decode_envelope([frame.buffer for frame in frames])
            guard.check(envelope.sequence)
            if envelope.term < self._term:
                continue  # an order of a leader that lost its term
            self._term = envelope.term
            self._on_envelope(envelope)

    def close(self) -> None:
        """Close the socket; what was sent may still leave."""
        self._sock.close(linger=100)
