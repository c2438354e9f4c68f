"""C kernel == numpy twin == plain Python, and no bytes of a pool make either crash."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msd_daemon.gather import KERNEL, SegmentColumns, gather_rows
from tests.support.microbatches import ChunkPool, columns_of, make_pool, plain_microbatch

NAMES = ("tokens", "labels", "position_ids", "cu_seqlens", "segment_source")

needs_kernel = pytest.mark.skipif(KERNEL != "c", reason="the C kernel was not built")


@dataclass
class Case:
    pool: ChunkPool
    columns: SegmentColumns
    shape: tuple[int, int]
    segments: list[tuple[list[int], int, int, int]]
    dtypes: tuple[str, str]
    labels: str
    is_joined: bool
    pad_id: int = 3
    raw: list[list[int]] = field(default_factory=list)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    token_bytes = draw(st.sampled_from([2, 4]))
    id_max = 65535 if token_bytes == 2 else 2**31 - 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chunks = [
        [rng.integers(0, id_max, n, endpoint=True).tolist() for n in lengths]
        for lengths in draw(
            st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=9), min_size=1, max_size=4)
        )
    ]
    pool = make_pool(chunks, token_bytes, has_index=draw(st.booleans()))
    usable = [(c, s) for c, rs in enumerate(chunks) for s, r in enumerate(rs) if r]
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 200)))
    raw, segments = [], []
    for row in range(shape[0]):
        column = 0
        while usable and column < shape[1] and draw(st.integers(0, 5)):
            column += draw(st.sampled_from([0, 0, 0, 1, 7]))  # gaps
            chunk, sample = draw(st.sampled_from(usable))
            tokens = chunks[chunk][sample]
            room = min(len(tokens), shape[1] - column)
            if room < 1:
                break
            length = draw(st.integers(1, room))
            start = draw(st.integers(0, len(tokens) - length))
            raw.append([pool.offsets[chunk], sample, start, length, row, column, chunk])
            segments.append((tokens[start : start + length], row, column, chunk))
            column += length
    return Case(
        pool,
        columns_of(raw),
        shape,
        segments,
        draw(st.sampled_from([("int32", "int64"), ("int32", "int32"), ("int64", "int64")])),
        draw(st.sampled_from(["shifted", "aligned"])),
        draw(st.booleans()),
        raw=raw,
    )


def gather(case: Case, kernel: str) -> tuple[Any, dict[str, np.ndarray]]:
    room = case.shape[0] * case.shape[1]
    dtypes = (*case.dtypes, "int32", "int32", "int32")
    shapes = (case.shape, case.shape, case.shape, room + 1, room)
    out = {n: np.full(s, 0x5A, d) for n, s, d in zip(NAMES, shapes, dtypes, strict=True)}
    result = gather_rows(
        case.pool.data,
        case.columns,
        case.shape,
        out["tokens"],
        out["labels"],
        out["position_ids"],
        pad_id=case.pad_id,
        ignore_label=-100,
        labels=case.labels,
        is_joined=case.is_joined,
        cu_seqlens_out=out["cu_seqlens"],
        segment_source_out=out["segment_source"],
        kernel=kernel,
    )
    return result, out


def check_against_plain(case: Case, kernel: str) -> None:
    result, out = gather(case, kernel)
    right = plain_microbatch(
        case.segments,
        case.shape,
        pad_id=case.pad_id,
        ignore_label=-100,
        labels=case.labels,
        is_joined=case.is_joined,
    )
    ends = {"cu_seqlens": result.segments + 1, "segment_source": result.segments}
    for name in NAMES:
        assert out[name].reshape(-1)[: ends.get(name)].tolist() == right[name], name
    assert result.max_seqlen == max(np.diff(right["cu_seqlens"]))
    assert result.valid_tokens == sum(label != -100 for label in right["labels"])


@settings(max_examples=150, deadline=None)
@given(cases())
def test_numpy_twin_equals_plain_python(case: Case) -> None:
    check_against_plain(case, "numpy")


@needs_kernel
@settings(max_examples=300, deadline=None)
@given(cases())
def test_c_kernel_equals_plain_python(case: Case) -> None:
    check_against_plain(case, "c")


def outcome(case: Case, kernel: str) -> Any:
    try:
        result, out = gather(case, kernel)
    except ValueError:
        return "refused"
    return result, [value.tobytes() for value in out.values()]


@needs_kernel
@settings(max_examples=400, deadline=None)
@given(cases(), st.data())
def test_damaged_pools_are_refused_alike_or_read_alike(case: Case, data: st.DataObject) -> None:
    size = len(case.pool.data)
    for _ in range(data.draw(st.integers(1, 4))):
        # Mostly headers and offsets: damage in tokens is just another token.
        base = data.draw(st.sampled_from(case.pool.offsets))
        place = min(base + data.draw(st.integers(0, 140)), size - 1)
        case.pool.data[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del case.pool.data[data.draw(st.integers(0, size)) :]  # a shorter pool
    assert outcome(case, "c") == outcome(case, "numpy")


@needs_kernel
@settings(max_examples=300, deadline=None)
@given(cases(), st.data())
def test_damaged_segments_are_refused_alike_or_read_alike(case: Case, data: st.DataObject) -> None:
    if not case.raw:
        return
    raw = [list(row) for row in case.raw]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.integers(0, len(raw) - 1))
        column = data.draw(st.integers(0, 6))
        limit = 2**63 if column == 0 else 2**31
        raw[row][column] = data.draw(
            st.one_of(st.integers(-3, 300), st.integers(-limit, limit - 1))
        )
    case.columns = columns_of(raw)
    assert outcome(case, "c") == outcome(case, "numpy")
