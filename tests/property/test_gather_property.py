"""C kernel == numpy twin == plain Python, and no bytes of a pool make either crash."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msd_client.contract.context_parallel import CP_LAYOUTS, NumpyOps, rank_places
from msd_daemon.gather import (
    KERNEL,
    GatherOutputs,
    GatherRule,
    SegmentColumns,
    deal_ranks,
    gather_rows,
)
from tests.support.microbatches import ChunkPool, columns_of, make_pool, plain_microbatch

NAMES = GatherOutputs._fields

needs_kernel = pytest.mark.skipif(KERNEL != "c", reason="the C kernel was not built")


@dataclass
class Case:
    pool: ChunkPool
    columns: SegmentColumns
    shape: tuple[int, int]
    segments: list[tuple[list[int], int, int, int]]
    dtypes: tuple[str, str]
    rule: dict[str, Any]
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
    multiple = draw(st.sampled_from([1, 1, 2, 4, 7]))
    shape = (draw(st.integers(1, 4)), multiple * draw(st.integers(1, 200 // multiple)))
    raw, segments = [], []
    for row in range(shape[0]):
        column = 0
        while usable and column < shape[1] and draw(st.integers(0, 5)):
            column += multiple * draw(st.sampled_from([0, 0, 0, 1, 7]))  # gaps
            chunk, sample = draw(st.sampled_from(usable))
            tokens = chunks[chunk][sample]
            room = min(len(tokens), shape[1] - column)
            if room < 1:
                break
            length = draw(st.integers(1, room))
            start = draw(st.integers(0, len(tokens) - length))
            raw.append([pool.offsets[chunk], sample, start, length, row, column, chunk])
            segments.append((tokens[start : start + length], row, column, chunk))
            column += -(-length // multiple) * multiple
    return Case(
        pool,
        columns_of(raw),
        shape,
        segments,
        draw(st.sampled_from([("int32", "int64"), ("int32", "int32"), ("int64", "int64")])),
        {
            "pad_id": 3,
            "ignore_label": -100,
            "labels": draw(st.sampled_from(["shifted", "aligned"])),
            "is_joined": draw(st.booleans()),
            "segment_multiple": multiple,
            "source_weights": draw(st.sampled_from([(), (1.0, 0.0, 0.25, 3.0)])),
        },
        raw=raw,
    )


def gather(case: Case, kernel: str) -> tuple[Any, dict[str, np.ndarray]]:
    room = case.shape[0] * case.shape[1]
    dtypes = (*case.dtypes, "int32", "float32", "int32", "int32", "int32")
    shapes = (*[case.shape] * 4, room + 1, room + 1, room)
    out = {n: np.full(s, 0x5A, d) for n, s, d in zip(NAMES, shapes, dtypes, strict=True)}
    weights = case.rule["source_weights"]
    if not weights:
        del out["loss_weights"]
    table = np.array(weights, np.float32) if weights else None
    rule = GatherRule(**(case.rule | {"source_weights": table}))
    outputs = GatherOutputs(**out)
    return gather_rows(case.pool.data, case.columns, case.shape, outputs, rule, kernel=kernel), out


def check_against_plain(case: Case, kernel: str) -> None:
    result, out = gather(case, kernel)
    right = plain_microbatch(case.segments, case.shape, **case.rule)
    ends = {
        "cu_seqlens": result.segments + 1,
        "cu_seqlens_padded": result.segments + 1,
        "segment_source": result.segments,
    }
    assert out.keys() == right.keys()
    for name, values in right.items():
        assert out[name].reshape(-1)[: ends.get(name)].tolist() == values, name
    assert result.max_seqlen == max(np.diff(right["cu_seqlens_padded"]))
    if "loss_weights" in right:
        assert result.valid_tokens == sum(weight > 0 for weight in right["loss_weights"])
    else:
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


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_are_dealt_to_ranks_as_the_places_say(data: st.DataObject) -> None:
    cp_count = data.draw(st.sampled_from([1, 2, 4, 8]))
    layout = data.draw(st.sampled_from(CP_LAYOUTS))
    row_cuts = data.draw(
        st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=1, max_size=4)
    )
    longest = max(map(sum, row_cuts))
    extents = [2 * cp_count * n for cuts in row_cuts for n in (*cuts, longest - sum(cuts)) if n]
    bounds = np.cumsum([0, *extents], dtype=np.int32)
    bounds = np.append(bounds, [bounds[-1]] * data.draw(st.integers(0, 2))).astype(np.int32)
    shape = (len(row_cuts), 2 * cp_count * longest)
    dtype = data.draw(st.sampled_from(["int32", "int64", "float32", "float64"]))
    source = np.arange(bounds[-1]).astype(dtype).reshape(shape)
    kernels = ["numpy", "c"] if KERNEL == "c" else ["numpy"]
    for kernel in kernels:
        target = np.full((cp_count, shape[0], shape[1] // cp_count), -1, dtype)
        deal_ranks(source, target, layout, bounds, kernel=kernel)
        for rank in range(cp_count):
            places = rank_places(layout, cp_count, rank, shape, bounds, NumpyOps())
            assert places.dtype == np.int32
            assert target[rank].tolist() == places.tolist()


@pytest.mark.parametrize("kernel", ["numpy", pytest.param("c", marks=needs_kernel)])
@pytest.mark.parametrize(
    "bounds",
    [[0, 8], [0, 6, 16], [8, 16], [0, 24, 16], [0, 16, 20], [0], [], [0, -8, 16], [0, 8, 6, 16]],
)
def test_boundaries_that_cut_no_rows_are_refused(kernel: str, bounds: list[int]) -> None:
    source, target = np.zeros((2, 8), np.int32), np.zeros((2, 2, 4), np.int32)
    with pytest.raises(ValueError, match="multiples of 4 places"):
        deal_ranks(source, target, "zigzag_document", np.array(bounds, np.int32), kernel=kernel)
