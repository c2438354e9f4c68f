"""The order of rows and the joining of runs: the kernel and its twin give the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_daemon.gather import KERNEL, join_runs, sort_rows

needs_c = pytest.mark.skipif(KERNEL != "c", reason="no compiled kernel")
INT32 = st.one_of(st.integers(-3, 3), st.integers(-(1 << 31), (1 << 31) - 1))
INT64 = st.one_of(st.integers(-3, 3), st.integers(-(1 << 63), (1 << 63) - 1))


@needs_c
@given(st.data(), st.integers(0, 40), st.lists(st.sampled_from("iq"), min_size=1, max_size=4))
def test_rows_are_in_the_order_of_numpy(data: st.DataObject, rows: int, widths: list[str]) -> None:
    keys = []
    for width in widths:
        numbers = st.lists(INT32 if width == "i" else INT64, min_size=rows, max_size=rows)
        keys.append(np.array(data.draw(numbers), np.int32 if width == "i" else np.int64))
    order = sort_rows(*keys, kernel="c")
    assert order.dtype == np.int64
    assert order.tolist() == sort_rows(*keys, kernel="numpy").tolist()
    if rows:
        named = list(zip(*reversed([key[order].tolist() for key in keys]), strict=True))
        assert all(one <= other for one, other in pairwise(named))


@needs_c
def test_keys_of_frames_lie_unaligned_and_are_sorted_all_the_same() -> None:
    body = b"\0\0\0\0" + np.array([5, -1, 1 << 40], np.int64).tobytes()
    key = np.frombuffer(body, np.int64, 3, 4)
    assert sort_rows(key, kernel="c").tolist() == [1, 0, 2]


@needs_c
def test_keys_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="4 or 8 bytes a row"):
        sort_rows(np.zeros(3, np.int64), np.zeros(5, np.int64), kernel="c")


@needs_c
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=30))
def test_runs_that_follow_each_other_at_both_ends_are_one(
    steps: list[tuple[int, bool, bool]],
) -> None:
    target, source, rows = 0, 1000, []
    for nbytes, has_gap, jumps in steps:
        target += 2 * has_gap
        source += 50 * jumps
        rows.append((target, source, nbytes))
        target, source = target + nbytes, source + nbytes
    columns = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    joined = join_runs(*columns.copy(), kernel="c")
    twin = join_runs(*columns.copy(), kernel="numpy")
    for own, theirs in zip(joined, twin, strict=True):
        assert own.tolist() == theirs.tolist()
    bytes_of = [
        (at + byte, where + byte)
        for at, where, nbytes in zip(*(column.tolist() for column in joined), strict=True)
        for byte in range(nbytes)
    ]
    assert bytes_of == [(at + byte, where + byte) for at, where, n in rows for byte in range(n)]
    ends = [bool(has_gap or jumps) for _, has_gap, jumps in steps[1:]]
    assert len(joined[0]) == (1 + sum(ends) if steps else 0)
