"""The consumer's half, move by move: what is asked for, how soon again, and what is refused."""

from __future__ import annotations

from federation.core.parcel_taker import (
    CheckParcel,
    ParcelTaker,
    Post,
    Room,
    TakerLimits,
    TellCame,
    TellFailed,
    TellSettled,
    TellSize,
)
from federation.exchange_messages import (
    FRAME_BYTES_MIN,
    ParcelData,
    ParcelKey,
    ParcelSize,
    Pull,
    Refused,
    Taken,
    TakenNoted,
    Want,
)
from tests.support.exchange_world import SECOND_NS, table_of

KEY = ParcelKey("j", 1, 5, "a", "b")
FRAME = FRAME_BYTES_MIN
LIMITS = TakerLimits(window_bytes=4 * FRAME)


def size_of(key: ParcelKey = KEY, frames: int = 3, layout: int = 9, giver: int = 1) -> ParcelSize:
    return ParcelSize(key, frames * FRAME, FRAME, layout, giver)


def sized(taker: ParcelTaker, size: ParcelSize, now_ns: int = 0) -> list[object]:
    taker.size_came(size, table_of(size.size_bytes), now_ns)
    return list(taker.effects())


def came(taker: ParcelTaker, frame: int, *, key: ParcelKey = KEY, layout: int = 9, now_ns: int = 0):
    return taker.data_came("a", ParcelData(key, layout, frame), FRAME, now_ns)


def filling(frames: int = 3) -> ParcelTaker:
    """Return a taker that asked for the frames of one parcel."""
    taker = ParcelTaker(LIMITS)
    taker.want(KEY, 0)
    sized(taker, size_of(frames=frames))
    taker.room(KEY, Room(4096, frames * FRAME), 1, 0)
    return taker


def test_the_way_of_a_parcel() -> None:
    taker = ParcelTaker(LIMITS)
    taker.want(KEY, 0)
    assert taker.effects() == [Post("a", Want(KEY))]
    assert sized(taker, size_of()) == [TellSize(KEY, 3 * FRAME, 1)]
    taker.room(KEY, Room(4096, 3 * FRAME), 1, 0)
    assert taker.effects() == [Post("a", Pull(KEY, 9, (0, 1, 2)))]
    assert [came(taker, frame) for frame in range(3)] == [
        4096 + frame * FRAME for frame in range(3)
    ]
    (check,) = taker.effects()
    assert isinstance(check, CheckParcel)
    assert (check.key, check.offset_bytes) == (KEY, 4096)
    taker.checked(KEY, 0)
    tell, post = taker.effects()
    assert isinstance(tell, TellCame)
    assert post == Post("a", Taken(KEY))
    taker.noted(TakenNoted(KEY))
    assert taker.effects() == [TellSettled(KEY)]
    assert (len(taker), taker.due_ns(), taker.on_the_way_bytes) == (0, None, 0)


