"""What a worker says it works on, read from outside; its stack behind it."""

from __future__ import annotations

import mmap
import os

import pytest

from msd_daemon.shm.mark_page import (
    KEY_BYTES_MAX,
    PAGE_BYTES,
    STACK_OFFSET,
    InFlight,
    Mark,
    MarkPage,
    MarkState,
)


@pytest.fixture
def page():
    made = MarkPage()
    yield made
    made.close()


@pytest.fixture
def worker(page):
    with mmap.mmap(page.fd, PAGE_BYTES) as view:
        yield InFlight(view)


def without_time(mark):
    assert mark is not None
    assert mark.since_ns > 0
    values = [getattr(mark, name) for name in Mark.__slots__ if name != "since_ns"]
    return tuple(values)


def test_a_record_is_seen_from_begin_to_end(page, worker):
    assert page.mark() is None
    worker.begin(3, 70_000, 2, 1 << 40, 1 << 40, b"a/b.jpg")
    assert without_time(page.mark()) == (
        1, MarkState.RECORD, 3, 70_000, 2, 1 << 40, 1 << 40, "a/b.jpg",
    )  # fmt: skip
    worker.end()
    assert page.mark() is None
    worker.begin(0, 0, 0, -1, 9, state=MarkState.WINDOW)
    assert without_time(page.mark()) == (2, MarkState.WINDOW, 0, 0, 0, -1, 9, "")


def test_a_call_of_the_users_code_begins_the_records_time_anew(page, worker):
    worker.begin(0, 0, 0, 5, 5)
    worker.leave()
    away = page.mark()
    assert (away.sequence, away.state) == (1, MarkState.AWAY)
    worker.back()
    back = page.mark()
    assert (back.sequence, back.state, back.first_place) == (2, MarkState.RECORD, 5)
    worker.end()
    worker.leave()
    worker.back()
    assert page.mark() is None


def test_long_keys_are_cut(page, worker):
    worker.begin(0, 0, 0, 0, 0, "ü".encode() * 500)
    assert page.mark().key == "ü" * (KEY_BYTES_MAX // 2)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_what_a_crash_made_of_the_page_is_no_mark(page, byte):
    os.pwrite(page.fd, bytes([byte]) * PAGE_BYTES, 0)
    assert page.mark() is None
    os.ftruncate(page.fd, 10)
    assert page.mark() is None
    assert page.stack() == ""


def test_a_stack_lies_behind_the_mark(page, worker):
    worker.begin(0, 0, 0, 5, 5)
    os.pwrite(page.fd, b"  File a line 1\n", STACK_OFFSET)
    assert page.stack() == "File a line 1"
    page.clear_stack()
    assert page.stack() == ""
    assert page.mark() is not None


def test_without_a_page_nothing_is_noted():
    worker = InFlight()
    worker.begin(0, 0, 0, 0, 0)
    worker.leave()
    worker.back()
    worker.end()


def test_a_closed_page_says_nothing():
    page = MarkPage()
    page.close()
    page.close()
    assert page.mark() is None
    assert page.stack() == ""
