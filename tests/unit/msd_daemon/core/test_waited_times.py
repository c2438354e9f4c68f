"""Sums of waits: of ranks, for sources; shares that grew."""

from __future__ import annotations

from msd_daemon.core.rank_waits import RankWaits
from msd_daemon.core.share_shift import ShareShift
from msd_daemon.core.starved_time import StarvedTime


def test_a_ranks_waits_add_up_and_a_hostile_one_counts_for_nothing():
    waits = RankWaits()
    for number in range(4):
        waits.released(3, 5, 100 * number + 1)
    waits.released(3, 1 << 63, 401)
    found = waits.of(3)
    # The first one's wait is the start's.
    assert (found.batches, found.waited_ns, found.released_ns) == (5, 15, 401)
    assert found.interval_ns == 100
    assert waits.of(9).batches == 0


def test_a_rank_waits_until_it_is_told_of_a_batch():
    waits = RankWaits()
    waits.waits(1, 50)
    waits.waits(2, 60)
    waits.served([1, 7])
    assert (waits.of(1).waiting_since_ns, waits.of(2).waiting_since_ns) == (0, 60)


def test_a_source_that_two_lack_is_waited_for_once():
    starved = StarvedTime()
    starved.draw_lacks([4, 5], 100)
    starved.plan_lacks(4, 150)
    starved.draw_lacks([], 200)
    assert starved.now == {4}
    assert starved.total_ns(5, 300) == 100
    starved.plan_lacks(None, 260)
    assert starved.total_ns(4, 300) == 160
    assert starved.total_ns(9, 300) == 0
    starved.draw_lacks([4], 400)
    assert starved.total_ns(4, 450) == 210


def test_a_share_has_grown_by_much_of_the_whole_or_of_itself():
    shift = ShareShift()
    shift.take([0.90, 0.09, 0.01], 0)
    shift.take([0.88, 0.11, 0.01], 10)
    assert [shift.of(source) for source in range(3)] == [None, None, None]
    shift.take([0.6, 0.35, 0.05], 20)
    grown = shift.of(1)
    assert grown is not None
    assert (grown.before, grown.at_ns) == (0.09, 20)
    assert shift.of(2) is not None  # five times what it was
    assert shift.of(0) is None
    shift.take([0.9, 0.05, 0.05], 30)
    assert shift.of(1) is None  # it fell again
    shift.take([0.9, 0.05, 0.05], 700_000_000_000)
    assert shift.of(2) is None  # long ago
