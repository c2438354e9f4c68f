from msd_daemon.core.deaths import DELAY_S_MAX, WELL_AFTER_S, BackOff
from msd_daemon.core.lateness import Lateness, LoopWatch
from msd_daemon.core.leases import Leases
from msd_daemon.core.watermark import FIRST_WAIT_S, SLOW_S, WAIT_S_MAX, Watermark

S = 1_000_000_000
PID = 7


def look_each_second(lateness, seconds, signs="same", start_s=0, *, is_busy=True):
    return [
        lateness.look(PID, signs, (start_s + n) * S, is_busy=is_busy) for n in range(seconds + 1)
    ]


def test_a_process_without_a_sign_is_still_for_as_long_as_it_was_looked_at():
    assert look_each_second(Lateness(), 5) == [0, 1, 2, 3, 4, 5]


def test_any_sign_of_work_begins_anew():
    lateness = Lateness()
    look_each_second(lateness, 5)
    assert lateness.look(PID, "other", 6 * S, is_busy=True) == 0
    assert lateness.look(PID, "other", 7 * S, is_busy=True) == 1


def test_who_has_nothing_to_do_is_not_late():
    assert set(look_each_second(Lateness(), 9, is_busy=False)) == {0}


def test_a_watcher_that_stood_still_declares_nobody_late_for_that():
    lateness = Lateness()
    lateness.look(PID, "same", 0, is_busy=True)
    assert lateness.look(PID, "same", 60 * S, is_busy=True) == 2


def test_a_stall_is_told_once_and_the_next_one_again():
    lateness = Lateness()
    assert not lateness.tell(PID)  # never seen
    look_each_second(lateness, 5)
    assert lateness.tell(PID)
    assert not lateness.tell(PID)
    assert lateness.was_told(PID)
    look_each_second(lateness, 5, "other", 6)
    assert not lateness.was_told(PID)
    assert lateness.tell(PID)


def test_a_pid_that_comes_again_is_another_process():
    lateness = Lateness()
    look_each_second(lateness, 5)
    lateness.forget(PID)
    assert lateness.look(PID, "same", 9 * S, is_busy=True) == 0


def test_the_loop_says_how_long_it_stood_still():
    watch = LoopWatch(1.0)
    assert watch.tick(0) == 0
    assert watch.tick(1 * S) == 0
    assert watch.tick(3 * S) == 0  # a little late is no stall
    assert watch.tick(19 * S) == 15
    assert (watch.stalls_total, watch.longest_s) == (1, 15)


def test_the_next_one_waits_the_longer_the_more_died_in_a_row():
    back_off = BackOff()
    delays = [back_off.delay_s("a", n / 10) for n in range(8)]
    assert delays == [0, 0.1, 0.2, 0.4, 0.8, 1.6, DELAY_S_MAX, DELAY_S_MAX]
    assert back_off.delay_s("b", 0.8) == 0
    assert back_off.delay_s("a", 0.8 + WELL_AFTER_S) == 0


def test_a_large_worker_is_replaced_and_its_successor_left_alone_for_a_while():
    mark = Watermark(100)
    assert not mark.is_due(0, 100, 0)
    assert mark.is_due(0, 101, 0)
    assert mark.recycled(0, 0) == FIRST_WAIT_S
    assert not mark.is_due(0, 101, FIRST_WAIT_S - 1)
    assert mark.is_due(1, 101, 0)
    assert mark.is_due(0, 101, FIRST_WAIT_S)


def test_work_that_needs_more_than_the_mark_is_not_replaced_all_the_time():
    mark, now_s = Watermark(100), 0.0
    waits = []
    for _ in range(9):
        assert mark.is_due(0, 101, now_s)
        waits.append(mark.recycled(0, now_s))
        now_s += waits[-1]
    assert waits == [min(FIRST_WAIT_S * 2**n, WAIT_S_MAX) for n in range(9)]
    assert mark.recycled_total == 9


def test_a_slow_leak_is_no_such_work():
    mark = Watermark(100)
    for turn in range(5):
        assert mark.recycled(0, turn * (SLOW_S + 1)) == FIRST_WAIT_S


def test_leases_grow_and_condemned_pieces_wait_for_the_end():
    leases = Leases()
    assert [leases.renew(0), leases.renew(0), leases.renew(1)] == [1, 2, 1]
    leases.condemn(5, 4096)
    leases.condemn(5, 8192)
    leases.condemn(6, 0)
    assert leases.condemned_count == 3
    assert leases.ended(5) == [4096, 8192]
    assert leases.ended(5) == []
    assert leases.condemned_count == 1
