"""What goes out on a session: kept until acknowledged, sent again after silence or a gap. Pure.

Go back to the first unacknowledged one: a link that breaks loses a run of packets, never single
ones, so the receiver keeps nothing out of order. The time to wait follows the measured round trip
(RFC 6298, in integers; packets that went twice are no sample, Karn).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from federation.core.incoming import ACK_DELAY_NS
from federation.core.packet import PACKET_BYTES_MAX, Piece

PACKET_COST_BYTES = 64
"""Counted for each packet beside its frames, so that empty ones are bounded, too."""
WINDOW_BYTES = 4 * (PACKET_BYTES_MAX + PACKET_COST_BYTES)
"""In flight at most; one packet after a time-out, doubled with each acknowledgement."""
WAIT_MIN_NS = 300_000_000
WAIT_MAX_NS = 4_000_000_000
WAIT_FIRST_NS = 1_000_000_000


@dataclass(slots=True)
class _Kept:
    number: int
    piece: Piece
    sent_ns: int = 0
    tries: int = 0

    @property
    def cost_bytes(self) -> int:
        return self.piece.size_bytes + PACKET_COST_BYTES


class Outgoing:
    """The sending half of one session."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()
        self._sent = 0
        """So many at the head of the queue are in flight."""
        self._flight_bytes = 0
        self._next = 1
        self._window_bytes = WINDOW_BYTES
        self._smooth_ns: int | None = None
        self._spread_ns = 0
        self._wait_ns = WAIT_FIRST_NS
        self._backoff = 0
        self._progress_ns = 0
        self._went_back_ns: int | None = None
        self.queued_bytes = 0
        self.resends = 0

    @property
    def wait_ns(self) -> int:
        """Until the first packet in flight is sent again."""
        return min(self._wait_ns << self._backoff, WAIT_MAX_NS)

    @property
    def deadline_ns(self) -> int | None:
        """When the first packet in flight has to be sent again."""
        return self._progress_ns + self.wait_ns if self._sent else None

    @property
    def last_number(self) -> int:
        """Of the last packet that was queued."""
        return self._next - 1

    def put(self, piece: Piece) -> None:
        """Queue a piece."""
        kept = _Kept(self._next, piece)
        self._next += 1
        self._kept.append(kept)
        self.queued_bytes += kept.cost_bytes

    def due(self, now_ns: int) -> list[tuple[int, Piece]]:
        """Return what may leave now: number and piece."""
        leaving = []
        while self._sent < len(self._kept):
            kept = self._kept[self._sent]
            if self._sent and self._flight_bytes + kept.cost_bytes > self._window_bytes:
                break
            if not self._sent:
                self._progress_ns = now_ns
            kept.sent_ns, kept.tries = now_ns, kept.tries + 1
            self.resends += kept.tries > 1
            self._sent += 1
            self._flight_bytes += kept.cost_bytes
            leaving.append((kept.number, kept.piece))
        return leaving

    def is_possible_ack(self, ack: int) -> bool:
        """Tell whether a peer can have received so much."""
        return ack < self._next

    def acknowledge(self, ack: int, now_ns: int) -> bool:
        """Drop all up to `ack`; tell whether there was anything."""
        is_progress = False
        while self._kept and self._kept[0].number <= ack:
            kept = self._kept.popleft()
            self.queued_bytes -= kept.cost_bytes
            if self._sent:
                self._sent -= 1
                self._flight_bytes -= kept.cost_bytes
            if kept.tries == 1:
                self._measure(now_ns - kept.sent_ns)
            is_progress = True
        if is_progress:
            self._backoff = 0
            self._progress_ns = now_ns
            self._went_back_ns = None
            self._window_bytes = min(2 * self._window_bytes, WINDOW_BYTES)
        return is_progress

    def gap(self, now_ns: int) -> None:
        """Go back: the peer has later ones, the first one in flight was lost.

        Once a round trip: what was sent again is under way.
        """
        if self._went_back_ns is None or now_ns - self._went_back_ns >= self._wait_ns:
            self._go_back(now_ns)

    def heard(self, now_ns: int) -> None:
        """Note a sign of life that acknowledges nothing new: after a cut, send again at once."""
        if self._backoff and self._sent:
            self.gap(now_ns)

    def time_out(self, now_ns: int) -> None:
        """Go back where the deadline passed."""
        deadline = self.deadline_ns
        if deadline is not None and now_ns >= deadline:
            self._backoff = min(self._backoff + 1, 8)
            self._window_bytes = PACKET_BYTES_MAX
            self._go_back(now_ns)

    def _go_back(self, now_ns: int) -> None:
        self._went_back_ns = now_ns
        self._sent = 0
        self._flight_bytes = 0

    def _measure(self, round_trip_ns: int) -> None:
        if self._smooth_ns is None:
            self._smooth_ns, self._spread_ns = round_trip_ns, round_trip_ns // 2
        else:
            off = abs(self._smooth_ns - round_trip_ns)
            self._spread_ns += (off - self._spread_ns) // 4
            self._smooth_ns += (round_trip_ns - self._smooth_ns) // 8
        wait = self._smooth_ns + 4 * self._spread_ns + 2 * ACK_DELAY_NS
        self._wait_ns = max(WAIT_MIN_NS, min(wait, WAIT_MAX_NS))

    def check(self) -> None:
        """Assert every invariant."""
        assert 0 <= self._sent <= len(self._kept)
        assert self.queued_bytes == sum(kept.cost_bytes for kept in self._kept)
        flight = [kept.cost_bytes for _, kept in zip(range(self._sent), self._kept, strict=False)]
        assert self._flight_bytes == sum(flight)
        assert self._flight_bytes <= WINDOW_BYTES + max(flight, default=0)
        numbers = [kept.number for kept in self._kept]
        assert numbers == list(range(self._next - len(numbers), self._next))
