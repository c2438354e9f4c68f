"""What comes in on a session: each number once and in order, pieces joined to messages. Pure."""

from __future__ import annotations

from typing import NamedTuple

from federation.core.packet import (
    MESSAGE_BYTES_MAX,
    MESSAGE_FRAMES_MAX,
    Flag,
    Packet,
    check_message,
)
from msd_client.contract.errors import ProtocolError

ACK_DELAY_NS = 20_000_000
"""An acknowledgement waits so long for a packet to ride on."""
ACK_BYTES = 1 << 20
"""After so many bytes it waits no longer."""


class Received(NamedTuple):
    """What a packet completed."""

    frames: tuple[bytes, ...]
    is_greeting: bool


class Incoming:
    """The receiving half of one session."""

    def __init__(self) -> None:
        self.ack = 0
        """All numbers up to here came."""
        self.duplicates = 0
        self.gaps = 0
        self.is_gap_owed = False
        self._gap_told = 0
        self._parts: list[bytearray | bytes] = []
        self._size = 0
        self._ack_due_ns: int | None = None
        self._unacked_bytes = 0

    @property
    def ack_due_ns(self) -> int | None:
        """When an acknowledgement has to leave."""
        return self._ack_due_ns

    def acked(self) -> None:
        """Note that a packet took the acknowledgement along."""
        self._ack_due_ns = None
        self._unacked_bytes = 0
        self.is_gap_owed = False

    def take(self, packet: Packet, now_ns: int) -> Received | None:
        """Take a DATA packet; return the message that it completes.

        Raises:
            ProtocolError: Pieces that belong to no message, or one that is too large.
        """
        if packet.number != self.ack + 1:
            self._out_of_order(packet.number, now_ns)
            return None
        self.ack += 1
        self._unacked_bytes += sum(map(len, packet.frames))
        due = now_ns if self._unacked_bytes >= ACK_BYTES else now_ns + ACK_DELAY_NS
        self._ack_due_ns = due if self._ack_due_ns is None else min(due, self._ack_due_ns)
        if packet.flags & Flag.GREETING:
            if self._parts or len(packet.frames) != 1:
                raise ProtocolError("a greeting in the middle of a message")
            return Received(packet.frames, is_greeting=True)
        return self._join(packet)

    def _out_of_order(self, number: int, now_ns: int) -> None:
        if number <= self.ack:
            self.duplicates += 1
            # The sender does not know yet: the acknowledgement may have been lost.
            self._ack_due_ns = now_ns
            return
        self.gaps += 1
        if self._gap_told != self.ack + 1:
            self._gap_told = self.ack + 1
            self.is_gap_owed = True
            self._ack_due_ns = now_ns

    def _join(self, packet: Packet) -> Received | None:
        rest = packet.frames
        if bool(packet.flags & Flag.JOINS) and not self._parts:
            raise ProtocolError("a piece continues a message that never began")
        self._size += sum(map(len, rest))
        if self._size > MESSAGE_BYTES_MAX or len(self._parts) + len(rest) > MESSAGE_FRAMES_MAX + 1:
            raise ProtocolError(
                f"message of more than {MESSAGE_BYTES_MAX} bytes or {MESSAGE_FRAMES_MAX} frames"
            )
        if packet.flags & Flag.JOINS and rest:
            last = self._parts[-1]
            if isinstance(last, bytes):
                last = self._parts[-1] = bytearray(last)
            last += rest[0]
            rest = rest[1:]
        self._parts.extend(rest)
        if packet.flags & Flag.MORE:
            return None
        frames = tuple(bytes(part) for part in self._parts)
        self._parts, self._size = [], 0
        check_message(frames)
        return Received(frames, is_greeting=False)
