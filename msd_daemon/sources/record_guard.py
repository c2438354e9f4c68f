"""What stands between a worker and a record that kills it: marks, and a list of those not to touch.

One `SourceGuard` for each source in a worker process; what the daemon tells of quarantined records
later reaches encoders that are open already. `ShardGuard` is its view of one shard in one epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from msd_daemon.shm.mark_page import InFlight, MarkState
from msd_daemon.sources.bad_record import KEY_SHOWN_MAX

AnyWindow = TypeVar("AnyWindow")
SUSPECTS_MAX = 64
"""Ranges of places that are handled record by record; the oldest is forgotten."""


class Placed(Protocol):
    """A record that knows where it lies."""

    place: int
    key: bytes | None


class Quarantined(NamedTuple):
    """A record that is not touched any more."""

    first_epoch: int
    """From this epoch on; before it the record was a sample, and a replay gives it again."""
    text: str


class LostPlace(NamedTuple):
    """Where a shard could not be opened in an epoch."""

    shard: int
    block: int
    """Of a seekable source; of a streamed shard its first record that is lost."""
    epoch: int


class Loss(NamedTuple):
    """What is lost there, for every replay too."""

    records: int
    text: str


class Suspect(NamedTuple):
    """Places of a shard where something killed a worker, it is not known what."""

    shard: int
    first_place: int
    last_place: int


@dataclass(eq=False)
class SourceGuard:
    """Of one source in one process."""

    source: int = 0
    """Index in the job."""
    in_flight: InFlight = field(default_factory=InFlight)
    shards: dict[str, int] = field(default_factory=dict)
    """Number of each shard by its path."""
    quarantined: dict[tuple[int, int], Quarantined] = field(default_factory=dict)
    """By (shard number, place)."""
    suspects: list[Suspect] = field(default_factory=list)
    losses: dict[LostPlace, Loss] = field(default_factory=dict)
    report: Callable[[LostPlace, Loss], None] | None = None
    """Has the daemon note a loss; returns once it is durable and known here."""
    hear: Callable[[], None] | None = None
    """Takes in what the daemon sent meanwhile of records that are not to be touched."""

    def listen(self) -> None:
        """Learn of a record that killed another worker, before it is reached here."""
        if self.hear is not None and self.in_flight.has_news():
            self.hear()

    def listen_now(self) -> None:
        """Take in what the daemon sent, and end where it is gone: of a worker that waits."""
        if self.hear is not None:
            self.hear()

    def lose(self, place: LostPlace, loss: Loss) -> None:
        """Note that records are lost, before anything is planned by it."""
        if place not in self.losses and self.report is not None:
            self.report(place, loss)

    def of(self, path: str, epoch: int) -> ShardGuard:
        """Return the view of a shard in an epoch."""
        return ShardGuard(self, self.shards.get(path, -1), epoch)

    def learn(self, order: dict[str, Any]) -> None:
        """Take in what the daemon tells: what is not to be touched, suspected and lost.

        Args:
            order: `records` [[shard, place, epoch, text]], `suspects` [[shard, first, last place]],
                `losses` [[shard, block, epoch, records, text]].
        """
        for shard, place, epoch, text in order["records"]:
            self.quarantined[shard, place] = Quarantined(epoch, text)
        for shard, block, epoch, records, text in order.get("losses", ()):
            self.losses[LostPlace(shard, block, epoch)] = Loss(records, text)
        told = [Suspect(*suspect) for suspect in order["suspects"]]
        self.suspects += [suspect for suspect in told if suspect not in self.suspects]
        del self.suspects[:-SUSPECTS_MAX]


@dataclass(frozen=True, slots=True)
class ShardGuard:
    """A source's guard for the records of one shard in one epoch."""

    source: SourceGuard
    shard: int
    epoch: int

    def fate(self, place: int) -> str | None:
        """Return why a record is not to be touched, None where it may be."""
        self.source.listen()
        found = self.source.quarantined
        if not found:
            return None
        entry = found.get((self.shard, place))
        return None if entry is None or entry.first_epoch > self.epoch else entry.text

    def begin(self, record: Placed) -> None:
        """A record is worked on from now on."""
        source = self.source
        source.in_flight.begin(
            source.source, max(self.shard, 0), self.epoch, record.place, record.place,
            (record.key or b"")[:KEY_SHOWN_MAX],
        )  # fmt: skip

    def end(self) -> None:
        """Nothing is worked on any more."""
        self.source.in_flight.end()

    def reading(self, windows: Iterator[AnyWindow]) -> Iterator[AnyWindow]:
        """Yield windows, each marked while it is read."""
        source, shard = self.source, max(self.shard, 0)
        while True:
            source.in_flight.begin(
                source.source, shard, self.epoch, -1, -1, state=MarkState.READING
            )
            window = next(windows, None)
            source.in_flight.end()
            if window is None:
                return
            yield window

    @contextmanager
    def working(self, records: Sequence[Placed]) -> Iterator[None]:
        """Mark records that are worked on at once: one, or a window."""
        if len(records) == 1:
            self.begin(records[0])
        elif records:
            source, places = self.source, [record.place for record in records]
            source.in_flight.begin(
                source.source, max(self.shard, 0), self.epoch, min(places), max(places),
                state=MarkState.WINDOW,
            )  # fmt: skip
        yield
        self.end()  # what ends the process (no memory) leaves its mark

    def is_suspect(self, records: Sequence[Placed]) -> bool:
        """True where records must be handled one by one: a worker died with some of them."""
        self.source.listen()
        return len(records) > 1 and any(
            suspect.shard == self.shard
            and any(suspect.first_place <= r.place <= suspect.last_place for r in records)
            for suspect in self.source.suspects
        )


NO_GUARD = ShardGuard(SourceGuard(), -1, 0)
"""Marks nothing, knows of nothing."""


def outside(in_flight: InFlight, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that has limits of its own: of the user's code, or to a store."""

    def guarded(*arguments: Any) -> Any:
        in_flight.leave()
        try:
            return call(*arguments)
        finally:
            in_flight.back()

    return guarded


def timed_outside(in_flight: InFlight, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of the user's code, as `outside`; its time is counted as theirs."""
    guarded = outside(in_flight, call)

    def timed(*arguments: Any) -> Any:
        begun_ns = time.monotonic_ns()
        try:
            return guarded(*arguments)
        finally:
            in_flight.user_ns += time.monotonic_ns() - begun_ns

    return timed
