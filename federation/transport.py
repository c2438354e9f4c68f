"""ZeroMQ sockets as msd uses them: options in one place, one reader per socket.

Control is node DEALER to planner ROUTER. ZeroMQ is transport, not delivery: envelopes carry a
sequence, and a gap or repetition is seen by `SequenceGuard`. On one host the endpoint is `ipc://`.
"""

from __future__ import annotations

import zmq

from msd_client.contract.errors import ProtocolError

MESSAGE_BYTES_MAX = 320 << 20
HIGH_WATER_MARK = 10_000
LINGER_MS = 200


def prepare_socket(sock: zmq.Socket[bytes]) -> None:
    """Set the options of a control socket."""
    sock.setsockopt(zmq.LINGER, LINGER_MS)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)


class SequenceGuard:
    """Checks that one peer's envelopes arrive in order, each once."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._next = 0

    def check(self, sequence: int) -> None:
        """Accept the next sequence.

        Raises:
            ProtocolError: An envelope was lost or repeated.
        """
        if sequence != self._next:
            raise ProtocolError(
                f"{self._peer} sent envelope {sequence}, expected {self._next}: messages were lost"
            )
        self._next += 1
