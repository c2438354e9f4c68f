"""Fencing of source loaders: partition leases, and pieces that a dying process may still write into.

A lease is the number under which a loader reads its partitions. It grows with every change of hands
and every order to go back; a chunk under an older one is refused, whoever sends it and whenever. A
process that is replaced before it ended (stopped, or stuck in the kernel) may wake once more and
write: what was lent to it is condemned, and lent to nobody before its end is certain. Pure.
"""

from __future__ import annotations


class Leases:
    """Of the loaders of one generation."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._condemned: dict[int, list[int]] = {}

    def renew(self, loader: int) -> int:
        """Return the next lease of a loader; it is the only one in force, or that of its shadow."""
        lease = self._last.get(loader, 0) + 1
        self._last[loader] = lease
        return lease

    def condemn(self, pid: int, offset_bytes: int) -> None:
        """Keep a piece of the pool from everybody until this process ended."""
        self._condemned.setdefault(pid, []).append(offset_bytes)

    def ended(self, pid: int) -> list[int]:
        """A process ended: return the offsets of the pieces that are anybody's again."""
        return self._condemned.pop(pid, [])

    @property
    def condemned_count(self) -> int:
        """Pieces that wait for the end of a process."""
        return sum(map(len, self._condemned.values()))
