"""Pools of real chunks, and a plain Python gather to hold the kernels against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msd_daemon.gather import SEGMENT_COLUMNS, SegmentColumns
from msd_daemon.shm.chunk_layout import encode_chunk_columns, encoded_bytes


@dataclass
class ChunkPool:
    """Chunks one after the other, as in the node's pool."""

    data: bytearray
    offsets: list[int]
    records: list[list[list[int]]]


def make_pool(
    chunks: Sequence[Sequence[Sequence[int]]],
    token_bytes: int = 2,
    *,
    has_index: bool = False,
    lead_bytes: int = 0,
) -> ChunkPool:
    """Encode chunks (lists of records of token ids) into one pool."""
    data = bytearray(lead_bytes)
    offsets = []
    for source, records in enumerate(chunks):
        ends = np.cumsum([0, *map(len, records)], dtype=np.int64)
        tokens = np.array([t for r in records for t in r], "<u2" if token_bytes == 2 else "<i4")
        size = encoded_bytes(len(records), tokens.nbytes, has_index=has_index)
        chunk = bytearray(size)
        payload = encode_chunk_columns(
            memoryview(chunk),
            token_bytes=token_bytes,
            source_index=source,
            block_key=source,
            first_index=0,
            flags=0,
            window_blocks=1,
            offsets=ends,
            status=np.zeros(len(records), np.uint8),
            index=np.arange(len(records), dtype=np.int32) if has_index else None,
        )
        payload[:] = tokens.tobytes()
        offsets.append(len(data))
        data += chunk
    return ChunkPool(data, offsets, [[list(r) for r in records] for records in chunks])


def columns_of(rows: Sequence[Sequence[int]]) -> SegmentColumns:
    """Return segment columns from (chunk_offset, sample, sample_offset, length, row, column, source)."""
    table = list(zip(*rows, strict=True)) if rows else [()] * len(SEGMENT_COLUMNS)
    return SegmentColumns(
        *(
            np.array(column, dtype)
            for column, (_, dtype) in zip(table, SEGMENT_COLUMNS, strict=True)
        )
    )


def plain_microbatch(
    segments: Sequence[tuple[list[int], int, int, int]],
    shape: tuple[int, int],
    *,
    pad_id: int,
    ignore_label: int,
    labels: str,
    is_joined: bool,
    segment_multiple: int = 1,
    source_weights: Sequence[float] = (),
) -> dict[str, list[Any]]:
    """Say token by token what a microbatch holds; segments are (tokens, row, column, source).

    Written from EXPERIENCE.md E4-E6 and BUGS.md H07-H09, not from the kernels. `loss_weights` is
    there where `source_weights` are.
    """
    rows, row_tokens = shape
    owner = [-1] * (rows * row_tokens)
    ids: list[int | None] = [None] * (rows * row_tokens)
    for number, (tokens, row, column, _) in enumerate(segments):
        start = row * row_tokens + column
        ids[start : start + len(tokens)] = tokens
        extent = -(-len(tokens) // segment_multiple) * segment_multiple
        owner[start : start + extent] = [number] * extent
    bounds, padded, sources, positions = [0], [0], [], []
    for at in range(rows * row_tokens):
        if at % row_tokens == 0 or owner[at] != owner[at - 1]:
            sources.append(segments[owner[at]][3] if owner[at] >= 0 else -1)
            padded.append(at)
            bounds.append(bounds[-1])
            positions.append(0)
        else:
            positions.append(positions[-1] + 1)
        padded[-1] = at + 1
        bounds[-1] += owner[at] < 0 or ids[at] is not None
    trained: list[tuple[int, float]] = []
    for at in range(rows * row_tokens):
        here, there = (at, at + 1) if labels == "shifted" else (at - 1, at)
        is_trained = (
            here // row_tokens == there // row_tokens
            and ids[here] is not None
            and ids[there] is not None
            and (is_joined or owner[here] == owner[there])
        )
        if not is_trained:
            trained.append((ignore_label, 0.0))
            continue
        weight = float(source_weights[segments[owner[at]][3]]) if source_weights else 1.0
        trained.append((ids[there] or 0, weight))
    out: dict[str, list[Any]] = {
        "tokens": [pad_id if token is None else token for token in ids],
        "labels": [label for label, _ in trained],
        "position_ids": positions,
        "cu_seqlens": bounds,
        "cu_seqlens_padded": padded,
        "segment_source": sources,
    }
    if source_weights:
        out["loss_weights"] = [weight for _, weight in trained]
    return out
