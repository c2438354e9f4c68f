"""Any plain value survives the way to a user's transform; any bytes are a value or refused."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msd_daemon.transforms.user_frames import DTYPES, FrameError, decode, encode

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**90), 2**90)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary()
)
VALUES = st.recursive(
    SCALARS | st.lists(st.integers(-9, 9)) | st.lists(st.floats(allow_nan=False)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def same(one, other):
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@given(VALUES)
def test_values_come_back(value):
    assert same(decode(bytearray(encode(value))), value)


@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 30),
)
def test_arrays_come_back(name, shape, text_bytes):
    count = int(np.prod(shape))
    array = np.arange(count).astype(name).reshape(shape)
    text, found = decode(bytearray(encode(["x" * text_bytes, array])))
    assert len(text) == text_bytes
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)


@given(VALUES, st.data())
def test_damaged_frames_are_values_or_refused(value, data):
    frame = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    with contextlib.suppress(FrameError):
        decode(frame[:cut])
