"""A small ring in real shared memory, with one writer and any number of readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_client.batch import Batch
from msd_client.contract.ring_layout import RingLayout
from msd_client.ring_reader import RingReader, SlotLease
from msd_daemon.shm.mapping import map_read_write
from msd_daemon.shm.ring_writer import RingWriter, write_superblock
from msd_daemon.shm.segment import make_segment

GENERATION = 11


class SmallRing:
    """Segment, writer and reader of one ring in this process."""

    def __init__(self, payload_bytes: int, slots: int) -> None:
        self.layout = RingLayout.for_payload(payload_bytes, slots, ring_id=1, generation=GENERATION)
        self.segment = make_segment(self.layout.ring_bytes, "auto", "test ring")
        self.mapping = map_read_write(self.segment.fd_read_write, self.layout.ring_bytes)
        write_superblock(self.mapping, self.layout, created_ns=0, daemon_pid=1, boot_id=b"")
        self.writer = RingWriter(self.mapping, self.layout)
        self.reader = RingReader(self.segment.fd_read_only, self.layout)

    def fill(self, slot: int, sequence: int, **arrays: npt.NDArray[Any]) -> int:
        return self.writer.fill(
            slot,
            sequence,
            arrays,
            {"rows": 2, "max_seqlen": 3, "valid_tokens": 5, "plan_step": 8},
            step=7,
            microbatch=1,
        )

    def lease(self, slot: int = 0, sequence: int = 1, **arrays: npt.NDArray[Any]) -> SlotLease:
        arrays = arrays or sample_arrays(sequence)
        return self.reader.open(slot, sequence, GENERATION, self.fill(slot, sequence, **arrays))

    def batch(self, slot: int = 0, sequence: int = 1, **options: Any) -> Batch:
        return Batch.from_lease(self.lease(slot, sequence), **options)

    @property
    def released(self) -> list[tuple[int, int]]:
        return list(self.reader.released)

    def close(self) -> None:
        self.writer.close()
        self.mapping.close()
        self.reader.close()
        self.segment.close()


def sample_arrays(start: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Return the fields of a microbatch of 2 rows of 4 tokens."""
    tokens = np.arange(start, start + 8, dtype=np.int32).reshape(2, 4)
    return {
        "tokens": tokens,
        "labels": tokens.astype(np.int64) + 1,
        "position_ids": np.array([[0, 1, 2, 0], [0, 1, 0, 1]], np.int32),
        "cu_seqlens": np.array([0, 3, 4, 6, 8], np.int32),
        "segment_source": np.array([0, -1, 1, 2], np.int32),
    }


@contextmanager
def small_ring(payload_bytes: int = 4096, slots: int = 4) -> Iterator[SmallRing]:
    """Yield a ring and close all of it."""
    ring = SmallRing(payload_bytes, slots)
    try:
        yield ring
    finally:
        ring.close()
