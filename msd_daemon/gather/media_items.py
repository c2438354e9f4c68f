"""Gathers images, videos and sounds from the pool into a microbatch, beside the tokens.

Owns no buffer and knows no job. Items are found first, as columns in the order of (row, column);
their units are then copied once, item by item, straight into the slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msd_client.contract.media_fields import MediaField, units_name
from msd_daemon.gather.segment_chunks import (
    Places,
    by_chunk,
    checked_numbers,
    flat_places,
    open_chunk,
    token_starts,
)
from msd_daemon.gather.segment_columns import SegmentColumns
from msd_daemon.shm.media_layout import GRID_T, TOKEN_OFFSET, TOKENS, UNITS, MediaView

Array = npt.NDArray[Any]


class MediaCounts(NamedTuple):
    """What a microbatch holds of a modality."""

    units: int
    items: int
    places: int
    """Placeholder tokens."""
    longest: int
    """Units of the largest item."""


@dataclass(frozen=True, slots=True)
class FoundItems:
    """The items of one modality in a microbatch, by (row, column); shapes (items,)."""

    places: Places
    """First placeholder token in the flattened rows."""
    tokens: Places
    units: Places
    grids: Places
    """Patches in time, height, width. Shape (items, 3)."""
    segments: Places
    """Number of the segment that each lies in."""
    data: Sequence[Array]
    """Units of each item, views of the pool."""

    @property
    def counts(self) -> MediaCounts:
        """Sums."""
        longest = int(self.units.max()) if len(self.units) else 0
        return MediaCounts(int(self.units.sum()), len(self.units), int(self.tokens.sum()), longest)


class _Part(NamedTuple):
    """Items of one chunk: columns place, tokens, units, t, h, w, segment; and their units."""

    columns: Places
    data: list[Array]


def find_items(
    pool: memoryview,
    segments: SegmentColumns,
    media: tuple[MediaField, ...],
    shape: tuple[int, int],
    segment_numbers: npt.NDArray[np.int32],
) -> list[FoundItems]:
    """Return the items that the segments of a microbatch hold, for each modality.

    Args:
        pool: The mapped pool, chunks as in `msd_daemon.shm.chunk_layout`.
        segments: Sorted by (row, column), no overlap.
        media: All modalities of the job, in its order.
        shape: (rows, row_tokens).
        segment_numbers: Number of each segment in the microbatch, padding counted. Shape
            (segments,).

    Raises:
        ValueError: A segment, chunk or place is out of bounds, or a segment cuts through an item.
        ChunkCorruptError: A chunk carries other media than the job, or damaged ones.
    """
    parts: list[list[_Part]] = [[] for _ in media]
    if segments.count:
        places = flat_places(segments, shape)
        numbers = checked_numbers(segment_numbers, segments.count)
        for chunk_offset, own in by_chunk(segments):
            chunk = open_chunk(pool, chunk_offset)
            token_starts(chunk, segments, own)  # checks records and spans
            for modality, view in enumerate(chunk.media(media)):
                if len(view.items):
                    parts[modality].append(_items_of(view, segments, own, places, numbers))
    return [_in_order(own) for own in parts]


def _items_of(
    view: MediaView, segments: SegmentColumns, own: Places, places: Places, numbers: Places
) -> _Part:
    sample = segments.sample[own].astype(np.int64)
    firsts = view.firsts[sample].astype(np.int64)
    counts = view.firsts[sample + 1] - firsts
    # One line for each pair of a segment and an item of its record.
    ends = np.cumsum(counts)
    item = np.arange(int(ends[-1])) + np.repeat(firsts - (ends - counts), counts)
    segment = np.repeat(own, counts)
    begin = view.items[item, TOKEN_OFFSET].astype(np.int64) - segments.sample_offset[segment]
    end = begin + view.items[item, TOKENS]
    length = segments.length[segment]
    is_touched = (end > 0) & (begin < length)
    is_inside = (begin >= 0) & (end <= length)
    if (is_touched & ~is_inside).any():
        number = int(np.flatnonzero(is_touched & ~is_inside)[0])
        raise ValueError(
            f"segment {segment[number]}: it cuts through an item, which lies at tokens "
            f"{begin[number]} to {end[number]} of its {length[number]}"
        )
    item, segment, begin = item[is_inside], segment[is_inside], begin[is_inside]
    columns = np.empty((7, len(item)), np.int64)
    columns[0] = places[segment] + begin
    columns[1] = view.items[item, TOKENS]
    columns[2] = view.items[item, UNITS]
    columns[3:6] = view.items[item, GRID_T:].T
    columns[6] = numbers[segment]
    starts = view.unit_starts
    spans = zip(starts[item].tolist(), starts[item + 1].tolist(), strict=True)
    return _Part(columns, [view.data[first:last] for first, last in spans])


def _in_order(parts: list[_Part]) -> FoundItems:
    columns = np.concatenate(
        [np.zeros((7, 0), np.int64), *(part.columns for part in parts)], axis=1
    )
    data = [array for part in parts for array in part.data]
    order = np.argsort(columns[0], kind="stable")
    columns = columns[:, order]
    return FoundItems(
        columns[0],
        columns[1],
        columns[2],
        columns[3:6].T,
        columns[6],
        [data[number] for number in order.tolist()],
    )


def write_items(rule: MediaField, found: FoundItems, outputs: Mapping[str, Array]) -> None:
    """Write the fields of one modality; of every array just the first entries, as many as there are.

    Args:
        rule: The modality.
        found: Its items.
        outputs: Arrays by field name (`media_fields.media_arrays`), C-contiguous.

    Raises:
        ValueError: There are more units, items or places than the arrays hold, or units are of
            another shape or dtype.
    """
    write_places(rule.modality, found, outputs)
    write_units(rule, found, outputs)


def write_places(name: str, found: FoundItems, outputs: Mapping[str, Array]) -> None:
    """Write where the items of a modality lie in the text; see `write_items`."""
    places = outputs[f"{name}_places"]
    numbers = outputs[f"{name}_segments"]
    counts = found.counts
    if counts.items > len(numbers) or counts.places > len(places):
        raise ValueError(
            f"{name}: {counts.items} items and {counts.places} places where the slot has room for "
            f"{len(numbers)} and {len(places)}"
        )
    numbers[: counts.items] = found.segments
    put_bounds(outputs[f"{name}_cu_places"], found.tokens)
    places[: counts.places] = token_places(found.places, found.tokens)


def write_units(rule: MediaField, found: FoundItems, outputs: Mapping[str, Array]) -> None:
    """Write what an encoder reads of the items of a modality; see `write_items`."""
    name = rule.modality
    units = outputs[units_name(name)]
    bounds = outputs[f"{name}_cu_seqlens"]
    counts = found.counts
    if counts.units > len(units) or counts.items >= len(bounds):
        raise ValueError(
            f"{name}: {counts.units} units and {counts.items} items where the slot has room for "
            f"{len(units)} and {len(bounds) - 1}"
        )
    if rule.has_grids:
        outputs[f"{name}_grids"][: counts.items] = found.grids
    put_bounds(bounds, found.units)
    start = 0
    for array in found.data:
        end = start + len(array)
        if array.shape[1] != units.shape[1]:
            raise ValueError(
                f"{name}: {len(array)} units of an item were left out of a parcel: its node was taken "
                "for one without a first pipeline stage"
            )
        units[start:end] = array
        start = end


def token_places(places: Places, tokens: Places) -> Places:
    """Return the place of each placeholder token of items, one item after the other.

    Args:
        places: First place of each item. Shape (items,).
        tokens: Placeholder tokens of each. Shape (items,).
    """
    ends = np.cumsum(tokens)
    count = int(ends[-1]) if len(ends) else 0
    found: Places = np.arange(count) + np.repeat(places - (ends - tokens), tokens)
    return found


def put_bounds(output: Array, counts: Places) -> None:
    """Write 0 and the running sums of `counts` into the first entries of `output`."""
    output[0] = 0
    output[1 : len(counts) + 1] = np.cumsum(counts)
