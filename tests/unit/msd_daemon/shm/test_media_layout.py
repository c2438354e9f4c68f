"""Media in a chunk's bytes: written once, read in place, refused where they do not add up."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.model.job import FieldRule
from msd_client.contract.errors import ChunkCorruptError
from msd_daemon.shm.chunk_header import FLAG_HAS_FIELDS, FLAG_HAS_MEDIA
from msd_daemon.shm.chunk_layout import ChunkView, encoded_bytes, single_bytes
from msd_daemon.shm.media_layout import (
    MediaColumn,
    MediaSize,
    MediaView,
    media_blocks,
    media_sizes,
)
from msd_daemon.sources.chunk_draft import ChunkDraft
from tests.support.media_rows import RULES, Sample, make_draft, make_item, make_sample

SEEDS = st.integers(0, 1 << 32)


def written(draft: ChunkDraft) -> memoryview:
    view = memoryview(bytearray(draft.encoded_bytes()))
    draft.write_into(view)
    return view


def records_of(view: MediaView) -> list[list[tuple[list[int], list[object]]]]:
    """Return (columns, units) of each item of each record."""
    found = []
    for first, last in zip(view.firsts[:-1].tolist(), view.firsts[1:].tolist(), strict=True):
        spans = [view.unit_starts[number : number + 2] for number in range(first, last)]
        found.append(
            [
                (view.items[number].tolist(), view.data[begin:end].tolist())
                for number, (begin, end) in zip(range(first, last), spans, strict=True)
            ]
        )
    return found


@given(SEEDS, st.lists(st.integers(0, 40), max_size=8))
def test_what_is_written_is_read(seed: int, lengths: list[int]) -> None:
    rng = random.Random(seed)
    samples = [make_sample(rng, length) for length in lengths]
    chunk = ChunkView(written(make_draft(samples)))
    has_items = any(sample.items for sample in samples)
    assert chunk.header.has_media == has_items
    views = chunk.media(RULES)
    assert len(views) == (len(RULES) if has_items else 0)
    for kind, view in enumerate(views):
        assert view.data.dtype == np.dtype(RULES[kind].unit_dtype)
        assert view.data.shape[1] == RULES[kind].unit_values
        assert records_of(view) == [
            [
                ([item.begin, item.tokens, len(item.data), *item.grid], item.data.tolist())
                for own, item in sample.items
                if own == kind
            ]
            for sample in samples
        ]
    assert chunk.tokens.tolist() == [t for s in samples for t in s.pool_ids.tolist()]


def image_sample(begin: int = 2) -> Sample:
    item = make_item(random.Random(1), 0, begin, 7)
    return Sample([5] * begin + [900] * item.tokens + [6, 6], items=[(0, item)])


def test_media_lie_behind_the_fields_where_the_header_says() -> None:
    draft = make_draft([image_sample(), Sample([1, 2])])
    units = len(draft.media[0].data[0])
    plain = written(replace(draft, media=()))
    draft.values = (np.arange(2, dtype="<i8"),)
    view = written(draft)
    header = ChunkView(view).header
    assert header.flags & FLAG_HAS_MEDIA
    assert header.flags & FLAG_HAS_FIELDS
    assert struct.unpack_from("<II", view, 56) == (1, 3)
    assert header.fields_offset == len(plain)
    assert header.media_offset == len(plain) + 64
    at = header.media_offset
    assert struct.unpack_from("<6q", view, at) == (1, units * 4, 0, 0, 0, 0)
    assert struct.unpack_from("<3i", view, at + 64) == (0, 1, 1)
    item = draft.media[0].items[0].tolist()
    assert list(struct.unpack_from("<6i", view, at + 128)) == item
    assert bytes(view[at + 192 : at + 192 + units * 4]) == draft.media[0].data[0].tobytes()
    assert ChunkView(view).values((FieldRule("a", "a", "row", "int64"),))[0].tolist() == [0, 1]


def test_a_chunk_without_an_item_is_the_chunk_of_a_source_without_media() -> None:
    draft = make_draft([Sample([1, 2, 3])])
    none = MediaColumn(np.zeros(1, np.int32), np.zeros((0, 6), np.int32), [])
    with_columns = replace(draft, media=(none, none, none))
    assert written(with_columns) == written(draft)
    assert ChunkView(written(with_columns)).media(RULES) == ()


def test_sizes_are_told_before_the_bytes_are_there() -> None:
    draft = make_draft([image_sample()])
    sizes = media_sizes(draft.media)
    units = len(draft.media[0].data[0])
    assert sizes == [MediaSize(1, 4 * units), MediaSize(0, 0), MediaSize(0, 0)]
    assert media_blocks(1, sizes) == [48, 8, 24, 4 * units, 8, 0, 0, 8, 0, 0]
    assert single_bytes(draft.payload_tokens, 4, (), sizes) == draft.encoded_bytes()
    assert single_bytes(9, 4, (), [MediaSize(0, 0)] * 3) == single_bytes(9, 4)
    assert encoded_bytes(1, 36, has_index=False, blocks=[1, 65]) == single_bytes(9, 4) + 64 + 128


@pytest.mark.parametrize(
    "change",
    [
        {"counts": np.array([2, 0], np.int32)},
        {"counts": np.array([1], np.int32)},
        {"items": np.zeros((1, 6), np.int32)},
        {"items": np.zeros((0, 6), np.int32)},
        {"data": []},
    ],
)
def test_columns_that_do_not_add_up_are_not_written(change: dict[str, object]) -> None:
    draft = make_draft([image_sample(), Sample([1, 2])])
    column = replace(draft.media[0], **change)
    draft.media = (column, *draft.media[1:])
    view = memoryview(bytearray(draft.encoded_bytes() + 4096))
    if len(column.items):
        with pytest.raises(ChunkCorruptError, match="media column 0 of 2 records"):
            draft.write_into(view)
    else:
        draft.write_into(view)
        assert ChunkView(view).media(RULES) == ()


@pytest.mark.parametrize(
    ("block", "place", "kind", "value", "message"),
    [
        (0, 0, "<q", -1, "-1 items"),
        (0, 0, "<q", 1 << 40, "items and"),
        (0, 0, "<q", 3, "media of a chunk end"),
        (0, 8, "<q", -4, "-4 bytes"),
        (0, 8, "<q", 1 << 62, "are mapped"),
        (0, 8, "<q", 8, "units of 4 bytes in 8"),
        (1, 0, "<i", 1, "run from 1"),
        (1, 4, "<i", 5, "run from 0 to"),
        (1, 4, "<i", -1, "run from 0 to"),
        (2, 0, "<i", -1, "lies at tokens -1"),
        (2, 0, "<i", 1000, "lies at tokens 1000"),
        (2, 4, "<i", 0, "below 1"),
        (2, 4, "<i", (1 << 31) - 1, "lies at tokens 2 to"),
        (2, 8, "<i", -5, "below 1"),
        (2, 8, "<i", (1 << 31) - 1, "units of 4 bytes"),
        (2, 12, "<i", 0, "below 1"),
    ],
)
def test_media_that_lie_are_refused(
    block: int, place: int, kind: str, value: int, message: str
) -> None:
    view = written(make_draft([image_sample(), Sample([1, 2])]))
    at = ChunkView(view).header.media_offset + 64 * block
    struct.pack_into(kind, view, at + place, value)
    with pytest.raises(ChunkCorruptError, match=message):
        ChunkView(view).media(RULES)


def test_first_items_whose_differences_wrap_are_refused_and_no_memory_taken() -> None:
    # Steps of 0x70000000, 0x70000000, 0x20000000 and, past the end of int32, 1.
    view = written(make_draft([image_sample(), *[Sample([1])] * 3]))
    at = ChunkView(view).header.media_offset + 64
    struct.pack_into("<5i", view, at, 0, 0x70000000, -0x20000000, 0, 1)
    with pytest.raises(ChunkCorruptError, match="run from 0 to"):
        ChunkView(view).media(RULES)


def test_items_on_one_another_are_refused() -> None:
    rng = random.Random(3)
    first = make_item(rng, 0, 0, 1)
    items = [(0, first), (0, make_item(rng, 0, first.tokens, 9))]
    view = written(make_draft([Sample([900] * 20, items=items)]))
    at = ChunkView(view).header.media_offset
    struct.pack_into("<i", view, at + 128 + 24, 0)
    with pytest.raises(ChunkCorruptError, match="item 1 of a chunk lies at tokens 0"):
        ChunkView(view).media(RULES)


def test_other_media_than_the_jobs_and_cut_chunks_are_refused() -> None:
    view = written(make_draft([image_sample()]))
    for rules in ((), RULES[:1]):
        with pytest.raises(ChunkCorruptError, match="media of 3 modalities"):
            ChunkView(view).media(rules)
    at = ChunkView(view).header.media_offset
    for end in (at + 8, at + 64, at + 200):
        with pytest.raises(ChunkCorruptError, match="mapped ones"):
            ChunkView(view[:end]).media(RULES)
    wide = (replace(RULES[0], unit_values=3), *RULES[1:])
    with pytest.raises(ChunkCorruptError, match="units of 3 bytes"):
        ChunkView(view).media(wide)


@given(SEEDS, st.integers(0, 1 << 20), st.binary(min_size=1, max_size=12))
def test_no_bytes_lead_outside_the_chunk(seed: int, place: int, junk: bytes) -> None:
    rng = random.Random(seed)
    samples = [make_sample(rng, 30) for _ in range(3)]
    view = written(make_draft([*samples, image_sample()]))
    at = ChunkView(view).header.media_offset
    place = 24 + place % (len(view) - 24) if seed % 2 else at + place % (len(view) - at)
    junk = junk[: len(view) - place]
    view[place : place + len(junk)] = junk
    try:
        views = ChunkView(view).media(RULES)
    except ChunkCorruptError:
        return
    for media in views:
        assert int(media.unit_starts[-1]) == len(media.data)
        assert len(media.items) == int(media.firsts[-1])
        media.data.copy()  # every byte of it is mapped


@given(SEEDS)
def test_a_part_keeps_the_items_that_lie_whole_in_it(seed: int) -> None:
    rng = random.Random(seed)
    sample = make_sample(rng, 40)
    views = ChunkView(written(make_draft([Sample([3]), sample, image_sample()]))).media(RULES)
    begin = rng.randrange(len(sample.tokens))
    length = rng.randint(1, len(sample.tokens) - begin)
    for kind, view in enumerate(views):
        part = view.part(1, begin, length)
        kept = [
            item
            for own, item in sample.items
            if own == kind and item.begin >= begin and item.begin + item.tokens <= begin + length
        ]
        assert part.counts.tolist() == [len(kept)]
        assert part.items.tolist() == [
            [item.begin - begin, item.tokens, len(item.data), *item.grid] for item in kept
        ]
        assert [data.tolist() for data in part.data] == [item.data.tolist() for item in kept]
