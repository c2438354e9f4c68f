"""Leadership of one planner: campaigns, renews the lease in a thread, and says when it is over.

The thread renews while the planner plans, however long a call takes; it stops once the planner's
loop has not come round for LOOP_LATE_S, so that a hung one is taken over. Between a renewal that
failed and the next that succeeds the planner is in doubt: it gives no orders. Nobody else led
meanwhile if the store still knows the term, so it then goes on where it was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from federation.store.lease_clock import LeaseClock
from federation.store.plan_store import LeaseRenewal, PlanStore, monotonic_ns
from msd_client.contract.errors import LeadershipLostError, PlanStoreError

log = logging.getLogger(__name__)

LOOP_LATE_S = 60.0
"""A planner whose loop does not come round for so long lets go of its lease."""


class Leadership:
    """One planner's leadership, term after term. One thread campaigns, asks and resigns.

    Args:
        store: Of that thread.
        name: Of the planner.
        endpoint: Where nodes reach it.
        loop_late_s: See LOOP_LATE_S.
        clock_ns: A monotonic clock.
    """

    def __init__(
        self,
        store: PlanStore,
        name: str,
        endpoint: str,
        *,
        loop_late_s: float = LOOP_LATE_S,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._store = store
        self._name = name
        self._endpoint = endpoint
        self._loop_late_ns = int(loop_late_s * 1e9)
        self._clock_ns = clock_ns
        self._keeper: _Keeper | None = None
        self._changed_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return what becomes readable when leadership changed; `look` clears it."""
        return self._changed_fd

    @property
    def term(self) -> int:
        """The term that is held; 0 while none is."""
        return 0 if self._keeper is None else self._store.term

    def campaign(self) -> int | None:
        """Try once to lead; return the term, None while another planner leads.

        Raises:
            PlanStoreError: The store does not answer.
        """
        assert self._keeper is None
        sent_ns = self._clock_ns()
        term = self._store.campaign(self._name, self._endpoint)
        if term is None:
            return None
        clock = LeaseClock(int(self._store.lease_s * 1e9), sent_ns)
        self._keeper = _Keeper(
            self._store.renewal(), clock, self._clock_ns, self._loop_late_ns, self._tell
        )
        self._keeper.start()
        return term

    def look(self) -> bool:
        """Say that the planner's loop came round; return whether it may give orders now.

        Raises:
            LeadershipLostError: The term is over.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._changed_fd)
        keeper = self._keeper
        if keeper is None:
            raise LeadershipLostError(f"planner {self._name} does not lead: it campaigns first")
        keeper.loop_came_round(self._clock_ns())
        if keeper.over:
            raise LeadershipLostError(
                f"planner {self._name}, term {self._store.term}: {keeper.over}; it stands by from "
                "here on",
                seen=self._store.term,
            )
        return keeper.clock.is_fresh(self._clock_ns())

    def end(self, *, is_resigned: bool) -> None:
        """Stop renewing.

        Args:
            is_resigned: Let others lead at once; False where they do already.
        """
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        keeper.stop()
        if is_resigned:
            self._store.resign()

    def close(self) -> None:
        """Stop renewing and close what `fileno` returns; the store is the caller's."""
        self.end(is_resigned=False)
        os.close(self._changed_fd)

    def _tell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._changed_fd, 1)


class _Keeper(threading.Thread):
    """Renews the lease of one term."""

    def __init__(
        self,
        renewal: LeaseRenewal,
        clock: LeaseClock,
        clock_ns: Callable[[], int],
        loop_late_ns: int,
        tell: Callable[[], None],
    ) -> None:
        super().__init__(name="lease", daemon=True)
        self.clock = clock
        self.over = ""
        """Why the term is over; empty while it is not."""
        self._renewal = renewal
        self._clock_ns = clock_ns
        self._loop_late_ns = loop_late_ns
        self._loop_ns = clock_ns()
        self._tell = tell
        self._is_stopped = threading.Event()

    def loop_came_round(self, now_ns: int) -> None:
        self._loop_ns = now_ns

    def stop(self) -> None:
        """Stop, and wait for a renewal that is under way."""
        self._is_stopped.set()
        self.join()

    def run(self) -> None:
        try:
            self._renew_on()
        finally:
            self._renewal.close()

    def _renew_on(self) -> None:
        is_in_doubt = False
        sent_ns = self._clock_ns()
        while not self._is_stopped.wait(self._rest_s(sent_ns)):
            sent_ns = self._clock_ns()
            if sent_ns - self._loop_ns > self._loop_late_ns:
                self._end(f"its loop did not come round for {self._loop_late_ns / 1e9:g} s")
                return
            try:
                if not self._renewal.renew():
                    self._end("another planner leads, or its lease ran out")
                    return
                self.clock.renewed(sent_ns)
                failed = ""
            except PlanStoreError as error:
                failed = error.message
            was_in_doubt, is_in_doubt = is_in_doubt, not self.clock.is_fresh(self._clock_ns())
            if is_in_doubt != was_in_doubt:
                log.warning("gives no orders: %s", failed) if is_in_doubt else log.warning(
                    "gives orders again: the term still holds"
                )
                self._tell()

    def _rest_s(self, sent_ns: int) -> float:
        return max(0.0, (self.clock.next_try_ns(sent_ns) - self._clock_ns()) / 1e9)

    def _end(self, why: str) -> None:
        self.over = why
        log.warning("leads no more: %s", why)
        self._tell()
