"""Rows and microbatches of the stream in one process: plain arrays, put together segment by segment.

What a trainer's batch holds, from the planner's segments and the tokens of their documents; written
for reading, as the yardstick of the gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import FieldRule, ResolvedJob
from federation.model.media import MediaRule
from msd_daemon.inline_media import (
    InlineMedia,
    ItemsByRule,
    items_of_row,
    media_of_batch,
    mrope_of_segment,
)
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT

NO_SOURCE = -1

Tokens = npt.NDArray[np.integer[Any]]
Positions = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class InlineSegment:
    """Where a piece of a row comes from."""

    source: str
    source_index: int
    epoch: int
    """Pass over the source, from 0."""
    window: int
    block: int
    """Place of the record's block in its window (streams: turn of the lanes)."""
    index: int
    """Place of the record in its block, in the source's order."""
    offset: int
    """First token of the piece inside its document."""
    length: int
    """Tokens of the piece."""
    column: int
    """Where in the row it begins."""
    begins_group: bool = True
    """False where it belongs to the group of the segment before it."""


class Piece(NamedTuple):
    """What a segment holds of its record."""

    tokens: Tokens
    """As they lie in the pool: with UNTRAINED_BIT where a job has masks."""
    values: tuple[npt.NDArray[Any], ...]
    """Of each user field of the job: those of its tokens, or the record's one value, shape (1,).
    Empty where the source has none."""
    items: ItemsByRule = ()
    """Images, videos and sounds of each media rule of the job."""


class RowArrays(NamedTuple):
    """What a row holds. Shapes (row_tokens,) and, of boundaries, (segments + 1,)."""

    tokens: Tokens
    labels: Tokens
    position_ids: Positions
    loss_weights: Weights | None
    cu_seqlens: Positions
    cu_seqlens_padded: Positions
    fields: dict[str, npt.NDArray[Any]]
    mrope_position_ids: Positions | None
    items: ItemsByRule


@dataclass(frozen=True, eq=False)
class InlineRow:
    """One packed row and who would receive it. Arrays have shape (row_tokens,)."""

    number: int
    """Canonical number, the same on any mesh."""
    dp_group: int
    microbatch: int
    slot: int
    """Row of the microbatch."""
    tokens: Tokens
    labels: Tokens
    position_ids: Positions
    loss_weights: Weights | None
    """What each label weighs in the loss; None where the job has no weights."""
    cu_seqlens: Positions
    """Cumulative tokens of the segments, the padding behind them as the last one. Shape
    (segments + 1,)."""
    cu_seqlens_padded: Positions
    """Their boundaries in places of the row: those of a segment that `segment_multiple` pads belong
    to it. Shape (segments + 1,)."""
    fields: dict[str, npt.NDArray[Any]]
    """User fields by name. Shapes (row_tokens,) per token, (segments,) per segment, (1,) per row."""
    mrope_position_ids: Positions | None
    """Positions of time, height and width, shape (3, row_tokens); None without `mrope`."""
    items: ItemsByRule
    """Images, videos and sounds of each media rule, in order of their tokens."""
    segments: tuple[InlineSegment, ...]


class InlineBatch(NamedTuple):
    """One microbatch of one DP group, with the fields of `msd_client.Batch`."""

    tokens: Tokens
    """Shape (rows, row_tokens), as labels, position_ids and loss_weights."""
    labels: Tokens
    position_ids: Positions
    loss_weights: Weights | None
    cu_seqlens: Positions
    """Over the flattened rows. Shape (segments + 1,)."""
    cu_seqlens_padded: Positions
    segment_source: Positions
    """Source index of each segment, -1 for padding. Shape (segments,)."""
    fields: dict[str, npt.NDArray[Any]]
    """User fields by name. Shapes (rows, row_tokens), (segments,) or (rows,)."""
    mrope_position_ids: Positions | None
    """Shape (3, rows, row_tokens)."""
    media: dict[str, InlineMedia]
    """By modality."""
    rows: tuple[InlineRow, ...]
    segment_group: Positions | None = None
    """Group of each segment, from 0, -1 for padding; None in jobs without groups. Shape (segments,)."""


