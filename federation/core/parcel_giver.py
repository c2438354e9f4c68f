"""The producer's half of the exchange: answers peers that ask for parcels.

It holds what its owner offers until the consumer says that it came. A peer may ask before the offer
is there (it is answered then), twice, for a parcel that is gone, or never stop asking: requests are
idempotent and what is kept of them is bounded. Data frames leave one by one, peers in turn. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from federation.exchange_messages import (
    ExchangeMessage,
    ParcelKey,
    ParcelSize,
    Pull,
    Refused,
    Taken,
    TakenNoted,
    Want,
)

EARLY_WANTS_MAX = 4096
"""Parcels that one peer may ask for before they are offered; the oldest are forgotten, and asked
for again."""
QUEUED_FRAMES_MAX = 4096
"""Data frames that one peer may wait for; it asks again for what is left out."""


class Answer(NamedTuple):
    """Effect: send this to a peer; a ParcelSize goes with the parcel's table."""

    peer: str
    message: ExchangeMessage


class TellTaken(NamedTuple):
    """Effect: the owner may forget the parcel's fragments."""

    key: ParcelKey


class TellDeclined(NamedTuple):
    """Effect: the consumer needs nothing of a parcel that is not offered now, and may be later."""

    key: ParcelKey


GiverEffect = Answer | TellTaken | TellDeclined


class DataFrame(NamedTuple):
    """A data frame that is to be sent next."""

    peer: str
    size: ParcelSize
    frame: int


@dataclass
class GiverCounts:
    """Totals since the process began."""

    taken_parcels: int = 0
    left_out_frames: int = 0
    """Asked for in vain: of no parcel that is offered, or too many at once."""


class ParcelGiver:
    """All parcels that this node gives. Feed it, drain `effects()`, send what `next_frame` says."""

    def __init__(self) -> None:
        self._offers: dict[ParcelKey, ParcelSize | Refused] = {}
        self._early: dict[str, dict[ParcelKey, None]] = {}
        self._queues: dict[str, deque[tuple[ParcelSize, int]]] = {}
        self._turn: deque[str] = deque()
        """Peers with frames to be sent, whose turn is next first."""
        self._fences: dict[str, int] = {}
        self._effects: list[GiverEffect] = []
        self.counts = GiverCounts()

    def __len__(self) -> int:
        return len(self._offers)

    @property
    def has_frames(self) -> bool:
        """True while a data frame is to be sent."""
        return bool(self._turn)

    def effects(self) -> list[GiverEffect]:
        """Return what is to be done since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    # what the owner says

    def offer(self, size: ParcelSize | Refused) -> None:
        """Hold a parcel for its consumer, or why it cannot be had; a second offer replaces the first."""
        key = size.key
        if self._is_fenced(key):
            return
        if key in self._offers:
            del self._offers[key]
            self._leave_queue(key.consumer)
        self._offers[key] = size
        early = self._early.get(key.consumer)
        if early is not None and key in early:
            del early[key]
            self._effects.append(Answer(key.consumer, size))

    def withdraw(self, key: ParcelKey) -> None:
        """Give nothing of a parcel any more."""
        self._offers.pop(key, None)
        self._leave_queue(key.consumer)

    def drop_generation(self, job: str, generation: int) -> None:
        """Give nothing of a job up to a generation any more, and hear nothing of it."""
        self._fences[job] = max(generation, self._fences.get(job, generation))
        for key in [key for key in self._offers if self._is_fenced(key)]:
            del self._offers[key]
        for early in self._early.values():
            for key in [key for key in early if self._is_fenced(key)]:
                del early[key]
        for peer in list(self._queues):
            self._leave_queue(peer)

    def keep_peers(self, peers: Collection[str]) -> None:
        """Forget what peers asked for that are none any more."""
        for known in (self._early, self._queues):
            for peer in [peer for peer in known if peer not in peers]:
                del known[peer]
        self._turn = deque(peer for peer in self._turn if peer in peers)

    def _is_fenced(self, key: ParcelKey) -> bool:
        return key.generation <= self._fences.get(key.job, -1)

    # what a peer says; the caller has checked that it is the key's consumer

    def want_came(self, want: Want) -> None:
        """Answer with the parcel's size, now or once it is offered."""
        self._answer_size(want.key)

    def pull_came(self, pull: Pull) -> None:
        """Queue data frames; a parcel or layout that is not offered is answered as a wish for it."""
        size = self._offers.get(pull.key)
        if not isinstance(size, ParcelSize) or size.layout != pull.layout:
            self.counts.left_out_frames += len(pull.frames)
            self._answer_size(pull.key)
            return
        peer = pull.key.consumer
        queue = self._queues.setdefault(peer, deque())
        if not queue:
            self._turn.append(peer)
        for frame in pull.frames:
            if frame >= size.frames_count or len(queue) >= QUEUED_FRAMES_MAX:
                self.counts.left_out_frames += 1
                continue
            queue.append((size, frame))
        if not queue:
            self._turn.pop()

    def taken_came(self, taken: Taken) -> None:
        """The consumer has it, or all that it would bring. Said again until it is noted."""
        key = taken.key
        if self._offers.pop(key, None) is not None:
            self.counts.taken_parcels += 1
            self._effects.append(TellTaken(key))
            self._leave_queue(key.consumer)
        elif not self._is_fenced(key):
            self._effects.append(TellDeclined(key))
        self._effects.append(Answer(key.consumer, TakenNoted(key)))

    def _answer_size(self, key: ParcelKey) -> None:
        size = self._offers.get(key)
        if size is not None:
            self._effects.append(Answer(key.consumer, size))
        elif not self._is_fenced(key):
            early = self._early.setdefault(key.consumer, {})
            early[key] = None
            if len(early) > EARLY_WANTS_MAX:
                del early[next(iter(early))]

    # frames

    def next_frame(self, busy: Collection[str]) -> DataFrame | None:
        """Return a data frame to be sent now, None where there is none.

        Args:
            busy: Peers that have as many frames under way as they may.
        """
        for _ in range(len(self._turn)):
            peer = self._turn.popleft()
            if peer in busy:
                self._turn.append(peer)
                continue
            queue = self._queues[peer]
            size, frame = queue.popleft()
            if queue:
                self._turn.append(peer)
            return DataFrame(peer, size, frame)
        return None

    def all_busy(self, busy: Collection[str]) -> bool:
        """Return whether all who wait for frames are among `busy`."""
        return all(peer in busy for peer in self._turn)

    def put_back(self, frame: DataFrame) -> None:
        """Take a frame back that cannot be sent yet: it is the next of its peer."""
        queue = self._queues[frame.peer]
        if not queue:
            self._turn.appendleft(frame.peer)
        queue.appendleft((frame.size, frame.frame))

    def _leave_queue(self, peer: str) -> None:
        """Leave out queued frames of parcels that are not offered any more."""
        queue = self._queues.get(peer)
        if not queue:
            return
        kept = deque(entry for entry in queue if self._offers.get(entry[0].key) is entry[0])
        self._queues[peer] = kept
        if not kept:
            self._turn.remove(peer)
