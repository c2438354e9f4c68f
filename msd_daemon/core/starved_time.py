"""For how long each source was waited for: the sum of what looks once a second would miss. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class StarvedTime:
    """Of the sources of one generation.

    Two things wait for a source: the draw, which lacks its next records, and a plan that came, of
    which samples are not here. A source counts once where both do.
    """

    def __init__(self) -> None:
        self._total_ns: dict[int, int] = {}
        self._since_ns: dict[int, int] = {}
        self._drawn: frozenset[int] = frozenset()
        self._planned: frozenset[int] = frozenset()

    def draw_lacks(self, sources: Iterable[int], now_ns: int) -> None:
        """The draw lacks these, and no others."""
        drawn = frozenset(sources)
        if drawn != self._drawn:
            self._drawn = drawn
            self._count(now_ns)

    def plan_lacks(self, source: int | None, now_ns: int) -> None:
        """The first plan that waits lacks samples of this source; None: of none."""
        planned = frozenset() if source is None else frozenset((source,))
        if planned != self._planned:
            self._planned = planned
            self._count(now_ns)

    def _count(self, now_ns: int) -> None:
        lacking = self._drawn | self._planned
        for source in [source for source in self._since_ns if source not in lacking]:
            since_ns = self._since_ns.pop(source)
            self._total_ns[source] = self._total_ns.get(source, 0) + now_ns - since_ns
        for source in lacking:
            self._since_ns.setdefault(source, now_ns)

    @property
    def now(self) -> frozenset[int]:
        """Sources that are waited for now."""
        return frozenset(self._since_ns)

    def total_ns(self, source: int, now_ns: int) -> int:
        """Return for how long a source was waited for so far."""
        since_ns = self._since_ns.get(source, now_ns)
        return self._total_ns.get(source, 0) + now_ns - since_ns