def fill_row(
    job: ResolvedJob,
    row_tokens: int,
    segments: Sequence[InlineSegment],
    pieces: Sequence[Piece],
) -> RowArrays:
    """Put one row together.

    Args:
        job: The job.
        row_tokens: Places of a row at this step.
        segments: The row's, in order.
        pieces: What each holds, as long as it says.
    """
    rule = job.batch
    tokens = np.full(row_tokens, rule.pad_id, rule.token_dtype)
    labels = np.full(row_tokens, rule.ignore_label, rule.label_dtype)
    position_ids = np.zeros(row_tokens, np.int32)
    weights = np.zeros(row_tokens, np.float32)
    untrained = np.zeros(row_tokens, np.bool_)
    true, padded = [0], [0]
    weight = 0.0
    end_before = 0
    for segment, piece in zip(segments, pieces, strict=True):
        start, end = segment.column, segment.column + segment.length
        extent = -(-segment.length // rule.segment_multiple) * rule.segment_multiple
        tokens[start:end] = piece.tokens
        if job.sources[segment.source_index].has_masks:
            untrained[start:end] = piece.tokens & UNTRAINED_BIT != 0
            tokens[start:end] = piece.tokens & ~UNTRAINED_BIT
        position_ids[start : start + extent] = np.arange(extent)
        # A label lies where a token predicts the next one (shifted), or where that one is (aligned).
        shift = 1 if rule.labels == "shifted" else 0
        weight_before, weight = weight, job.sources[segment.source_index].loss_weight
        labels[start + 1 - shift : end - shift] = tokens[start + 1 : end]
        weights[start + 1 - shift : end - shift] = weight
        if rule.documents == "joined" and 0 < start == end_before:
            labels[start - shift] = tokens[start]
            weights[start - shift] = weight_before if shift else weight
        end_before = end
        true.append(true[-1] + segment.length)
        padded.append(start + extent)
    # A label is of the next place (shifted) or of its own (aligned).
    is_ignored = np.append(untrained[1:], False) if rule.labels == "shifted" else untrained
    labels[is_ignored] = rule.ignore_label
    weights[is_ignored] = 0
    rest = row_tokens - padded[-1]
    if rest:
        position_ids[padded[-1] :] = np.arange(rest)
        true.append(true[-1] + rest)
        padded.append(row_tokens)
    items = items_of_row(
        job.media, [segment.column for segment in segments], [piece.items for piece in pieces]
    )
    return RowArrays(
        tokens,
        labels,
        position_ids,
        weights if job.has_loss_weights else None,
        np.array(true, np.int32),
        np.array(padded, np.int32),
        {
            field.name: _field_values(field, place, row_tokens, len(true) - 1, segments, pieces)
            for place, field in enumerate(job.fields)
        },
        _mrope_ids(job, padded, items) if rule.positions == "mrope" else None,
        items,
    )


def _mrope_ids(job: ResolvedJob, bounds: Sequence[int], items: ItemsByRule) -> Positions:
    parts = []
    for segment, (first, end) in enumerate(itertools.pairwise(bounds)):
        own = [
            (item._replace(begin=item.begin - first), rule.merge)
            for rule, by_rule in zip(job.media, items, strict=True)
            for item in by_rule
            if item.segment == segment and rule.modality != "audio"
        ]
        parts.append(mrope_of_segment(end - first, sorted(own, key=lambda pair: pair[0].begin)))
    return np.concatenate(parts, axis=1)


def _field_values(
    field: FieldRule,
    place: int,
    row_tokens: int,
    segments_count: int,
    segments: Sequence[InlineSegment],
    pieces: Sequence[Piece],
) -> npt.NDArray[Any]:
    size = {"token": row_tokens, "segment": segments_count, "row": 1}[field.per]
    values = np.full(size, field.fill, field.dtype)
    for number, (segment, piece) in enumerate(zip(segments, pieces, strict=True)):
        if not piece.values:
            continue
        if field.per == "token":
            values[segment.column : segment.column + segment.length] = piece.values[place]
        elif field.per == "segment" or number == 0:
            values[number] = piece.values[place][0]
    return values


def batch_of(
    rows: Sequence[InlineRow],
    fields: Sequence[FieldRule],
    media: Sequence[MediaRule] = (),
    *,
    has_groups: bool = False,
) -> InlineBatch:
    """Return the microbatch of these rows, with the job's user fields, media and groups."""
    tokens: Tokens = np.stack([row.tokens for row in rows])
    labels: Tokens = np.stack([row.labels for row in rows])
    weights = [row.loss_weights for row in rows if row.loss_weights is not None]
    mrope = [row.mrope_position_ids for row in rows if row.mrope_position_ids is not None]
    true, padded = [0], [0]
    sources: list[int] = []
    groups: list[int] = []
    group = -1
    for row in rows:
        true += (row.cu_seqlens[1:] + true[-1]).tolist()
        padded += (row.cu_seqlens_padded[1:] + padded[-1]).tolist()
        sources += [segment.source_index for segment in row.segments]
        for segment in row.segments:
            group += segment.begins_group
            groups.append(group)
        groups += [NO_SOURCE] * (len(row.cu_seqlens) - 1 - len(row.segments))
        sources += [NO_SOURCE] * (len(row.cu_seqlens) - 1 - len(row.segments))
    return InlineBatch(
        tokens,
        labels,
        np.stack([row.position_ids for row in rows]),
        np.stack(weights) if weights else None,
        np.array(true, np.int32),
        np.array(padded, np.int32),
        np.array(sources, np.int32),
        {field.name: _join(rows, field) for field in fields},
        np.stack(mrope, axis=1) if mrope else None,
        media_of_batch(
            media,
            [row.items for row in rows],
            [len(row.cu_seqlens) - 1 for row in rows],
            tokens.shape[1],
        ),
        tuple(rows),
        np.array(groups, np.int32) if has_groups else None,
    )


def _join(rows: Sequence[InlineRow], field: FieldRule) -> npt.NDArray[Any]:
    values = [row.fields[field.name] for row in rows]
    return np.stack(values) if field.per == "token" else np.concatenate(values)
