"""Narrow columns come back as they were, and foreign bytes are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_client.contract.narrow import pack_columns, unpack_columns

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.lists(st.tuples(INT64, INT64, st.integers(0, 300)), max_size=20))
def test_columns_come_back(rows: list[tuple[int, int, int]]) -> None:
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    data = pack_columns(columns)
    assert np.array_equal(unpack_columns(data, 3, len(rows)), columns)
    for wrong in (data[:-1], data + b"x"):
        with pytest.raises(ValueError, match="bytes"):
            unpack_columns(wrong, 3, len(rows))


def test_columns_take_as_many_bytes_as_their_values() -> None:
    columns = np.array([[1 << 40] * 100, [5] * 99 + [260], [5] * 99 + [1 << 17]], np.int64)
    assert len(pack_columns(columns)) == 3 * 9 + 100 * (1 + 1 + 4)


def test_a_width_that_is_none_is_refused() -> None:
    data = bytearray(pack_columns(np.array([[7, 9]])))
    data[8] = 3
    with pytest.raises(ValueError, match="columns"):
        unpack_columns(bytes(data), 1, 2)
