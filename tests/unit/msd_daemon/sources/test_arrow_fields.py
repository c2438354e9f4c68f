"""Arrow files and streams: same rows both ways, blocks by content alone, cuts, dictionaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.arrow_blocks import cut_batches
from msd_daemon.sources.arrow_file import OpenArrow
from msd_daemon.sources.arrow_folder import dataset_shards
from msd_daemon.sources.record import ReadMeter
from tests.support.records import (
    count_statuses,
    fields_of,
    open_rows,
    read_blocks,
    read_folder,
    read_rows,
    shard_of,
    small_blocks,
)
from tests.support.sources import DATA, needs_data

TESTING = DATA / "shards" / "arrow_testing"
PAIRS = sorted(path.stem for path in TESTING.glob("*.stream"))


def write(path: Path, batches: list[pa.RecordBatch], kind: str, **options: Any) -> Path:
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with (
        pa.OSFile(str(path), "wb") as sink,
        make(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)
    return path


def numbered(*counts: int) -> list[pa.RecordBatch]:
    ends = np.cumsum([0, *counts])
    return [
        pa.record_batch({"n": pa.array(range(begin, begin + count), pa.int64())})
        for begin, count in zip(ends.tolist(), counts, strict=False)
    ]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return type(left) is type(right) and np.array_equal(left, right, equal_nan=False)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return bool(left == right) or (left != left and right != right)


@needs_data
@pytest.mark.parametrize("name", PAIRS)
def test_streams_and_files_of_the_format_itself(name: str) -> None:
    expected = json.loads((DATA / "shards" / "expected.json").read_text())["arrow_testing"]["files"]
    found = []
    for suffix, kind in ((".arrow_file", "file"), (".stream", "stream")):
        records = read_rows("arrow", TESTING / f"{name}{suffix}")
        tools = expected[f"arrow_testing/{name}{suffix}"]["tools"]["pyarrow"]
        assert len(records) == tools[kind]["rows"]
        assert count_statuses(records) in ({}, {0: len(records)})
        found.append(fields_of(records))
    assert all(same(left, right) for left, right in zip(*found, strict=True))
    with pa.OSFile(str(TESTING / f"{name}.stream")) as file:
        table = pa.ipc.open_stream(file).read_all()
    plain = [column for column in table.schema if not pa.types.is_nested(column.type)]
    for column in plain:
        if pa.types.is_string(column.type) or pa.types.is_integer(column.type):
            assert [row[column.name] for row in found[0]] == table[column.name].to_pylist()


@needs_data
def test_a_saved_dataset_and_a_feather_file() -> None:
    records = read_folder("arrow", DATA / "text" / "sotu_hf", ("id", "year"))
    assert len(records) == 78
    assert fields_of(records)[0] == {"id": "sotu/1946_harry_s_truman_d", "year": 1946}
    texts = [row["text"] for row in fields_of(read_rows("arrow", DATA / "text/moby_dick.feather"))]
    assert texts == feather.read_table(DATA / "text/moby_dick.feather")["text"].to_pylist()
    assert len(texts) == 138


@needs_data
def test_a_cut_file_gives_all_before_the_cut() -> None:
    records = read_rows("arrow", DATA / "broken/derived/moby_cut.feather")
    assert count_statuses(records) == {0: 40, int(RecordStatus.UNREADABLE): 1}
    whole = fields_of(read_rows("arrow", DATA / "text/moby_dick.feather"))
    assert fields_of(records) == whole[:40]
    assert "is damaged at byte 250176" in records[-1].fault
    assert records[-1].place == 40


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_blocks_are_runs_of_rows(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "a.arrow", numbered(3, 0, 4, 25, 2, 9), kind)
    blocks = read_blocks("arrow", path, shuffle=small_blocks(10))
    assert [len(block) for block in blocks] == [7, 10, 10, 5, 2, 9]
    rows = [row["n"] for block in blocks for row in fields_of(block)]
    assert rows == list(range(43))
    assert [record.place for block in blocks for record in block] == list(range(43))


def test_blocks_are_capped_in_bytes_too(tmp_path: Path) -> None:
    batch = pa.record_batch({"b": [b"x" * 1000] * 100})
    path = write(tmp_path / "a.arrow", [batch], "stream")
    sizes = [len(block) for block in read_blocks("arrow", path, shuffle=small_blocks(50, 10_000))]
    assert sum(sizes) == 100
    assert max(sizes) == 9
    large = pa.record_batch({"b": [b"x" * 50_000]})
    path = write(tmp_path / "b.arrow", [large, large], "stream")
    sizes = [len(block) for block in read_blocks("arrow", path, shuffle=small_blocks(50, 10_000))]
    assert sizes == [1, 1]


def test_a_compressed_batch_is_not_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", numbered(30, 30), "file", compression="zstd")
    blocks = read_blocks("arrow", path, shuffle=small_blocks(10))
    assert [len(block) for block in blocks] == [30, 30]
    assert [row["n"] for block in blocks for row in fields_of(block)] == list(range(60))


def test_cuts_of_batches() -> None:
    rows, sizes = np.array([5, 5, 0, 30]), np.array([50, 50, 10, 300])
    rule = small_blocks(10, 1000)
    assert cut_batches(rows, sizes, rule, can_split=True).tolist() == [
        [0, 3, 0, 10],
        [3, 4, 0, 10],
        [3, 4, 10, 10],
        [3, 4, 20, 10],
    ]
    assert cut_batches(rows, sizes, rule, can_split=False).tolist() == [
        [0, 3, 0, 10],
        [3, 4, 0, 30],
    ]
    none = np.zeros(0, np.int64)
    assert cut_batches(none, none, rule, can_split=True).tolist() == [[0, 0, 0, 0]]


def test_dictionaries_that_are_replaced_or_grow(tmp_path: Path) -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    batches = [
        pa.record_batch({"d": pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), values)})
        for values in (["a", "b"], ["c", "d"], ["c", "d", "e"])
    ]
    assert batches[0].schema.field("d").type == kind
    for deltas in (False, True):
        options = {"emit_dictionary_deltas": deltas}
        path = write(tmp_path / f"{deltas}.arrow", batches, "stream", **options)
        blocks = read_blocks("arrow", path, shuffle=small_blocks(2))
        assert [[row["d"] for row in fields_of(block)] for block in blocks] == [
            ["a", "b"],
            ["c", "d"],
            ["c", "d"],
        ]


def test_only_wanted_columns_are_given(tmp_path: Path) -> None:
    batch = pa.record_batch({"a": [1, 2], "b": ["x", "y"], "c": [b"1", b"2"]})
    for compression in (None, "lz4"):
        path = write(tmp_path / "a.arrow", [batch], "stream", compression=compression)
        assert fields_of(read_rows("arrow", path, ("c", "a", "zz"))) == [
            {"a": 1, "c": b"1"},
            {"a": 2, "c": b"2"},
        ]


def test_rows_of_bombs_are_too_large_before_they_are_made(tmp_path: Path) -> None:
    value = "x" * 1_000_000
    view = np.array([len(value), 0x78787878, 0, 0] * 500, "<i4").tobytes()
    buffers = [None, pa.py_buffer(view), pa.py_buffer(value.encode())]
    bombs = {
        "dictionary": pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), [value]),
        "run": pa.RunEndEncodedArray.from_arrays(pa.array([500], pa.int32()), [value]),
        "view": pa.Array.from_buffers(pa.string_view(), 500, buffers),
    }
    for name, column in bombs.items():
        path = write(tmp_path / f"{name}.arrow", [pa.record_batch({"x": column})], "stream")
        records = read_rows("arrow", path, record_bytes_max=100_000)
        assert count_statuses(records) == {int(RecordStatus.TOO_LARGE): 500}, name
        assert records[0].fault == "1000000 bytes, record_bytes_max = 100000"


def test_bad_texts_cost_their_row(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    path = write(tmp_path / "a.arrow", [pa.record_batch({"x": texts})], "stream")
    records = read_rows("arrow", path)
    assert [record.status for record in records] == [0, RecordStatus.BAD_ENCODING, 0]


def test_what_is_no_arrow_is_named(tmp_path: Path) -> None:
    for name, content, reason in (
        ("empty", b"", "is empty"),
        ("text", b"no arrow at all" * 9, "is no Arrow file or stream"),
        ("v1", b"FEA1" + bytes(60), "Feather V1"),
    ):
        path = tmp_path / f"{name}.arrow"
        path.write_bytes(content)
        with pytest.raises(CorruptRecordError, match=reason):
            open_rows("arrow").measure(shard_of(path))
        records = list(open_rows("arrow").records(shard_of(path), 0))
        assert [record.status for record in records] == [RecordStatus.UNREADABLE]


def test_a_footer_that_lies_is_walked_around(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", numbered(5, 5), "file")
    data = bytearray(path.read_bytes())
    data[-10:-6] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    records = read_rows("arrow", path)
    assert [row["n"] for row in fields_of(records)] == list(range(10))
    assert "has no footer that can be read" in records[-1].fault


def test_an_uncompressed_batch_is_mapped_not_copied(tmp_path: Path) -> None:
    batch = pa.record_batch({"b": [bytes([n]) * 1_000_000 for n in range(100)]})
    path = write(tmp_path / "a.arrow", [batch], "stream")
    del batch
    meter = ReadMeter()
    with OpenArrow(shard_of(path), meter) as opened:
        before = pa.total_allocated_bytes()
        (found,) = opened.batches(0, 1, ["b"])
        assert found["b"][99].as_py()[:1] == b"c"
        assert pa.total_allocated_bytes() - before < 1_000_000


def test_saved_folders_are_read_as_their_state_says(tmp_path: Path) -> None:
    assert dataset_shards(tmp_path) is None
    state: dict[str, Any] = {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert dataset_shards(tmp_path) == [tmp_path / "b.arrow", tmp_path / "a.arrow"]
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"indices mapping .*flatten_indices"):
        dataset_shards(tmp_path)
    for name in ("../x.arrow", "/etc/passwd", "", "..", "a/b.arrow"):
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(ConfigError, match="no file of this folder"):
            dataset_shards(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        dataset_shards(tmp_path)
