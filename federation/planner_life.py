"""The life of a cluster's planner: stands by, leads, stands by again; ends by resigning.

While it stands by it says who leads. While it leads its service gets what nodes send; while it is in
doubt whether it leads (the store does not answer), that waits and no order leaves.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from federation.store.leadership import Leadership
from federation.store.plan_store import PlanStore
from msd_client.contract.errors import LeadershipLostError, PlanStoreError

log = logging.getLogger(__name__)

CAMPAIGN_MS = 250
"""Between two tries to lead."""
DOUBT_MS = 100
LOOP_MS = 1000
"""Longest rest of the loop, so that the lease's keeper sees it come round."""


class Standing(NamedTuple):
    """What a planner says of itself to nodes."""

    leads: bool
    term: int
    """Its own where it leads, else the one that it last saw."""
    leader: str | None
    """Endpoint of who leads, where known."""


class Router(Protocol):
    """The planner's end of the wire, as its life sees it."""

    def poll(self, timeout_ms: int | None, also: Sequence[int] = ()) -> list[Any]:
        """Return what nodes sent; wait at most so long, or until one of the descriptors is readable."""
        ...


class Service(Protocol):
    """Plans a cluster's jobs for one term."""

    def handle(self, events: list[Any]) -> int | None:
        """Take what nodes sent, and do what is due.

        Returns:
            Milliseconds until it wants to be called again; None: once something comes.

        Raises:
            LeadershipLostError: The store took nothing of it: another planner leads.
            PlanStoreError: It can't go on without the store; it is closed, and begun anew later.
        """
        ...

    def close(self) -> None:
        """Close what it holds open."""
        ...


class PlannerLife:
    """Runs one planner until it is asked to stop.

    Args:
        store: Shared with the other planners; its caller closes it.
        leadership: On that store.
        router: To nodes.
        announce: Tells nodes, those that come and those that are there.
        make_service: Of a term.
        endpoint: Where nodes reach this planner.
        stop_fd: Becomes readable when the planner shall end.
        alive: Called whenever the loop comes round.
    """

    def __init__(
        self,
        store: PlanStore,
        leadership: Leadership,
        router: Router,
        announce: Callable[[Standing], None],
        make_service: Callable[[int], Service],
        *,
        endpoint: str,
        stop_fd: int,
        alive: Callable[[], None],
    ) -> None:
        self._store = store
        self._leadership = leadership
        self._router = router
        self._announce = announce
        self._make_service = make_service
        self._endpoint = endpoint
        self._stop_fd = stop_fd
        self._alive = alive
        self._standing: Standing | None = None
        self._trouble = ""
        """What the store was said not to do last, so that it is said once."""

    def run(self) -> None:
        """Stand by and lead, in turn, until asked to stop."""
        while not self._is_stopped():
            self._alive()
            term = self._try_to_lead()
            if term is not None:
                self._lead(term)
            self._router.poll(CAMPAIGN_MS, [self._stop_fd])  # nodes are told that it does not lead

    def _is_stopped(self) -> bool:
        poller = select.poll()  # not select(): it takes no descriptor above 1,023
        poller.register(self._stop_fd, select.POLLIN)
        return bool(poller.poll(0))

    def _say(self, standing: Standing) -> None:
        if standing != self._standing:
            self._standing = standing
            self._announce(standing)

    def _try_to_lead(self) -> int | None:
        try:
            term = self._leadership.campaign()
            if term is not None:
                self._trouble = ""
                return term
            leader = self._store.leader()
        except PlanStoreError as error:
            if not self._trouble:
                log.warning("can't campaign, tries on: %s", error.message)
            self._trouble = error.message
            return None
        self._trouble = ""
        if leader is not None:
            if self._standing is None or self._standing.term != leader.term:
                log.info("stands by: %s leads, term %d", leader.name, leader.term)
            self._say(Standing(False, leader.term, leader.endpoint))
        return None

    def _lead(self, term: int) -> None:
        log.info("leads, term %d", term)
        service: Service | None = None
        try:
            service = self._make_service(term)
            self._say(Standing(True, term, self._endpoint))
            self._serve(service)
        except (LeadershipLostError, PlanStoreError) as error:
            log.warning("%s", error.message)
        finally:
            self._say(Standing(False, term, None))
            if service is not None:
                service.close()
            self._leadership.end(is_resigned=True)

    def _serve(self, service: Service) -> None:
        waiting: list[Any] = []
        also = [self._leadership.fileno(), self._stop_fd]
        while not self._is_stopped():
            self._alive()
            if not self._leadership.look():
                waiting += self._router.poll(DOUBT_MS, also)
                continue
            wait_ms = service.handle(waiting)
            wait_ms = LOOP_MS if wait_ms is None else min(wait_ms, LOOP_MS)
            waiting = self._router.poll(wait_ms, also)
