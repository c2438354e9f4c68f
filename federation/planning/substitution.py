"""When others take over a part of a slow source's share, and when it gets it back. Pure.

A share is halved each time ranks waited for its source long enough, down to what the job allows, and
comes back by a quarter after a while without any wait (additive increase, multiplicative decrease in
the manner of TCP's congestion control, Chiu and Jain 1989, but both by factors: shares may be tiny). What
comes out are weights like any other's: they are journalled before a step is planned by them, so a
replay knows nothing of the waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from federation.model.job import SlowSourcesRule

SECOND_NS = 1_000_000_000
LOWER = 0.5
RAISE = 1.25
CALM = 4
"""Times `after_s` without a wait, before shares come back."""
LOOK_NS_MAX = 5 * SECOND_NS
"""A pause between looks counts for no more: nobody knows what was in it."""
SHARE_TOLERANCE = 1e-6
FACTOR_MIN = 1e-3


@dataclass
class Substitution:
    """Of one job's sources."""

    rule: SlowSourcesRule
    sources: int
    factors: list[float] = field(default_factory=list)
    """Of its own share each source has so much now; 1: nobody takes of it."""
    expected: list[float] = field(default_factory=list)
    """Shares that were asked for last; empty where none were."""
    _asked: tuple[list[float], list[float]] = field(init=False)
    """Factors and shares that were asked for last."""
    _waited_ns: list[int] = field(init=False)
    _calm_ns: int = 0
    _looked_ns: int | None = None

    def __post_init__(self) -> None:
        if len(self.factors) != self.sources:
            self.factors, self.expected = [1.0] * self.sources, []
        self._asked = (list(self.factors), list(self.expected))
        self._waited_ns = [0] * self.sources

    @property
    def asked(self) -> tuple[list[float], list[float]]:
        """Factors and shares of the last change."""
        return self._asked

    @property
    def is_active(self) -> bool:
        """True while others take a part of some source's share."""
        return any(factor < 1 for factor in self.factors)

    def look(
        self, now_ns: int, slow: Collection[int], shares: Sequence[float]
    ) -> list[float] | None:
        """Return other weights of the sources, None where they are to stay.

        Args:
            now_ns: Monotonic.
            slow: Sources that ranks wait for now.
            shares: In force, by source; what was asked for is in force by now.
        """
        passed = 0 if self._looked_ns is None else min(now_ns - self._looked_ns, LOOK_NS_MAX)
        self._looked_ns = now_ns
        self._follow(shares)
        self._calm_ns = 0 if slow else self._calm_ns + passed
        for source in range(self.sources):
            waited = self._waited_ns[source] + (passed if source in slow else -passed)
            self._waited_ns[source] = max(waited, 0)
        factors = self._lowered(shares) or self._raised()
        if factors is None:
            return None
        weights = [
            share * new / old for share, new, old in zip(shares, factors, self.factors, strict=True)
        ]
        total = sum(weights)
        self.factors, self.expected = factors, [weight / total for weight in weights]
        self._asked = (list(self.factors), list(self.expected))
        return list(self.expected)

    def _follow(self, shares: Sequence[float]) -> None:
        """Take shares that somebody else, or the schedule, has set since for whole.

        Where those that were asked for are in force again (a run that goes on from before they were),
        so are their factors.
        """
        if _are_alike(shares, self._asked[1]):
            if not self.expected:
                self.factors, self.expected = list(self._asked[0]), list(self._asked[1])
                self._calm_ns = 0
        elif self.expected:
            self.factors, self.expected = [1.0] * self.sources, []
            self._waited_ns = [0] * self.sources

    def _lowered(self, shares: Sequence[float]) -> list[float] | None:
        """Return the factors with those of sources that were waited for long enough lowered."""
        least = 1 - self.rule.at_most
        after_ns = int(self.rule.after_s * SECOND_NS)
        due = [
            source
            for source, waited in enumerate(self._waited_ns)
            if waited >= after_ns and shares[source] > 0 and self.factors[source] > least
        ]
        others = [n for n, share in enumerate(shares) if share > 0 and n not in due]
        if not due or not others:
            return None  # nobody could take over
        factors = list(self.factors)
        for source in due:
            factors[source] = max(factors[source] * LOWER, least, FACTOR_MIN)
            self._waited_ns[source] = 0
        return factors

    def _raised(self) -> list[float] | None:
        """Return the factors closer to 1 after a time without a wait."""
        if not self.is_active or self._calm_ns < CALM * self.rule.after_s * SECOND_NS:
            return None
        self._calm_ns = 0
        return [min(factor * RAISE, 1.0) for factor in self.factors]


def _are_alike(shares: Sequence[float], others: Sequence[float]) -> bool:
    return len(shares) == len(others) and all(
        abs(one - other) <= SHARE_TOLERANCE for one, other in zip(shares, others, strict=True)
    )
