"""The chunk's bytes: written once, read in place, refused where they do not fit."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.model.chunk import ChunkMeta
from federation.model.job import FieldRule
from msd_client.contract.errors import ChunkCorruptError
from msd_daemon.shm.chunk_layout import ChunkView, encoded_bytes, single_bytes
from msd_daemon.shm.field_layout import field_blocks, value_bytes
from msd_daemon.sources.chunk_draft import ChunkDraft


def make_draft(
    lengths: list[int], dtype: str = "<u2", index: list[int] | None = None
) -> ChunkDraft:
    meta = ChunkMeta(
        source_index=5,
        block_key=(3 << 48) | 7,
        first_index=-1 if index else 40,
        lengths=np.array(lengths, dtype=np.int32),
        status=np.array([0 if length else 2 for length in lengths], dtype=np.uint8),
        is_block_end=True,
        window_blocks=9,
        is_lane_end=bool(index),
    )
    parts = [np.arange(length, dtype=np.int32) + 10 * at for at, length in enumerate(lengths)]
    indices = None if index is None else np.array(index, dtype=np.int32)
    return ChunkDraft(meta, np.dtype(dtype), parts, indices)


@given(st.lists(st.integers(0, 50), max_size=30), st.sampled_from(["<u2", "<i4"]), st.booleans())
def test_what_is_written_is_read(lengths: list[int], dtype: str, has_index: bool) -> None:
    draft = make_draft(lengths, dtype, list(range(len(lengths)))[::-1] if has_index else None)
    view = memoryview(bytearray(draft.encoded_bytes() + 64))
    draft.write_into(view)
    chunk = ChunkView(view)
    header = chunk.header
    assert (header.source_index, header.block_key, header.window_blocks) == (5, (3 << 48) | 7, 9)
    assert header.is_block_end
    assert header.is_lane_end == bool(has_index and lengths)
    assert header.has_index == has_index
    assert header.payload_offset % 64 == 0
    assert draft.encoded_bytes() % 64 == 0
    assert chunk.lengths.tolist() == lengths
    assert chunk.status.tolist() == draft.meta.status.tolist()
    assert chunk.tokens.dtype == np.dtype(dtype)
    want = list(range(len(lengths)))[::-1] if has_index else [40 + n for n in range(len(lengths))]
    assert chunk.index.tolist() == want
    for number, part in enumerate(draft.payload):
        assert chunk.record(number).tolist() == part.tolist()


def test_the_header_lies_where_the_kernel_reads_it() -> None:
    draft = make_draft([2, 0, 3])
    view = memoryview(bytearray(draft.encoded_bytes()))
    draft.write_into(view)
    assert struct.unpack_from("<IHHiiqiIIIq", view, 0) == (
        0x4B44534D, 1, 2, 5, 3, (3 << 48) | 7, 40, 1, 128, 9, 10,
    )  # fmt: skip
    assert struct.unpack_from("<4q", view, 64) == (0, 2, 2, 5)
    assert bytes(view[96:99]) == bytes((0, 2, 0))
    assert struct.unpack_from("<5H", view, 128) == (0, 1, 20, 21, 22)


FIELDS = (
    FieldRule("a", "a", "token", "float32"),
    FieldRule("b", "b", "segment", "int64"),
    FieldRule("c", "c", "row", "int32"),
    FieldRule("d", "d", "token", "float64"),
)


def with_values(draft: ChunkDraft) -> ChunkDraft:
    tokens, records = draft.payload_tokens, len(draft.meta.lengths)
    draft.values = (
        np.arange(tokens, dtype="<f4"),
        np.arange(records, dtype="<i8") - 7,
        np.arange(records, dtype="<i4") + 7,
        np.arange(tokens, dtype="<f8") / 3,
    )
    return draft


@given(st.lists(st.integers(0, 50), max_size=30), st.sampled_from(["<u2", "<i4"]), st.booleans())
def test_values_lie_aligned_behind_the_tokens(
    lengths: list[int], dtype: str, has_index: bool
) -> None:
    draft = with_values(
        make_draft(lengths, dtype, list(range(len(lengths))) if has_index else None)
    )
    view = memoryview(bytearray(draft.encoded_bytes()))
    draft.write_into(view)
    chunk = ChunkView(view)
    for wanted, got in zip(draft.values, chunk.values(FIELDS), strict=True):
        assert got.dtype == wanted.dtype
        assert got.tolist() == wanted.tolist()
        place = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        assert (got.__array_interface__["data"][0] - place) % 64 == 0 or not len(got)
    assert chunk.tokens.tolist() == [t for part in draft.payload for t in part.tolist()]
    blocks = field_blocks(FIELDS, len(lengths), sum(lengths))
    assert draft.encoded_bytes() == encoded_bytes(
        len(lengths), chunk.payload_bytes, has_index=draft.index is not None, blocks=blocks
    )


def test_fields_lie_where_the_header_says() -> None:
    draft = with_values(make_draft([2, 0, 3]))
    view = memoryview(bytearray(draft.encoded_bytes()))
    draft.write_into(view)
    assert struct.unpack_from("<I", view, 28) == (1 | 8,)
    assert struct.unpack_from("<qII", view, 48) == (3 * 64 + 40, 4, 0)
    assert struct.unpack_from("<5f", view, 192) == (0, 1, 2, 3, 4)
    assert struct.unpack_from("<3q", view, 256) == (-7, -6, -5)
    assert struct.unpack_from("<3i", view, 320) == (7, 8, 9)
    assert struct.unpack_from("<2d", view, 384) == (0, 1 / 3)
    assert len(view) == 448


def test_sizes_of_values_are_told_before_they_are_there() -> None:
    assert value_bytes(FIELDS) == (12, 12)
    assert value_bytes(()) == (0, 0)
    assert single_bytes(10, 4) == 128 + 64
    assert single_bytes(10, 4, FIELDS) == 128 + 64 + 64 + 64 + 64 + 128


@pytest.mark.parametrize(
    ("place", "kind", "value"),
    [(48, "<q", -1), (48, "<q", 1 << 40), (48, "<q", 1 << 62)],
)
def test_fields_beyond_the_view_are_refused(place: int, kind: str, value: int) -> None:
    draft = with_values(make_draft([2, 0, 3]))
    view = memoryview(bytearray(draft.encoded_bytes()))
    draft.write_into(view)
    struct.pack_into(kind, view, place, value)
    with pytest.raises(ChunkCorruptError, match="bytes of fields"):
        ChunkView(view)


def test_other_fields_than_the_jobs_are_refused() -> None:
    draft = with_values(make_draft([2, 0, 3]))
    view = memoryview(bytearray(draft.encoded_bytes()))
    draft.write_into(view)
    for fields in ((), FIELDS[:3], FIELDS[::-1]):
        with pytest.raises(ChunkCorruptError, match="carries 4 fields"):
            ChunkView(view).values(fields)
    with pytest.raises(ChunkCorruptError, match="the pool lent"):
        draft.write_into(view[:-64])


@pytest.mark.parametrize(
    ("place", "kind", "value"),
    [
        (0, "<I", 7),
        (4, "<H", 2),
        (6, "<H", 3),
        (12, "<i", -1),
        (12, "<i", 4),
        (12, "<i", 1 << 30),
        (32, "<I", 192),
        (40, "<q", -2),
        (40, "<q", 1 << 40),
        (40, "<q", 8),
        (64, "<q", 1),
    ],
)
def test_a_header_that_lies_is_refused(place: int, kind: str, value: int) -> None:
    draft = make_draft([2, 0, 3])
    view = memoryview(bytearray(draft.encoded_bytes()))
    draft.write_into(view)
    struct.pack_into(kind, view, place, value)
    with pytest.raises(ChunkCorruptError):
        ChunkView(view)


def test_a_place_that_is_too_small_is_refused() -> None:
    draft = make_draft([200])
    with pytest.raises(ChunkCorruptError, match="the pool lent 256"):
        draft.write_into(memoryview(bytearray(256)))
    with pytest.raises(ChunkCorruptError, match="needs 64 bytes"):
        ChunkView(memoryview(bytes(10)))
