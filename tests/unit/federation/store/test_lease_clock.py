"""A leader stops before its store may let another one lead, whatever takes how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from federation.store.lease_clock import LeaseClock

LEASE_NS = 3_000_000_000
DELAY = st.integers(0, 2 * LEASE_NS)


@given(st.lists(st.tuples(DELAY, DELAY, DELAY, st.booleans()), max_size=20), DELAY)
def test_a_fresh_lease_has_not_run_out_at_the_store(
    tries: list[tuple[int, int, int, bool]], look_ns: int
) -> None:
    """Each try: rest before it, way to the store, way back, whether it was granted and heard."""
    now_ns = 0
    clock = LeaseClock(LEASE_NS, now_ns)
    ends_ns = now_ns + LEASE_NS  # at the store, at the earliest
    for rest_ns, there_ns, back_ns, is_heard in tries:
        sent_ns = now_ns + rest_ns
        arrived_ns = sent_ns + there_ns
        if arrived_ns >= ends_ns:
            break  # the store lets others lead
        ends_ns = max(ends_ns, arrived_ns + LEASE_NS)
        now_ns = arrived_ns + back_ns
        if is_heard:
            clock.renewed(sent_ns)
        assert not clock.is_fresh(ends_ns)
    now_ns += look_ns
    assert now_ns < ends_ns or not clock.is_fresh(now_ns)


def test_a_late_answer_takes_nothing_back_and_tries_come_three_a_lease() -> None:
    clock = LeaseClock(LEASE_NS, 0)
    clock.renewed(2_000)
    clock.renewed(1_000)
    assert clock.stops_ns == 2_000 + 2_000_000_000
    assert clock.is_fresh(clock.stops_ns - 1)
    assert not clock.is_fresh(clock.stops_ns)
    assert clock.next_try_ns(500) == 500 + 1_000_000_000
