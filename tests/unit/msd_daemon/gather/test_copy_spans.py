"""Runs of bytes from one memory to another: the kernel and its twin."""

from __future__ import annotations

import socket
from typing import Literal

import numpy as np
import pytest

from msd_daemon.gather import KERNEL, copy_spans, send_spans, store_bytes
from msd_daemon.gather.spans import Spans, join_spans

Kernel = Literal["c", "numpy"]
KERNELS: list[Kernel] = ["numpy"] if KERNEL == "numpy" else ["c", "numpy"]
kernels = pytest.mark.parametrize("kernel", KERNELS)


def columns(*rows: tuple[int, int, int]) -> list[np.ndarray]:
    return [np.array(column, np.int64) for column in zip(*rows, strict=True)]


@kernels
def test_runs_are_copied_and_the_rest_stays(kernel: Kernel) -> None:
    source, target = bytes(range(100)), memoryview(bytearray(50))
    copy_spans(source, target, *columns((10, 0, 3), (99, 49, 1), (0, 20, 0)), kernel=kernel)
    expected = bytearray(50)
    expected[:3], expected[49] = source[10:13], 99
    assert target == expected


@kernels
@pytest.mark.parametrize(
    "row",
    [
        (-1, 0, 1), (0, -1, 1), (0, 0, -1), (99, 0, 2), (0, 49, 2), (101, 0, 0), (0, 51, 0),
        (1 << 62, 0, 1 << 62), (0, 1 << 62, 1 << 62), (0, 0, (1 << 63) - 1),
    ],
)  # fmt: skip
def test_a_run_out_of_bounds_is_refused_and_nothing_copied(
    kernel: Kernel, row: tuple[int, int, int]
) -> None:
    target = memoryview(bytearray(50))
    with pytest.raises(ValueError, match="span 1 is out of bounds"):
        copy_spans(bytes([7]) * 100, target, *columns((0, 0, 5), row), kernel=kernel)
    assert target == bytes(50)


def test_columns_of_other_lengths_are_refused() -> None:
    if KERNEL == "c":
        one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
        with pytest.raises(ValueError, match="lengths"):
            copy_spans(b"ab", memoryview(bytearray(2)), one, two, one, kernel="c")


@kernels
def test_nothing_to_copy(kernel: Kernel) -> None:
    none = np.zeros(0, np.int64)
    copy_spans(b"ab", memoryview(bytearray(2)), none, none, none, kernel=kernel)


def test_any_range_of_joined_runs_is_what_was_asked_for() -> None:
    rng = np.random.default_rng(3)
    base = rng.integers(0, 256, 4000).astype(np.uint8)
    for _ in range(50):
        nbytes = rng.integers(0, 30, 40)
        source = rng.integers(0, 3900, 40)
        source[1::2] = (source + nbytes)[::2]  # half of them follow the one before
        target = np.cumsum(nbytes + rng.integers(0, 2, 40)) - nbytes
        spans = join_spans(target, source, nbytes)
        assert len(spans.target) <= np.count_nonzero(nbytes)
        whole = np.zeros(int((target + nbytes).max()) + 5, np.uint8)
        for place, origin, size in zip(target, source, nbytes, strict=True):
            whole[place : place + size] = base[origin : origin + size]
        for _ in range(20):
            begin, end = sorted(rng.integers(0, len(whole) + 1, 2).tolist())
            out = np.zeros(end - begin, np.uint8)
            spans.gather(base.data, begin, out.data)
            assert np.array_equal(out, whole[begin:end])


def test_no_runs_at_all() -> None:
    none = np.zeros(0, np.int64)
    spans = join_spans(none, none, none)
    assert isinstance(spans, Spans)
    spans.gather(memoryview(b""), 0, memoryview(bytearray(5)))


@kernels
def test_bytes_are_stored_whatever_their_length_and_place(kernel: Kernel) -> None:
    rng = np.random.default_rng(4)
    source = rng.integers(0, 256, 700).astype(np.uint8)
    for begin in range(20):
        for size in [*range(40), 63, 64, 65, 127, 128, 129, 500]:
            target = np.zeros(600, np.uint8)
            store_bytes(source[3 : 3 + size].data, target[begin : begin + size].data, kernel=kernel)
            assert np.array_equal(target[begin : begin + size], source[3 : 3 + size])
            assert not target[:begin].any()
            assert not target[begin + size :].any()


