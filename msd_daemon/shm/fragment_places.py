"""Where the fragments of a parcel lie in the pool: their tokens, their fields' values, their media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msd_daemon.gather import find_fragments
from msd_daemon.shm.chunk_header import FLAG_HAS_FIELDS, FLAG_HAS_MEDIA
from msd_daemon.shm.chunk_layout import ChunkView
from msd_daemon.shm.field_layout import FieldRow, block_places, field_blocks, value_dtype
from msd_daemon.shm.fragment_columns import FragmentColumns
from msd_daemon.shm.media_layout import MediaColumn, MediaRow

Int64 = npt.NDArray[np.int64]


class FragmentPlaces(NamedTuple):
    """Where fragments lie in the pool. Arrays of shape (fragments,)."""

    token_bytes: Int64
    has_fields: npt.NDArray[np.bool_]
    payload: Int64
    values: list[Int64]
    """Of each field; meaningless where the chunk has none."""
    media: dict[int, tuple[MediaColumn, ...]]
    """By fragment, of those whose chunk has media."""


def find_places(
    pool: memoryview,
    fragments: FragmentColumns,
    fields: Sequence[FieldRow],
    media: Sequence[MediaRow],
) -> FragmentPlaces:
    """Return where fragments lie.

    Args:
        pool: The mapped pool.
        fragments: Any number.
        fields: The job's, in its order.
        media: The job's rules, in their order.

    Raises:
        ChunkCorruptError: A fragment lies outside its record, or its chunk is none.
    """
    found = find_fragments(pool, fragments)
    flags = found.flags
    places = FragmentPlaces(
        found.token_bytes,
        flags & FLAG_HAS_FIELDS != 0,
        found.payload,
        [np.zeros(len(fragments), np.int64) for _ in fields],
        {},
    )
    rich = np.flatnonzero(flags & (FLAG_HAS_FIELDS | FLAG_HAS_MEDIA))
    chunks = fragments.chunk_offset
    sample = fragments.sample.astype(np.int64)
    for offset in np.unique(chunks[rich]).tolist():
        rows = rich[chunks[rich] == offset]
        view = ChunkView(pool[offset : offset + int(fragments.chunk_bytes[rows[0]])])
        _find_values(view, rows, offset, found.first, sample, fields, places)
        _find_media(view, rows, fragments, media, places)
    return places


def _find_values(
    view: ChunkView,
    rows: npt.NDArray[np.intp],
    chunk: int,
    start: Int64,
    sample: Int64,
    fields: Sequence[FieldRow],
    places: FragmentPlaces,
) -> None:
    header = view.header
    if not header.has_fields:
        return
    view.values(fields)  # refuses a chunk of other fields
    tokens = header.payload_bytes // header.token_bytes
    blocks = block_places(header.fields_offset, field_blocks(fields, header.records, tokens))
    for rule, block, found in zip(fields, blocks, places.values, strict=True):
        value = start if rule.per == "token" else sample
        found[rows] = chunk + block + value[rows] * value_dtype(rule).itemsize


def _find_media(
    view: ChunkView,
    rows: npt.NDArray[np.intp],
    fragments: FragmentColumns,
    media: Sequence[MediaRow],
    places: FragmentPlaces,
) -> None:
    items = view.media(media)
    for row in rows.tolist() if items else ():
        part = int(fragments.sample[row]), int(fragments.first_token[row])
        places.media[row] = tuple(
            column.part(*part, int(fragments.length[row])) for column in items
        )
