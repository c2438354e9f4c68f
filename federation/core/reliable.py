"""One end of a reliable session between two processes over a transport that loses messages. Pure.

ZeroMQ loses what it handed to TCP when a connection breaks, silently. Here every message is
numbered, acknowledged, sent again after silence or a gap, and delivered once and in order while both
processes live. A peer that was restarted is noticed: the session ends, what was not acknowledged is
dropped, and the owner, told `Down` and `Up`, tells everything anew.

A session is a pair of ids, one drawn by each end, new ones for each session, so that nothing late of
an earlier one is ever taken for this one's. The initiator greets until it is answered; the listener
answers with a fresh id and begins only when a greeting brings that id back, so an old greeting that
comes late begins nothing:

| end | packet | does |
|---|---|---|
| listener | HELLO that brings our fresh id back | begins this session, ends the one before |
| listener | HELLO of the session's peer | answers with the session's id, unless it brings it |
| listener | anything else that is not this session's | answers with HELLO and the fresh id |
| initiator | HELLO to our id, no session | begins, answers with HELLO |
| initiator | HELLO to our id from the session's peer | answers with HELLO |
| initiator | HELLO to our id from another | the peer forgot us: ends, draws an id, greets |
| initiator | anything else that is not this session's | nothing |

Silence does not end a session: `Silent` and `Heard` tell of it, and what was sent meanwhile arrives
later. The owner decides how long a silence may last (`reset`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from federation.core.incoming import Incoming
from federation.core.outgoing import Outgoing
from federation.core.packet import Flag, Kind, Packet, Piece, split_message
from msd_client.contract.errors import ProtocolError

HEARTBEAT_NS = 1_000_000_000
"""An end that sent nothing for so long says that it lives."""
SILENT_AFTER_NS = 5_000_000_000
"""A peer that was not heard for so long counts as silent."""
GREET_NS = 500_000_000
"""Between greetings that nobody answered."""
QUEUED_BYTES_ROOM = 32 << 20
"""Above this `has_room` asks the owner to hold back."""
QUEUED_BYTES_MAX = 256 << 20
"""Above this the session ends: the peer can't keep up, and starts anew."""
_IDS = (1 << 64) - 1


@dataclass(frozen=True)
class Transmit:
    """Send this packet; it may be lost."""

    packet: Packet


@dataclass(frozen=True)
class Deliver:
    """The peer sent this message."""

    frames: tuple[bytes, ...]


@dataclass(frozen=True)
class Up:
    """A session began; nothing of an earlier one will come."""

    incarnation: int
    hello: bytes


@dataclass(frozen=True)
class Greeted:
    """The peer says something else of itself from here on; in order with its messages."""

    hello: bytes


@dataclass(frozen=True)
class Down:
    """The session ended; what the peer had not acknowledged is dropped."""

    reason: str


@dataclass(frozen=True)
class Silent:
    """The peer was not heard for a while; nothing is lost yet."""

    for_ns: int


@dataclass(frozen=True)
class Heard:
    """The silent peer is back, in the same session."""


Effect = Transmit | Deliver | Up | Greeted | Down | Silent | Heard


@dataclass(frozen=True)
class EndStatistics:
    """Of one end's present session."""

    queued_bytes: int
    resends: int
    duplicates: int
    gaps: int
    heard_ns: int


