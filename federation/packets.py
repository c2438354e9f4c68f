"""Packets of the control wire as multiparts, and back; whatever a peer sends is hostile until here.

| part | bytes | |
|---|---|---|
| magic | 4 | `MSDL` |
| version | u8 | of the wire; first, so that any two versions can tell each other |
| kind | u8 | |
| flags | u16 | |
| sender, receiver, number, ack | 4 x u64 | little-endian |

The header is one frame; the packet's frames follow it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from federation.core.packet import (
    HELLO_BYTES_MAX,
    PACKET_BYTES_MAX,
    PACKET_FRAMES_MAX,
    Flag,
    Kind,
    Packet,
)
from msd_client.contract.errors import ProtocolError, VersionMismatchError

MAGIC = b"MSDL"
WIRE_VERSION = 1
_HEADER = struct.Struct("<4sBBH4Q")
_FLAGS = int(Flag.MORE | Flag.JOINS | Flag.GREETING | Flag.GAP)
WIRE_FRAME_BYTES_MAX = PACKET_BYTES_MAX
"""Largest frame; the socket's own limit, so a larger one is never stored."""


def encode_packet(packet: Packet) -> list[bytes]:
    """Return the frames of the multipart."""
    header = _HEADER.pack(
        MAGIC,
        WIRE_VERSION,
        packet.kind,
        packet.flags,
        packet.sender,
        packet.receiver,
        packet.number,
        packet.ack,
    )
    return [header, *packet.frames]


def decode_packet(frames: Sequence[bytes | memoryview]) -> Packet:
    """Return the packet of a multipart.

    Raises:
        VersionMismatchError: The peer speaks another version of the wire.
        ProtocolError: It is no packet.
    """
    header = bytes(frames[0][: _HEADER.size + 1]) if frames else b""
    if header[:4] != MAGIC or len(header) < 5:
        raise ProtocolError("not a packet of msd")
    if header[4] != WIRE_VERSION:
        raise VersionMismatchError(
            f"wire version {header[4]}, this end speaks {WIRE_VERSION}: install the same msd on all "
            "nodes and planners",
            seen=header[4],
            known=WIRE_VERSION,
        )
    if len(header) != _HEADER.size:
        raise ProtocolError(f"packet header of {len(frames[0])} bytes, expected {_HEADER.size}")
    _, _, kind, flags, sender, receiver, number, ack = _HEADER.unpack(header)
    body = frames[1:]
    size = sum(map(len, body))
    if len(body) > PACKET_FRAMES_MAX or size > PACKET_BYTES_MAX:
        raise ProtocolError(
            f"packet of {size} bytes in {len(body)} frames exceeds {PACKET_BYTES_MAX} bytes or "
            f"{PACKET_FRAMES_MAX} frames"
        )
    if flags & ~_FLAGS or kind not in list(Kind) or sender == 0:
        raise ProtocolError(f"packet of kind {kind} with flags {flags:#x} from session {sender}")
    packet = Packet(Kind(kind), sender, receiver, number, ack, Flag(flags), tuple(map(bytes, body)))
    _check_shape(packet)
    return packet


def _check_shape(packet: Packet) -> None:
    is_one_frame = len(packet.frames) == 1 and len(packet.frames[0]) <= HELLO_BYTES_MAX
    match packet.kind:
        case Kind.HELLO | Kind.REFUSED:
            is_right = is_one_frame and not packet.number
        case Kind.DATA:
            is_greeting = bool(packet.flags & Flag.GREETING)
            is_right = packet.number > 0 and (is_one_frame if is_greeting else True)
        case Kind.ACK:
            is_right = not packet.frames and not packet.number
    if not is_right:
        raise ProtocolError(
            f"{packet.kind.name} packet {packet.number} with {len(packet.frames)} frames"
        )
