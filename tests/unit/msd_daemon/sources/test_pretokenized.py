"""Columns of token ids: taken as they lie, nothing put around them, each bad one named."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.model.chunk import RecordStatus
from federation.model.job import ShuffleRule, SourceSpec
from msd_daemon.sources.encoded import EncodedRecords, no_records
from msd_daemon.sources.order import record_windows
from msd_daemon.sources.parquet import ParquetFormat
from msd_daemon.sources.parquet_ids import IdBatch, id_windows
from msd_daemon.sources.record import RawRecord, ReadMeter
from msd_daemon.transforms import Tokenizer, describe_tokenizer, open_tokenizer
from tests.support.sources import (
    IN_ORDER,
    compress,
    id_tokenizer,
    make_loader,
    make_spec,
    placed,
    read_chunks,
    read_stream,
    statuses_of,
)

RECORDS = [[1, 2, 3], [7], [], [65535, 0], list(range(100))]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    data = b"".join(json.dumps({"ids": ids}).encode() + b"\n" for ids in records)
    kind = path.suffix[1:]
    path.write_bytes(data if kind == "jsonl" else compress(data, kind, 2))
    return path


def write_parquet(path: Path, records: list[Any], kind: pa.DataType, rows: int = 2) -> Path:
    table = pa.table({"n": range(len(records)), "ids": pa.array(records, kind)})
    pq.write_table(table, path, row_group_size=rows)
    return path


def ids_spec(path: Path, **fields: Any) -> SourceSpec:
    return make_spec(
        [path], tokens_field="ids", **({"shuffle": IN_ORDER, "max_epochs": 1} | fields)
    )


def faults(spec: SourceSpec, tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """Return status and fault of each record, fetched one by one."""
    loader = make_loader(spec, tokenizer=tokenizer)
    drafts = [
        loader.fetch(record.block_key, [record.index])
        for record in read_stream(make_loader(spec, tokenizer=tokenizer))
    ]
    return [(int(draft.meta.status[0]), draft.meta.fault) for draft in drafts]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_lists_of_json_lines_are_taken_as_they_lie(tmp_path: Path, kind: str) -> None:
    spec = ids_spec(write_jsonl(tmp_path / f"a.{kind}", RECORDS))
    records = read_stream(make_loader(spec, tokenizer=id_tokenizer(1 << 16)))
    assert [list(record.tokens) for record in records] == RECORDS
    assert [record.status for record in records] == [0, 0, RecordStatus.EMPTY, 0, 0]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.list_(pa.int64()),
        pa.list_(pa.uint16()),
        pa.list_(pa.uint32()),
        pa.list_(pa.uint64()),
        pa.large_list(pa.int64()),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 2, 100])
def test_every_list_of_integers_is_read(tmp_path: Path, kind: pa.DataType, rows: int) -> None:
    spec = ids_spec(write_parquet(tmp_path / "a.parquet", RECORDS, kind, rows))
    loader = make_loader(spec, tokenizer=id_tokenizer(1 << 16))
    records = read_stream(loader)
    assert [list(record.tokens) for record in records] == RECORDS
    assert loader.statistics().tokens == 106


def test_lists_of_fixed_size_with_nulls_are_read(tmp_path: Path) -> None:
    records = [[1, 2], None, [3, 4], [5, 6]]
    path = write_parquet(tmp_path / "a.parquet", records, pa.list_(pa.int16(), 2), 4)
    read = read_stream(make_loader(ids_spec(path), tokenizer=id_tokenizer()))
    assert [record.tokens for record in read] == [(1, 2), (), (3, 4), (5, 6)]
    assert read[1].status == RecordStatus.FIELD_MISSING


@pytest.mark.parametrize(("count", "dtype"), [(1 << 16, "<u2"), ((1 << 16) + 1, "<i4")])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chunks_are_as_narrow_as_the_vocabulary(
    tmp_path: Path, count: int, dtype: str, kind: str
) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, RECORDS)
    else:
        write_parquet(path, RECORDS, pa.list_(pa.int64()))
    (draft, *_) = read_chunks(make_loader(ids_spec(path), tokenizer=id_tokenizer(count)))
    assert draft.dtype == np.dtype(dtype)
    assert all(part.dtype == np.dtype(dtype) for part in draft.payload)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_no_bos_or_eos_is_put_around_ids(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, [[1, 2]])
    else:
        write_parquet(path, [[1, 2]], pa.list_(pa.int32()))
    tokenizer = open_tokenizer(describe_tokenizer(None, kind="bytes", eos="end", bos="start"))
    (record,) = read_stream(make_loader(ids_spec(path), tokenizer=tokenizer))
    assert record.tokens == (1, 2)


def test_bad_ids_of_json_lines_are_counted_with_their_value(tmp_path: Path) -> None:
    records: list[Any] = [
        [1, -3, 2],
        [1, 2, 1000],
        [1.5],
        [1.0],
        ["7"],
        [True],
        [None],
        [[1]],
        7,
        "ids",
        None,
        [10**30],
        [5],
    ]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    with path.open("a") as file:
        file.write('{"other": [1]}\n{"ids": [1], "n": ' + "9" * 5000 + "}\n{nonsense\n")
    found = faults(ids_spec(path), id_tokenizer(1000))
    place = [fault.partition(": ")[2].partition(": ")[2] for _, fault in found]
    assert place == [
        "field 'ids' holds -3 at 1, ids go from 0 to 999",
        "field 'ids' holds 1000 at 2, ids go from 0 to 999",
        "field 'ids' holds 1.5 at 0, not an integer",
        "field 'ids' holds 1.0 at 0, not an integer",
        "field 'ids' holds '7' at 0, not an integer",
        "field 'ids' holds True at 0, not an integer",
        "field 'ids' holds None at 0, not an integer",
        "field 'ids' holds [1] at 0, not an integer",
        "field 'ids' is a int, not a list of ids",
        "field 'ids' is a str, not a list of ids",
        "field 'ids' is null, not a list of ids",
        "field 'ids' holds 1000000000000000000000000000000 at 0, ids go from 0 to 999",
        "",
        "field 'ids' is absent",
        "",
        "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ]
    missing = int(RecordStatus.FIELD_MISSING)
    assert [status for status, _ in found] == [missing] * 12 + [0, missing, 0, 3]
    assert found[1][1].startswith(f"{path}: record at byte offset 20: ")


def test_bad_ids_of_parquet_are_counted_with_their_value(tmp_path: Path) -> None:
    records: list[Any] = [[1], [1, -3, -4], [1, 2, 1000], None, [4, None], [], [2] * 60, [5, 6]]
    path = write_parquet(tmp_path / "a.parquet", records, pa.list_(pa.int64()), 5)
    found = faults(ids_spec(path, record_bytes_max=200), id_tokenizer(1000))
    assert [(status, fault.removeprefix(str(path))) for status, fault in found] == [
        (0, ""),
        (5, ": record at row 1: column 'ids' holds -3 at 1, ids go from 0 to 999"),
        (5, ": record at row 2: column 'ids' holds 1000 at 2, ids go from 0 to 999"),
        (5, ": record at row 3: column 'ids' is null"),
        (5, ": record at row 4: column 'ids' holds None at 1, ids go from 0 to 999"),
        (int(RecordStatus.EMPTY), ""),
        (6, ": record at row 1: 240 bytes of ids, record_bytes_max = 200"),
        (0, ""),
    ]
    whole = make_loader(ids_spec(path, record_bytes_max=200), tokenizer=id_tokenizer(1000))
    assert [record.tokens for record in read_stream(whole) if record.tokens] == [(1,), (5, 6)]


@pytest.mark.parametrize(
    ("values", "kind", "reason"),
    [
        ([["a"]], pa.list_(pa.string()), "holds list<element: string>, not lists of token ids"),
        ([[1.0]], pa.list_(pa.float64()), "not lists of token ids"),
        ([1], pa.int64(), "holds int64, not lists of token ids"),
    ],
)
def test_columns_of_other_types_are_refused_and_counted_by_row(
    tmp_path: Path, values: list[Any], kind: pa.DataType, reason: str
) -> None:
    spec = ids_spec(write_parquet(tmp_path / "a.parquet", values, kind))
    ((status, fault),) = faults(spec, id_tokenizer())
    assert status == RecordStatus.FIELD_MISSING
    assert reason in fault
    with pytest.raises(ValueError, match=reason.replace("<", ".").replace(">", ".")):
        _check(spec)


def _check(spec: SourceSpec) -> None:
    try:
        ParquetFormat(spec, ReadMeter()).check(spec.shards[0])
    except Exception as error:
        raise ValueError(str(error)) from error


def test_damage_of_one_row_group_of_ids_leaves_the_others(tmp_path: Path) -> None:
    records = np.random.default_rng(1).integers(0, 1 << 20, (90, 50)).tolist()
    path = tmp_path / "a.parquet"
    table = pa.table({"ids": pa.array(records, pa.list_(pa.int32()))})
    pq.write_table(table, path, row_group_size=30, use_dictionary=False, write_page_checksum=True)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(data)
    read = read_stream(make_loader(ids_spec(path), tokenizer=id_tokenizer()))
    assert [list(r.tokens) for r in read if r.status == 0] == records[:30] + records[60:]
    assert statuses_of(read) == {0: 60, RecordStatus.UNREADABLE: 1}


def test_windows_of_columns_are_cut_as_those_of_records(tmp_path: Path) -> None:
    """The same lengths give the same permutation whether rows are strings or lists of ids."""
    lengths = [3, 40, 0, 7, 7, 90, 1, 1, 1, 12, 200, 5] * 40
    ids = [[number] * length for number, length in enumerate(lengths)]
    texts = ["x" * (4 * length) for length in lengths]
    pq.write_table(
        pa.table({"ids": pa.array(ids, pa.list_(pa.int32())), "text": texts}),
        tmp_path / "a.parquet",
        row_group_size=300,
    )
    for rule in (
        ShuffleRule(window_records=7, window_bytes=300),
        ShuffleRule(window_records=100, window_bytes=100_000),
        ShuffleRule(window_records=5000, window_bytes=1),
    ):
        by_text = read_stream(make_loader(make_spec([tmp_path / "a.parquet"], shuffle=rule)))
        by_ids = read_stream(
            make_loader(ids_spec(tmp_path / "a.parquet", shuffle=rule), tokenizer=id_tokenizer()),
            payload_bytes_max=1000,
        )
        assert [4 * len(record.tokens) for record in by_ids] == [
            len(record.tokens) for record in by_text
        ]


def test_fetched_ids_are_those_of_the_stream_in_any_order(tmp_path: Path) -> None:
    records = [[number, number + 1] for number in range(40)]
    path = write_parquet(tmp_path / "a.parquet", records, pa.list_(pa.int32()), 20)
    spec = ids_spec(path, shuffle=ShuffleRule(window_records=6))
    stream = read_stream(make_loader(spec, tokenizer=id_tokenizer()))
    key = stream[25].block_key
    block = [record for record in stream if record.block_key == key]
    fetched = placed(make_loader(spec, tokenizer=id_tokenizer()).fetch(key, [19, 0, 7, 7]))
    assert fetched == [block[19], block[0], block[7], block[7]]


def test_a_table_without_rows_has_no_record_of_ids(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [], pa.list_(pa.int32()))
    assert read_stream(make_loader(ids_spec(path), tokenizer=id_tokenizer())) == []


@given(
    sizes=st.lists(st.integers(0, 50), max_size=60),
    cuts=st.sets(st.integers(1, 59), max_size=12),
    window_records=st.integers(1, 9),
    window_bytes=st.integers(1, 200),
)
def test_windows_do_not_depend_on_batches(
    sizes: list[int], cuts: set[int], window_records: int, window_bytes: int
) -> None:
    rule = ShuffleRule(window_records=window_records, window_bytes=window_bytes)
    records = (RawRecord(number, bytes(size)) for number, size in enumerate(sizes))
    want = [[record.place for record in window] for window, _ in record_windows(records, rule)]
    bounds = [0, *sorted(cut for cut in cuts if cut < len(sizes)), len(sizes)]
    batches = (
        IdBatch(
            np.array(sizes[begin:end], np.int64),
            EncodedRecords(
                np.ones(end - begin, np.int32),
                np.zeros(end - begin, np.uint8),
                np.arange(begin, end, dtype=np.int32),
            ),
        )
        for begin, end in itertools.pairwise(bounds)
    )
    windows = list(id_windows(batches, rule, no_records(np.dtype(np.int32))))
    assert [window.records.tokens.tolist() for window in windows] == want
    assert [window.is_block_end for window in windows] == [False] * (len(want) - 1) + [True]
    assert [window.count for window in windows] == [len(window) for window in want]


def test_long_row_groups_are_read_in_batches(tmp_path: Path) -> None:
    """Batches of bounded bytes: a row group of several of them gives the same records."""
    records = np.random.default_rng(2).integers(0, 1 << 20, (700, 500)).tolist()
    path = write_parquet(tmp_path / "a.parquet", records, pa.list_(pa.int32()), 700)
    spec = ids_spec(path, shuffle=ShuffleRule(window_records=300, window_bytes=300_000))
    stream = read_stream(make_loader(spec, tokenizer=id_tokenizer()), 100_000)
    assert sorted(list(record.tokens) for record in stream) == sorted(records)
    assert [list(record.tokens) for record in stream[:150]] != records[:150]
    assert sorted(list(record.tokens) for record in stream[:150]) == sorted(records[:150])
