"""Records as columns: lengths, statuses, tokens, field values, marks and media, cut together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.chunk import Marks
from msd_daemon.shm.field_layout import ValueArray
from msd_daemon.shm.media_layout import MediaColumn
from msd_daemon.sources.bad_record import BadRecord, Numbered
from msd_daemon.sources.chunk_draft import TokenDtype, Tokens
from msd_daemon.sources.item_columns import (
    join_marks,
    join_media,
    media_bytes,
    pick_marks,
    pick_media,
)

Ids = npt.NDArray[np.int64]


class FieldColumn(NamedTuple):
    """Values of one field of the job."""

    is_per_token: bool
    array: ValueArray
    """Shape (tokens,), beside them, or (records,)."""


@dataclass
class EncodedRecords:
    """Consecutive records, encoded."""

    lengths: npt.NDArray[np.int32]
    """Tokens of each record. Shape (records,)."""
    status: npt.NDArray[np.uint8]
    """RecordStatus of each record. Shape (records,)."""
    tokens: Tokens
    """Of all records in order. Shape (sum of lengths,)."""
    faults: Numbered = field(default_factory=list)
    """The bad ones by their number, ascending."""
    columns: tuple[FieldColumn, ...] = ()
    """Of the job's fields, in its order."""
    marks: Marks | None = None
    """None: every token is trained, every record is one sample."""
    media: tuple[MediaColumn, ...] = ()
    """Of the job's media rules, in their order; none where the source has no media."""

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def offsets(self) -> Ids:
        """First token of each record, and their number at the end. Shape (records + 1,)."""
        offsets = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return offsets

    def media_bytes(self) -> Ids:
        """Return the bytes of each record's media. Shape (records,)."""
        return media_bytes(self.media, len(self))

    def part(self, begin: int, end: int) -> EncodedRecords:
        """Return the records [begin, end), views."""
        first, last = int(self.offsets[begin]), int(self.offsets[end])
        places = np.arange(begin, end)
        return EncodedRecords(
            self.lengths[begin:end],
            self.status[begin:end],
            self.tokens[first:last],
            [(at - begin, fault) for at, fault in self.faults if begin <= at < end],
            tuple(
                FieldColumn(is_per_token, array[first:last] if is_per_token else array[begin:end])
                for is_per_token, array in self.columns
            ),
            pick_marks(self.marks, places),
            pick_media(self.media, places),
        )

    def rows(self, places: npt.NDArray[np.int64]) -> EncodedRecords:
        """Return the records at places, in their order."""
        count = len(places)
        if count and bool((places[1:] == places[:-1] + 1).all()):
            return self.part(int(places[0]), int(places[0]) + count)
        begins, ends = self.offsets[places].tolist(), self.offsets[places + 1].tolist()
        spans = list(zip(begins, ends, strict=True))
        faults: Numbered = []
        if self.faults:
            known = dict(self.faults)
            listed = enumerate(places.tolist())
            faults = [(number, known[place]) for number, place in listed if place in known]
        return EncodedRecords(
            self.lengths[places],
            self.status[places],
            _slices(self.tokens, spans),
            faults,
            tuple(
                FieldColumn(is_per_token, _slices(array, spans) if is_per_token else array[places])
                for is_per_token, array in self.columns
            ),
            pick_marks(self.marks, places),
            pick_media(self.media, places),
        )


def _slices(array: Any, spans: list[tuple[int, int]]) -> Any:
    if not spans:
        return array[:0]
    return np.concatenate([array[begin:end] for begin, end in spans])


def join_records(parts: Sequence[EncodedRecords]) -> EncodedRecords:
    """Return the records of all parts, at least one, in order."""
    if len(parts) == 1:
        return parts[0]
    starts = itertools.accumulate((len(part) for part in parts), initial=0)
    return EncodedRecords(
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.status for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        [(start + at, fault) for start, part in zip(starts, parts) for at, fault in part.faults],  # noqa: B905 - one start more
        join_columns(parts),
        join_marks([(part.marks, len(part)) for part in parts]),
        join_media([part.media for part in parts]),
    )


def join_columns(parts: Sequence[EncodedRecords]) -> tuple[FieldColumn, ...]:
    """Return the field columns of all parts, at least one, in order."""
    if len(parts) == 1:
        return parts[0].columns
    return tuple(
        FieldColumn(columns[0].is_per_token, np.concatenate([column.array for column in columns]))
        for columns in zip(*(part.columns for part in parts), strict=True)
    )


def no_records(dtype: TokenDtype) -> EncodedRecords:
    """Return an empty run."""
    return EncodedRecords(
        np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=dtype)
    )


def named(names: Sequence[BadRecord], dtype: TokenDtype) -> EncodedRecords:
    """Return records of these names, of one token each, so that runs of them are bounded too."""
    lengths, status = np.ones(len(names), np.int32), np.zeros(len(names), np.uint8)
    return EncodedRecords(lengths, status, np.zeros(len(names), dtype), list(enumerate(names)))
