"""What a cluster's router tells its owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Message:
    """A node sent this: each once, in order, within one session."""

    node: str
    frames: list[bytes]


@dataclass(frozen=True)
class PeerUp:
    """A node's session began: it knows nothing of what was sent to it before, and tells all anew."""

    node: str
    incarnation: int
    hello: dict[str, Any]
    """The facts that its daemon gave."""


@dataclass(frozen=True)
class PeerGreeted:
    """A node says something else of itself from here on."""

    node: str
    hello: dict[str, Any]


@dataclass(frozen=True)
class PeerDown:
    """A node's session ended: restarted, refused or dropped; what it had not taken is gone."""

    node: str
    reason: str


@dataclass(frozen=True)
class PeerSilent:
    """A node was not heard for a while; what is sent to it is kept for its return."""

    node: str
    for_s: float


@dataclass(frozen=True)
class PeerHeard:
    """A silent node is back in the same session; nothing was lost."""

    node: str


@dataclass(frozen=True)
class Readable:
    """One of the caller's own descriptors can be read."""

    fd: int


Event = Message | PeerUp | PeerGreeted | PeerDown | PeerSilent | PeerHeard | Readable


@dataclass(frozen=True)
class PeerTraffic:
    """Of one node since it first came; for `msdctl cluster`."""

    node: str
    is_up: bool
    is_silent: bool
    heard_ns: int
    """Of the monotonic clock."""
    sessions: int
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    queued_bytes: int
    resends: int
