"""Parquet rows as fields: types, faults by row, `where` before everything else, bounded memory."""

from __future__ import annotations

import datetime as dt
import decimal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.model.chunk import RecordStatus
from msd_daemon.sources.record import MediaPath, ReadMeter
from tests.support.records import (
    count_statuses,
    fields_of,
    open_rows,
    read_blocks,
    read_rows,
    shard_of,
)
from tests.support.sources import DATA, ROOT, needs_data

MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def written(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_media_are_bytes_else_paths(tmp_path: Path) -> None:
    values = [
        {"bytes": b"jpeg", "path": "a.jpg"},
        {"bytes": None, "path": "b.jpg"},
        {"bytes": None, "path": None},
        None,
    ]
    path = written(
        tmp_path / "a.parquet",
        {"image": pa.array(values, MEDIA), "images": pa.array([values[:2]] * 4, pa.list_(MEDIA))},
    )
    found = fields_of(read_rows("parquet", path))
    assert [row["image"] for row in found] == [b"jpeg", MediaPath("b.jpg"), None, None]
    assert found[0]["images"] == [b"jpeg", MediaPath("b.jpg")]


def test_values_are_plain(tmp_path: Path) -> None:
    columns = {
        "list": pa.array([[1, 2], None], pa.list_(pa.int32())),
        "holes": pa.array([[1, None], []], pa.large_list(pa.float64())),
        "deep": pa.array([[[1], [2, 3]], None]),
        "struct": pa.array([{"a": 1, "b": {"c": "x"}}, None]),
        "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        "dictionary": pa.array(["x", None]).dictionary_encode(),
        "large": pa.array(["x", None], pa.large_string()),
        "view": pa.array(["x", None], pa.string_view()),
        "time": pa.array([1_700_000_000_000_000_001, None], pa.timestamp("ns", "UTC")),
        "date": pa.array([dt.date(2024, 2, 29), None]),
        "decimal": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(5, 2)),
        "duration": pa.array([5, None], pa.duration("ms")),
        "half": pa.array([np.float16(0.5), None], pa.float16()),
        "bool": pa.array([True, None]),
        "dates": pa.array([[dt.date(2024, 2, 29)], None], pa.list_(pa.date32())),
    }
    first, second = fields_of(read_rows("parquet", written(tmp_path / "a.parquet", columns)))
    assert first.pop("list").tolist() == [1, 2]
    assert first == {
        "holes": [1.0, None],
        "deep": [[1], [2, 3]],
        "struct": {"a": 1, "b": {"c": "x"}},
        "map": {"a": 1},
        "dictionary": "x",
        "large": "x",
        "view": "x",
        "time": "2023-11-14 22:13:20.000000001Z",
        "date": "2024-02-29",
        "decimal": "1.50",
        "duration": 5,
        "half": 0.5,
        "bool": True,
        "dates": ["2024-02-29"],
    }
    assert second.pop("holes").tolist() == []
    assert second.pop("map") == {}
    assert set(second.values()) == {None}


def test_faults_belong_to_their_row(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff", b"x" * 5000, b"d"]).view(pa.string())
    path = written(tmp_path / "a.parquet", {"n": range(4), "text": texts})
    records = read_rows("parquet", path, record_bytes_max=1000)
    assert [record.status for record in records] == [
        RecordStatus.OK,
        RecordStatus.BAD_ENCODING,
        RecordStatus.TOO_LARGE,
        RecordStatus.OK,
    ]
    assert records[1].fault == "column 'text' is not UTF-8 at byte 0 of a text"
    assert records[2].fault == "5008 bytes, record_bytes_max = 1000"
    assert [record.place for record in records] == [0, 1, 2, 3]
    assert [record.fields_bytes for record in records] == [9, 0, 0, 9]


def test_damage_of_one_row_group_leaves_the_others(tmp_path: Path) -> None:
    texts = [f"text {number} é" * (number % 5 + 1) for number in range(90)]
    path = written(
        tmp_path / "a.parquet",
        {"text": texts},
        row_group_size=30,
        compression="zstd",
        use_dictionary=False,
    )
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(data)
    blocks = read_blocks("parquet", path)
    assert [row["text"] for row in fields_of(blocks[0] + blocks[2])] == texts[:30] + texts[60:]
    assert [record.status for record in blocks[1]] == [RecordStatus.UNREADABLE]
    assert "row group 1 is damaged" in blocks[1][0].fault


def test_columns_that_are_lacking_are_lacking(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"a": [1, 2], "b": ["x", "y"]})
    assert fields_of(read_rows("parquet", path, ("b", "zz"))) == [{"b": "x"}, {"b": "y"}]
    assert fields_of(read_rows("parquet", path, ("zz",))) == [{}, {}]


BIG = {"k": list(range(5000)), "big": [bytes([n % 251]) * 1000 for n in range(5000)]}


def read_counted(path: Path, where: str) -> tuple[dict[int, int], int]:
    meter = ReadMeter()
    opened = open_rows("parquet", [path], ("big",), meter, where=where)
    shard = shard_of(path)
    blocks = range(opened.measure(shard)[0])
    records = [record for block in blocks for record in opened.records(shard, block)]
    return count_statuses(records), meter.read_bytes


