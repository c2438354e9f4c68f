"""The producer's half, move by move."""

from __future__ import annotations

from federation.core.parcel_giver import (
    EARLY_WANTS_MAX,
    QUEUED_FRAMES_MAX,
    Answer,
    DataFrame,
    ParcelGiver,
    TellDeclined,
    TellTaken,
)
from federation.exchange_messages import (
    FRAME_BYTES_MIN,
    ParcelKey,
    ParcelSize,
    Pull,
    Refused,
    Taken,
    TakenNoted,
    Want,
)

KEY = ParcelKey("j", 1, 5, "a", "b")
OTHER = KEY._replace(consumer="c")


def size_of(key: ParcelKey = KEY, frames: int = 3, layout: int = 9) -> ParcelSize:
    return ParcelSize(key, frames * FRAME_BYTES_MIN, FRAME_BYTES_MIN, layout, 1)


def offering(*keys: ParcelKey) -> ParcelGiver:
    giver = ParcelGiver()
    for key in keys:
        giver.offer(size_of(key))
    return giver


def frames_of(giver: ParcelGiver) -> list[tuple[str, int]]:
    found = []
    while (frame := giver.next_frame(())) is not None:
        found.append((frame.peer, frame.frame))
    assert not giver.has_frames
    return found


def test_a_wish_is_answered_now_or_once_it_is_offered() -> None:
    giver = offering(KEY)
    giver.want_came(Want(KEY))
    assert giver.effects() == [Answer("b", size_of())]
    giver.want_came(Want(OTHER))
    assert giver.effects() == []
    giver.offer(size_of(OTHER))
    assert giver.effects() == [Answer("c", size_of(OTHER))]
    giver.offer(size_of(OTHER))
    assert giver.effects() == []


def test_frames_leave_in_order_and_peers_in_turn() -> None:
    giver = offering(KEY, OTHER)
    giver.pull_came(Pull(KEY, 9, (2, 0, 1)))
    giver.pull_came(Pull(OTHER, 9, (0,)))
    giver.pull_came(Pull(OTHER, 9, (1,)))
    assert frames_of(giver) == [("b", 2), ("c", 0), ("b", 0), ("c", 1), ("b", 1)]


def test_a_busy_peer_is_passed_over_and_a_frame_put_back_is_the_next() -> None:
    giver = offering(KEY, OTHER)
    giver.pull_came(Pull(KEY, 9, (0, 1)))
    giver.pull_came(Pull(OTHER, 9, (0,)))
    assert giver.next_frame({"b"}) == DataFrame("c", size_of(OTHER), 0)
    assert giver.next_frame({"b"}) is None
    assert giver.has_frames
    for _ in range(2):
        frame = giver.next_frame(())
        assert frame == DataFrame("b", size_of(), 0)
        giver.put_back(frame)
    assert frames_of(giver) == [("b", 0), ("b", 1)]
    giver.pull_came(Pull(KEY, 9, (2,)))
    (frame,) = [giver.next_frame(())]
    assert frame is not None
    giver.put_back(frame)
    assert frames_of(giver) == [("b", 2)]


def test_frames_of_nothing_that_is_offered_are_a_wish() -> None:
    giver = ParcelGiver()
    giver.pull_came(Pull(KEY, 9, (0, 1)))
    assert giver.effects() == []
    giver.offer(size_of())
    assert giver.effects() == [Answer("b", size_of())]
    giver.pull_came(Pull(KEY, 8, (0,)))
    assert giver.effects() == [Answer("b", size_of())]
    giver.pull_came(Pull(KEY, 9, (3, 1 << 40)))
    assert frames_of(giver) == []
    assert giver.counts.left_out_frames == 5


def test_another_offer_of_a_parcel_takes_the_place_of_the_first() -> None:
    giver = offering(KEY)
    giver.pull_came(Pull(KEY, 9, (0, 1)))
    giver.offer(size_of(layout=10))
    assert frames_of(giver) == []
    giver.pull_came(Pull(KEY, 10, (0,)))
    assert frames_of(giver) == [("b", 0)]


def test_a_taken_parcel_is_told_once_and_noted_always() -> None:
    giver = offering(KEY)
    giver.pull_came(Pull(KEY, 9, (0, 1)))
    giver.taken_came(Taken(KEY))
    assert giver.effects() == [TellTaken(KEY), Answer("b", TakenNoted(KEY))]
    giver.taken_came(Taken(KEY))
    assert giver.effects() == [TellDeclined(KEY), Answer("b", TakenNoted(KEY))]
    assert frames_of(giver) == []
    assert len(giver) == 0


def test_a_parcel_that_cannot_be_had_is_answered_with_the_reason() -> None:
    giver = ParcelGiver()
    refusal = Refused(KEY, "config.budget", "too large")
    giver.want_came(Want(KEY))
    giver.offer(refusal)
    giver.want_came(Want(KEY))
    giver.pull_came(Pull(KEY, 9, (0,)))
    assert giver.effects() == [Answer("b", refusal)] * 3


def test_nothing_of_a_dropped_generation_is_heard_or_given() -> None:
    giver = offering(KEY, KEY._replace(generation=2), KEY._replace(job="k"))
    giver.pull_came(Pull(KEY, 9, (0,)))
    giver.want_came(Want(KEY._replace(step=7)))
    giver.drop_generation("j", 1)
    assert (len(giver), frames_of(giver)) == (2, [])
    giver.offer(size_of())
    giver.offer(size_of(KEY._replace(step=7)))
    giver.want_came(Want(KEY))
    assert (len(giver), giver.effects()) == (2, [])
    giver.drop_generation("j", 0)  # an older one takes nothing back
    giver.offer(size_of())
    assert len(giver) == 2


def test_what_a_peer_may_leave_behind_is_bounded() -> None:
    giver = offering(KEY)
    for step in range(2 * EARLY_WANTS_MAX):
        giver.want_came(Want(KEY._replace(step=100 + step)))
    assert len(giver._early["b"]) == EARLY_WANTS_MAX
    for _ in range(QUEUED_FRAMES_MAX):
        giver.pull_came(Pull(KEY, 9, (0, 1, 2)))
    assert len(frames_of(giver)) == QUEUED_FRAMES_MAX
    assert giver.counts.left_out_frames == 2 * QUEUED_FRAMES_MAX


def test_peers_that_are_none_any_more_leave_nothing() -> None:
    giver = offering(KEY, OTHER)
    giver.pull_came(Pull(KEY, 9, (0,)))
    giver.pull_came(Pull(OTHER, 9, (1,)))
    giver.keep_peers({"c"})
    assert frames_of(giver) == [("c", 1)]