@kernels
def test_bytes_of_another_length_than_their_place_are_refused(kernel: Kernel) -> None:
    for size in (0, 4, 6):
        with pytest.raises(ValueError, match=r"bytes|structures"):
            store_bytes(b"12345", memoryview(bytearray(size)), kernel=kernel)


def sent_by(count: int, target: socket.socket) -> bytes:
    got = bytearray()
    while len(got) < count:
        got += target.recv(1 << 20)
    return bytes(got)


@kernels
@pytest.mark.parametrize("head", [b"", b"head"])
def test_runs_of_two_memories_are_sent_in_order(kernel: Kernel, head: bytes) -> None:
    pool, own = bytes(range(100)), bytes(range(100, 200))
    from_, _, nbytes = columns((90, 0, 10), (100, 0, 5), (0, 0, 0), (3, 0, 4), (199, 0, 1))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = send_spans(ours, head, pool, own, from_, nbytes, kernel=kernel)
        expected = head + pool[90:] + own[:5] + pool[3:7] + own[99:]
        assert sent == len(expected)
        assert sent_by(sent, theirs) == expected


@kernels
@pytest.mark.parametrize("skip", [0, 1, 10, 14, 15, 20])
@pytest.mark.parametrize("limit", [0, 1, 6, 11, 100, None])
def test_a_part_of_runs_is_sent(kernel: Kernel, skip: int, limit: int | None) -> None:
    pool, own = bytes(range(100)), bytes(range(100, 150))
    from_, _, nbytes = columns((90, 0, 10), (100, 0, 5), (3, 0, 0), (3, 0, 4), (149, 0, 1))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = send_spans(ours, b"head", pool, own, from_, nbytes, skip, limit, kernel=kernel)
        runs = (pool[90:] + own[:5] + pool[3:7] + own[49:])[skip:][:limit]
        assert sent_by(sent, theirs) == b"head" + runs


@kernels
@pytest.mark.parametrize("part", [(-1, None), (0, -1)])
def test_a_part_below_zero_is_refused(kernel: Kernel, part: tuple[int, int | None]) -> None:
    from_, _, nbytes = columns((0, 0, 5))
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="below 0"):
        send_spans(ours, b"h", bytes(10), b"", from_, nbytes, *part, kernel=kernel)


@kernels
def test_more_runs_than_the_system_takes_at_once_are_begun(kernel: Kernel) -> None:
    pool = bytes(range(256)) * 20
    from_ = np.arange(5000, dtype=np.int64)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = send_spans(ours, b"", pool, b"", from_, np.ones(5000, np.int64), kernel=kernel)
        assert 1000 <= sent <= 1024
        assert sent_by(sent, theirs) == pool[:sent]


@kernels
def test_a_socket_that_is_full_or_closed_is_told_of(kernel: Kernel) -> None:
    pool = bytes(1 << 20)
    from_, _, nbytes = columns((0, 0, 1 << 20))
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            ours.setblocking(False)
            taken = 0
            with pytest.raises(BlockingIOError):
                while True:
                    sent = send_spans(ours, b"", pool, b"", from_, nbytes, kernel=kernel)
                    assert 0 < sent <= 1 << 20
                    taken += sent
            assert taken
        with pytest.raises(BrokenPipeError):
            send_spans(ours, b"", pool, b"", from_, nbytes, kernel=kernel)


@kernels
@pytest.mark.parametrize(
    "row",
    [
        (-1, 0, 1),
        (0, 0, -1),
        (99, 0, 2),
        (100, 0, 51),
        (151, 0, 0),
        (149, 0, 2),
        (1 << 62, 0, 1 << 62),
    ],
)
def test_a_run_outside_both_memories_is_refused_and_nothing_sent(
    kernel: Kernel, row: tuple[int, int, int]
) -> None:
    from_, _, nbytes = columns((0, 0, 5), row)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(ValueError, match="span 1 is out of bounds"):
            send_spans(ours, b"h", bytes(100), bytes(50), from_, nbytes, kernel=kernel)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
