"""A planner's own view of its leadership: doubt, loss, and a loop that hangs."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from federation.store.leadership import Leadership
from msd_client.contract.errors import LeadershipLostError, PlanStoreError


class FakeStore:
    """Grants leases of 30 ms, by itself, as it is told to answer."""

    lease_s = 0.03

    def __init__(self) -> None:
        self.term = 0
        self.answer: bool | PlanStoreError = True
        self.resigned = 0
        self.renewals = 0

    def campaign(self, name: str, endpoint: str) -> int | None:
        self.term += 1
        return self.term

    def renewal(self) -> FakeStore:
        return self

    def renew(self) -> bool:
        self.renewals += 1
        if isinstance(self.answer, PlanStoreError):
            raise self.answer
        return self.answer

    def resign(self) -> None:
        self.resigned += 1

    def close(self) -> None:
        pass


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def leadership(store: FakeStore) -> Iterator[Leadership]:
    made = Leadership(store, "a", "tcp://a:1", loop_late_s=5.0)  # type: ignore[arg-type]
    yield made
    made.close()


def wait(leadership: Leadership) -> None:
    """Wait until something is told."""
    poller = select.poll()
    poller.register(leadership, select.POLLIN)
    assert poller.poll(20_000)


def test_doubt_passes_once_the_store_answers_that_the_term_holds(
    store: FakeStore, leadership: Leadership
) -> None:
    leadership.campaign()
    store.answer = PlanStoreError("it does not answer")
    wait(leadership)
    assert not leadership.look()
    assert leadership.term == 1
    store.answer = True
    wait(leadership)
    while not leadership.look():  # a lease is short here, and this machine may be busy
        pass
    assert leadership.term == 1


def test_a_term_that_is_over_stays_over(store: FakeStore, leadership: Leadership) -> None:
    leadership.campaign()
    store.answer = False
    wait(leadership)
    for _ in range(2):
        with pytest.raises(LeadershipLostError, match="term 1: another planner leads"):
            leadership.look()
    store.answer = True
    leadership.end(is_resigned=True)
    assert (leadership.term, store.resigned) == (0, 1)
    with pytest.raises(LeadershipLostError, match="it campaigns first"):
        leadership.look()
    assert leadership.campaign() == 2
    assert leadership.look() in (True, False)


def test_a_loop_that_hangs_is_let_go_of(store: FakeStore) -> None:
    leadership = Leadership(store, "a", "tcp://a:1", loop_late_s=0.1)  # type: ignore[arg-type]
    leadership.campaign()
    wait(leadership)  # the loop does not come round
    with pytest.raises(LeadershipLostError, match=r"did not come round for 0\.1 s"):
        leadership.look()
    renewals = store.renewals
    leadership.end(is_resigned=True)
    assert store.renewals == renewals > 0
    leadership.close()
