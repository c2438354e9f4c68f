"""How long a leader may believe that it leads. Pure: time comes in as an argument.

A lease counts, at the store, from a moment after its renewal was sent; the leader counts from when
it sent it, and stops at two thirds, so it stops before the store lets anybody else lead.
"""

from __future__ import annotations

RENEWALS_PER_LEASE = 3


class LeaseClock:
    """The lease of one term.

    Args:
        lease_ns: Its length.
        sent_ns: When what was granted had been asked for.
    """

    def __init__(self, lease_ns: int, sent_ns: int) -> None:
        self._lease_ns = lease_ns
        self._renewed_ns = sent_ns

    def renewed(self, sent_ns: int) -> None:
        """The store granted a renewal that was sent at this time; answers may come out of order."""
        self._renewed_ns = max(self._renewed_ns, sent_ns)

    @property
    def stops_ns(self) -> int:
        """From when on the leader no longer leads, unless a renewal succeeds."""
        return self._renewed_ns + self._lease_ns * 2 // 3

    def is_fresh(self, now_ns: int) -> bool:
        """Return True while the leader may lead."""
        return now_ns < self.stops_ns

    def next_try_ns(self, tried_ns: int) -> int:
        """Return when to renew again after a try that was sent at this time."""
        return tried_ns + self._lease_ns // RENEWALS_PER_LEASE
