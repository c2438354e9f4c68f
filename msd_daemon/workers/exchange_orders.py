"""Kinds and bodies of the frames between the daemon and its exchange process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from federation.exchange_messages import ParcelKey
from msd_client.contract.codec import pack, unpack


class ToExchange(IntEnum):
    """Orders to the exchange process. All bodies are msgpack lists; a key is a list of five."""

    SETUP = 1
    """Map of `ExchangeSetup`; answered by READY or START_FAILED."""
    POOL = 2
    """[job, bytes, [[per, dtype]] of its fields, [[unit values, unit dtype]] of its media]; the pool's
    descriptor rides along."""
    DROP_POOL = 3
    """[ticket, job]; answered by DONE."""
    PEERS = 4
    """[[node, endpoint, public key or None]]: all there are."""
    OFFER = 5
    """[key, fragment columns (FragmentColumns.encode), whether units of media go with them]."""
    WANT = 6
    """[key], or [key, offset, bytes] with the room that an earlier process was given."""
    ROOM = 7
    """[key, offset, bytes, ask]."""
    ACKNOWLEDGE = 8
    """[key]: a parcel that an earlier process took, and whose producer may not know."""
    WITHDRAW = 9
    """[ticket, key]; answered by DONE."""
    DROP_GENERATION = 10
    """[ticket, job, generation]; answered by DONE."""
    START = 11
    """Empty: all that was known before is told, peers may be heard."""


class FromExchange(IntEnum):
    """What the exchange process says."""

    READY = 1
    """[endpoint, pid]."""
    START_FAILED = 2
    """Encoded error."""
    SIZE = 3
    """[key, bytes, ask]."""
    CAME = 4
    """[key, offset, frames of its ParcelTable]."""
    SETTLED = 5
    """[key]: its producer knows that it came."""
    TAKEN = 6
    """[key]: its consumer has it."""
    FAILED = 7
    """[key, code, message]."""
    PEER = 8
    """[node, is_up, reason]."""
    DONE = 9
    """[ticket]: nothing of what was dropped is read or written any more."""
    DECLINED = 11
    """[key]: its consumer has all that it would bring, and it was not offered when it said so."""
    STATISTICS = 10
    """Map of `ExchangeStatistics`."""


@dataclass(frozen=True)
class ExchangeSetup:
    """How the process is to be."""

    node: str
    listen: str
    """Endpoint to bind, as ZeroMQ takes it; port 0 for any free one."""
    public_key: bytes
    """Z85; empty for none."""
    secret_key: bytes
    frame_bytes: int
    window_bytes: int
    io_threads: int


@dataclass(frozen=True)
class ExchangeStatistics:
    """Frozen snapshot, about a second old; totals since the process began."""

    given_bytes: int = 0
    linked_bytes: int = 0
    """Of these, what went from pool to socket over plain links."""
    given_parcels: int = 0
    """Those that their consumers acknowledged."""
    taken_bytes: int = 0
    taken_parcels: int = 0
    offered_count: int = 0
    """Parcels that wait for their consumers now."""
    wanted_count: int = 0
    """Parcels that are on their way here now."""
    lost_frames: int = 0
    """Were asked for again."""
    late_frames: int = 0
    """Came twice, or for a parcel that nobody wanted any more."""
    spoiled_parcels: int = 0
    refused_messages: int = 0
    """Of strangers, or malformed."""
    up_count: int = 0
    """Peers that answer."""


def encode_order(*values: Any) -> bytes:
    """Return the body of a frame."""
    return pack(list(values))


def decode_order(body: bytes) -> list[Any]:
    """Return the values of a frame, keys as `ParcelKey`."""
    values: list[Any] = unpack(body, bytes_max=len(body))
    return [
        ParcelKey(*value)
        if isinstance(value, list) and len(value) == 5 and isinstance(value[0], str)
        else value
        for value in values
    ]