def test_where_reads_other_columns_only_where_a_record_is_left(tmp_path: Path) -> None:
    options = {"row_group_size": 1000, "use_dictionary": False, "write_statistics": False}
    path = written(tmp_path / "a.parquet", BIG, **options)
    ok, filtered = int(RecordStatus.OK), int(RecordStatus.FILTERED)
    counts, read_bytes = read_counted(path, "k < 10")
    assert counts == {ok: 10, filtered: 4990}
    assert read_bytes < 400_000  # the ids, and one batch of 256 rows of the other column
    counts, read_bytes = read_counted(path, "k < 0")
    assert counts == {filtered: 5000}
    assert read_bytes < 50_000
    counts, read_bytes = read_counted(path, "k >= 0")
    assert counts == {ok: 5000}
    assert read_bytes > 5_000_000


def test_where_skips_row_groups_by_their_statistics(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", BIG, row_group_size=1000, use_dictionary=False)
    counts, read_bytes = read_counted(path, "k > 4999.5 and big is not None")
    assert counts == {int(RecordStatus.FILTERED): 5000}
    assert read_bytes < 20_000  # footers alone
    counts, read_bytes = read_counted(path, "4998 < k")
    assert counts == {int(RecordStatus.OK): 1, int(RecordStatus.FILTERED): 4999}
    assert read_bytes < 1_100_000


def test_where_finds_nested_fields_and_faults(tmp_path: Path) -> None:
    metas = [{"lang": "en"}, {"lang": None}, None, {"lang": "de"}]
    path = written(tmp_path / "a.parquet", {"meta": metas, "q": ["a", None, "b", "c"]})
    found = read_rows("parquet", path, ("q",), where="meta.lang == 'de'")
    assert [record.status for record in found] == [8, 8, 8, 0]
    found = read_rows("parquet", path, ("meta",), where="q > 1")
    assert [record.status for record in found] == [5, 8, 5, 5]
    told = "where: 'q > 1' compares 'a' (a str) with 1 (a int): use number(q)"
    assert found[0].fault == told


def test_a_filter_on_a_column_that_is_not_there(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"a": [1, 2]})
    assert count_statuses(read_rows("parquet", path, where="zz > 1")) == {8: 2}
    assert count_statuses(read_rows("parquet", path, where="not zz > 1")) == {0: 2}


@needs_data
def test_where_on_a_corpus() -> None:
    path = DATA / "text/kernel_docs.parquet"
    whole = pq.read_table(path).to_pylist()
    kept = [row["id"] for row in whole if row["lang"] == "zh_CN" and len(row["text"]) > 2000]
    found = read_rows("parquet", path, ("id",), where="lang == 'zh_CN' and len(text) > 2000")
    assert [row["id"] for row in fields_of(found)] == kept
    assert len(found) == len(whole) == 2029
    assert len(kept) > 20


_PEAK = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.support.hostile_reader import peak_mib
from tests.support.records import open_rows, shard_of
path = Path(sys.argv[2])
opened = open_rows("parquet", [path])
opened.measure(shard_of(path))
before = peak_mib()
count = sum(1 for record in opened.records(shard_of(path), 0) if not record.status)
print(count, peak_mib() - before)
"""


def test_a_large_row_group_is_streamed(tmp_path: Path) -> None:
    rows = 40_000
    path = tmp_path / "a.parquet"
    chunk = pa.array([f"{number:08d}" * 1250 for number in range(1000)])
    written(
        path,
        {"text": pa.chunked_array([chunk] * 40)},  # 400 MB in one row group, a few on disk
        row_group_size=rows,
        compression="zstd",
        use_dictionary=False,
        data_page_size=1 << 20,
    )
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    assert pq.ParquetFile(path).metadata.row_group(0).total_byte_size > 400_000_000
    arguments = [sys.executable, "-c", _PEAK, str(ROOT), str(path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=110)
    count, peak_mib = map(int, done.stdout.split())
    assert count == rows
    assert peak_mib < 64


@pytest.mark.parametrize("where", ["", "k % 7 != 0", "k >= 100 and t.endswith('3')"])
def test_readers_that_are_put_away_go_on(tmp_path: Path, where: str) -> None:
    """More blocks than readers that may be open, read in turn."""
    columns = {"k": range(2000), "t": [f"text {n}" for n in range(2000)]}
    path = written(tmp_path / "a.parquet", columns, row_group_size=400)
    expected = read_blocks("parquet", path, ("t",), where=where)
    opened = open_rows("parquet", [path], ("t",), where=where)
    readers = [opened.records(shard_of(path), block) for block in range(5)]
    found: list[list[Any]] = [[] for _ in readers]
    for _ in range(400 // 80):
        for reader, records in zip(readers, found, strict=True):
            records += [next(reader) for _ in range(80)]
    assert [next(reader, None) for reader in readers] == [None] * 5
    assert found == expected
