"""Rings of generations that are over: their memory lives on in ranks whose views are alive."""

from __future__ import annotations

from collections.abc import Iterable

from msd_client.contract.errors import UsageError
from msd_daemon.services.membership import Member

OLD_RINGS_MAX = 2
"""Generations whose rings may live on beside the running one's (DESIGN.md section 7)."""


class OldRings:
    """Of one job. The daemon itself has closed them; ranks say at their start what they still hold."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        """By generation."""

    @property
    def total_bytes(self) -> int:
        """Bytes that count in the budget."""
        return sum(self._bytes.values())

    def ended(self, generation: int, rings_bytes: int) -> None:
        """A generation is over."""
        self._bytes[generation] = rings_bytes

    def forget(self) -> None:
        """All ranks are gone, and all mappings with them."""
        self._bytes.clear()

    def settle(self, job_name: str, members: Iterable[Member]) -> None:
        """Keep what the ranks that start hold still.

        Raises:
            UsageError: Batches of too many generations are alive; ranks and numbers are named.
        """
        holders: dict[int, list[int]] = {}
        for member in members:
            for generation in member.held:
                if generation in self._bytes:
                    holders.setdefault(generation, []).append(member.rank)
        self._bytes = {g: size for g, size in self._bytes.items() if g in holders}
        if len(holders) > OLD_RINGS_MAX:
            ranks = sorted({rank for found in holders.values() for rank in found})
            raise UsageError(
                f"ranks {ranks[:16]} of job {job_name!r} hold batches of {len(holders)} earlier "
                f"generations (each load_state_dict begins one), at most {OLD_RINGS_MAX} may be held: "
                "drop them (del batch) before iterating again",
                seen=len(holders),
                limit=OLD_RINGS_MAX,
            )
