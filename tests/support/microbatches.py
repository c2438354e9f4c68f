"""Pools of real chunks, and a plain Python gather to hold the kernels against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
) -> dict[str, list[int]]:
    """Say token by token what a microbatch holds; segments are (tokens, row, column, source).

    Written from EXPERIENCE.md E4-E6 and BUGS.md H07, H08, not from the kernels.
    """
    rows, row_tokens = shape
    owner = [-1] * (rows * row_tokens)
    ids = [pad_id] * (rows * row_tokens)
    for number, (tokens, row, column, _) in enumerate(segments):
        for k, token in enumerate(tokens):
            owner[row * row_tokens + column + k] = number
            ids[row * row_tokens + column + k] = token
    out: dict[str, list[int]] = {"tokens": ids, "labels": [], "position_ids": []}
    bounds, sources, position = [0], [], 0
    for at in range(rows * row_tokens):
        is_row_start = at % row_tokens == 0
        if is_row_start or owner[at] != owner[at - 1]:
            if at:
                bounds.append(at)
            sources.append(segments[owner[at]][3] if owner[at] >= 0 else -1)
            position = 0
        out["position_ids"].append(position)
        position += 1

        def is_trained(here: int, there: int) -> bool:
            if there // row_tokens != here // row_tokens or owner[here] < 0 or owner[there] < 0:
                return False
            return is_joined or owner[here] == owner[there]

        if labels == "shifted":
            is_valid = at + 1 < rows * row_tokens and is_trained(at, at + 1)
            out["labels"].append(ids[at + 1] if is_valid else ignore_label)
        else:
            is_valid = at > 0 and is_trained(at - 1, at)
            out["labels"].append(ids[at] if is_valid else ignore_label)
    bounds.append(rows * row_tokens)
    out["cu_seqlens"], out["segment_source"] = bounds, sources
    return out
