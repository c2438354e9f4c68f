"""What is tried again, how long is waited, and what the end of trying says; no real clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from msd_client.contract.errors import StoreError, StoreMissingError
from msd_daemon.stores.answers import FailureKind, RequestFailure, kind_of_status
from msd_daemon.stores.http_client import retry_after_s
from msd_daemon.stores.retry import Retrier, backoff_s, tell_waits


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


class OpenGate:
    def __init__(self, slots: int = 1 << 30) -> None:
        self.slots = slots
        self.held = 0
        self.told: list[float] = []

    def enter(self, deadline_s: float) -> int | None:
        self.held += 1
        return self.held if self.slots else None

    def leave(self, slot: int) -> None:
        self.held -= 1

    def throttled(self, retry_after_s: float) -> None:
        self.told.append(retry_after_s)


def script(*outcomes: RequestFailure | str) -> Callable[[], str]:
    left = list(outcomes)

    def request() -> str:
        outcome = left.pop(0)
        if isinstance(outcome, RequestFailure):
            raise outcome
        return outcome

    return request


def make(draw: float = 0.5, deadline_s: float = 300.0) -> tuple[Retrier, Clock, OpenGate]:
    clock, gate = Clock(), OpenGate()
    retrier = Retrier(gate, deadline_s, clock=clock, sleep=clock.sleep, draw=lambda: draw)
    return retrier, clock, gate


def failure(kind: FailureKind, retry_after_s: float = 0.0) -> RequestFailure:
    return RequestFailure(kind, "HTTP 503 SlowDown", retry_after_s)


THROTTLED, TRANSIENT, DENIED = (
    FailureKind.THROTTLED,
    FailureKind.TRANSIENT,
    FailureKind.DENIED,
)


def test_waits_double_with_full_jitter_and_end_with_the_answer() -> None:
    retrier, clock, gate = make(draw=0.5)
    request = script(*[failure(THROTTLED)] * 3, failure(TRANSIENT), "ok")
    assert retrier.run("s3://b/k", request) == "ok"
    assert clock.sleeps == [0.05, 0.1, 0.2, 0.4]
    assert gate.told == [0.0] * 3
    assert gate.held == 0
    assert (retrier.counts.requests, retrier.counts.retries, retrier.counts.throttled) == (5, 4, 3)


def test_nothing_of_a_throttled_read_slows_the_next_one() -> None:
    retrier, clock, _ = make()
    retrier.run("s3://b/k", script(*[failure(THROTTLED)] * 6, "ok"))
    clock.sleeps.clear()
    retrier.run("s3://b/k", script(failure(THROTTLED), "ok"))
    assert clock.sleeps == [0.05]


def test_the_wait_is_capped_and_never_negative() -> None:
    assert backoff_s(0, 0.0) == 0.0
    assert backoff_s(7, 1.0) == 12.8
    assert backoff_s(8, 1.0) == backoff_s(10**6, 1.0) == 20.0


def test_retry_after_is_waited_out() -> None:
    retrier, clock, gate = make(draw=0.0)
    assert retrier.run("s3://b/k", script(failure(THROTTLED, 7.0), "ok")) == "ok"
    assert clock.sleeps == [7.0]
    assert gate.told == [7.0]


def test_denied_once_is_survived_and_twice_is_told_with_bucket_and_key() -> None:
    retrier, _, _ = make()
    assert retrier.run("s3://b/k", script(failure(DENIED), failure(TRANSIENT), "ok")) == "ok"
    with pytest.raises(StoreError, match=r"^s3://b/k .*after 2 tries: check the credentials"):
        retrier.run("s3://b/k", script(failure(DENIED), failure(DENIED), "ok"))


def test_missing_and_refused_are_not_tried_again() -> None:
    retrier, clock, _ = make()
    with pytest.raises(StoreMissingError, match="s3://b/k is not there"):
        retrier.run("s3://b/k", script(failure(FailureKind.MISSING)))
    with pytest.raises(StoreError, match="check the URL"):
        retrier.run("s3://b/k", script(failure(FailureKind.REFUSED)))
    assert clock.sleeps == []


def test_the_deadline_ends_it_with_the_last_reason() -> None:
    retrier, clock, gate = make(draw=0.999, deadline_s=5.0)
    with pytest.raises(StoreError, match=r"s3://b/k .*HTTP 503 SlowDown, after 6 tries in .* = 5"):
        retrier.run("s3://b/k", script(*[failure(THROTTLED)] * 100))
    assert clock.now < 105.0
    assert gate.held == 0
    gate.slots = 0
    with pytest.raises(StoreError, match="all request slots of the host were taken"):
        retrier.run("s3://b/k", script("ok"))


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (429, "", "THROTTLED"),
        (503, "", "THROTTLED"),
        (400, "SlowDown", "THROTTLED"),
        (408, "", "TRANSIENT"),
        (500, "InternalError", "TRANSIENT"),
        (502, "", "TRANSIENT"),
        (504, "", "TRANSIENT"),
        (599, "", "TRANSIENT"),
        (400, "RequestTimeout", "TRANSIENT"),
        (400, "ExpiredToken", "DENIED"),
        (401, "", "DENIED"),
        (403, "AccessDenied", "DENIED"),
        (404, "NoSuchKey", "MISSING"),
        (400, "", "REFUSED"),
        (301, "", "REFUSED"),
    ],
)
def test_what_a_status_asks_for(status: int, code: str, kind: str) -> None:
    assert kind_of_status(status, code) is FailureKind[kind]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (None, 0.0),
        ("", 0.0),
        ("7", 7.0),
        ("99999999999999999999", 86400.0),
        ("-3", 0.0),
        ("soon", 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:40 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str | None, want: float) -> None:
    assert retry_after_s(text, 60.0) == want


def test_a_long_wait_is_told_once_with_its_reason() -> None:
    told: list[str] = []
    tell_waits(told.append)
    try:
        retrier, _, _ = make(draw=0.5, deadline_s=30.0)
        for _ in range(2):  # waits of 0.05, 0.1, 0.2 ... 3.2 s: the seventh ends after 6.35 s
            assert retrier.run("s3://b/k", script(*[failure(TRANSIENT)] * 8, "x")) == "x"
    finally:
        tell_waits(None)
    (line,) = told
    assert line == (
        "waiting for s3://b/k: HTTP 503 SlowDown, 7 tries; a read is given up after "
        "stores.deadline_s = 30"
    )


def test_short_waits_are_not_told() -> None:
    told: list[str] = []
    tell_waits(told.append)
    try:
        assert make()[0].run("s3://b/k", script(*[failure(TRANSIENT)] * 6, "x")) == "x"
    finally:
        tell_waits(None)
    assert told == []