class ReliableEnd:
    """One end; `incarnation` is a random number of 64 bits of this process."""

    def __init__(self, incarnation: int, hello: bytes, *, is_initiator: bool, now_ns: int) -> None:
        self._is_initiator = is_initiator
        self._hello = hello
        self._last_id = incarnation & _IDS
        self._own = self._draw()
        self._fresh = self._draw()
        self._peer: int | None = None
        self._out = Outgoing()
        self._in = Incoming()
        self._sent_ns = now_ns
        self._heard_ns = now_ns
        self._is_silent = False
        self._greet_ns = now_ns
        self._may_be_old = False
        """A greeting under an id that is in use may still say what we no longer say of ourselves."""

    @property
    def is_open(self) -> bool:
        """True while a session is on, also while its peer is silent."""
        return self._peer is not None

    @property
    def session(self) -> tuple[int, int] | None:
        """Ids of the session: this end's and the peer's; None while none is on."""
        return None if self._peer is None else (self._own, self._peer)

    @property
    def has_room(self) -> bool:
        """False where the owner should hold back until acknowledgements came."""
        return self._out.queued_bytes <= QUEUED_BYTES_ROOM

    def is_up(self, now_ns: int) -> bool:
        """Tell whether a session is on and its peer was heard lately."""
        return self._peer is not None and now_ns - self._heard_ns < SILENT_AFTER_NS

    def statistics(self) -> EndStatistics:
        """Return a snapshot."""
        return EndStatistics(
            self._out.queued_bytes,
            self._out.resends,
            self._in.duplicates,
            self._in.gaps,
            self._heard_ns,
        )

    def next_deadline_ns(self) -> int | None:
        """Return when `tick` has to be called at the latest; None: a packet must come first."""
        if self._peer is None:
            return self._greet_ns if self._is_initiator else None
        times = [self._sent_ns + HEARTBEAT_NS, self._in.ack_due_ns, self._out.deadline_ns]
        if not self._is_silent:
            times.append(self._heard_ns + SILENT_AFTER_NS)
        return min(time for time in times if time is not None)

    def send(self, frames: Sequence[bytes], now_ns: int) -> list[Effect]:
        """Send a message; without a session it is dropped, as `Up` has everything told anew.

        Raises:
            ProtocolError: It is larger than the contract allows.
        """
        pieces = list(split_message(frames))
        if self._peer is None:
            return []
        for piece in pieces:
            self._out.put(piece)
        if self._out.queued_bytes > QUEUED_BYTES_MAX:
            return self.reset(f"{self._out.queued_bytes} bytes wait for acknowledgement", now_ns)
        return self._pump(now_ns)

    def set_hello(self, hello: bytes, now_ns: int) -> list[Effect]:
        """Say this of ourselves from now on, in order with what is sent."""
        self._hello = hello
        self._may_be_old = True
        if self._peer is None:
            return []
        self._greet_again()
        return self._pump(now_ns)

    def assure(self, now_ns: int) -> list[Effect]:
        """Say at once that this end lives, which also shows whether there is a way to the peer."""
        return [] if self._peer is None else [self._packet(Kind.ACK, now_ns)]

    def reset(self, reason: str, now_ns: int) -> list[Effect]:
        """End the session, if one is on; an initiator greets anew."""
        if self._peer is None:
            return []
        self._forget()
        self._greet_ns = now_ns
        return [Down(reason), *self.tick(now_ns)]

    def handle(self, packet: Packet, now_ns: int) -> list[Effect]:
        """Take a packet that came.

        Raises:
            ProtocolError: It is this session's and breaks its rules; `reset` is due.
        """
        if packet.kind is Kind.REFUSED:
            return []
        is_ours = packet.sender == self._peer and packet.receiver == self._own
        if not is_ours:
            return self._strange(packet, now_ns)
        effects: list[Effect] = []
        if self._is_silent:
            effects.append(Heard())
        self._is_silent, self._heard_ns = False, now_ns
        if packet.kind is Kind.HELLO:
            if self._is_initiator:
                effects.append(self._greeting(packet.sender, now_ns))
            return effects
        if not self._out.is_possible_ack(packet.ack):
            raise ProtocolError(
                f"acknowledges packet {packet.ack}, the last one sent is {self._out.last_number}"
            )
        if not self._out.acknowledge(packet.ack, now_ns):
            self._out.heard(now_ns)
        if packet.flags & Flag.GAP:
            self._out.gap(now_ns)
        if packet.kind is Kind.DATA:
            received = self._in.take(packet, now_ns)
            if received is not None:
                effects.append(
                    Greeted(received.frames[0])
                    if received.is_greeting
                    else Deliver(received.frames)
                )
        return effects + self._pump(now_ns)

    def tick(self, now_ns: int) -> list[Effect]:
        """Do what is due."""
        if self._peer is None:
            if self._is_initiator and now_ns >= self._greet_ns:
                return [self._greeting(0, now_ns)]
            return []
        effects: list[Effect] = []
        if not self._is_silent and now_ns - self._heard_ns >= SILENT_AFTER_NS:
            self._is_silent = True
            effects.append(Silent(now_ns - self._heard_ns))
        self._out.time_out(now_ns)
        effects += self._pump(now_ns)
        is_ack_due = self._in.ack_due_ns is not None and now_ns >= self._in.ack_due_ns
        if is_ack_due or now_ns - self._sent_ns >= HEARTBEAT_NS:
            effects.append(self._packet(Kind.ACK, now_ns))
        return effects

    def check(self) -> None:
        """Assert every invariant."""
        self._out.check()
        assert self._peer is not None or self._out.queued_bytes == 0
        assert self._own != self._fresh

    def _strange(self, packet: Packet, now_ns: int) -> list[Effect]:
        """A packet that is not the session's: the table above."""
        if self._is_initiator:
            if packet.kind is not Kind.HELLO or packet.receiver != self._own:
                return []
            if self._peer is None:
                begun = self._begin(packet, now_ns, may_be_old=self._may_be_old)
                return [*begun, self._greeting(packet.sender, now_ns), *self._pump(now_ns)]
            return self.reset("the peer was restarted or forgot this end", now_ns)
        if packet.kind is Kind.HELLO and packet.receiver == self._fresh:
            effects: list[Effect] = []
            if self._peer is not None:
                effects.append(Down("the peer was restarted or began anew"))
            own, may_be_old = self._fresh, self._may_be_old
            self._forget()
            self._own = own
            effects += self._begin(packet, now_ns, may_be_old=may_be_old)
            return effects + self._pump(now_ns)
        if packet.sender == self._peer:
            # A greeting that was sent before it knew our id, or anything older.
            is_early = packet.kind is Kind.HELLO and packet.receiver == 0
            return [self._greeting(packet.sender, now_ns)] if is_early else []
        answer = Packet(Kind.HELLO, self._fresh, packet.sender, frames=(self._hello,))
        return [Transmit(answer)]

    def _begin(self, packet: Packet, now_ns: int, *, may_be_old: bool) -> list[Effect]:
        self._peer = packet.sender
        if may_be_old:
            self._greet_again()
        self._heard_ns = self._sent_ns = now_ns
        return [Up(packet.sender, packet.frames[0])]

    def _forget(self) -> None:
        self._peer = None
        self._own, self._fresh = self._draw(), self._draw()
        self._out, self._in = Outgoing(), Incoming()
        self._is_silent = self._may_be_old = False

    def _greet_again(self) -> None:
        self._out.put(Piece(Flag.GREETING, (self._hello,), len(self._hello)))

    def _draw(self) -> int:
        self._last_id = self._last_id % _IDS + 1
        return self._last_id

    def _greeting(self, receiver: int, now_ns: int) -> Transmit:
        self._greet_ns = now_ns + GREET_NS
        return Transmit(Packet(Kind.HELLO, self._own, receiver, frames=(self._hello,)))

    def _pump(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = [
            self._packet(Kind.DATA, now_ns, number, piece)
            for number, piece in self._out.due(now_ns)
        ]
        if self._in.is_gap_owed:
            effects.append(self._packet(Kind.ACK, now_ns))
        return effects

    def _packet(
        self, kind: Kind, now_ns: int, number: int = 0, piece: Piece | None = None
    ) -> Transmit:
        assert self._peer is not None
        flags = piece.flags if piece else Flag.NONE
        if self._in.is_gap_owed:
            flags |= Flag.GAP
        frames = piece.frames if piece else ()
        packet = Packet(kind, self._own, self._peer, number, self._in.ack, flags, frames)
        self._in.acked()
        self._sent_ns = now_ns
        return Transmit(packet)