def test_a_wish_is_repeated_less_and_less_often() -> None:
    taker = ParcelTaker(LIMITS)
    taker.want(KEY, 0)
    asked, now = [], 0
    for _ in range(6):
        due = taker.due_ns()
        assert due is not None
        taker.effects()
        taker.tick(due - 1)
        assert taker.effects() == []
        taker.tick(due)
        assert taker.effects() == [Post("a", Want(KEY))]
        asked.append((due - now) // SECOND_NS)
        now = due
    assert asked == [1, 2, 4, 8, 8, 8]


def test_no_more_is_asked_for_than_the_window_holds_lowest_step_first() -> None:
    taker = ParcelTaker(LIMITS)
    later, first = KEY._replace(step=9), KEY._replace(step=2, producer="c")
    for key in (later, KEY, first):
        taker.want(key, 0)
        sized(taker, size_of(key, frames=3))
    for offset, key in enumerate((later, KEY, first)):
        taker.room(key, Room(offset << 30, 3 * FRAME), offset + 1, 0)
    assert taker.effects() == [Post("a", Pull(later, 9, (0, 1, 2)))]  # half a window at a time
    came(taker, 0, key=later)
    assert taker.effects() == [Post("c", Pull(first, 9, (0, 1)))]
    assert taker.on_the_way_bytes == 4 * FRAME
    came(taker, 1, key=later)
    assert taker.effects() == []
    came(taker, 2, key=later)
    assert [post.message for post in taker.effects()[1:]] == [
        Pull(first, 9, (2,)),
        Pull(KEY, 9, (0,)),
    ]


def test_a_frame_behind_others_says_that_they_were_lost() -> None:
    taker = filling(frames=4)
    taker.effects()
    assert came(taker, 2) == 4096 + 2 * FRAME
    assert taker.effects() == [Post("a", Pull(KEY, 9, (0, 1)))]
    assert taker.counts.lost_frames == 2


def test_silence_loses_frames_but_not_while_others_come() -> None:
    taker = filling(frames=4)
    taker.effects()
    came(taker, 0, now_ns=2 * SECOND_NS)
    taker.tick(4 * SECOND_NS)
    assert taker.effects() == []
    taker.tick(5 * SECOND_NS)
    assert taker.effects() == [Post("a", Pull(KEY, 9, (1, 2, 3)))]
    taker.tick(10 * SECOND_NS)  # it waits twice as long now
    assert taker.effects() == []
    taker.tick(11 * SECOND_NS)
    assert taker.effects() == [Post("a", Pull(KEY, 9, (1, 2, 3)))]


def test_a_frame_that_comes_late_after_all_is_not_asked_for_again() -> None:
    taker = ParcelTaker(TakerLimits(window_bytes=6 * FRAME))
    taker.want(KEY, 0)
    sized(taker, size_of(frames=9))
    taker.room(KEY, Room(4096, 9 * FRAME), 1, 0)
    taker.effects()
    came(taker, 1)  # 0 counts as lost, and waits for half a window to be free
    assert came(taker, 0) == 4096
    assert came(taker, 0) is None
    came(taker, 2)
    assert taker.effects() == [Post("a", Pull(KEY, 9, (6, 7, 8)))]
    assert taker.counts.late_frames == 1


def test_frames_of_another_shape_or_layout_or_of_strange_parcels_go_nowhere() -> None:
    taker = filling()
    assert taker.data_came("a", ParcelData(KEY, 8, 0), FRAME, 0) is None
    assert taker.data_came("a", ParcelData(KEY, 9, 3), FRAME, 0) is None
    assert taker.data_came("a", ParcelData(KEY, 9, 0), FRAME - 1, 0) is None
    assert taker.data_came("a", ParcelData(KEY._replace(step=6), 9, 0), FRAME, 0) is None
    assert taker.data_came("z", ParcelData(KEY, 9, 0), FRAME, 0) == 4096  # the caller knows peers
    assert taker.counts.late_frames == 4


def test_another_layout_begins_anew_in_the_same_room_where_it_fits() -> None:
    taker = filling()
    came(taker, 0)
    taker.effects()
    assert sized(taker, size_of(frames=2, layout=10)) == [Post("a", Pull(KEY, 10, (0, 1)))]
    assert taker.on_the_way_bytes == 2 * FRAME
    assert came(taker, 1) is None  # of the old layout
    assert came(taker, 0, layout=10) == 4096


def test_another_layout_that_needs_more_room_is_told() -> None:
    taker = filling()
    came(taker, 0)
    taker.effects()
    assert sized(taker, size_of(frames=4, layout=10)) == [TellSize(KEY, 4 * FRAME, 2)]
    assert came(taker, 1) is None  # the room is the owner's again
    assert taker.effects() == []


def test_a_size_told_twice_changes_nothing() -> None:
    taker = filling()
    taker.effects()
    assert sized(taker, size_of()) == []


def test_another_process_of_the_producer_is_asked_again_at_once() -> None:
    taker = filling()
    taker.effects()
    came(taker, 0)
    assert sized(taker, size_of(giver=2)) == [Post("a", Pull(KEY, 9, (1, 2)))]
    other, settled = KEY._replace(step=6), KEY._replace(step=7)
    taker.want(other, 0)
    taker.acknowledge(settled, 0)
    taker.effects()
    taker.peer_restarted("c", 0)
    assert taker.effects() == []
    taker.peer_restarted("a", 0)
    assert taker.effects() == [
        Post("a", Want(other)),
        Post("a", Taken(settled)),
        Post("a", Pull(KEY, 9, (1, 2))),
    ]


def test_a_parcel_that_is_wanted_again_does_not_count_twice_in_the_window() -> None:
    taker = filling(frames=2)
    taker.withdraw(KEY, 0)
    assert taker.on_the_way_bytes == 2 * FRAME  # they still come
    taker.want(KEY, 0)
    sized(taker, size_of(frames=2))
    taker.room(KEY, Room(0, 2 * FRAME), 2, 0)
    assert taker.on_the_way_bytes == 2 * FRAME
    for frame in (0, 1):
        came(taker, frame)
    assert taker.on_the_way_bytes == 0
    assert isinstance(taker.effects()[-1], CheckParcel)


def test_a_refused_parcel_is_told_and_forgotten() -> None:
    taker = filling()
    taker.effects()
    taker.refused(Refused(KEY, "config.budget", "too large"), 0)
    assert taker.effects() == [TellFailed(KEY, "config.budget", "too large")]
    assert came(taker, 0) is None
    assert len(taker) == 0


def test_what_an_earlier_process_was_given_is_used_where_it_is_large_enough() -> None:
    for room, effect in (
        (Room(0, 3 * FRAME), Post("a", Pull(KEY, 9, (0, 1, 2)))),
        (Room(0, 3 * FRAME - 1), TellSize(KEY, 3 * FRAME, 1)),
    ):
        taker = ParcelTaker(LIMITS)
        taker.want(KEY, 0, room)
        taker.effects()
        assert sized(taker, size_of()) == [effect]


def test_room_for_an_older_question_is_the_owners_again() -> None:
    taker = ParcelTaker(LIMITS)
    taker.want(KEY, 0)
    sized(taker, size_of(frames=3))
    assert sized(taker, size_of(frames=3, layout=10)) == [TellSize(KEY, 3 * FRAME, 2)]
    taker.room(KEY, Room(0, 3 * FRAME), 1, 0)
    assert taker.effects() == []
    taker.room(KEY, Room(4096, 3 * FRAME), 2, 0)
    assert taker.effects() == [Post("a", Pull(KEY, 10, (0, 1, 2)))]
    assert came(taker, 0, layout=10) == 4096


def test_room_that_is_too_small_is_refused() -> None:
    taker = ParcelTaker(LIMITS)
    taker.want(KEY, 0)
    sized(taker, size_of(frames=3))
    taker.room(KEY, Room(0, 3 * FRAME - 1), 1, 0)
    reason = f"room of {3 * FRAME - 1} bytes for {3 * FRAME}"
    assert taker.effects() == [TellFailed(KEY, "internal", reason)]
    assert len(taker) == 0


def test_a_frame_larger_than_the_window_is_asked_for_alone() -> None:
    taker = ParcelTaker(TakerLimits(window_bytes=FRAME))
    taker.want(KEY, 0)
    size = ParcelSize(KEY, 10 * FRAME, 4 * FRAME, 9, 1)
    sized(taker, size)
    taker.room(KEY, Room(0, 10 * FRAME), 1, 0)
    assert taker.effects() == [Post("a", Pull(KEY, 9, (0,)))]
    taker.data_came("a", ParcelData(KEY, 9, 0), 4 * FRAME, 0)
    assert taker.effects() == [Post("a", Pull(KEY, 9, (1,)))]
