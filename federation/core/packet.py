"""Packets of the control wire as values, and the limits that both ends keep. Pure.

A message of the owner is a list of frames; it crosses in one packet, or in several where it is
larger than a packet may be, so that a slow link never has to carry one huge frame between two
heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple

from msd_client.contract.errors import ProtocolError

PACKET_BYTES_MAX = 1 << 20
"""Frames of one packet together: 0.8 s at 10 Mbit/s, so heartbeats get through."""
PACKET_FRAMES_MAX = 256
MESSAGE_BYTES_MAX = 64 << 20
"""All frames of a message."""
MESSAGE_FRAMES_MAX = 16_384
MESSAGE_HEADER_BYTES_MAX = 1 << 20
"""First frame of a message; long things go into the others."""
HELLO_BYTES_MAX = 64 << 10
NUMBER_MAX = (1 << 64) - 1


class Kind(IntEnum):
    """What a packet is."""

    HELLO = 1
    """Begins a session; the one frame says who speaks."""
    DATA = 2
    """A numbered piece of a message, or a numbered greeting."""
    ACK = 3
    """Nothing but what every packet carries: alive, and received up to `ack`."""
    REFUSED = 4
    """The listening end gives no session; the one frame says why. Outside of any session."""


class Flag(IntFlag):
    """Of DATA and ACK packets."""

    NONE = 0
    MORE = 1
    """The message goes on in the next packet."""
    JOINS = 2
    """The first frame continues the last one of the packet before."""
    GREETING = 4
    """The one frame is what the sender's hello says from here on."""
    GAP = 8
    """A packet after `ack` + 1 came: send again from there."""


@dataclass(frozen=True, slots=True)
class Packet:
    """One multipart of the wire."""

    kind: Kind
    sender: int
    """Session id of the sender."""
    receiver: int
    """Session id of the receiver as the sender knows it, 0 before it knows one."""
    number: int = 0
    """Of a DATA packet, from 1 on."""
    ack: int = 0
    """All numbers up to here came."""
    flags: Flag = Flag.NONE
    frames: tuple[bytes, ...] = ()


class Piece(NamedTuple):
    """What one DATA packet carries of a message."""

    flags: Flag
    frames: tuple[bytes, ...]
    size_bytes: int


def check_message(frames: Sequence[bytes]) -> int:
    """Return the bytes of a message.

    Raises:
        ProtocolError: It is larger than the contract allows.
    """
    size = sum(map(len, frames))
    if not frames:
        raise ProtocolError("a message without frames")
    if len(frames[0]) > MESSAGE_HEADER_BYTES_MAX:
        raise ProtocolError(
            f"header of {len(frames[0])} bytes exceeds {MESSAGE_HEADER_BYTES_MAX}: "
            "long things belong into frames"
        )
    if size > MESSAGE_BYTES_MAX or len(frames) > MESSAGE_FRAMES_MAX:
        raise ProtocolError(
            f"message of {size} bytes in {len(frames)} frames exceeds {MESSAGE_BYTES_MAX} bytes or "
            f"{MESSAGE_FRAMES_MAX} frames"
        )
    return size


def split_message(frames: Sequence[bytes]) -> Iterator[Piece]:
    """Yield the pieces of a message, each as full as a packet may be.

    Raises:
        ProtocolError: It is larger than the contract allows.
    """
    size = check_message(frames)
    if size <= PACKET_BYTES_MAX and len(frames) <= PACKET_FRAMES_MAX:
        yield Piece(Flag.NONE, tuple(map(bytes, frames)), size)
        return
    part: list[bytes] = []
    room, joins = PACKET_BYTES_MAX, Flag.NONE
    for frame in frames:
        at = 0
        if len(part) == PACKET_FRAMES_MAX:
            yield Piece(joins | Flag.MORE, tuple(part), PACKET_BYTES_MAX - room)
            part, room, joins = [], PACKET_BYTES_MAX, Flag.NONE
        while len(frame) - at > room:
            part.append(bytes(frame[at : at + room]))
            at += room
            yield Piece(joins | Flag.MORE, tuple(part), PACKET_BYTES_MAX)
            part, room, joins = [], PACKET_BYTES_MAX, Flag.JOINS
        part.append(bytes(frame[at:]))
        room -= len(frame) - at
    yield Piece(joins, tuple(part), PACKET_BYTES_MAX - room)
