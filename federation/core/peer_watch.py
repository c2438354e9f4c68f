"""Whether each peer answers: pings, silence, and when to connect anew. Pure: times are arguments.

ZeroMQ mends a broken link by itself, but a client that was refused once never tries again (libzmq,
seen in 4.3.5), and a process that hangs still holds its links. So answers alone count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class WatchTimes:
    """Nanoseconds."""

    ping_ns: int = SECOND_NS
    silence_ns: int = 5 * SECOND_NS
    """A peer that says nothing for so long is down."""
    connect_ns: int = 2 * SECOND_NS
    """A link that gives no answer is made anew after this, then after twice as long, and so on."""
    connect_ns_max: int = 16 * SECOND_NS


class SendPing(NamedTuple):
    """Effect: ask a peer whether it is there."""

    peer: str
    number: int


class Reconnect(NamedTuple):
    """Effect: make the link to a peer anew."""

    peer: str


class PeerChanged(NamedTuple):
    """Effect: the owner is to know."""

    peer: str
    is_up: bool
    reason: str


class PeerForgot(NamedTuple):
    """Effect: ask the peer again for everything: it is another process, or the link was lost."""

    peer: str


WatchEffect = SendPing | Reconnect | PeerChanged | PeerForgot


@dataclass(eq=False)
class _Peer:
    heard_ns: int
    ping_ns: int
    connect_ns: int
    wait_ns: int
    is_up: bool = False
    giver: int = -1
    number: int = 0
    reasons: set[str] = field(default_factory=set)
    """What was told of it since it answered last: a link that fails again and again says the same."""


class PeerWatch:
    """All peers of a node. Feed it, then drain `effects()`."""

    def __init__(self, times: WatchTimes | None = None) -> None:
        self._times = times or WatchTimes()
        self._peers: dict[str, _Peer] = {}
        self._effects: list[WatchEffect] = []

    def effects(self) -> list[WatchEffect]:
        """Return what is to be done since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    def up(self) -> list[str]:
        """Return the peers that answer."""
        return [name for name, peer in self._peers.items() if peer.is_up]

    def add(self, peer: str, now_ns: int) -> None:
        """Watch a peer whose link was just made."""
        wait_ns = self._times.connect_ns
        self._peers[peer] = _Peer(now_ns, now_ns, now_ns + wait_ns, wait_ns)

    def remove(self, peer: str) -> None:
        """Watch a peer no longer."""
        known = self._peers.pop(peer, None)
        if known is not None and known.is_up:
            self._effects.append(PeerChanged(peer, False, "it is no peer any more"))

    def linked(self, peer: str, now_ns: int) -> None:
        """A link stands: nothing that was asked for over an earlier one comes."""
        known = self._peers.get(peer)
        if known is not None:
            self._ping(peer, known, now_ns)
            self._effects.append(PeerForgot(peer))

    def unlinked(self, peer: str, reason: str) -> None:
        """A link was lost, or could not be made."""
        known = self._peers.get(peer)
        if known is None:
            return
        known.is_up = False
        if reason not in known.reasons:
            known.reasons.add(reason)
            self._effects.append(PeerChanged(peer, False, reason))

    def heard(self, peer: str, now_ns: int) -> None:
        """A peer sent something."""
        known = self._peers.get(peer)
        if known is not None:
            known.heard_ns = now_ns

    def pong(self, peer: str, giver: int, now_ns: int) -> None:
        """A peer answered; `giver` is the incarnation of its process."""
        known = self._peers.get(peer)
        if known is None:
            return
        known.heard_ns = now_ns
        known.wait_ns = self._times.connect_ns
        known.reasons.clear()
        if not known.is_up:
            known.is_up = True
            self._effects.append(PeerChanged(peer, True, ""))
        if known.giver not in (-1, giver):
            self._effects.append(PeerForgot(peer))
        known.giver = giver

    def tick(self, now_ns: int) -> None:
        """Ping, find those that are silent, make links anew."""
        for name, peer in self._peers.items():
            if peer.is_up and now_ns - peer.heard_ns >= self._times.silence_ns:
                seconds = (now_ns - peer.heard_ns) / SECOND_NS
                peer.connect_ns = now_ns
                self.unlinked(name, f"it has not answered for {seconds:.1f} s")
            if not peer.is_up and now_ns >= peer.connect_ns:
                if not peer.reasons:
                    self.unlinked(name, "it does not answer")
                peer.connect_ns = now_ns + peer.wait_ns
                peer.wait_ns = min(2 * peer.wait_ns, self._times.connect_ns_max)
                self._effects.append(Reconnect(name))
            if now_ns >= peer.ping_ns:
                self._ping(name, peer, now_ns)

    def due_ns(self) -> int | None:
        """Return when `tick` has something to do."""
        return min((peer.ping_ns for peer in self._peers.values()), default=None)

    def _ping(self, name: str, peer: _Peer, now_ns: int) -> None:
        peer.ping_ns = now_ns + self._times.ping_ns
        peer.number += 1
        self._effects.append(SendPing(name, peer.number))
