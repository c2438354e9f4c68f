"""The writer's side of a slot: open first, closed last, void after an abort."""

from __future__ import annotations

import numpy as np
import pytest

from msd_client.contract.errors import BudgetError, SegmentCorruptError
from msd_client.contract.ring_layout import RingLayout, decode_superblock
from msd_daemon.shm.ring_writer import RingWriter
from tests.support.rings import GENERATION, sample_arrays, small_ring


def test_a_filled_slot_is_read_back_as_it_was() -> None:
    with small_ring() as ring:
        arrays = sample_arrays()
        payload_bytes = ring.fill(2, 41, **arrays)
        lease = ring.reader.open(2, 41, GENERATION, payload_bytes)
        assert (lease.header.step, lease.header.microbatch) == (7, 1)
        assert [field.name for field in lease.table.fields] == list(arrays)
        assert all(field.offset_bytes % 128 == 0 for field in lease.table.fields)


def test_a_begun_slot_is_refused_until_it_is_committed() -> None:
    with small_ring() as ring:
        payload_bytes = ring.fill(0, 1, **sample_arrays())
        write = ring.writer.begin(0, 2)
        for sequence in (1, 2):
            with pytest.raises(SegmentCorruptError, match="closing sequence"):
                ring.reader.open(0, sequence, GENERATION, payload_bytes)
        ring.writer.abort(write)
        with pytest.raises(SegmentCorruptError):
            ring.reader.open(0, 2, GENERATION, payload_bytes)
        assert ring.fill(0, 2, **sample_arrays()) == payload_bytes
        ring.reader.open(0, 2, GENERATION, payload_bytes).release()


def test_the_superblock_says_what_the_layout_is() -> None:
    with small_ring() as ring:
        assert decode_superblock(ring.mapping.view[:4096]) == ring.layout


def test_empty_arrays_are_written_too() -> None:
    with small_ring() as ring:
        arrays = {"tokens": np.empty((0, 4), np.int32), "weights": np.ones(3, np.float32)}
        lease = ring.reader.open(0, 1, GENERATION, ring.fill(0, 1, **arrays))
        assert lease.table.fields[0].shape == (0, 4)


def test_a_payload_beyond_the_slot_is_refused_and_never_published() -> None:
    with small_ring(payload_bytes=4096, slots=2) as ring:
        neighbour = ring.fill(1, 5, **sample_arrays())
        with pytest.raises(BudgetError, match="exceeds the 4096"):
            ring.fill(0, 1, tokens=np.ones(2000, np.int32))
        with pytest.raises(SegmentCorruptError):
            ring.reader.open(0, 1, GENERATION, 8000)
        ring.reader.open(1, 5, GENERATION, neighbour).release()


def test_slots_and_sequences_that_cannot_be_are_refused() -> None:
    with small_ring(slots=2) as ring:
        with pytest.raises(SegmentCorruptError):
            ring.writer.begin(2, 0)
        for sequence in (-1, 2**64 - 1):
            with pytest.raises(ValueError, match="sequence"):
                ring.writer.begin(0, sequence)


def test_a_segment_smaller_than_its_layout_is_refused() -> None:
    with small_ring(slots=2) as ring:
        larger = RingLayout.for_payload(4096, 8, ring_id=1, generation=1)
        with pytest.raises(BudgetError, match="its segment has"):
            RingWriter(ring.mapping, larger)
