"""Where fragments lie: the kernel and its twin find the same, and refuse the same."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_client.contract.errors import ChunkCorruptError
from msd_daemon import gather
from msd_daemon.gather import KERNEL, find_fragments
from msd_daemon.shm.chunk_header import HEADER_BYTES
from msd_daemon.shm.chunk_layout import ChunkView
from msd_daemon.shm.fragment_columns import FragmentColumns
from tests.support.parcels import FIELDS, MEDIA, FilledPool, Source

needs_c = pytest.mark.skipif(KERNEL != "c", reason="no compiled kernel")
PICKS = [(1, 0, 4, 100), (0, 1, 0, 7), (0, 0, 0, 300), (1, 1, 2, 1), (0, 2, 3, 10)]


def filled() -> FilledPool:
    pool = FilledPool(memoryview(bytearray(1 << 16)), fields=FIELDS, media=MEDIA)
    pool.put(Source(3, [300, 7, 40]))
    pool.put(Source(1, [5000, 3], token_bytes=4, has_fields=False))
    return pool


def found_by_c(pool: FilledPool, fragments: FragmentColumns) -> bool:
    """Return whether the kernel, asked alone, finds all of them."""
    columns = [
        np.require(getattr(fragments, name), dtype) for name, dtype in gather._FINDER_COLUMNS
    ]
    out = [np.empty(len(fragments), np.int64) for _ in range(4)]
    found: int = gather._kernel.find_fragments(pool.view, *columns, *out)
    return found < 0


def found_by_twin(pool: FilledPool, fragments: FragmentColumns) -> bool:
    try:
        find_fragments(pool.view, fragments, kernel="numpy")
    except ChunkCorruptError:
        return False
    return True


@needs_c
def test_both_find_the_same_and_it_is_what_lies_there() -> None:
    pool = filled()
    fragments = pool.fragments(PICKS)
    found, twin = (find_fragments(pool.view, fragments, kernel=kernel) for kernel in ("c", "numpy"))
    for own, theirs in zip(found, twin, strict=True):
        assert own.dtype == theirs.dtype == np.int64
        assert own.tolist() == theirs.tolist()
    for row, (chunk, record, first, tokens) in enumerate(PICKS):
        placed = pool.chunks[chunk]
        view = ChunkView(pool.view[placed.offset : placed.offset + placed.nbytes])
        begin = int(view.offsets[record]) + first
        assert int(found.first[row]) == begin
        at, width = int(found.payload[row]), int(found.token_bytes[row])
        ids = np.frombuffer(pool.view, f"<u{width}", tokens, at)
        assert np.array_equal(ids, view.tokens[begin : begin + tokens])
        assert int(found.flags[row]) == view.header.flags


@needs_c
@given(st.data())
def test_both_refuse_the_same_of_a_damaged_pool(data: st.DataObject) -> None:
    pool = filled()
    fragments = pool.fragments(PICKS)
    chunk = pool.chunks[data.draw(st.integers(0, 1))]
    # Header, offsets of records, and what comes behind them.
    place = chunk.offset + data.draw(st.integers(0, HEADER_BYTES + 40))
    junk = data.draw(st.binary(min_size=1, max_size=12))
    pool.view[place : place + len(junk)] = junk
    assert found_by_c(pool, fragments) == found_by_twin(pool, fragments)


@needs_c
@given(
    st.sampled_from(["chunk_offset", "chunk_bytes", "source", "sample", "first_token", "length"]),
    st.one_of(st.integers(-3, 400), st.integers(-(1 << 31), (1 << 31) - 1)),
)
def test_both_refuse_the_same_fragments(name: str, value: int) -> None:
    pool = filled()
    fragments = pool.fragments(PICKS[:1])
    column = np.full(1, value, getattr(fragments, name).dtype)
    fragments = dataclasses.replace(fragments, **{name: column})
    assert found_by_c(pool, fragments) == found_by_twin(pool, fragments)


@pytest.mark.parametrize("offset", [(1 << 63) - 1, (1 << 63) - 60, -1, 1 << 40])
def test_an_offset_that_wraps_leads_nowhere(offset: int) -> None:
    pool = filled()
    struct.pack_into("<q", pool.view, pool.chunks[0].offset + HEADER_BYTES + 8, offset)
    with pytest.raises(ChunkCorruptError, match="tokens 0 to 7 of record 1"):
        find_fragments(pool.view, pool.fragments([(0, 1, 0, 7)]))
    assert not found_by_twin(pool, pool.fragments([(0, 1, 0, 7)]))


def test_what_only_the_kernel_would_refuse_is_judged_by_the_twin() -> None:
    """A chunk's size is one number; where two are told the twin takes the last, for both."""
    pool = filled()
    fragments = pool.fragments([(0, 1, 0, 7), (0, 0, 0, 3)])
    sizes = fragments.chunk_bytes.copy()
    sizes[0] = HEADER_BYTES
    fragments = dataclasses.replace(fragments, chunk_bytes=sizes)
    assert find_fragments(pool.view, fragments).first.tolist() == [300, 0]


@needs_c
def test_columns_of_other_lengths_are_refused() -> None:
    pool = filled()
    fragments = dataclasses.replace(pool.fragments(PICKS), length=np.ones(2, np.int32))
    with pytest.raises(ValueError, match="different lengths"):
        find_fragments(pool.view, fragments, kernel="c")
