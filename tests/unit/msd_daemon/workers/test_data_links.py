"""Links of data frames, both ends in one process: pieces, withdrawals in mid-frame, strangers, noise."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from federation.core.parcel_taker import FramePlace
from federation.exchange_messages import (
    FRAME_BYTES_MAX,
    WIRE_VERSION,
    ParcelData,
    ParcelKey,
    Ping,
    encode_header,
)
from msd_daemon.workers import data_links
from msd_daemon.workers.data_links import HEAD, HELLO, MAGIC, STRANGERS_MAX, DataLinks, encode_head

KEY = ParcelKey("j", 1, 0, "a", "b")
FRAME = 2 << 20
PLACE = FramePlace(0, 1, 1)


class Owner:
    """A consumer's exchange with room for one frame at the front of its pool."""

    def __init__(self) -> None:
        self.pool = bytearray(FRAME)
        self.place: FramePlace | None = PLACE
        self.asked = 0
        self.came: list[tuple[ParcelData, int, bool]] = []
        self.lost: list[str] = []

    def frame_place(self, peer: str, data: ParcelData, size_bytes: int) -> FramePlace | None:
        assert peer == "a"
        self.asked += 1
        return self.place if size_bytes <= FRAME else None

    def frame_room(self, data: ParcelData, place: FramePlace, size_bytes: int) -> memoryview:
        assert place == self.place
        return memoryview(self.pool)[:size_bytes]

    def frame_came(self, peer: str, data: ParcelData, size_bytes: int, *, is_whole: bool) -> None:
        self.came.append((data, size_bytes, is_whole))

    def link_lost(self, peer: str) -> None:
        self.lost.append(peer)


class Pieces:
    """A frame in pieces of memory."""

    def __init__(self, pieces: list[memoryview]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    @property
    def pieces(self) -> int:
        return len(self._pieces)

    def _left(self, done: int) -> list[memoryview]:
        left = []
        for piece in self._pieces:
            left.append(piece[min(done, len(piece)) :])
            done -= min(done, len(piece))
        return left

    def send(self, sock: socket.socket, head: bytes | memoryview, done: int) -> int:
        return sock.sendmsg([head, *self._left(done)])

    def copy(self, done: int, out: memoryview) -> None:
        out[:] = b"".join(self._left(done))


class End:
    """One exchange process's links and loop."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.poller = zmq.Poller()
        self.links = DataLinks(self.poller, "127.0.0.1", self.owner)
        self.links.start()

    def turn(self) -> None:
        for ready, _ in self.poller.poll(1):
            self.links.ready(ready)


Ends = tuple[End, End]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Give a producer and a consumer."""
    a, b = End(), End()
    yield a, b
    a.links.close()
    b.links.close()


def until(condition: Callable[[], object], *ends: End) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        for end in ends:
            end.turn()


def linked(a: End, b: End) -> None:
    b.links.connect("a", "127.0.0.1", a.links.port, a.links.token_of("b"))
    until(lambda: a.links.giving("b"), a, b)


def pieces_of(data: bytes, count: int = 300) -> list[memoryview]:
    """Return the bytes in pieces of random sizes."""
    cuts = sorted({0, len(data), *random.Random(1).choices(range(len(data)), k=count)})
    return [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)]


def give(a: End, pieces: list[memoryview], frame: int = 0) -> None:
    link = a.links.giving("b")
    assert link is not None
    assert a.links.give(link, ParcelData(KEY, 5, frame), Pieces(pieces))


def test_a_frame_goes_in_pieces_from_where_they_lie_to_where_it_belongs(ends: Ends) -> None:
    a, b = ends
    linked(a, b)
    # Of few pieces, of many (they are gathered), of one byte.
    for frame, (size, count) in enumerate([(FRAME, 300), (FRAME - 77, 3000), (1, 1), (4096, 3)]):
        data = random.Random(frame).randbytes(size)
        give(a, pieces_of(data, count), frame)
        until(lambda frame=frame: len(b.owner.came) > frame, a, b)
        assert b.owner.came[frame] == (ParcelData(KEY, 5, frame), size, True)
        assert b.owner.pool[:size] == data
        until(lambda: not a.links.busy(), a)


def test_a_pool_that_is_let_go_of_in_mid_frame_is_not_read_any_more(ends: Ends) -> None:
    a, b = ends
    linked(a, b)
    link = a.links.giving("b")
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    data = random.Random(0).randbytes(FRAME)
    pool = bytearray(data)
    give(a, pieces_of(pool))
    assert a.links.busy() == {"b"}  # nobody reads yet
    a.links.let_go(lambda key: key.job == "other")
    a.links.let_go(lambda key: key == KEY)
    pool[:] = bytes(FRAME)
    pool.clear()  # raises while any of it is exported
    until(lambda: b.owner.came, a, b)
    assert b.owner.pool == data


