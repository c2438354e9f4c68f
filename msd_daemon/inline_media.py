"""Images, videos and sounds in the stream of one process: plain lists, for reading (`inline_rows`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.media import MediaRule
from msd_daemon.shm.media_layout import MediaColumn
from msd_daemon.transforms.mrope import mrope_positions

Numbers = npt.NDArray[np.int32]


class InlineItem(NamedTuple):
    """One image, video or sound."""

    begin: int
    """First placeholder token, from the start of what holds the item: a record, a piece, a row."""
    tokens: int
    """Placeholder tokens."""
    grid: tuple[int, int, int]
    """Patches in time, height and width; of a sound (frames, 1, 1)."""
    data: npt.NDArray[Any]
    """Patches or frames. Shape (units, unit_values)."""
    segment: int = -1
    """Of a row: which of its segments holds the item."""


ItemsByRule = tuple[tuple[InlineItem, ...], ...]
"""Of each media rule of the job, in order of their tokens; empty where a source has no media."""


class InlineMedia(NamedTuple):
    """One modality of a microbatch, with the arrays of `msd_client.media.Media`."""

    patches: npt.NDArray[Any]
    grids: Numbers
    cu_seqlens: Numbers
    places: Numbers
    cu_places: Numbers
    segments: Numbers


def items_of_records(media: Sequence[MediaColumn], records: int) -> list[ItemsByRule]:
    """Return the items of each record of a draft."""
    found: list[list[tuple[InlineItem, ...]]] = [[] for _ in range(records)]
    for column in media:
        last = 0
        for number, count in enumerate(column.counts.tolist()):
            lines = zip(
                column.items[last : last + count].tolist(), column.data[last:], strict=False
            )
            found[number].append(
                tuple(
                    InlineItem(begin, tokens, (t, h, w), data)
                    for (begin, tokens, _, t, h, w), data in lines
                )
            )
            last += count
    return [tuple(by_rule) for by_rule in found]


def items_of_part(items: ItemsByRule, offset: int, length: int) -> ItemsByRule:
    """Return the items that lie whole in a part of a record."""
    return tuple(
        tuple(
            item._replace(begin=item.begin - offset)
            for item in by_rule
            if offset <= item.begin and item.begin + item.tokens <= offset + length
        )
        for by_rule in items
    )


def items_of_row(
    rules: Sequence[MediaRule], columns: Sequence[int], pieces: Sequence[ItemsByRule]
) -> ItemsByRule:
    """Return the items of a row.

    Args:
        rules: The job's.
        columns: Where each piece begins in the row.
        pieces: Items of each piece.
    """
    return tuple(
        tuple(
            item._replace(begin=column + item.begin, segment=segment)
            for segment, (column, items) in enumerate(zip(columns, pieces, strict=True))
            for item in (items[kind] if items else ())
        )
        for kind in range(len(rules))
    )


def mrope_of_segment(extent: int, items: Sequence[tuple[InlineItem, int]]) -> Numbers:
    """Return the positions of time, height and width of a segment. Shape (3, extent).

    Args:
        extent: Places of the segment.
        items: Its images and videos by place, counted from the segment's start, with their merge.
    """
    # Merged before, as images and videos may be merged differently.
    table = [
        (item.begin, item.tokens, 0, item.grid[0], item.grid[1] // merge, item.grid[2] // merge)
        for item, merge in items
    ]
    return mrope_positions(extent, np.array(table, np.int32), merge=1)


def media_of_batch(
    rules: Sequence[MediaRule],
    rows: Sequence[ItemsByRule],
    row_segments: Sequence[int],
    row_tokens: int,
) -> dict[str, InlineMedia]:
    """Return the media of a microbatch by modality.

    Args:
        rules: The job's.
        rows: Items of each row.
        row_segments: Segments of each row, those of padding included.
        row_tokens: Places of a row.
    """
    found: dict[str, InlineMedia] = {}
    for kind, rule in enumerate(rules):
        data = [np.zeros((0, rule.unit_values), rule.unit_dtype)]
        grids: list[tuple[int, int, int]] = []
        units, tokens = [0], [0]
        places: list[int] = []
        segments: list[int] = []
        for row, items in enumerate(rows):
            for item in items[kind]:
                data.append(item.data)
                grids.append(item.grid)
                units.append(units[-1] + len(item.data))
                tokens.append(tokens[-1] + item.tokens)
                first = row * row_tokens + item.begin
                places += range(first, first + item.tokens)
                segments.append(sum(row_segments[:row]) + item.segment)
        found[rule.modality] = InlineMedia(
            np.concatenate(data),
            np.array(grids, np.int32).reshape(-1, 3),
            *(np.array(column, np.int32) for column in (units, places, tokens, segments)),
        )
    return found
