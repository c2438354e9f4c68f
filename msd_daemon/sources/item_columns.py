"""Marks and media of consecutive records: cut, reordered and joined as their tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from federation.model.chunk import Marks
from msd_daemon.shm.media_layout import MediaColumn

Int32 = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

NO_MARKS = np.zeros((0, 4), np.int32)


def marks_of(tables: Sequence[list[tuple[int, int, int, int]]]) -> Marks:
    """Return the marks of records, given as the lines of each."""
    counts = np.array([len(lines) for lines in tables], np.int32)
    flat = [line for lines in tables for line in lines]
    return Marks(counts, np.array(flat, np.int32).reshape(-1, 4) if flat else NO_MARKS)


def pick_marks(marks: Marks | None, places: Places) -> Marks | None:
    """Return the marks of the records at places, in their order."""
    if marks is None:
        return None
    lines = _lines(marks.counts, places)
    return Marks(marks.counts[places], marks.table[lines])


def join_marks(parts: Sequence[tuple[Marks | None, int]]) -> Marks | None:
    """Return the marks of all parts in order; a part is its marks and how many records it has."""
    if all(marks is None for marks, _ in parts):
        return None
    known = [
        Marks(np.zeros(records, np.int32), NO_MARKS) if marks is None else marks
        for marks, records in parts
    ]
    return Marks(
        np.concatenate([marks.counts for marks in known]),
        np.concatenate([marks.table for marks in known]),
    )


def pick_media(media: tuple[MediaColumn, ...], places: Places) -> tuple[MediaColumn, ...]:
    """Return the media of the records at places, in their order."""
    picked = []
    for column in media:
        lines = _lines(column.counts, places)
        data = [column.data[line] for line in lines.tolist()]
        picked.append(MediaColumn(column.counts[places], column.items[lines], data))
    return tuple(picked)


def join_media(parts: Sequence[tuple[MediaColumn, ...]]) -> tuple[MediaColumn, ...]:
    """Return the media of all parts, which have the same modalities, in order."""
    return tuple(
        MediaColumn(
            np.concatenate([column.counts for column in columns]),
            np.concatenate([column.items for column in columns]),
            [array for column in columns for array in column.data],
        )
        for columns in zip(*parts, strict=True)
    )


def media_bytes(media: tuple[MediaColumn, ...], records: int) -> Places:
    """Return the bytes of each record's media. Shape (records,)."""
    total = np.zeros(records, np.int64)
    for column in media:
        sizes = np.array([array.nbytes for array in column.data], np.int64)
        owner = np.repeat(np.arange(records), column.counts)
        total += np.bincount(owner, weights=sizes, minlength=records).astype(np.int64)
    return total


def _lines(counts: Int32, places: Places) -> Places:
    """Return which lines of a ragged table belong to the records at places."""
    ends = np.cumsum(counts, dtype=np.int64)
    taken = counts[places].astype(np.int64)
    first = ends[places] - taken
    inside = np.arange(int(taken.sum())) - np.repeat(np.cumsum(taken) - taken, taken)
    lines: Places = np.repeat(first, taken) + inside
    return lines
