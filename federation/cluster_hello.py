"""What both ends of the control wire say of themselves when a session begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from federation.core.packet import HELLO_BYTES_MAX
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import ConfigError, ProtocolError
from msd_client.contract.plain import decode_plain, encode_plain


@dataclass(frozen=True)
class NodeHello:
    """A node daemon's greeting."""

    node: str
    """Its name; with CURVE it has to be its key's."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the daemon tells the planner of itself."""


@dataclass(frozen=True)
class PlannerHello:
    """A planner's greeting, and again whenever its leadership changes."""

    planner: str
    leads: bool
    term: int
    """Its own where it leads, else the highest that it knows."""
    leader: str | None = None
    """Endpoint of who leads, where known."""
    version: str = ""
    """Release of msd."""
    facts: dict[str, Any] = field(default_factory=dict)


def encode_hello(hello: NodeHello | PlannerHello) -> bytes:
    """Return the frame of a greeting.

    Raises:
        ProtocolError: It is too large.
    """
    frame = pack(encode_plain(hello))
    if len(frame) > HELLO_BYTES_MAX:
        raise ProtocolError(f"greeting of {len(frame)} bytes exceeds {HELLO_BYTES_MAX}")
    return frame


def decode_node_hello(frame: bytes) -> NodeHello:
    """Return a node's greeting.

    Raises:
        ProtocolError: It is none.
    """
    try:
        return decode_plain(NodeHello, unpack_map(frame, bytes_max=HELLO_BYTES_MAX), "hello")
    except ConfigError as error:
        raise ProtocolError(error.message) from error


def decode_planner_hello(frame: bytes) -> PlannerHello:
    """Return a planner's greeting.

    Raises:
        ProtocolError: It is none.
    """
    try:
        hello = decode_plain(PlannerHello, unpack_map(frame, bytes_max=HELLO_BYTES_MAX), "hello")
    except ConfigError as error:
        raise ProtocolError(error.message) from error
    if not 0 <= hello.term < 1 << 63:
        raise ProtocolError(f"hello.term: {hello.term} is out of range")
    return hello
