"""State of the slots of one ring, in the daemon's memory alone (DESIGN.md section 9).

    free -> filling (constructor, sequence) -> filled (waits for its turn) -> published (owing
    readers) -> free

A retaining ring keeps what every reader released until a fill needs the slot, so that a reader may
come late and still begin at sequence 0: pipeline stages in the middle, which read if and when they
like. Without readers it holds nobody up.

Sequences are dense from 0 in a generation and are published in order. One owner, one thread; the
shell sends READY and takes RELEASE. Pure: no I/O, no clock (times come in as arguments).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from msd_client.contract.errors import InvalidTransitionError


class Publication(NamedTuple):
    """A slot that readers may open now."""

    slot: int
    sequence: int
    payload_bytes: int


class Debt(NamedTuple):
    """The reader that releases last."""

    reader: int
    held_count: int
    since_ns: int
    is_behind_others: bool
    """True where another reader already released the slot that this one holds."""


@dataclass(frozen=True)
class RingStatistics:
    """Frozen snapshot of one ring."""

    slots_count: int
    free_count: int
    filling_count: int
    filled_count: int
    published_count: int
    published_total: int
    stale_releases_total: int
    held_count: int = 0
    """Of the published ones: those that every reader that owes them was given already."""

    @property
    def ready_count(self) -> int:
        """Published slots that somebody has yet to be given."""
        return self.published_count - self.held_count


@dataclass
class _Filling:
    sequence: int
    constructor: int


@dataclass
class _Published:
    publication: Publication
    owing: set[int]
    since_ns: int
    is_settled: bool = False
    """Retaining rings: everybody who read at the time released it, so a fill may take it."""

    @property
    def sequence(self) -> int:
        return self.publication.sequence


class RingState:
    """Slots of one ring; readers are local ranks of one DP group and pipeline stage."""

    def __init__(
        self, slots_count: int, readers: frozenset[int], *, is_retaining: bool = False
    ) -> None:
        self.is_retaining = is_retaining
        self._free: deque[int] = deque(range(slots_count))
        self._filling: dict[int, _Filling] = {}
        self._filled: dict[int, Publication] = {}
        """By sequence."""
        self._published: dict[int, _Published] = {}
        """By slot, in order of publication."""
        self._slots_count = slots_count
        self._readers = set(readers)
        self._leaving: set[int] = set()
        self._given: dict[int, int] = {}
        """By reader: the sequence that it asks for next, as far as it told."""
        self._next_fill = 0
        self._next_publish = 0
        self._reissue: deque[int] = deque()
        self._stale_releases = 0
        self._reclaimed = 0
        """Retained slots that a fill took."""

    @property
    def readers(self) -> frozenset[int]:
        """Readers that still owe releases."""
        return frozenset(self._readers)

    @property
    def next_fill(self) -> int:
        """Sequence that `begin_fill` would take next."""
        return self._reissue[0] if self._reissue else self._next_fill

    def has_free(self) -> bool:
        """Return True where a fill can begin."""
        return bool(self._free) or (self.is_retaining and self._oldest_settled() is not None)

    def begin_fill(self, constructor: int) -> tuple[int, int]:
        """Take a free slot for the next sequence; return (slot, sequence)."""
        if not self._free:
            retained = self._oldest_settled() if self.is_retaining else None
            if retained is None:
                raise InvalidTransitionError("begin_fill without a free slot")
            del self._published[retained]
            self._free.append(retained)
            self._reclaimed += 1
        slot = self._free.popleft()
        if self._reissue:
            sequence = self._reissue.popleft()
        else:
            sequence = self._next_fill
            self._next_fill += 1
        self._filling[slot] = _Filling(sequence, constructor)
        return slot, sequence

    def fill_ended(
        self, slot: int, sequence: int, payload_bytes: int, now_ns: int
    ) -> list[Publication]:
        """Take a filled slot; return what may be published now, in order."""
        filling = self._filling.pop(slot, None)
        if filling is None or filling.sequence != sequence:
            raise InvalidTransitionError(f"slot {slot} was not being filled with {sequence}")
        self._filled[sequence] = Publication(slot, sequence, payload_bytes)
        ready = []
        while (publication := self._filled.pop(self._next_publish, None)) is not None:
            self._next_publish += 1
            self._published[publication.slot] = _Published(publication, set(self._readers), now_ns)
            ready.append(publication)
        return ready

    def constructor_lost(self, constructor: int) -> list[int]:
        """Free the slots a dead constructor was filling; their sequences are issued again."""
        lost = [
            slot for slot, filling in self._filling.items() if filling.constructor == constructor
        ]
        sequences = sorted(self._filling.pop(slot).sequence for slot in lost)
        self._free.extend(lost)
        self._reissue = deque(sorted([*self._reissue, *sequences]))
        return sequences

    def released(self, slot: int, sequence: int, reader: int) -> bool:
        """Clear a reader's claim; return True where that freed the slot. Stale ones are counted."""
        published = self._published.get(slot)
        if published is None or published.sequence != sequence or reader not in published.owing:
            self._stale_releases += 1
            return False
        published.owing.discard(reader)
        return self._free_if_settled(slot, published)

    def given(self, reader: int, next_sequence: int) -> None:
        """A reader says which sequence it asks for next: those before it were given to it."""
        known = self._given.get(reader, 0)
        self._given[reader] = max(known, min(next_sequence, self._next_publish))

    def was_given_all(self, reader: int) -> bool:
        """Return True where nothing is published that a reader was not given yet."""
        return self._given.get(reader, 0) >= self._next_publish

    def free_unread(self) -> list[int]:
        """Settle published slots that nobody owes; return their sequences (no reader is left)."""
        return [
            published.sequence
            for slot, published in list(self._published.items())
            if self._free_if_settled(slot, published)
        ]

    def reader_joins(self, reader: int) -> list[Publication]:
        """Take a reader in late; return what it has to catch up with, from sequence 0 on.

        Raises:
            InvalidTransitionError: The ring retains nothing, or sequence 0 is gone.
        """
        if not self.is_retaining or self._reclaimed:
            raise InvalidTransitionError(
                f"reader {reader} comes after {self._next_publish} slots, {self._reclaimed} are gone"
            )
        self._readers.add(reader)
        for published in self._published.values():
            published.owing.add(reader)
        return [published.publication for published in self._published.values()]

    def reader_leaves(self, reader: int, held: list[tuple[int, int]]) -> list[int]:
        """A reader reads no more but keeps some (slot, sequence); return sequences that were freed."""
        self._readers.discard(reader)
        self._leaving.add(reader)
        kept = set(held)
        freed = []
        for slot, published in list(self._published.items()):
            if (slot, published.sequence) in kept:
                continue
            published.owing.discard(reader)
            if self._free_if_settled(slot, published):
                freed.append(published.sequence)
        return freed

    def reader_lost(self, reader: int) -> list[int]:
        """Forget a reader that is gone; return sequences whose slot that freed."""
        self._readers.discard(reader)
        self._leaving.discard(reader)
        self._given.pop(reader, None)
        freed = []
        for slot, published in list(self._published.items()):
            published.owing.discard(reader)
            if self._free_if_settled(slot, published):
                freed.append(published.sequence)
        return freed

    def oldest_debt(self) -> Debt | None:
        """Return who holds the oldest published slot, or None where none is published."""
        owed = [published for published in self._published.values() if published.owing]
        if not owed:
            return None
        oldest = min(owed, key=lambda p: (p.since_ns, p.sequence))
        reader = min(oldest.owing)
        is_alone = len(oldest.owing) < len(self._readers)
        return Debt(reader, self.held_by(reader), oldest.since_ns, is_behind_others=is_alone)

    def owed_by(self, reader: int) -> list[Publication]:
        """Return the published slots that a reader has not released, in order."""
        return [p.publication for p in self._published.values() if reader in p.owing]

    def held_by(self, reader: int) -> int:
        """Return how many published slots a reader has not released."""
        return sum(reader in published.owing for published in self._published.values())

    def statistics(self) -> RingStatistics:
        """Return a frozen snapshot."""
        return RingStatistics(
            self._slots_count,
            len(self._free),
            len(self._filling),
            len(self._filled),
            len(self._published),
            self._next_publish,
            self._stale_releases,
            sum(self._is_held(published) for published in self._published.values()),
        )

    def check(self) -> None:
        """Assert that every slot is in exactly one state."""
        slots = [
            *self._free,
            *self._filling,
            *self._published,
            *(p.slot for p in self._filled.values()),
        ]
        assert sorted(slots) == list(range(self._slots_count)), slots
        assert all(p.owing <= self._readers | self._leaving for p in self._published.values())

    def _is_held(self, published: _Published) -> bool:
        owing = published.owing
        return bool(owing) and all(self._given.get(it, 0) > published.sequence for it in owing)

    def _oldest_settled(self) -> int | None:
        for slot, published in self._published.items():
            return slot if published.is_settled and not published.owing else None
        return None

    def _free_if_settled(self, slot: int, published: _Published) -> bool:
        """Free a slot that nobody owes; True where that settles its sequence, which it does once."""
        if published.owing or published.is_settled:
            return False
        if self.is_retaining:
            published.is_settled = True
            return True
        del self._published[slot]
        self._free.append(slot)
        return True
