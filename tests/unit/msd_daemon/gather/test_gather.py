"""Known answers and refusals of the gather; both kernels take every test."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from msd_daemon.gather import KERNEL, GatherOutputs, GatherRule, SegmentColumns, gather_rows
from tests.support.microbatches import ChunkPool, columns_of, make_pool

KERNELS = ["numpy", pytest.param("c", marks=pytest.mark.skipif(KERNEL != "c", reason="no kernel"))]


RULE = GatherRule(pad_id=0, ignore_label=-100)


def run(
    pool: ChunkPool,
    segments: SegmentColumns,
    shape: tuple[int, int],
    *,
    kernel: str,
    segments_max: int = 64,
    dtypes: tuple[str, str] = ("int32", "int64"),
    weights: list[float] | None = None,
    **rule: Any,
) -> dict[str, Any]:
    table = None if weights is None else np.array(weights, np.float32)
    rule_ = dataclasses.replace(RULE, source_weights=table, **rule)
    out = GatherOutputs(
        tokens=np.full(shape, 7777, dtypes[0]),
        labels=np.full(shape, 7777, dtypes[1]),
        position_ids=np.full(shape, 7777, np.int32),
        loss_weights=None if table is None else np.full(shape, 7777, np.float32),
        cu_seqlens=np.full(segments_max + 1, 7777, np.int32),
        cu_seqlens_padded=np.full(segments_max + 1, 7777, np.int32),
        segment_source=np.full(segments_max, 7777, np.int32),
    )
    result = gather_rows(pool.data, segments, shape, out, rule_, kernel=kernel)
    found = out._asdict()
    if not rule_.is_constant:
        ends = {"segment_source": result.segments}
        for name in ("cu_seqlens", "cu_seqlens_padded", "segment_source"):
            found[name] = found[name][: ends.get(name, result.segments + 1)]
    if rule_.segment_multiple == 1:
        assert found["cu_seqlens"].tolist() == found["cu_seqlens_padded"].tolist()
    lists = {name: value.tolist() for name, value in found.items() if value is not None}
    return lists | result._asdict()


def row_of(pool: ChunkPool, lengths: list[int], row: int, first: int = 0) -> list[tuple[int, ...]]:
    places = np.cumsum([0, *lengths[:-1]])
    return [
        (pool.offsets[0], first + k, 0, length, row, int(place), 5)
        for k, (length, place) in enumerate(zip(lengths, places, strict=True))
    ]


@pytest.mark.parametrize("kernel", KERNELS)
def test_boundaries_of_two_rows_are_those_of_h07(kernel: str) -> None:
    lengths = [3, 5, 2, 4, 2]
    pool = make_pool([[list(range(10, 10 + n)) for n in lengths]])
    segments = columns_of(row_of(pool, lengths[:2], 0) + row_of(pool, lengths[2:], 1, first=2))
    out = run(pool, segments, (2, 8), kernel=kernel)
    assert out["cu_seqlens"] == [0, 3, 8, 10, 14, 16]
    assert out["max_seqlen"] == 5
    assert out["position_ids"] == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 0, 1]]
    assert out["segment_source"] == [5] * 5


@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_is_a_segment_of_its_own(kernel: str) -> None:
    pool = make_pool([[[1, 2, 3], [4, 5]]])
    segments = columns_of(row_of(pool, [3], 0) + row_of(pool, [2], 2, first=1))
    out = run(pool, segments, (3, 4), kernel=kernel)
    assert out["cu_seqlens"] == [0, 3, 4, 8, 10, 12]
    assert out["segment_source"] == [5, -1, -1, 5, -1]
    assert out["tokens"] == [[1, 2, 3, 0], [0, 0, 0, 0], [4, 5, 0, 0]]
    assert out["position_ids"] == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 1]]
    assert out["max_seqlen"] == 4
    assert out["valid_tokens"] == 3


H08 = [
    ("shifted", [[11, 12, 13], [21, 22]], [12, 13, -100, 22, -100, -100], 3),
    ("aligned", [[11, 12, 13], [21, 22]], [-100, 12, 13, -100, 22, -100], 3),
    ("shifted", [[11, 12, 13, 9], [21, 22, 9]], [12, 13, 9, -100, 22, 9, -100, -100], 5),
    ("aligned", [[11, 12, 13, 9], [21, 22, 9]], [-100, 12, 13, 9, -100, 22, 9, -100], 5),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("labels", "documents", "right", "valid"), H08)
def test_labels_at_document_joins_are_those_of_h08(
    kernel: str, labels: str, documents: list[list[int]], right: list[int], valid: int
) -> None:
    pool = make_pool([documents])
    segments = columns_of(row_of(pool, [len(d) for d in documents], 0))
    out = run(pool, segments, (1, len(right)), kernel=kernel, labels=labels)
    assert out["labels"] == [right]
    assert out["valid_tokens"] == valid == sum(label != -100 for label in right)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("labels", "right"),
    [
        ("shifted", [[12, 13, 21, 22, -100, -100], [14, -100, -100, -100, -100, -100]]),
        ("aligned", [[-100, 12, 13, 21, 22, -100], [-100, 14, -100, -100, -100, -100]]),
    ],
)
def test_joined_labels_run_through_a_row_and_stop_at_its_end(
    kernel: str, labels: str, right: list[list[int]]
) -> None:
    pool = make_pool([[[11, 12, 13], [21, 22], [13, 14]]])
    segments = columns_of(row_of(pool, [3, 2], 0) + row_of(pool, [2], 1, first=2))
    out = run(pool, segments, (2, 6), kernel=kernel, labels=labels, is_joined=True)
    assert out["labels"] == right
    assert out["valid_tokens"] == 5


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_document_split_over_rows_keeps_its_join_label_inside_the_row(kernel: str) -> None:
    pool = make_pool([[[1, 2, 3, 4, 5, 6]]])
    at = pool.offsets[0]
    segments = columns_of([(at, 0, 0, 4, 0, 0, 0), (at, 0, 4, 2, 1, 0, 0)])
    out = run(pool, segments, (2, 4), kernel=kernel)
    assert out["labels"] == [[2, 3, 4, -100], [6, -100, -100, -100]]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_joined", [False, True])
def test_a_gap_between_segments_becomes_padding(kernel: str, is_joined: bool) -> None:
    pool = make_pool([[[1, 2, 3], [4, 5]]])
    at = pool.offsets[0]
    segments = columns_of([(at, 0, 0, 3, 0, 0, 0), (at, 1, 0, 2, 0, 4, 1)])
    out = run(pool, segments, (1, 8), kernel=kernel, is_joined=is_joined)
    assert out["tokens"] == [[1, 2, 3, 0, 4, 5, 0, 0]]
    assert out["labels"] == [[2, 3, -100, -100, 5, -100, -100, -100]]
    assert out["cu_seqlens"] == [0, 3, 4, 6, 8]
    assert out["segment_source"] == [0, -1, 1, -1]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("token_bytes", [2, 4])
@pytest.mark.parametrize("dtypes", [("int32", "int32"), ("int64", "int64"), ("int64", "int32")])
def test_widths_keep_the_largest_ids(
    kernel: str, token_bytes: int, dtypes: tuple[str, str]
) -> None:
    largest = 65535 if token_bytes == 2 else 2**31 - 1
    pool = make_pool([[[largest, 0, largest]]], token_bytes)
    out = run(pool, columns_of(row_of(pool, [3], 0)), (1, 3), kernel=kernel, dtypes=dtypes)
    assert out["tokens"] == [[largest, 0, largest]]
    assert out["labels"] == [[0, largest, -100]]


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_segments_at_all_give_padding(kernel: str) -> None:
    out = run(make_pool([[[1]]]), columns_of([]), (2, 3), kernel=kernel)
    assert out["tokens"] == [[0, 0, 0], [0, 0, 0]]
    assert out["labels"] == [[-100] * 3] * 2
    assert out["valid_tokens"] == 0
    assert out["cu_seqlens"] == [0, 3, 6]


@pytest.mark.parametrize("kernel", KERNELS)
def test_left_out_outputs_change_nothing_else(kernel: str) -> None:
    pool = make_pool([[[1, 2, 3]]])
    positions = np.zeros((1, 4), np.int32)
    segments = columns_of(row_of(pool, [3], 0))
    outputs = GatherOutputs(position_ids=positions)
    result = gather_rows(pool.data, segments, (1, 4), outputs, RULE, kernel=kernel)
    assert positions.tolist() == [[0, 1, 2, 0]]
    assert result == (2, 3, 2)


def _bad(pool: ChunkPool) -> dict[str, list[tuple[int, ...]]]:
    at = pool.offsets[0]
    good = (at, 0, 0, 3, 0, 0, 0)
    return {
        "negative chunk": [(-64, *good[1:])],
        "chunk behind the pool": [(len(pool.data), *good[1:])],
        "chunk at the pool's last bytes": [(len(pool.data) - 32, *good[1:])],
        "huge chunk offset": [(2**62, *good[1:])],
        "misaligned chunk": [(at + 8, *good[1:])],
        "no chunk there": [(at + 64, *good[1:])],
        "sample too large": [(at, 2, *good[2:])],
        "negative sample": [(at, -1, *good[2:])],
        "span too long": [(at, 0, 1, 3, 0, 0, 0)],
        "negative span": [(at, 0, -1, 2, 0, 0, 0)],
        "huge span": [(at, 0, 2**31 - 1, 2**31 - 1, 0, 0, 0)],
        "empty span": [(at, 0, 0, 0, 0, 0, 0)],
        "negative length": [(at, 0, 2, -1, 0, 0, 0)],
        "row too large": [(at, 0, 0, 3, 2, 0, 0)],
        "negative row": [(at, 0, 0, 3, -1, 0, 0)],
        "negative column": [(at, 0, 0, 3, 0, -1, 0)],
        "over the row's end": [(at, 0, 0, 3, 0, 6, 0)],
        "overlap": [good, (at, 1, 0, 2, 0, 2, 0)],
        "not sorted": [(at, 0, 0, 3, 1, 0, 0), (at, 1, 0, 2, 0, 0, 0)],
    }


BAD_NAMES = list(_bad(make_pool([[[1, 2, 3], [4, 5]]])))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", BAD_NAMES)
def test_segments_out_of_bounds_are_refused(kernel: str, name: str) -> None:
    pool = make_pool([[[1, 2, 3], [4, 5]]])
    with pytest.raises(ValueError, match=r"^segment \d+: "):
        run(pool, columns_of(_bad(pool)[name]), (2, 8), kernel=kernel)


HEADER_FAULTS = {
    "magic": (0, "<u4", 0),
    "version": (4, "<u2", 2),
    "token bytes": (6, "<u2", 8),
    "negative records": (12, "<i4", -1),
    "records beyond the pool": (12, "<i4", 2**31 - 1),
    "index column that is not there": (28, "<u4", 4),
    "payload before the columns": (32, "<u4", 0),
    "payload misaligned": (32, "<u4", 130),
    "payload behind the pool": (32, "<u4", 2**32 - 64),
    "payload too long": (40, "<i8", 2**62),
    "payload negative": (40, "<i8", -2),
    "offset negative": (64, "<i8", -1),
    "offset beyond the payload": (72, "<i8", 2**60),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", HEADER_FAULTS)
def test_a_broken_chunk_header_is_refused(kernel: str, name: str) -> None:
    # 13 records end their columns at byte 192, where the payload follows: no room for an index.
    pool = make_pool([[[1, 2]] * 13])
    place, dtype, value = HEADER_FAULTS[name]
    pool.data[place : place + np.dtype(dtype).itemsize] = np.array(value, dtype).tobytes()
    with pytest.raises(ValueError, match=r"^segment 0: "):
        run(pool, columns_of([(0, 0, 0, 2, 0, 0, 0)]), (1, 4), kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_padded"])
def test_boundaries_beyond_their_room_are_refused_and_stay_inside(kernel: str, name: str) -> None:
    pool = make_pool([[[1, 2], [3, 4]]])
    segments = columns_of(row_of(pool, [2, 2], 0))
    bounds, sources = np.full(8, 7777, np.int32), np.full(8, 7777, np.int32)
    outputs = GatherOutputs(
        *(np.zeros((1, 5), dtype) for dtype in (np.int32, np.int64, np.int32)),
        **{name: bounds[:3], "segment_source": sources[:2]},
    )
    with pytest.raises(ValueError, match="room for 2 segments"):
        gather_rows(pool.data, segments, (1, 5), outputs, RULE, kernel=kernel)
    assert bounds[3:].tolist() == [7777] * 5
    assert sources[2:].tolist() == [7777] * 6


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("tokens", np.zeros((1, 5), np.int32)),
        ("tokens", np.zeros((1, 4), np.float32)),
        ("tokens", np.zeros((4, 2), np.int32)[:, 0].reshape(1, 4)[:, ::-1]),
        ("labels", np.zeros((1, 3), np.int64)),
        ("position_ids", np.zeros((1, 4), np.int64)),
        ("loss_weights", np.zeros((1, 4), np.float64)),
        ("loss_weights", np.zeros((1, 5), np.float32)),
        ("cu_seqlens", np.zeros(9, np.int64)),
        ("cu_seqlens_padded", np.zeros(0, np.int32)),
    ],
)
def test_outputs_of_a_wrong_form_are_refused(kernel: str, name: str, array: np.ndarray) -> None:
    pool = make_pool([[[1, 2, 3]]])
    rule = dataclasses.replace(RULE, source_weights=np.ones(9, np.float32))
    outputs = GatherOutputs(**{name: array})
    segments = columns_of(row_of(pool, [3], 0))
    with pytest.raises(ValueError, match=r"output|room for -1"):
        gather_rows(pool.data, segments, (1, 4), outputs, rule, kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_loss_weights_without_weights_of_sources_are_refused(kernel: str) -> None:
    outputs = GatherOutputs(loss_weights=np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match="needs source_weights"):
        gather_rows(b"", columns_of([]), (1, 4), outputs, RULE, kernel=kernel)
    doubles = dataclasses.replace(RULE, source_weights=np.ones(2))
    with pytest.raises(ValueError, match="source_weights are float64"):
        gather_rows(b"", columns_of([]), (1, 4), outputs, doubles, kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(0, 4), (1, 0), (-1, 4), (2**16, 2**16)])
def test_impossible_shapes_are_refused(kernel: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"shape \("):
        gather_rows(b"", columns_of([]), shape, GatherOutputs(), RULE, kernel=kernel)


# ---- segments in multiples of places ----


@pytest.mark.parametrize("kernel", KERNELS)
def test_true_and_padded_boundaries_are_those_of_h09(kernel: str) -> None:
    pool = make_pool([[[11, 12, 13, 14, 15], [21, 22, 23]]])
    at = pool.offsets[0]
    segments = columns_of([(at, 0, 0, 5, 0, 0, 4), (at, 1, 0, 3, 0, 8, 5)])
    out = run(pool, segments, (1, 12), kernel=kernel, segment_multiple=4)
    assert out["cu_seqlens"] == [0, 5, 8]
    assert out["cu_seqlens_padded"] == [0, 8, 12]
    assert out["tokens"] == [[11, 12, 13, 14, 15, 0, 0, 0, 21, 22, 23, 0]]
    assert out["labels"] == [[12, 13, 14, 15, *[-100] * 4, 22, 23, -100, -100]]
    assert out["position_ids"] == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    assert out["segment_source"] == [4, 5]
    assert (out["segments"], out["max_seqlen"], out["valid_tokens"]) == (2, 8, 6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_left_of_a_row_is_a_segment_of_its_own(kernel: str) -> None:
    pool = make_pool([[[1, 2, 3, 4, 5], [6]]])
    at = pool.offsets[0]
    segments = columns_of([(at, 0, 0, 5, 0, 0, 0), (at, 1, 0, 1, 1, 0, 0)])
    out = run(pool, segments, (2, 12), kernel=kernel, segment_multiple=4)
    assert out["cu_seqlens"] == [0, 5, 9, 10, 18]
    assert out["cu_seqlens_padded"] == [0, 8, 12, 16, 24]
    assert out["segment_source"] == [0, -1, 0, -1]
    assert out["position_ids"][0] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("labels", ["shifted", "aligned"])
def test_joined_labels_run_on_only_where_tokens_touch(kernel: str, labels: str) -> None:
    pool = make_pool([[[1, 2, 3, 4], [5, 6], [7]]])
    at = pool.offsets[0]
    segments = columns_of([(at, 0, 0, 4, 0, 0, 0), (at, 1, 0, 2, 0, 4, 0), (at, 2, 0, 1, 0, 6, 0)])
    out = run(
        pool, segments, (1, 8), kernel=kernel, labels=labels, is_joined=True, segment_multiple=2
    )
    full = [2, 3, 4, 5, 6, 7, -100, -100]
    assert out["labels"] == [full if labels == "shifted" else [-100, *full[:6], -100]]
    out = run(
        pool,
        columns_of([(at, 0, 1, 3, 0, 0, 0), (at, 1, 0, 2, 0, 4, 0)]),
        (1, 8),
        kernel=kernel,
        labels=labels,
        is_joined=True,
        segment_multiple=4,
    )
    shifted = [[3, 4, -100, -100, 6, -100, -100, -100]]
    aligned = [[-100, 3, 4, -100, -100, 6, -100, -100]]
    assert out["labels"] == (shifted if labels == "shifted" else aligned)
    assert out["valid_tokens"] == 3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("column", "length", "multiple", "message"),
    [
        (2, 3, 4, "column 2 is no multiple of segment_multiple 4"),
        (8, 5, 4, r"place \(row 0, column 8\) is outside"),
        (0, 3, 5, "segment_multiple 5 does not divide row_tokens 12"),
        (0, 3, 0, "segment_multiple 0 does not divide"),
    ],
)
def test_segments_off_their_multiple_are_refused(
    kernel: str, column: int, length: int, multiple: int, message: str
) -> None:
    pool = make_pool([[[1, 2, 3, 4, 5]]])
    segments = columns_of([(pool.offsets[0], 0, 0, length, 0, column, 0)])
    with pytest.raises(ValueError, match=message):
        run(pool, segments, (1, 12), kernel=kernel, segment_multiple=multiple)


@pytest.mark.parametrize("kernel", KERNELS)
def test_extents_may_not_overlap_either(kernel: str) -> None:
    pool = make_pool([[[1, 2, 3, 4, 5], [6]]])
    at = pool.offsets[0]
    segments = columns_of([(at, 0, 0, 5, 0, 0, 0), (at, 1, 0, 1, 0, 4, 0)])
    with pytest.raises(ValueError, match=r"place 4 overlaps .* ends at 8"):
        run(pool, segments, (1, 12), kernel=kernel, segment_multiple=4)


# ---- loss weights ----


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("labels", "is_joined", "weights", "valid"),
    [
        ("shifted", False, [0.5, 0.5, 0, 2, 0, 0, 0, 0], 3),
        ("aligned", False, [0, 0.5, 0.5, 0, 2, 0, 0, 0], 3),
        # The label of a join weighs what the source of its place does.
        ("shifted", True, [0.5, 0.5, 0.5, 2, 2, 0, 0, 0], 5),
        ("aligned", True, [0, 0.5, 0.5, 2, 2, 0, 0, 0], 4),
    ],
)
def test_loss_weights_are_those_of_the_labels_sources(
    kernel: str, labels: str, is_joined: bool, weights: list[float], valid: int
) -> None:
    pool = make_pool([[[1, 2, 3], [4, 5], [6, 7]]])
    at = pool.offsets[0]
    segments = columns_of([(at, 0, 0, 3, 0, 0, 0), (at, 1, 0, 2, 0, 3, 1), (at, 2, 0, 2, 0, 5, 2)])
    out = run(
        pool,
        segments,
        (1, 8),
        kernel=kernel,
        labels=labels,
        is_joined=is_joined,
        weights=[0.5, 2, 0],
    )
    assert out["loss_weights"] == [weights]
    assert out["valid_tokens"] == valid == sum(weight > 0 for weight in weights)
    blind = dataclasses.replace(
        RULE,
        labels=labels,
        is_joined=is_joined,
        source_weights=np.array([0.5, 2, 0], np.float32),
    )
    result = gather_rows(pool.data, segments, (1, 8), GatherOutputs(), blind, kernel=kernel)
    assert result.valid_tokens == valid, "counted whatever outputs there are"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("source", [-1, 2])
def test_a_source_without_a_weight_is_refused(kernel: str, source: int) -> None:
    pool = make_pool([[[1, 2, 3]]])
    segments = columns_of([(pool.offsets[0], 0, 0, 3, 0, 0, source)])
    with pytest.raises(ValueError, match=f"source {source} where 2 sources"):
        run(pool, segments, (1, 4), kernel=kernel, weights=[1, 1])


# ---- constant shapes ----


@pytest.mark.parametrize("kernel", KERNELS)
def test_constant_boundaries_repeat_their_last_value(kernel: str) -> None:
    pool = make_pool([[[1, 2, 3], [4, 5]]])
    segments = columns_of(row_of(pool, [3], 0) + row_of(pool, [2], 1, first=1))
    out = run(
        pool,
        segments,
        (2, 4),
        kernel=kernel,
        segments_max=6,
        is_constant=True,
        segment_multiple=2,
    )
    assert out["cu_seqlens"] == [0, 3, 5, 7, 7, 7, 7]
    assert out["cu_seqlens_padded"] == [0, 4, 6, 8, 8, 8, 8]
    assert out["segment_source"] == [5, 5, -1, -1, -1, -1]
    assert (out["segments"], out["max_seqlen"]) == (3, 4)


def test_columns_travel_as_bytes() -> None:
    columns = columns_of([(64, 1, 2, 3, 4, 5, 6), (128, 7, 8, 9, 10, 11, 12)])
    again = SegmentColumns.decode(b"head" * 2 + columns.encode(), 2, offset=8)
    assert again.encode() == columns.encode()
    assert again.source.tolist() == [6, 12]
    assert SegmentColumns.decode(b"", 0).count == 0


@pytest.mark.parametrize("count", [3, -1])
def test_columns_that_are_not_there_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="segments need"):
        SegmentColumns.decode(columns_of([(64, 1, 2, 3, 4, 5, 6)] * 2).encode(), count)


def test_columns_of_a_wrong_dtype_are_refused() -> None:
    columns = columns_of([(64, 1, 2, 3, 4, 5, 6)])
    with pytest.raises(ValueError, match="segment column row"):
        SegmentColumns(
            columns.chunk_offset,
            columns.sample,
            columns.sample_offset,
            columns.length,
            columns.row.astype(np.int64),
            columns.column,
            columns.source,
        )


def test_the_environment_forces_the_twin() -> None:
    code = "import msd_daemon.gather as g; print(g.KERNEL)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"MSD_GATHER": "numpy", "PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "numpy"
