"""When others take over from a slow source, how much, and when it gets its share back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.model.job import SlowSourcesRule
from federation.planning.substitution import SECOND_NS, Substitution

RULE = SlowSourcesRule(after_s=2.0, at_most=0.7)
SHARES = [0.5, 0.3, 0.2, 0.0]


class Clock:
    """A job whose shares are what was asked for last."""

    def __init__(self, rule: SlowSourcesRule = RULE, shares: list[float] | None = None) -> None:
        self.substitution = Substitution(rule, 4)
        self.shares = list(shares or SHARES)
        self.now_ns = 0

    def seconds(self, count: int, *slow: int) -> int:
        """Look once a second; return how many changes came."""
        changes = 0
        for _ in range(count):
            self.now_ns += SECOND_NS
            weights = self.substitution.look(self.now_ns, slow, self.shares)
            if weights is not None:
                self.shares, changes = weights, changes + 1
        return changes


def test_a_share_is_halved_after_the_wait_and_no_further_than_allowed():
    clock = Clock()
    assert clock.seconds(2, 0) == 0
    assert clock.seconds(1, 0) == 1
    assert clock.shares == pytest.approx([0.25 / 0.75, 0.3 / 0.75, 0.2 / 0.75, 0])
    assert clock.seconds(2, 0) == 1
    assert clock.substitution.factors == pytest.approx([0.3, 1, 1, 1])
    assert clock.seconds(50, 0) == 0, "beyond that ranks wait"


def test_it_comes_back_once_nobody_waits_any_more():
    clock = Clock()
    clock.seconds(3, 0)
    assert clock.seconds(7) == 0
    assert clock.seconds(1) == 1
    assert clock.substitution.factors[0] == pytest.approx(0.625)
    assert clock.seconds(40) == 3
    assert clock.shares == pytest.approx(SHARES)
    assert not clock.substitution.is_active
    assert clock.seconds(100) == 0


def test_short_waits_are_forgotten():
    clock = Clock()
    for _ in range(20):
        assert clock.seconds(1, 0) == 0
        assert clock.seconds(1) == 0


def test_where_all_are_slow_nobody_can_take_over():
    clock = Clock(shares=[0.5, 0.5, 0, 0])
    assert clock.seconds(30, 0, 1) == 0
    alone = Clock(shares=[1.0, 0, 0, 0])
    assert alone.seconds(30, 0) == 0


def test_shares_that_others_set_are_taken_for_whole_and_ones_own_known_again():
    clock = Clock()
    clock.seconds(3, 0)
    lowered = clock.shares
    clock.shares = [0.1, 0.1, 0.8, 0.0]
    assert clock.seconds(60) == 0, "a schedule's point: nothing is to come back"
    assert not clock.substitution.is_active
    clock.shares = lowered
    clock.seconds(1)
    assert clock.substitution.factors[0] == 0.5, "a run that goes on from before it"


def test_what_was_kept_is_gone_on_with():
    before = Clock()
    before.seconds(3, 0)
    after = Clock()
    after.substitution = Substitution(RULE, 4, *before.substitution.asked)
    after.shares = before.shares
    assert after.seconds(60) == 4
    assert after.shares == pytest.approx(SHARES)


def test_a_long_pause_counts_little():
    clock = Clock(SlowSourcesRule(after_s=60, at_most=0.5))
    clock.seconds(1, 0)
    clock.now_ns += 10**15
    assert clock.seconds(1, 0) == 0


@given(
    st.lists(st.sets(st.integers(0, 3)), max_size=200),
    st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
    st.floats(0.01, 0.95),
)
def test_no_source_ever_has_less_than_its_bound(
    waits: list[set[int]], weights: list[float], at_most: float
):
    shares = [weight / sum(weights) for weight in weights]
    clock = Clock(SlowSourcesRule(1.0, at_most), shares)
    for slow in waits:
        clock.seconds(1, *slow)
        assert sum(clock.shares) == pytest.approx(1)
        for share, own, factor in zip(
            clock.shares, shares, clock.substitution.factors, strict=True
        ):
            assert 1 - at_most - 1e-9 <= factor <= 1
            assert share >= own * (1 - at_most) - 1e-9
    clock.seconds(400)
    assert clock.shares == pytest.approx(shares)
