"""From pool to batch: what the builder writes is what a reader gets."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import (
    BudgetError,
    InternalError,
    MeshMismatchError,
    SegmentCorruptError,
)
from msd_daemon.gather import SegmentColumns
from msd_daemon.shm.mapping import map_read_only
from msd_daemon.shm.segment import make_segment
from msd_daemon.workers.microbatch_builder import MicrobatchBuilder, MicrobatchTask
from tests.support.microbatches import columns_of, make_pool, plain_microbatch
from tests.support.rings import GENERATION, SmallRing, small_ring

SPEC = BatchSpec.for_rule(rows=2, row_tokens=6, row_segments_max=3, pad_id=7)
RECORDS = [[11, 12, 13], [21, 22], [31, 32, 33, 34, 35, 36]]
GOOD = [(0, 0, 0, 3, 0, 0, 4), (0, 1, 0, 2, 0, 3, 5), (0, 2, 1, 5, 1, 0, 6)]


@dataclass
class Bench:
    ring: SmallRing
    builder: MicrobatchBuilder

    def task(self, segments: SegmentColumns, valid: int = -1, sequence: int = 1) -> MicrobatchTask:
        return MicrobatchTask(
            slot=1,
            sequence=sequence,
            step=20,
            plan_step=21,
            microbatch=3,
            segments=segments,
            valid_tokens=valid,
        )

    def batch(self, sequence: int, payload_bytes: int) -> Batch:
        lease = self.ring.reader.open(1, sequence, GENERATION, payload_bytes)
        return Batch.from_lease(lease, SPEC, as_="numpy")


@pytest.fixture
def bench() -> Iterator[Bench]:
    data = make_pool([RECORDS]).data
    segment = make_segment(len(data), "auto", "pool")
    with small_ring(SPEC.payload_bytes_max) as ring:
        os.pwrite(segment.fd_read_write, data, 0)
        pool = map_read_only(segment.fd_read_only, segment.nbytes)
        builder = MicrobatchBuilder(pool, ring.writer, SPEC)
        yield Bench(ring, builder)
        builder.close()
        assert pool.close(), "a closed builder holds no view of the pool"
    segment.close()


def test_a_built_microbatch_is_read_as_the_rules_say(bench: Bench) -> None:
    payload_bytes = bench.builder.build(bench.task(columns_of(GOOD), valid=7))
    batch = bench.batch(1, payload_bytes)
    right = plain_microbatch(
        [([11, 12, 13], 0, 0, 4), ([21, 22], 0, 3, 5), ([32, 33, 34, 35, 36], 1, 0, 6)],
        (2, 6),
        pad_id=7,
        ignore_label=-100,
        labels="shifted",
        is_joined=False,
    )
    for name, values in right.items():
        assert batch[name].reshape(-1).tolist() == values, name
    assert batch.tokens.shape == batch.labels.shape == batch.position_ids.shape == (2, 6)
    assert [str(batch[f.name].dtype) for f in SPEC.fields] == [f.dtype for f in SPEC.fields]
    assert (batch.step, batch.plan_step, batch.microbatch, batch.rows) == (20, 21, 3, 2)
    assert (batch.max_seqlen, batch.valid_tokens) == (5, 7)
    assert payload_bytes <= SPEC.payload_bytes_max


def test_a_slot_is_built_again_with_fewer_segments(bench: Bench) -> None:
    bench.builder.build(bench.task(columns_of(GOOD)))
    payload_bytes = bench.builder.build(bench.task(columns_of(GOOD[2:]), sequence=2))
    batch = bench.batch(2, payload_bytes)
    assert batch.cu_seqlens.tolist() == [0, 6, 11, 12]
    assert batch.segment_source.tolist() == [-1, 6, -1]


def test_an_error_leaves_the_slot_unreadable_and_usable(bench: Bench) -> None:
    payload_bytes = bench.builder.build(bench.task(columns_of(GOOD)))
    bad = columns_of([*GOOD[:2], (0, 9, 0, 5, 1, 0, 6)])
    with pytest.raises(ValueError, match="segment 2: sample 9"):
        bench.builder.build(bench.task(bad, sequence=2))
    for sequence in (1, 2):
        with pytest.raises(SegmentCorruptError):
            bench.ring.reader.open(1, sequence, GENERATION, payload_bytes)
    assert bench.builder.build(bench.task(columns_of(GOOD), sequence=2)) == payload_bytes


def test_another_count_of_trained_labels_than_planned_is_an_error(bench: Bench) -> None:
    with pytest.raises(InternalError, match=r"holds 7 trained labels .* announced 8"):
        bench.builder.build(bench.task(columns_of(GOOD), valid=8))
    with pytest.raises(SegmentCorruptError):
        bench.ring.reader.open(1, 1, GENERATION, 100)


def test_a_spec_larger_than_the_slots_is_refused(bench: Bench) -> None:
    spec = BatchSpec.for_rule(rows=64, row_tokens=4096, row_segments_max=3)
    pool = map_read_only(bench.ring.segment.fd_read_only, 4096)
    with pytest.raises(BudgetError, match="a slot of ring 1 has"):
        MicrobatchBuilder(pool, bench.ring.writer, spec)
    assert pool.close()


def test_wide_tokens_and_aligned_labels_follow_the_spec() -> None:
    spec = BatchSpec.for_rule(
        rows=1,
        row_tokens=6,
        row_segments_max=6,
        token_dtype="int64",
        label_dtype="int32",
        labels="aligned",
        documents="joined",
    )
    data = make_pool([RECORDS], token_bytes=4).data
    with small_ring(spec.payload_bytes_max) as ring:
        ring.mapping.view[ring.layout.slot_offset(3) :][: len(data)] = data  # slot 3 plays the pool
        pool = ring.mapping
        builder = MicrobatchBuilder(pool, ring.writer, spec)
        at = ring.layout.slot_offset(3)
        segments = columns_of([(at, 0, 0, 3, 0, 0, 0), (at, 1, 0, 2, 0, 3, 1)])
        task = MicrobatchTask(0, 1, 0, 0, 0, segments, valid_tokens=4)
        lease = ring.reader.open(0, 1, GENERATION, builder.build(task))
        batch = Batch.from_lease(lease, spec, as_="numpy")
        assert batch.tokens.dtype == np.int64
        assert batch.labels.dtype == np.int32
        assert batch.labels.tolist() == [[-100, 12, 13, 21, 22, -100]]
        builder.close()


@pytest.mark.parametrize("boundaries", ["exact", "constant"])
def test_segments_say_their_group_and_padding_has_none(boundaries: str) -> None:
    spec = BatchSpec.for_rule(
        rows=2, row_tokens=6, row_segments_max=3, has_groups=True, boundaries=boundaries
    )
    data = make_pool([RECORDS]).data
    with small_ring(spec.payload_bytes_max) as ring:
        ring.mapping.view[ring.layout.slot_offset(3) :][: len(data)] = data  # slot 3 plays the pool
        builder = MicrobatchBuilder(ring.mapping, ring.writer, spec)
        at = ring.layout.slot_offset(3)
        placed = [(at, 0, 0, 2, 0, 0, 0), (at, 1, 0, 2, 0, 2, 0), (at, 2, 0, 3, 1, 0, 1)]
        segments = columns_of(placed)
        groups = np.array([0, 0, 1], np.int32)
        task = MicrobatchTask(0, 1, 0, 0, 0, segments, groups=groups)
        lease = ring.reader.open(0, 1, GENERATION, builder.build(task))
        batch = Batch.from_lease(lease, spec, as_="numpy")
        count = spec.segments_max if boundaries == "constant" else 5
        assert batch.segment_group.tolist() == [0, 0, -1, 1, -1, *[-1] * (count - 5)]
        assert batch.segment_source.tolist() == [0, 0, -1, 1, -1, *[-1] * (count - 5)]
        with pytest.raises(ValueError, match="which segments belong together"):
            builder.build(MicrobatchTask(0, 2, 0, 0, 0, segments))
        builder.close()


RAMP = [(0, 0, 0, 3, 0, 0, 4), (0, 1, 0, 2, 1, 0, 5)]


@pytest.mark.parametrize("cp_count", [1, 2])
def test_row_lengths_take_turns_in_one_slot(cp_count: int) -> None:
    spec = BatchSpec.for_rule(rows=2, row_tokens=16, row_segments_max=3, cp_count=cp_count)
    data = make_pool([RECORDS]).data
    with small_ring(spec.payload_bytes_max) as ring:
        ring.mapping.view[ring.layout.slot_offset(3) :][: len(data)] = data
        builder = MicrobatchBuilder(ring.mapping, ring.writer, spec)
        at = ring.layout.slot_offset(3)
        segments = columns_of([(at, *place[1:]) for place in RAMP])
        for sequence, row_tokens in enumerate([4, 16, 4, 8, 0, 4], start=1):
            task = MicrobatchTask(0, sequence, 0, 0, 0, segments, 3, row_tokens)
            payload_bytes = builder.build(task)
            row = [11, 12, 13] + [0] * ((row_tokens or 16) - 3)
            parts = []
            for rank in range(cp_count):
                lease = ring.reader.open(0, sequence, GENERATION, payload_bytes)
                batch = Batch.from_lease(lease, spec, as_="numpy", copy=True, cp_rank=rank)
                parts.append((batch.cp_places, batch.tokens))
            whole = np.zeros(2 * len(row), np.int32)
            for places, tokens in parts:
                whole[places] = tokens
            assert whole[: len(row)].tolist() == row
            assert whole[len(row) :].tolist() == [21, 22] + [0] * (len(row) - 2)
        task = MicrobatchTask(0, 99, 0, 0, 0, segments, 3, 32)
        with pytest.raises(BudgetError, match="rows of 32 tokens in ring 1"):
            builder.build(task)
        odd = MicrobatchTask(0, 99, 0, 0, 0, segments, 3, 3)
        if cp_count == 2:
            with pytest.raises(MeshMismatchError, match="row_tokens 3 is no multiple"):
                builder.build(odd)
        builder.close()


def test_constructors_of_jobs_without_user_fields_never_import_their_gather() -> None:
    code = """
    import sys
    from tests.support.microbatches import Document, build_batches
    from msd_client.contract.batch_spec import BatchSpec
    spec = BatchSpec.for_rule(rows=1, row_tokens=4, row_segments_max=2)
    print(build_batches(spec, [[Document([1, 2, 3])]], as_="numpy")[0].tokens.tolist())
    print("msd_daemon.gather.user_fields" in sys.modules, "torch" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": ":".join([os.getcwd(), *(p for p in sys.path if p)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "[[1, 2, 3, 0]]\nFalse False\n", done.stderr
