import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_client.contract.errors import InvalidTransitionError
from msd_daemon.core.slots import RingState


def fill(ring: RingState, constructor: int = 0) -> tuple[int, int]:
    return ring.begin_fill(constructor)


def test_slots_are_published_in_sequence_order_though_filled_out_of_order():
    ring = RingState(3, frozenset({0}))
    first, second = fill(ring), fill(ring)
    assert ring.fill_ended(*second, 10, 0) == []
    assert [p.sequence for p in ring.fill_ended(*first, 11, 0)] == [0, 1]


def test_a_slot_is_free_only_after_every_reader_released_it():
    ring = RingState(1, frozenset({4, 7}))
    slot, sequence = fill(ring)
    ring.fill_ended(slot, sequence, 1, 0)
    assert not ring.released(slot, sequence, 4)
    assert not ring.has_free()
    assert ring.released(slot, sequence, 7)
    assert ring.has_free()


def test_stale_and_foreign_releases_change_nothing_and_are_counted():
    ring = RingState(2, frozenset({0, 1}))
    slot, sequence = fill(ring)
    ring.fill_ended(slot, sequence, 1, 0)
    assert not ring.released(slot, sequence + 1, 0)
    assert not ring.released(slot, sequence, 9)
    assert not ring.released(slot, sequence, 0)
    assert not ring.released(slot, sequence, 0)
    assert ring.statistics().stale_releases_total == 3
    assert ring.held_by(1) == 1


def test_a_lost_reader_owes_nothing_any_more():
    ring = RingState(2, frozenset({0, 1}))
    first, second = fill(ring), fill(ring)
    ring.fill_ended(*first, 1, 0)
    ring.fill_ended(*second, 1, 0)
    ring.released(*first, 0)
    assert ring.reader_lost(1) == [0]
    assert ring.held_by(1) == 0
    assert ring.released(*second, 0)


def test_a_dead_constructors_sequences_are_issued_again_first():
    ring = RingState(3, frozenset({0}))
    a, b, c = fill(ring, 0), fill(ring, 1), fill(ring, 0)
    assert ring.constructor_lost(0) == [a[1], c[1]]
    assert ring.next_fill == a[1]
    again = fill(ring, 2)
    assert again[1] == a[1]
    ring.fill_ended(*b, 1, 0)
    assert [p.sequence for p in ring.fill_ended(*again, 1, 0)] == [0, 1]


def test_filling_without_a_free_slot_is_refused():
    ring = RingState(1, frozenset({0}))
    fill(ring)
    with pytest.raises(InvalidTransitionError):
        fill(ring)


def test_the_reader_that_holds_longest_is_named():
    ring = RingState(3, frozenset({3, 5}))
    for now in (100, 200):
        slot, sequence = fill(ring)
        ring.fill_ended(slot, sequence, 1, now)
    ring.released(0, 0, 3)
    assert ring.oldest_debt() == (5, 2, 100, True)


@given(st.lists(st.integers(0, 5), max_size=120), st.integers(1, 5), st.integers(1, 4))
def test_any_sequence_of_events_keeps_every_slot_in_one_state(moves, slots, readers):
    ring = RingState(slots, frozenset(range(readers)))
    filling: list[tuple[int, int]] = []
    owed: list[tuple[int, int, int]] = []
    published: list[int] = []
    for move in moves:
        if move <= 1 and ring.has_free():
            filling.append(fill(ring))
        elif move == 2 and filling:
            slot, sequence = filling.pop()
            for publication in ring.fill_ended(slot, sequence, 1, 0):
                published.append(publication.sequence)
                owed += [(publication.slot, publication.sequence, r) for r in ring.readers]
        elif move == 3 and owed:
            ring.released(*owed.pop(0))
        elif move == 4 and filling:
            ring.constructor_lost(0)
            filling.clear()
        elif move == 5 and len(ring.readers) > 1:
            lost = max(ring.readers)
            ring.reader_lost(lost)
            owed = [debt for debt in owed if debt[2] != lost]
        ring.check()
    assert published == list(range(len(published)))


