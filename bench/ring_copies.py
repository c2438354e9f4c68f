"""Filling a slot against a plain copy of the same bytes, in one process and one loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from bench.ring_payload import make_pool, make_ring, make_spec
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.ring_layout import PAYLOAD_OFFSET, TocField
from msd_daemon.shm.mapping import Mapping, map_read_write
from msd_daemon.shm.ring_writer import RingWriter
from msd_daemon.shm.segment import make_segment
from msd_daemon.workers.microbatch_builder import MicrobatchBuilder, MicrobatchTask

PAYLOAD_BYTES = 64 << 20
WINDOWS = 5
SCALARS = {"rows": 1024, "max_seqlen": 1300, "valid_tokens": 1 << 22, "plan_step": 0}


def run_copies(*, is_quick: bool, say: Callable[..., None]) -> dict[str, float]:
    """Return `fill_over_memcpy`, `gather_over_memcpy` and the milliseconds behind them.

    Three jobs take turns, each turn in another order: a copy of one buffer into a prefaulted
    segment, `RingWriter.fill` of arrays that are views of the same buffer, and the gather of a
    microbatch of the same payload. Ratios of medians per window, median over the windows.
    """
    spec = make_spec(PAYLOAD_BYTES)
    layout, ring_segment, ring_mapping = make_ring(spec.payload_bytes_max, 1)
    plain_segment = make_segment(layout.ring_bytes, "auto", "bench plain")
    plain_mapping = map_read_write(plain_segment.fd_read_write, plain_segment.nbytes)
    pool = make_pool(spec)
    writer = RingWriter(ring_mapping, layout)
    builder = MicrobatchBuilder(pool.mapping, writer, spec)
    say(
        f"  ring: {ring_segment.kind}, huge pages {ring_mapping.is_huge}; plain: {plain_mapping.is_huge}"
    )
    try:
        task = MicrobatchTask(0, 1, 0, 0, 0, pool.segments)
        built_bytes = builder.build(task)
        source = np.frombuffer(writer.payload(0), np.uint8, built_bytes).copy()
        arrays = {
            f.name: source[f.offset_bytes : f.offset_bytes + f.nbytes]
            .view(f.dtype)
            .reshape(f.shape)
            for f in _built_fields(spec, pool.segments.count)
        }
        filled_bytes = writer.fill(0, 1, arrays, SCALARS)
        target = _payload_of(plain_mapping, layout.first_slot_offset + PAYLOAD_OFFSET, filled_bytes)
        plain_source = source[:filled_bytes]
        jobs: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(target, plain_source),
            "fill": lambda: writer.fill(0, 1, arrays, SCALARS),
            "gather": lambda: builder.build(task),
        }
        return _alternate(jobs, rounds=30 if is_quick else 84, say=say)
    finally:
        builder.close()
        for mapping in (ring_mapping, plain_mapping):
            mapping.close()
        ring_segment.close()
        plain_segment.close()
        pool.close()


def _built_fields(spec: BatchSpec, segments: int) -> list[TocField]:
    counts = {"boundary": segments + 1, "segment": segments}
    fields = []
    for field in spec.fields:
        shape = field.shape_max if field.extent == "token" else (counts[field.extent],)
        nbytes = int(np.prod(shape)) * np.dtype(field.dtype).itemsize
        fields.append(TocField(field.name, field.dtype, shape, field.offset_bytes, nbytes))
    return fields


def _payload_of(mapping: Mapping, start: int, nbytes: int) -> Any:
    return np.frombuffer(mapping.view, np.uint8, nbytes, start)


def _alternate(
    jobs: dict[str, Callable[[], object]], *, rounds: int, say: Callable[..., None]
) -> dict[str, float]:
    names = list(jobs)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    medians_ms: dict[str, list[float]] = {name: [] for name in names}
    for job in jobs.values():
        job()
    for window in range(WINDOWS):
        taken: dict[str, list[int]] = {name: [] for name in names}
        for turn in range(rounds):
            # Each job follows each other one equally often: a copy finds what its forerunner cached.
            shift = turn % len(names)
            order = names[shift:] + names[:shift]
            for name in order if turn % 2 else reversed(order):
                began = time.perf_counter_ns()
                jobs[name]()
                taken[name].append(time.perf_counter_ns() - began)
        for name in names:
            medians_ms[name].append(median(taken[name]) / 1e6)
            ratios[name].append(medians_ms[name][-1] / medians_ms["memcpy"][-1])
        say(
            f"  window {window}: "
            + ", ".join(f"{n} {medians_ms[n][-1]:.2f} ms ({ratios[n][-1]:.3f})" for n in names)
        )
    return {
        "fill_over_memcpy": round(median(ratios["fill"]), 4),
        "gather_over_memcpy": round(median(ratios["gather"]), 4),
        "memcpy_64mib_ms": round(median(medians_ms["memcpy"]), 3),
    }
