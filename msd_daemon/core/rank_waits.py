"""What ranks say of their own waits, and when they gave batches back. Pure; the clock comes in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WAITED_NS_MAX = 1 << 52
"""More than fifty days: no rank waited so long for a batch."""
NEWEST_WEIGHT = 0.25
WAIT_NS_MIN = 1_000_000
"""A batch that came sooner was there when it was asked for."""


@dataclass(slots=True)
class RankTimes:
    """Of one rank, in one generation. Times are monotonic nanoseconds, 0 where not known."""

    batches: int = 0
    waited_ns: int = 0
    """For all but the first."""
    released_ns: int = 0
    interval_ns: int = 0
    """From one batch that it gives back to the next: a moving average."""
    waiting_since_ns: int = 0
    last_waited_ns: int = 0
    """For the batch that it gave back last."""


class RankWaits:
    """Of the ranks of one generation on this node."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankTimes] = {}

    def released(self, rank: int, waited_ns: int, now_ns: int) -> None:
        """A rank gave a batch back, for which it had waited so long (its own word)."""
        times = self._ranks.get(rank)
        if times is None:
            times = self._ranks[rank] = RankTimes()
        times.batches += 1
        # The first one's wait is the start's: everybody waits then, and for everything.
        if times.batches > 1 and waited_ns < WAITED_NS_MAX:
            times.waited_ns += waited_ns
            times.last_waited_ns = waited_ns
        if times.released_ns:
            taken_ns = now_ns - times.released_ns
            known_ns = times.interval_ns or taken_ns
            times.interval_ns = int(known_ns + NEWEST_WEIGHT * (taken_ns - known_ns))
        times.released_ns = now_ns

    def waits(self, rank: int, since_ns: int) -> None:
        """A rank says that it has waited since then."""
        self._ranks.setdefault(rank, RankTimes()).waiting_since_ns = since_ns

    def is_waiting(self, rank: int) -> bool:
        """True where a rank that was given all there is waits: it says so, or had to of late."""
        times = self.of(rank)
        return times.waiting_since_ns > 0 or times.last_waited_ns >= WAIT_NS_MIN

    def served(self, ranks: Iterable[int]) -> None:
        """Ranks were told of another batch."""
        for rank in ranks:
            times = self._ranks.get(rank)
            if times is not None:
                times.waiting_since_ns = 0

    def of(self, rank: int) -> RankTimes:
        """Return a rank's times, all 0 where it gave nothing back yet."""
        return self._ranks.get(rank) or RankTimes()