def test_a_ring_without_readers_goes_round():
    ring = RingState(1, frozenset({0}))
    ring.reader_lost(0)
    for _ in range(3):
        slot, sequence = fill(ring)
        assert len(ring.fill_ended(slot, sequence, 1, 0)) == 1
        assert ring.free_unread() == [sequence]
        ring.check()


def test_a_leaving_reader_keeps_what_its_views_hold_and_no_more():
    ring = RingState(3, frozenset({0, 1}))
    first, second = fill(ring), fill(ring)
    ring.fill_ended(*first, 1, 0)
    ring.fill_ended(*second, 1, 0)
    ring.released(*first, 1)
    ring.released(*second, 1)
    assert ring.reader_leaves(0, [first]) == [second[1]]
    third = fill(ring)
    ring.fill_ended(*third, 1, 0)
    assert ring.held_by(0) == 1
    assert not ring.released(*third, 0)
    assert ring.released(*first, 0)
    ring.check()


def retaining_ring(slots=4, readers=()):
    return RingState(slots, frozenset(readers), is_retaining=True)


def fill_next(ring):
    slot, sequence = ring.begin_fill(0)
    (publication,) = ring.fill_ended(slot, sequence, 8, now_ns=sequence)
    return publication


def test_a_retaining_ring_without_readers_goes_round_and_settles_each_sequence_once():
    ring = retaining_ring(slots=2)
    settled = []
    for _ in range(5):
        assert ring.has_free()
        fill_next(ring)
        settled += ring.free_unread()
        ring.check()
    assert settled == [0, 1, 2, 3, 4]


def test_a_late_reader_of_a_retaining_ring_begins_at_sequence_0_and_then_holds_it_up():
    ring = retaining_ring(slots=3)
    early = [fill_next(ring) for _ in range(2)]
    assert ring.free_unread() == [0, 1]
    assert ring.reader_joins(7) == early
    assert not ring.released(early[0].slot, 0, 7)  # it settled before this reader came
    fill_next(ring)
    assert ring.has_free()  # the slot of sequence 0
    assert fill_next(ring).sequence == 3
    assert not ring.has_free()
    assert ring.oldest_debt().reader == 7
    assert not ring.released(early[1].slot, 1, 7)
    assert ring.has_free()
    ring.check()


def test_a_reader_later_than_what_is_retained_is_refused():
    ring = retaining_ring(slots=2)
    for _ in range(3):
        fill_next(ring)
        ring.free_unread()
    with pytest.raises(InvalidTransitionError, match="1 are gone"):
        ring.reader_joins(7)
    with pytest.raises(InvalidTransitionError):
        RingState(2, frozenset({1})).reader_joins(7)


def test_a_peer_may_come_after_another_reader_released_everything():
    ring = retaining_ring(slots=4, readers={1})
    first = fill_next(ring)
    assert ring.released(first.slot, 0, 1)
    assert [p.sequence for p in ring.reader_joins(2)] == [0]
    assert ring.readers == {1, 2}


def test_a_slot_that_its_readers_were_given_is_held_and_not_ready():
    ring = RingState(3, frozenset({0, 1}))
    assert ring.was_given_all(0)
    first, second = fill(ring), fill(ring)
    ring.fill_ended(*first, 1, 0)
    ring.fill_ended(*second, 1, 0)
    assert not ring.was_given_all(0)
    ring.given(0, 2)
    assert ring.was_given_all(0)
    assert (ring.statistics().ready_count, ring.statistics().held_count) == (2, 0)
    ring.given(1, 1)
    assert (ring.statistics().ready_count, ring.statistics().held_count) == (1, 1)
    ring.given(1, 1 << 60)  # no more than there is
    assert (ring.statistics().ready_count, ring.statistics().held_count) == (0, 2)
    ring.fill_ended(*fill(ring), 1, 0)
    assert not ring.was_given_all(1)
    assert (ring.statistics().ready_count, ring.statistics().held_count) == (1, 2)
