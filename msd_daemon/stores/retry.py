"""Trying again: exponential waits with full jitter, within a deadline; nothing of it outlives a read.

Waits belong to one read alone, so a throttled hour leaves no slow-down behind; what all processes
share is the limiter, which recovers by itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from msd_client.contract.errors import StoreError, StoreMissingError
from msd_daemon.stores.answers import FailureKind, RequestFailure

T = TypeVar("T")

BACKOFF_BASE_S = 0.1
BACKOFF_MAX_S = 20.0
DENIED_TRIES_MAX = 2
TELL_AFTER_S = 5.0
"""A wait that lasts so long is told, where somebody listens."""
_RANDOM = random.SystemRandom()  # waits must differ between forked processes


class Gate(Protocol):
    """Lets requests to a host begin; shared by all processes of a node."""

    def enter(self, deadline_s: float) -> int | None:
        """Return a slot once there is one, None where the deadline (monotonic) passed before."""
        ...

    def leave(self, slot: int) -> None:
        """Give a slot back."""
        ...

    def throttled(self, retry_after_s: float) -> None:
        """Tell that the host asked for fewer requests."""
        ...


@dataclass
class RetryCounts:
    """What happened so far; for status and tests."""

    requests: int = 0
    retries: int = 0
    throttled: int = 0


def backoff_s(retry: int, draw: float) -> float:
    """Return the wait before a retry: full jitter over an exponentially growing span.

    Args:
        retry: Number of the retry, from 0.
        draw: In [0, 1).
    """
    return draw * min(BACKOFF_MAX_S, BACKOFF_BASE_S * 2.0 ** min(retry, 30))


_listener: list[Callable[[str], None]] = []


def tell_waits(listener: Callable[[str], None] | None) -> None:
    """Set what is told of long waits of this process, one line a store; None: nobody is."""
    _listener[:] = [] if listener is None else [listener]


class Retrier:
    """Runs requests to one host until they succeed, or fail for good.

    Args:
        gate: The host's limiter.
        deadline_s: Longest time of one call with all retries.
        clock: Monotonic seconds.
        sleep: Waits so many seconds.
        draw: Gives numbers in [0, 1).
    """

    def __init__(
        self,
        gate: Gate,
        deadline_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = _RANDOM.random,
    ) -> None:
        self._gate = gate
        self._deadline_s = deadline_s
        self._clock = clock
        self._sleep = sleep
        self._draw = draw
        self.counts = RetryCounts()
        self._is_told = False

    def run(self, what: str, request: Callable[[], T]) -> T:
        """Return what a request gives.

        Args:
            what: Bucket and key, for errors.
            request: Makes one try; raises RequestFailure.

        Raises:
            StoreMissingError: There is no such object.
            StoreError: It failed for good, or the deadline passed; the last reason is named.
        """
        begun = self._clock()
        deadline = begun + self._deadline_s
        tries = denials = 0
        failure: RequestFailure | None = None
        while True:
            slot = self._gate.enter(deadline)
            if slot is None:
                raise self._given_up(
                    what, tries, failure, "all request slots of the host were taken"
                )
            try:
                self.counts.requests += 1
                return request()
            except RequestFailure as error:
                failure = error
            finally:
                self._gate.leave(slot)
            tries += 1
            denials += failure.kind is FailureKind.DENIED
            self._refuse_final(what, tries, denials, failure)
            wait_s = self._wait_s(tries, failure)
            if self._clock() + wait_s >= deadline:
                raise self._given_up(what, tries, failure, "")
            self.counts.retries += 1
            if self._clock() + wait_s - begun >= TELL_AFTER_S:
                self._tell(what, tries, failure)
            self._sleep(wait_s)

    def _tell(self, what: str, tries: int, failure: RequestFailure) -> None:
        if self._is_told or not _listener:
            return
        self._is_told = True
        _listener[0](
            f"waiting for {what}: {failure.reason}, {tries} tries; a read is given up after "
            f"stores.deadline_s = {self._deadline_s:g}"
        )

    def _wait_s(self, tries: int, failure: RequestFailure) -> float:
        jitter_s = backoff_s(tries - 1, self._draw())
        if failure.kind is not FailureKind.THROTTLED:
            return jitter_s
        self.counts.throttled += 1
        self._gate.throttled(failure.retry_after_s)
        # Some time behind what the server named, so that not all come back at once.
        return failure.retry_after_s + jitter_s

    def _refuse_final(self, what: str, tries: int, denials: int, failure: RequestFailure) -> None:
        kind = failure.kind
        if kind is FailureKind.MISSING:
            raise StoreMissingError(
                f"{what} is not there ({failure.reason}): restore it or submit the job anew",
                object=what,
            )
        if kind is FailureKind.REFUSED or denials >= DENIED_TRIES_MAX:
            remedy = "check the URL, region and endpoint"
            if kind is FailureKind.DENIED:
                remedy = "check the credentials of the daemon's environment and the bucket's policy"
            raise StoreError(
                f"{what} cannot be read: {failure.reason}, after {tries} tries: {remedy}",
                object=what,
                tries=tries,
            )

    def _given_up(
        self, what: str, tries: int, failure: RequestFailure | None, reason: str
    ) -> StoreError:
        last = reason if failure is None else failure.reason
        return StoreError(
            f"{what} cannot be read: {last}, after {tries} tries in "
            f"stores.deadline_s = {self._deadline_s:g}: does the store answer?",
            object=what,
            tries=tries,
        )
