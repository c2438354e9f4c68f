"""Frames between a worker and a user's transform: whatever arrives is a value or refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from msd_daemon.sources.record import MediaPath as RecordPath
from msd_daemon.transforms import user_frames
from msd_daemon.transforms.user_frames import FrameError, MediaPath, decode, encode


def test_paths_of_media_have_a_type_at_each_end():
    frame = encode({"a": RecordPath("x/y.jpg")}, RecordPath)
    there = decode(bytearray(frame))["a"]
    assert (type(there), there, there.path) == (MediaPath, "x/y.jpg", "x/y.jpg")
    assert decode(bytearray(encode({"a": there})), 0, RecordPath) == {"a": RecordPath("x/y.jpg")}


def test_lists_of_one_number_type_are_blocks():
    assert len(encode([1] * 1000)) == 9 + 8000
    assert len(encode([1.5] * 1000)) == 9 + 8000
    assert decode(bytearray(encode([1, 2, 3, 2**70]))) == [1, 2, 3, 2**70]
    assert decode(bytearray(encode([True] * 5))) == [True] * 5
    assert [type(v) for v in decode(bytearray(encode([1, 2, 3, 4.0])))] == [int, int, int, float]


def test_arrays_lie_aligned_and_are_writable():
    frame = bytearray(16) + bytearray(encode(["x", np.arange(5.0)]))
    _, array = decode(frame, 16)
    array[0] = 9
    assert array.tolist() == [9, 1, 2, 3, 4]
    assert (array.ctypes.data - np.frombuffer(frame, np.uint8).ctypes.data) % 16 == 0


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"Z",
        b"S" + struct.pack("=Q", 5) + b"abc",
        b"S" + struct.pack("=Q", 2) + b"\xff\xff",
        b"L" + struct.pack("=Q", 1 << 62),
        b"M" + struct.pack("=Q", 1) + b"N",
        b"i" + struct.pack("=Q", 7) + bytes(7),
        b"A" + struct.pack("=BB", 6, 0) + b"object" + bytes(8),
        b"A" + struct.pack("=BBQQ", 5, 2, 1 << 39, 1 << 39) + b"uint8",
        b"A" + struct.pack("=BBQ", 5, 1, 9) + b"uint8" + bytes(15),
        b"NN",
        (b"L" + struct.pack("=Q", 1)) * 100 + b"N",
    ],
)
def test_bytes_that_are_no_value_are_refused(frame):
    with pytest.raises(FrameError):
        decode(bytearray(frame))


def test_values_have_a_limit_on_both_sides(monkeypatch):
    frame = encode([None] * 100)
    monkeypatch.setattr(user_frames, "VALUES_MAX", 100)
    with pytest.raises(FrameError, match="more than 100 values, use arrays"):
        encode([None] * 100)
    with pytest.raises(FrameError, match="too many values"):
        decode(bytearray(frame))


def test_a_list_in_itself_ends():
    loop = []
    loop.append(loop)
    with pytest.raises(FrameError, match="nested deeper than 64"):
        encode(loop)
