"""Pools of real chunks, and a plain Python gather to hold the kernels against."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_daemon.gather import SEGMENT_COLUMNS, SegmentColumns
from msd_daemon.shm.chunk_layout import encode_chunk_columns, encoded_bytes
from msd_daemon.shm.mapping import map_read_only
from msd_daemon.shm.segment import make_segment
from msd_daemon.workers.microbatch_builder import MicrobatchBuilder, MicrobatchTask
from tests.support.rings import GENERATION, small_ring


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
    values: Sequence[Sequence[npt.NDArray[Any]]] | None = None,
) -> ChunkPool:
    """Encode chunks (lists of records of token ids) into one pool.

    Args:
        chunks: Records of each chunk.
        token_bytes: 2 or 4.
        has_index: True gives the chunks an index column.
        lead_bytes: Before the first chunk.
        values: Values of user fields, of each chunk.
    """
    data = bytearray(lead_bytes)
    offsets = []
    for source, records in enumerate(chunks):
        ends = np.cumsum([0, *map(len, records)], dtype=np.int64)
        tokens = np.array([t for r in records for t in r], "<u2" if token_bytes == 2 else "<i4")
        own = values[source] if values else ()
        blocks = [array.nbytes for array in own]
        size = encoded_bytes(len(records), tokens.nbytes, has_index=has_index, blocks=blocks)
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
            values=own,
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


@dataclass(frozen=True)
class Document:
    """A whole document of a row, with the values of its user fields."""

    tokens: Sequence[int]
    source: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)


def place_rows(
    rows: Sequence[Sequence[Document]], spec: BatchSpec
) -> list[tuple[Document, int, int]]:
    """Return the documents with row and column, one behind the other from each row's start."""
    placed = []
    for number, row in enumerate(rows):
        column = 0
        for document in row:
            placed.append((document, number, column))
            multiple = spec.segment_multiple
            column += -(-len(document.tokens) // multiple) * multiple
    return placed


def build_batches(
    spec: BatchSpec,
    rows: Sequence[Sequence[Document]],
    *,
    as_: Literal["torch", "numpy"] = "torch",
    row_tokens: int = 0,
    valid_tokens: int = -1,
) -> list[Batch]:
    """Send documents the whole way, chunk to slot to batch; one batch for each context-parallel rank.

    Args:
        spec: Fields and conventions.
        rows: Documents of each row.
        as_: Kind of arrays; copies, so nothing is held.
        row_tokens: Of a ramp; 0 = the spec's.
        valid_tokens: What the plan announces.
    """
    placed = place_rows(rows, spec)
    values = [_field_values(spec, [document for document, _, _ in placed])]
    # Chunks of a job with fields carry them all; a chunk without records is none.
    records = [list(document.tokens) for document, _, _ in placed]
    pool = make_pool([records], token_bytes=4, values=values) if records else make_pool([[[1]]])
    segments = columns_of(
        [
            (pool.offsets[0], number, 0, len(document.tokens), row, column, document.source)
            for number, (document, row, column) in enumerate(placed)
        ]
    )
    with ExitStack() as stack:
        segment = make_segment(len(pool.data), "auto", "pool")
        stack.callback(segment.close)
        os.pwrite(segment.fd_read_write, pool.data, 0)
        mapping = map_read_only(segment.fd_read_only, segment.nbytes)
        stack.callback(mapping.close)
        ring = stack.enter_context(small_ring(spec.payload_bytes_max, slots=1))
        builder = MicrobatchBuilder(mapping, ring.writer, spec)
        stack.callback(builder.close)
        task = MicrobatchTask(0, 1, 5, 6, 2, segments, valid_tokens, row_tokens)
        payload_bytes = builder.build(task)
        batches = []
        for cp_rank in range(spec.cp_count):
            lease = ring.reader.open(0, 1, GENERATION, payload_bytes)
            batches.append(Batch.from_lease(lease, spec, as_=as_, copy=True, cp_rank=cp_rank))
        return batches


def _field_values(spec: BatchSpec, documents: Sequence[Document]) -> list[npt.NDArray[Any]]:
    values = []
    for user in spec.user_fields:
        column: list[Any] = []
        for document in documents:
            value = document.values[user.name]
            column += value if user.per == "token" else [value]
        values.append(np.array(column, user.dtype))
    return values


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