@pytest.mark.parametrize("later", [None, FramePlace(0, 2, 1), FramePlace(0, 1, 2)])
def test_room_that_is_taken_back_in_mid_frame_is_not_written_any_more(
    ends: Ends, later: FramePlace | None
) -> None:
    a, b = ends
    linked(a, b)
    link = a.links.giving("b")
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    give(a, pieces_of(b"\x11" * FRAME))
    until(lambda: b.owner.asked, b)
    b.owner.place = later
    b.owner.pool[:] = b"\x22" * FRAME
    until(lambda: b.owner.came, a, b)
    assert b.owner.came == [(ParcelData(KEY, 5, 0), FRAME, False)]
    assert b.owner.pool == b"\x22" * FRAME
    b.owner.place = PLACE
    give(a, pieces_of(b"\x33" * FRAME))  # the link goes on
    until(lambda: len(b.owner.came) == 2, a, b)
    assert b.owner.pool == b"\x33" * FRAME


def test_a_lost_link_is_told_and_made_anew(ends: Ends) -> None:
    a, b = ends
    linked(a, b)
    first = a.links.giving("b")
    a.links.keep_peers(())
    until(lambda: b.owner.lost == ["a"], a, b)
    linked(a, b)
    assert a.links.giving("b") is not first
    b.links.disconnect("a")
    until(lambda: a.links.giving("b") is None, a)
    linked(a, b)
    give(a, pieces_of(b"x" * 100))
    until(lambda: b.owner.came, a, b)


def test_a_consumer_that_reads_nothing_is_cut(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = ends
    linked(a, b)
    until(lambda: b.links._taking["a"].is_linked, b)
    while not a.links.busy():
        give(a, pieces_of(bytes(FRAME)))
    monkeypatch.setattr(data_links, "STALLED_NS", 0)
    a.links.tick(time.monotonic_ns())
    assert a.links.giving("b") is None


HELLOS = [
    HELLO.pack(MAGIC, WIRE_VERSION, bytes(16)),
    HELLO.pack(b"msdX", WIRE_VERSION, bytes(16)),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
]


@pytest.mark.parametrize("hello", HELLOS)
def test_a_stranger_is_cut(ends: Ends, hello: bytes) -> None:
    a, _ = ends
    a.links.token_of("b")
    with socket.create_connection(("127.0.0.1", a.links.port)) as sock:
        sock.sendall(hello)
        sock.setblocking(False)
        until(lambda: _is_cut(sock), a)
    assert a.links.giving("b") is None


def test_another_version_is_no_link(ends: Ends) -> None:
    a, _ = ends
    token = a.links.token_of("b")
    with socket.create_connection(("127.0.0.1", a.links.port)) as sock:
        sock.sendall(HELLO.pack(MAGIC, WIRE_VERSION + 1, token))
        sock.setblocking(False)
        until(lambda: _is_cut(sock), a)
    assert a.links.giving("b") is None


def _is_cut(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_many_that_say_nothing_are_bounded_and_cut(
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = ends
    with contextlib.ExitStack() as stack:
        for _ in range(3 * STRANGERS_MAX):
            stack.enter_context(socket.create_connection(("127.0.0.1", a.links.port)))
            a.turn()
        until(lambda: len(a.links._strangers) == STRANGERS_MAX, a)
        monkeypatch.setattr(data_links, "HELLO_NS", 0)
        a.links.tick(time.monotonic_ns())
        assert not a.links._strangers
        linked(a, b)


NOISE = [
    HEAD.pack(0, 10) + bytes(500),
    HEAD.pack(1 << 30, 10) + bytes(500),
    HEAD.pack(10, FRAME_BYTES_MAX + 1) + bytes(500),
    HEAD.pack(10, 0) + bytes(500),
    encode_head(b"\xc1\xc1\xc1\xc1", 4) + bytes(4),
    encode_head(encode_header(Ping("a", 1)), 4) + bytes(4),
]


@pytest.mark.parametrize("noise", NOISE)
def test_a_producer_that_sends_noise_loses_its_link(ends: Ends, noise: bytes) -> None:
    a, b = ends
    linked(a, b)
    until(lambda: b.links._taking["a"].is_linked, b)
    link = a.links.giving("b")
    link.sock.sendall(noise)
    until(lambda: b.owner.lost == ["a"], b)
    assert b.owner.pool == bytes(FRAME)
    assert not b.owner.came
