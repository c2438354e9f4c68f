"""What planners share: leadership with a growing term, what is open, and journals.

Blocking. The leader alone writes, and every write is fenced: in its transaction the store compares
the term, so that a leader which was stopped and wakes changes nothing (LeadershipLostError). No
wall clock takes part: leases count on the store's own time, or on each observer's monotonic clock.
"""

from __future__ import annotations

import time
from typing import Literal, NamedTuple, Protocol

from federation.journal_place import JournalPlace
from msd_client.contract.errors import ConfigError

LEASE_S = 3.0
"""So long a leader that says nothing is waited for."""

RecordKind = Literal["jobs", "nodes"]
"""`jobs`: what a successor needs to go on with a job, by job id; `nodes`: what is known of each."""

RECORD_NAME_BYTES_MAX = 512
RECORD_BYTES_MAX = 64 << 20


class Leader(NamedTuple):
    """Who leads, as the store says."""

    term: int
    name: str
    """Of the planner."""
    endpoint: str
    """Where nodes reach it."""


class LeaseRenewal(Protocol):
    """Renews the lease of one term; has a connection of its own, for a thread of its own."""

    def renew(self) -> bool:
        """Renew the lease once.

        Returns:
            False where the term is over: another planner leads, or nobody.

        Raises:
            PlanStoreError: The store does not answer; the lease may run on.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class PlanStore(Protocol):
    """One planner's way to the store; used by one thread."""

    @property
    def lease_s(self) -> float:
        """Length of a lease."""
        ...

    @property
    def term(self) -> int:
        """The term that this planner holds, or held last; 0 where it never led."""
        ...

    def campaign(self, name: str, endpoint: str) -> int | None:
        """Try once to lead.

        Args:
            name: Of this planner.
            endpoint: Where nodes reach it, told to standbys' peers.

        Returns:
            The term, higher than any before it; None while another planner leads.

        Raises:
            PlanStoreError: The store does not answer.
        """
        ...

    def renewal(self) -> LeaseRenewal:
        """Return what renews the lease of the term that is held."""
        ...

    def resign(self) -> None:
        """Let others lead at once; where the store does not answer, the lease runs out."""
        ...

    def leader(self) -> Leader | None:
        """Return who leads, None for nobody.

        Raises:
            PlanStoreError: The store does not answer.
        """
        ...

    def put(self, kind: RecordKind, name: str, body: bytes) -> None:
        """Keep a record, in place of the one of that name.

        Raises:
            LeadershipLostError: The term is over; nothing is written.
            PlanStoreError: It can't be written now.
        """
        ...

    def drop(self, kind: RecordKind, name: str) -> None:
        """Forget a record, if there is one.

        Raises:
            LeadershipLostError: The term is over; nothing is written.
            PlanStoreError: It can't be written now.
        """
        ...

    def records(self, kind: RecordKind) -> dict[str, bytes]:
        """Return the records of a kind by name, in order of names.

        Raises:
            PlanStoreError: The store does not answer.
        """
        ...

    def journal(self, job_id: str) -> JournalPlace:
        """Return where a job's journal lies; opening it needs the term, as every write to it does."""
        ...

    def close(self) -> None:
        """Close all connections; the lease is left to run out."""
        ...


def monotonic_ns() -> int:
    """Return nanoseconds of a clock that nobody sets and that counts a suspended machine's sleep."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def check_record(kind: RecordKind, name: str, body: bytes) -> None:
    """Refuse a record that no store keeps.

    Raises:
        ConfigError: Its name or body is too long, or it has no name.
    """
    name_bytes = len(name.encode())
    if not 0 < name_bytes <= RECORD_NAME_BYTES_MAX:
        raise ConfigError(
            f"a name of {name_bytes} bytes in {kind} of the plan store, 1 to "
            f"{RECORD_NAME_BYTES_MAX} may be: choose a shorter one",
            seen=name_bytes,
            limit=RECORD_NAME_BYTES_MAX,
        )
    if len(body) > RECORD_BYTES_MAX:
        raise ConfigError(
            f"{kind} {name} has {len(body)} bytes, the plan store keeps at most "
            f"{RECORD_BYTES_MAX} of one: make it smaller",
            seen=len(body),
            limit=RECORD_BYTES_MAX,
        )
