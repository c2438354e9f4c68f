"""Images, sounds and videos of a chunk's records: items of them, and their units side by side.

In a chunk they lie behind the values of fields (see `chunk_layout`), in blocks that are 64-byte
aligned, little endian:

    i64 (items, bytes of their units) for each media rule of the job, then for each rule
    i32 first item of each record [records + 1], i32 ITEM_COLUMNS [items, 6], units [units, values]

Values and dtype of a unit stand in the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ChunkCorruptError
from msd_daemon.shm.field_layout import block_places

ITEM_COLUMNS = ("token_offset", "tokens", "units", "t", "h", "w")
TOKEN_OFFSET, TOKENS, UNITS, GRID_T, GRID_H, GRID_W = range(6)
ITEM_BYTES = 4 * len(ITEM_COLUMNS)
BLOCKS_PER_RULE = 3

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass
class MediaColumn:
    """All items of one modality that consecutive records hold."""

    counts: npt.NDArray[np.int32]
    """Items of each record. Shape (records,)."""
    items: npt.NDArray[np.int32]
    """ITEM_COLUMNS of each item: first placeholder token in its record, placeholder tokens, units
    (patches or frames), grid (of a sound: frames, 1, 1). Shape (items, 6)."""
    data: list[npt.NDArray[Any]]
    """Units of each item, of the rule's dtype. Shapes (units, unit_values); (units, 0) where they were
    left out."""

    def without_units(self) -> MediaColumn:
        """Return the items alone, for readers that only need to know where they stand."""
        return MediaColumn(self.counts, self.items, [array[:, :0] for array in self.data])


class MediaRow(Protocol):
    """What the layout asks of a media rule of the job (`MediaRule`, `MediaField`)."""

    @property
    def unit_values(self) -> int:
        """Values of a unit."""
        ...

    @property
    def unit_dtype(self) -> str:
        """A numpy name."""
        ...


class MediaSize(NamedTuple):
    """What the items of one modality take."""

    items: int
    data_bytes: int
    """Of their units."""


def has_items(columns: Sequence[MediaColumn]) -> bool:
    """Return True where any of the columns holds an item; without one a chunk has no media."""
    return any(len(column.items) for column in columns)


def media_sizes(columns: Sequence[MediaColumn]) -> list[MediaSize]:
    """Return what each column takes in a chunk."""
    return [
        MediaSize(len(column.items), sum(array.nbytes for array in column.data))
        for column in columns
    ]


def media_blocks(records: int, sizes: Sequence[MediaSize]) -> list[int]:
    """Return the bytes of each block of media in a chunk, without their alignment."""
    if not any(size.items for size in sizes):
        return []
    blocks = [16 * len(sizes)]
    for size in sizes:
        blocks += [4 * (records + 1), ITEM_BYTES * size.items, size.data_bytes]
    return blocks


def put_media(
    view: memoryview, places: Sequence[int], records: int, columns: Sequence[MediaColumn]
) -> None:
    """Write the columns into their blocks; the units are copied once.

    Args:
        view: Writable bytes from the chunk's first one on; holds every block.
        places: Where the blocks of `media_blocks` begin.
        records: Records of the chunk.
        columns: One for each media rule of the job.

    Raises:
        ChunkCorruptError: A column does not add up: counts, table and units disagree.
    """
    put_media_tables(view, places, records, columns)
    for number, column in enumerate(columns):
        data_at = places[BLOCKS_PER_RULE * (number + 1)]
        for array in column.data:
            place = np.frombuffer(view, array.dtype, array.size, data_at)
            np.copyto(place.reshape(array.shape), array)
            data_at += array.nbytes


def put_media_tables(
    view: memoryview, places: Sequence[int], records: int, columns: Sequence[MediaColumn]
) -> None:
    """Write all of the blocks but the units, see `put_media`.

    Raises:
        ChunkCorruptError: A column does not add up: counts, table and units disagree.
    """
    sizes = media_sizes(columns)
    np.frombuffer(view, "<i8", 2 * len(sizes), places[0])[:] = np.array(sizes, "<i8").reshape(-1)
    for number, (column, size) in enumerate(zip(columns, sizes, strict=True)):
        _check_column(number, column, records)
        firsts_at, table_at, _ = places[1 + BLOCKS_PER_RULE * number :][:BLOCKS_PER_RULE]
        firsts = np.frombuffer(view, "<i4", records + 1, firsts_at)
        firsts[0] = 0
        np.cumsum(column.counts, dtype=np.int32, out=firsts[1:])
        if size.items:
            np.frombuffer(view, "<i4", column.items.size, table_at)[:] = column.items.reshape(-1)


def _check_column(number: int, column: MediaColumn, records: int) -> None:
    items = column.items
    is_sound = (
        column.counts.shape == (records,)
        and items.shape == (len(column.data), len(ITEM_COLUMNS))
        and int(column.counts.sum(dtype=np.int64)) == len(items)
        and [len(array) for array in column.data] == items[:, UNITS].tolist()
        and len({(array.dtype, array.shape[1:]) for array in column.data}) <= 1
    )
    if not is_sound:
        raise ChunkCorruptError(
            f"media column {number} of {records} records does not add up: counts of "
            f"{column.counts.shape} records for {column.counts.sum()} items, a table of "
            f"{items.shape}, units of {len(column.data)} items"
        )


@dataclass(frozen=True, slots=True)
class MediaView:
    """The items of one modality of a chunk, read in place and checked."""

    firsts: Int32
    """First item of each record. Shape (records + 1,)."""
    items: Int32
    """ITEM_COLUMNS of each item. Shape (items, 6)."""
    unit_starts: Int64
    """First unit of each item. Shape (items + 1,)."""
    data: npt.NDArray[Any]
    """Shape (units, unit_values); (units, 0) where they were left out."""

    def part(self, record: int, offset: int, tokens: int) -> MediaColumn:
        """Return the items that lie whole in a part of a record, as those of a record of its own.

        Args:
            record: Number of the record.
            offset: First token of the part.
            tokens: Tokens of the part.
        """
        first, last = int(self.firsts[record]), int(self.firsts[record + 1])
        begins = self.items[first:last, TOKEN_OFFSET] - offset
        is_inside = (begins >= 0) & (begins + self.items[first:last, TOKENS] <= tokens)
        kept = first + np.flatnonzero(is_inside)
        items = self.items[kept]
        items[:, TOKEN_OFFSET] -= offset
        spans = zip(self.unit_starts[kept].tolist(), self.unit_starts[kept + 1].tolist())  # noqa: B905 - of one array
        data = [self.data[begin:end] for begin, end in spans]
        return MediaColumn(np.array([len(kept)], np.int32), items, data)


def read_media(
    view: memoryview, at: int, offsets: Int64, count: int, rules: Sequence[MediaRow]
) -> tuple[MediaView, ...]:
    """Return the media of a chunk, one view for each rule; nothing of the bytes is believed.

    Args:
        view: Bytes from the chunk's first one on; may reach beyond the chunk's end.
        at: Where the blocks of media begin.
        offsets: Token offsets of the records. Shape (records + 1,).
        count: Rules that the chunk was written with.
        rules: The job's, in its order.

    Raises:
        ChunkCorruptError: The chunk carries other media than these, they reach beyond the view, or
            an item lies outside its record, on another one, or has other units than there are.
    """
    if count != len(rules):
        raise ChunkCorruptError(
            f"chunk carries media of {count} modalities, the job has {len(rules)}"
        )
    head_bytes = 16 * count
    if not 0 <= at <= len(view) - head_bytes:
        raise ChunkCorruptError(f"chunk has media at byte {at} of {len(view)} mapped ones")
    head = np.frombuffer(view, "<i8", 2 * count, at).tolist()
    sizes = [MediaSize(*pair) for pair in zip(head[::2], head[1::2], strict=True)]
    for number, size in enumerate(sizes):
        if not 0 <= size.items <= len(view) or not 0 <= size.data_bytes <= len(view):
            raise ChunkCorruptError(
                f"chunk has {size.items} items and {size.data_bytes} bytes of media {number}, "
                f"{len(view)} bytes are mapped"
            )
    records = len(offsets) - 1
    blocks = [head_bytes] + [
        block
        for size in sizes
        for block in (4 * (records + 1), ITEM_BYTES * size.items, size.data_bytes)
    ]
    places = block_places(at, blocks)
    end = places[-1] + blocks[-1]
    if end > len(view):
        raise ChunkCorruptError(f"media of a chunk end at byte {end} of {len(view)} mapped ones")
    return tuple(
        _read_rule(view, places[1 + BLOCKS_PER_RULE * number :], offsets, sizes[number], rule)
        for number, rule in enumerate(rules)
    )


def _read_rule(
    view: memoryview, places: Sequence[int], offsets: Int64, size: MediaSize, rule: MediaRow
) -> MediaView:
    dtype = np.dtype(rule.unit_dtype).newbyteorder("<")
    unit_bytes = rule.unit_values * dtype.itemsize
    records = len(offsets) - 1
    firsts: Int32 = np.frombuffer(view, "<i4", records + 1, places[0])
    items: Int32 = np.zeros((0, len(ITEM_COLUMNS)), "<i4")
    if size.items:
        flat: Int32 = np.frombuffer(view, "<i4", size.items * len(ITEM_COLUMNS), places[1])
        items = flat.reshape(-1, len(ITEM_COLUMNS))
    starts = np.zeros(size.items + 1, np.int64)
    np.cumsum(items[:, UNITS], dtype=np.int64, out=starts[1:])
    wide = firsts.astype(np.int64)  # of int32 a difference may wrap
    counts = wide[1:] - wide[:-1]
    if firsts[0] != 0 or firsts[-1] != size.items or (counts < 0).any():
        raise ChunkCorruptError(
            f"first items of a chunk's records run from {firsts[0]} to {firsts[-1]}, there are "
            f"{size.items}"
        )
    # Items without a byte: a parcel for nodes where nobody reads units (see `without_units`).
    is_left_out = size.items > 0 and size.data_bytes == 0
    if (items[:, 1:] < 1).any() or (
        int(starts[-1]) * unit_bytes != size.data_bytes and not is_left_out
    ):
        raise ChunkCorruptError(
            f"{size.items} items of a chunk have {starts[-1]} units of {unit_bytes} bytes in "
            f"{size.data_bytes}, or one has a number below 1"
        )
    _check_spans(items, counts, np.diff(offsets))
    data: npt.NDArray[Any] = np.zeros((0, rule.unit_values), dtype)
    if is_left_out:
        data = np.zeros((int(starts[-1]), 0), dtype)
    elif size.data_bytes:
        values = np.frombuffer(view, dtype, size.data_bytes // dtype.itemsize, places[2])
        data = values.reshape(-1, rule.unit_values)
    return MediaView(firsts, items, starts, data)


def _check_spans(items: Int32, counts: Int64, lengths: Int64) -> None:
    """Refuse items outside their record, out of order, or on one another."""
    record = np.repeat(np.arange(len(counts)), counts)
    begins = items[:, TOKEN_OFFSET].astype(np.int64)
    ends = begins + items[:, TOKENS]
    is_sound = (begins >= 0) & (ends <= lengths[record])
    is_sound[1:] &= (record[1:] != record[:-1]) | (begins[1:] >= ends[:-1])
    if not is_sound.all():
        number = int(np.flatnonzero(~is_sound)[0])
        raise ChunkCorruptError(
            f"item {number} of a chunk lies at tokens {begins[number]} to {ends[number]} of record "
            f"{record[number]}, which has {lengths[record[number]]}, or before the item ahead of it"
        )
