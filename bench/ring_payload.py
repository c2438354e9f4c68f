"""What the ring bench moves: microbatches of ~700-token segments of a given payload size."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.ring_layout import RingLayout
from msd_daemon.gather import SegmentColumns
from msd_daemon.shm.chunk_layout import encode_chunk_columns, encoded_bytes
from msd_daemon.shm.mapping import Mapping, map_read_write
from msd_daemon.shm.ring_writer import write_superblock
from msd_daemon.shm.segment import Segment, make_segment

ROW_TOKENS = 4096
TOKEN_FIELD_BYTES = 4 + 8 + 4
"""Bytes of tokens (int32), labels (int64) and position_ids (int32) per token."""
SEGMENT_TOKENS = (100, 1300)
"""Lengths are uniform in this range, 700 in the mean; a row's last one fills the row."""
CHUNK_BYTES = 1 << 20
GENERATION = 1


def make_spec(payload_bytes: int) -> BatchSpec:
    """Return a microbatch whose token fields take `payload_bytes`."""
    rows = payload_bytes // TOKEN_FIELD_BYTES // ROW_TOKENS
    return BatchSpec.for_rule(
        rows=rows, row_tokens=ROW_TOKENS, row_segments_max=ROW_TOKENS // SEGMENT_TOKENS[0] + 1
    )


@dataclass
class Pool:
    """A pool segment with chunks of documents, and a microbatch made of them."""

    segment: Segment
    mapping: Mapping
    segments: SegmentColumns

    def close(self) -> None:
        self.mapping.close()
        self.segment.close()


def make_pool(spec: BatchSpec) -> Pool:
    """Write chunks of uint16 tokens (1 MiB each) that fill a whole microbatch."""
    lengths, rows, columns = _cut_rows(spec.rows, np.random.default_rng(1))
    tokens = np.random.default_rng(2).integers(0, 1 << 16, spec.rows * spec.row_tokens, np.uint16)
    ends = np.cumsum(lengths)
    chunk_of = (ends - 1) * 2 // CHUNK_BYTES
    bounds = np.searchsorted(chunk_of, np.arange(chunk_of[-1] + 2))
    sizes = [
        encoded_bytes(b - a, int(lengths[a:b].sum()) * 2, has_index=False)
        for a, b in itertools.pairwise(bounds.tolist())
    ]
    segment = make_segment(sum(sizes), "auto", "bench pool")
    mapping = map_read_write(segment.fd_read_write, segment.nbytes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    for number, size in enumerate(sizes):
        a, b, at = int(bounds[number]), int(bounds[number + 1]), int(offsets[number])
        first = int(ends[a] - lengths[a])
        payload = encode_chunk_columns(
            mapping.view[at : at + size],
            token_bytes=2,
            source_index=0,
            block_key=number,
            first_index=0,
            flags=0,
            window_blocks=1,
            offsets=np.concatenate([[0], np.cumsum(lengths[a:b])]).astype(np.int64),
            status=np.zeros(b - a, np.uint8),
        )
        body = tokens[first : int(ends[b - 1])]
        payload[: body.nbytes] = body.view(np.uint8).data
    segments = SegmentColumns(
        chunk_offset=offsets[chunk_of].astype("<i8"),
        sample=(np.arange(len(lengths)) - bounds[chunk_of]).astype("<i4"),
        sample_offset=np.zeros(len(lengths), "<i4"),
        length=lengths.astype("<i4"),
        row=rows.astype("<i4"),
        column=columns.astype("<i4"),
        source=np.zeros(len(lengths), "<i4"),
    )
    return Pool(segment, mapping, segments)


def _cut_rows(rows: int, random: np.random.Generator) -> tuple[Any, Any, Any]:
    """Return lengths, rows and columns of segments that fill all rows."""
    lengths, owners, columns = [], [], []
    for row in range(rows):
        at = 0
        while at < ROW_TOKENS:
            length = min(int(random.integers(*SEGMENT_TOKENS, endpoint=True)), ROW_TOKENS - at)
            lengths.append(length)
            owners.append(row)
            columns.append(at)
            at += length
    return np.array(lengths), np.array(owners), np.array(columns)


def make_ring(payload_bytes: int, slots: int) -> tuple[RingLayout, Segment, Mapping]:
    """Make a ring as the daemon does: reserved, populated, collapsed, superblock written."""
    layout = RingLayout.for_payload(payload_bytes, slots, ring_id=0, generation=GENERATION)
    segment = make_segment(layout.ring_bytes, "auto", "bench ring")
    mapping = map_read_write(segment.fd_read_write, segment.nbytes)
    write_superblock(mapping, layout, created_ns=0, daemon_pid=1, boot_id=b"")
    return layout, segment, mapping
