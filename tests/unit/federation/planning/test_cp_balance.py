"""Attention of context-parallel ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from federation.planning.cp_balance import attention_pairs
from msd_client.contract.context_parallel import CP_LAYOUTS, NumpyOps, rank_places


def array(*values):
    return np.array(values, np.int64)


def test_one_document_by_hand():
    one = (array(0), array(0), array(8), (1, 8))
    # Queries have 1 to 8 keys. Rank 0 of 2: chunks of 2, the first and the last.
    assert attention_pairs("zigzag_row", 2, *one).tolist() == [[1 + 2 + 7 + 8, 3 + 4 + 5 + 6]]
    assert attention_pairs("zigzag_document", 2, *one).tolist() == [[18, 18]]
    assert attention_pairs("contiguous", 2, *one).tolist() == [[10, 26]]


def test_two_documents_make_rows_uneven():
    two = (array(0, 0), array(0, 4), array(4, 4), (1, 8))
    assert attention_pairs("zigzag_row", 2, *two).tolist() == [[1 + 2 + 3 + 4, 3 + 4 + 1 + 2]]
    three = (array(0, 0, 1), array(0, 6, 0), array(6, 2, 8), (2, 8))
    # Row 0: rank 0 has queries 0, 1 of the first and both of the second.
    assert attention_pairs("zigzag_row", 2, *three).tolist() == [
        [1 + 2 + 1 + 2, 3 + 4 + 5 + 6],
        [18, 18],
    ]


@st.composite
def rows_of_documents(draw):
    cp_count = draw(st.integers(1, 5))
    multiple = 2 * cp_count * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.lists(st.integers(1, 60), max_size=5), min_size=1, max_size=3))
    extents = [[-(-n // multiple) * multiple for n in row] for row in lengths]
    row_tokens = max(*map(sum, extents), multiple)
    return cp_count, multiple, lengths, extents, row_tokens


@given(rows_of_documents(), st.sampled_from(CP_LAYOUTS))
def test_pairs_are_those_of_the_places_that_ranks_get(case, layout):
    cp_count, multiple, lengths, extents, row_tokens = case
    keys = np.zeros((len(lengths), row_tokens), np.int64)
    bounds, segments = [0], []
    for row, (own, taken) in enumerate(zip(lengths, extents, strict=True)):
        column = 0
        for length, extent in zip(own, taken, strict=True):
            keys[row, column : column + length] = np.arange(1, length + 1)
            segments.append((row, column, length))
            column += extent
            bounds.append(row * row_tokens + column)
        bounds.append((row + 1) * row_tokens)
    columns = np.array(segments, np.int64).reshape(-1, 3).T
    shape = (len(lengths), row_tokens)
    found = attention_pairs(layout, cp_count, *columns, shape, multiple)
    for rank in range(cp_count):
        places = rank_places(layout, cp_count, rank, shape, np.array(bounds, np.int32), NumpyOps())
        assert int(found[:, rank].sum()) == int(keys.ravel()[places].sum())
        if layout != "zigzag_document":
            assert found[:, rank].tolist() == keys.ravel()[places].sum(axis=1).tolist()


@given(rows_of_documents())
def test_zigzag_by_document_is_even_but_for_padding(case):
    cp_count, multiple, lengths, extents, row_tokens = case
    for own, taken in zip(lengths, extents, strict=True):
        columns = np.cumsum([0, *taken])[:-1]
        whole = [np.zeros(len(own), np.int64), columns[: len(own)], np.array(taken, np.int64)]
        found = attention_pairs("zigzag_document", cp_count, *whole, (1, row_tokens), multiple)
        assert len(set(found[0].tolist())) == 1
        whole[2] = np.array(own, np.int64)
        found = attention_pairs("zigzag_document", cp_count, *whole, (1, row_tokens), multiple)
        most = sum((b - a) * b for a, b in zip(own, taken, strict=True))
        assert found.max() - found.min() <= most
