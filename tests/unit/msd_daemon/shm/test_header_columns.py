"""Headers of many chunks at once say what one at a time says."""

from __future__ import annotations

import numpy as np
import pytest

from msd_client.contract.errors import ChunkCorruptError, ProtocolError
from msd_daemon.shm.chunk_header import ChunkHeader, HeaderColumns, decode_header
from msd_daemon.shm.fragment_columns import FragmentColumns
from tests.support.parcels import FIELDS, MEDIA, FilledPool, Source


@pytest.fixture
def pool() -> FilledPool:
    filled = FilledPool(memoryview(bytearray(1 << 17)), fields=FIELDS, media=MEDIA)
    filled.put(Source(3, [300, 7, 40]))
    filled.put(Source(1, [5000, 3], token_bytes=4, has_fields=False))
    filled.put(Source(3, [20, 60], items={0: [(0, 2, 4, 8)]}))
    return filled


def columns(pool: FilledPool) -> HeaderColumns:
    offsets = np.array([chunk.offset for chunk in pool.chunks])
    return HeaderColumns(pool.view, offsets, np.array([chunk.nbytes for chunk in pool.chunks]))


def test_every_number_of_every_header(pool: FilledPool) -> None:
    headers = [decode_header(pool.view[chunk.offset :]) for chunk in pool.chunks]
    seen = columns(pool)
    for name in ChunkHeader.__dataclass_fields__:
        assert seen.of(name).tolist() == [getattr(header, name) for header in headers]


def test_any_changed_bit_is_refused_by_both_or_harmless(pool: FilledPool) -> None:
    chunk = pool.chunks[1]
    for bit in range(64 * 8):
        place = chunk.offset + bit // 8
        pool.view[place] ^= 1 << bit % 8
        try:
            seen = columns(pool)
        except ChunkCorruptError:
            pass
        else:  # what a parcel reads of it lies in the chunk
            end = seen.of("payload_offset") + seen.of("payload_bytes")
            assert (end <= [chunk.nbytes for chunk in pool.chunks]).all()
            decode_header(pool.view[chunk.offset : chunk.offset + chunk.nbytes])
        pool.view[place] ^= 1 << bit % 8


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (-64, 128),
        (32, 128),
        (0, 63),
        (0, 1 << 40),
        (1 << 40, 128),
        (1 << 17, 64),
        (1 << 62, 1 << 62),
    ],
)
def test_a_chunk_outside_of_its_memory_is_refused(pool: FilledPool, offset: int, size: int) -> None:
    with pytest.raises(ChunkCorruptError, match="is not one of"):
        HeaderColumns(pool.view, np.array([offset]), np.array([size]))


def test_fragment_columns_come_back(pool: FilledPool) -> None:
    fragments = pool.fragments([(0, 1, 0, 7), (1, 0, 4, 100)])
    body = fragments.encode()
    again = FragmentColumns.decode(memoryview(body))
    for name in FragmentColumns.__dataclass_fields__:
        assert getattr(again, name).tolist() == getattr(fragments, name).tolist()
    with pytest.raises(ProtocolError, match="cut short"):
        FragmentColumns.decode(body[:-1])
