"""A parcel's bytes: every range of it, its chunks, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from federation.exchange_messages import ParcelTable
from msd_client.contract.errors import BudgetError, ChunkCorruptError
from msd_daemon.shm.chunk_layout import ChunkView
from msd_daemon.shm.parcel_layout import ParcelLayout, check_parcel, lay_out
from tests.support.parcels import FIELDS, MEDIA, FilledPool, Source, record_content

PICKS = [(0, 1, 0, 7), (1, 0, 4, 100), (0, 0, 0, 300), (2, 1, 5, 20), (0, 2, 3, 10), (2, 0, 0, 20)]
"""(chunk, record, first token, tokens)."""


@pytest.fixture
def pool() -> FilledPool:
    filled = FilledPool(memoryview(bytearray(1 << 18)), fields=FIELDS, media=MEDIA)
    filled.put(Source(3, [300, 7, 40]))
    filled.put(Source(1, [5000, 3], token_bytes=4, has_fields=False))
    items = {0: [(0, 2, 4, 8)], 1: [(0, 6, 3, 5), (1, 10, 9, 2), (0, 30, 5, 4)]}
    filled.put(Source(3, [20, 60], items=items))
    return filled


def lay(pool: FilledPool, picks: list[tuple[int, int, int, int]] = PICKS) -> ParcelLayout:
    return lay_out(pool.view, pool.fragments(picks), FIELDS, MEDIA)


def whole(layout: ParcelLayout, pool: FilledPool) -> memoryview:
    out = memoryview(bytearray(b"\xaa" * layout.size_bytes))
    layout.gather(pool.view, 0, out)
    return out


def test_a_parcel_is_one_chunk_of_each_source_and_width_with_the_fragments_in_their_order(
    pool: FilledPool,
) -> None:
    layout = lay(pool)
    parcel = whole(layout, pool)
    check_parcel(parcel, layout.table, FIELDS, MEDIA)
    assert layout.table.parts[:, 0].tolist() == [1, 3]
    at = 0
    for source, begin, used, records in layout.table.parts.tolist():
        view = ChunkView(parcel[begin : begin + used])
        mine = sorted(pick for pick in PICKS if pool.chunks[pick[0]].source.index == source)
        assert len(mine) == records
        for record, pick in enumerate(mine):
            row = at + record
            assert layout.table.block_key[row] == pool.chunks[pick[0]].block_key
            named = (layout.table.index[row], layout.table.offset[row], layout.table.length[row])
            assert named == pick[1:]
            seen = record_content(view, record, 0, pick[3], FIELDS, MEDIA)
            assert seen == pool.content(pick)
        at += records


def test_units_can_be_left_out_and_items_stand_where_they_stood(pool: FilledPool) -> None:
    full = lay(pool)
    layout = lay_out(pool.view, pool.fragments(PICKS), FIELDS, MEDIA, has_units=False)
    assert layout.size_bytes < full.size_bytes
    parcel, whole_parcel = whole(layout, pool), whole(full, pool)
    check_parcel(parcel, layout.table, FIELDS, MEDIA)
    left_out = 0
    for (_, begin, used, _), (_, other, its, _) in zip(
        layout.table.parts.tolist(), full.table.parts.tolist(), strict=True
    ):
        mine = ChunkView(parcel[begin : begin + used])
        theirs = ChunkView(whole_parcel[other : other + its])
        assert np.array_equal(mine.tokens, theirs.tokens)
        for bare, column in zip(mine.media(MEDIA), theirs.media(MEDIA), strict=True):
            assert np.array_equal(bare.items, column.items)
            assert np.array_equal(bare.firsts, column.firsts)
            assert bare.data.shape == (len(column.data), 0)
            left_out += column.data.nbytes
    assert left_out > 0


def test_every_range_holds_the_bytes_of_the_whole(pool: FilledPool) -> None:
    layout = lay(pool)
    parcel = bytes(whole(layout, pool))
    assert b"\xaa" * 8 not in parcel  # gaps are zeros, not what lay in the buffer before
    rng = np.random.default_rng(1)
    for _ in range(300):
        begin, end = sorted(rng.integers(0, layout.size_bytes + 1, 2).tolist())
        out = memoryview(bytearray(b"\x55" * (end - begin)))
        layout.gather(pool.view, begin, out)
        assert bytes(out) == parcel[begin:end]


def test_the_same_fragments_elsewhere_give_the_same_parcel(pool: FilledPool) -> None:
    moved = FilledPool(pool.view, fields=FIELDS, media=MEDIA)
    shift = 1 << 17
    moved.view[shift : shift + pool.end] = pool.view[: pool.end]
    moved.chunks = [
        type(chunk)(chunk.source, chunk.offset + shift, chunk.nbytes, chunk.block_key)
        for chunk in pool.chunks
    ]
    first, second = lay(pool), lay(moved)
    assert first.digest == second.digest
    assert whole(first, pool) == whole(second, moved)
    assert lay(pool, PICKS[:-1]).digest != first.digest


@pytest.mark.parametrize(
    "picks", [[(1, 0, 0, 5000), (1, 1, 0, 3)], [(1, 1, 0, 3), (1, 0, 0, 5000)]]
)
def test_neighbours_are_copied_in_one_piece_in_whatever_order_they_are_asked_for(
    pool: FilledPool, picks: list[tuple[int, int, int, int]]
) -> None:
    layout = lay_out(pool.view, pool.fragments(picks))
    assert len(layout.pooled.target) == 1


@pytest.mark.parametrize(
    "pick",
    [(0, 3, 0, 1), (0, -1, 0, 1), (0, 0, 299, 2), (0, 0, -1, 2), (0, 0, 0, 0), (0, 1, 0, -1)],
)
def test_a_fragment_outside_its_record_is_refused(
    pool: FilledPool, pick: tuple[int, int, int, int]
) -> None:
    with pytest.raises(ChunkCorruptError, match="source 3, block 1000"):
        lay(pool, [(0, 0, 0, 1), pick])


def test_a_chunk_that_is_none_or_lies_outside_is_refused(pool: FilledPool) -> None:
    fragments = pool.fragments([(0, 0, 0, 1)])
    for offset in (-64, len(pool.view), 64):
        fragments.chunk_offset[:] = offset
        with pytest.raises(ChunkCorruptError):
            lay_out(pool.view, fragments, FIELDS, MEDIA)


def test_an_empty_parcel_is_refused(pool: FilledPool) -> None:
    with pytest.raises(BudgetError, match="0 fragments"):
        lay_out(pool.view, pool.fragments([(0, 0, 0, 1)] * 2).__class__(*[np.zeros(0, int)] * 9))


def test_damage_is_found_or_does_no_harm(pool: FilledPool) -> None:
    layout = lay(pool)
    parcel = whole(layout, pool)
    table = ParcelTable.decode(layout.table.encode(), layout.size_bytes)
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(400):
        damaged = memoryview(bytearray(parcel))
        begin = int(layout.table.parts[rng.integers(2), 1])
        damaged[begin + int(rng.integers(0, 120))] ^= 1 << int(rng.integers(8))
        try:
            check_parcel(damaged, table, FIELDS, MEDIA)
        except ChunkCorruptError:
            found += 1
    assert found > 200
