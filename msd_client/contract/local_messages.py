"""Packets of the node's Unix socket (AF_UNIX SEQPACKET) between daemon, trainers and msdctl.

Two kinds share a connection. Events are fixed 40-byte structs (`=IIQQQQ`: kind, slot, sequence,
generation, payload bytes, aux) and announce or release one slot. Control messages are msgpack maps
cut into parts of at most `PART_BYTES_MAX`, each behind a u32 kind; the receiver joins them.

A control request carries `id` and `verb`, its answer the same `id` and either `ok` or `error`;
a message with `note` is unasked. Descriptors travel with the last part (SCM_RIGHTS).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from msd_client.contract.codec import CONTROL_BYTES_MAX, pack, unpack_map
from msd_client.contract.errors import ProtocolError

PROTOCOL_VERSION = (0, 1)
"""(major, minor): peers of the same major and at most one minor apart talk to each other."""

EVENT = struct.Struct("=IIQQQQ")
KIND = struct.Struct("=I")

READY = 1
RELEASE = 2
READY_WITH_NOTE = 3
"""READY of a step's first microbatch with the step's note behind it, in one packet."""
CONTROL_PART = 10
CONTROL_END = 11

PART_BYTES_MAX = 48 * 1024
"""Well under the smallest default send buffer (208 KiB holds four such packets)."""
PACKET_BYTES_MAX = PART_BYTES_MAX + KIND.size


class RingEvent(NamedTuple):
    """READY (daemon to reader) or RELEASE (reader to daemon) of one slot."""

    kind: int
    slot: int
    sequence: int
    generation: int
    payload_bytes: int
    """Of RELEASE: how many batches of the generation the reader was given by now."""
    aux: int = 0

    def encode(self) -> bytes:
        """Return the 40-byte packet."""
        return EVENT.pack(*self)


@dataclass(frozen=True)
class ControlMessage:
    """A whole control message with the descriptors that came along."""

    body: dict[str, Any]
    fds: tuple[int, ...] = ()


def encode_control(message: dict[str, Any]) -> Iterator[bytes]:
    """Yield the packets of a control message, in order."""
    yield from encode_packed(pack(message))


def encode_packed(packed: bytes) -> Iterator[bytes]:
    """Yield the packets of an already packed control message, in order."""
    for start in range(0, max(len(packed), 1), PART_BYTES_MAX):
        part = packed[start : start + PART_BYTES_MAX]
        is_last = start + PART_BYTES_MAX >= len(packed)
        yield KIND.pack(CONTROL_END if is_last else CONTROL_PART) + part


def encode_ready_with_note(event: RingEvent, packed_note: bytes) -> bytes | None:
    """Return one packet for a READY event and a packed note, None where they do not fit."""
    if len(packed_note) > PART_BYTES_MAX - EVENT.size:
        return None
    return event._replace(kind=READY_WITH_NOTE).encode() + packed_note


Received = RingEvent | ControlMessage


class PacketJoiner:
    """Turns packets of one peer into events and whole control messages."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._fds: list[int] = []

    def feed(self, packet: bytes, fds: list[int] | None = None) -> tuple[Received, ...]:
        """Return the events and messages that this packet completes.

        Raises:
            ProtocolError: The packet is malformed or the message grows beyond its limit.
        """
        if fds:
            self._fds.extend(fds)
        if len(packet) < KIND.size:
            raise ProtocolError(f"packet of {len(packet)} bytes is shorter than its kind")
        (kind,) = KIND.unpack_from(packet)
        if kind in (READY, RELEASE):
            if len(packet) != EVENT.size:
                raise ProtocolError(f"event packet of {len(packet)} bytes, expected {EVENT.size}")
            return (RingEvent(*EVENT.unpack(packet)),)
        if kind == READY_WITH_NOTE and len(packet) > EVENT.size:
            event = RingEvent(*EVENT.unpack_from(packet))._replace(kind=READY)
            return (ControlMessage(unpack_map(packet[EVENT.size :])), event)
        if kind not in (CONTROL_PART, CONTROL_END):
            raise ProtocolError(f"packet kind {kind} is unknown")
        self._parts_bytes += len(packet) - KIND.size
        if self._parts_bytes > CONTROL_BYTES_MAX:
            raise ProtocolError(f"control message exceeds {CONTROL_BYTES_MAX} bytes")
        self._parts.append(packet[KIND.size :])
        if kind == CONTROL_PART:
            return ()
        body = unpack_map(b"".join(self._parts))
        whole = ControlMessage(body, tuple(self._fds))
        self._parts, self._parts_bytes, self._fds = [], 0, []
        return (whole,)


def check_version(theirs: object, *, who: str) -> None:
    """Refuse a peer more than one minor version away.

    Raises:
        ProtocolError: The version is malformed.
        VersionMismatchError: Both versions are named.
    """
    from msd_client.contract.errors import VersionMismatchError

    if not (
        isinstance(theirs, (list, tuple))
        and len(theirs) == 2
        and all(isinstance(v, int) for v in theirs)
    ):
        raise ProtocolError(f"{who} sent no protocol version")
    major, minor = theirs
    if major != PROTOCOL_VERSION[0] or abs(minor - PROTOCOL_VERSION[1]) > 1:
        ours = ".".join(map(str, PROTOCOL_VERSION))
        raise VersionMismatchError(
            f"{who} speaks protocol {major}.{minor}, this side {ours}: "
            "update the older one (one minor version apart is allowed)"
        )
