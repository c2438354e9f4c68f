"""Parquet: damage stays in its row group, odd columns are read or refused by name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.parquet import ParquetFormat
from msd_daemon.sources.record import ReadMeter
from tests.support.sources import (
    IN_ORDER,
    make_loader,
    make_spec,
    read_chunks,
    read_stream,
    statuses_of,
    texts_of,
)

TEXTS = [f"text {number} é" * (number % 5 + 1) for number in range(90)]


def test_damage_of_one_row_group_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": TEXTS})
    pq.write_table(table, path, row_group_size=30, compression="zstd", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(data)
    records = read_stream(make_loader(make_spec([path], shuffle=IN_ORDER)))
    assert texts_of(records) == TEXTS[:30] + TEXTS[60:]
    assert [r.status for r in records[30:-30]] == [RecordStatus.UNREADABLE]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_every_type_that_holds_text_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    values = pa.array(TEXTS, pa.string())
    column = values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
    pq.write_table(pa.table({"n": range(90), "text": column}), tmp_path / "a.parquet")
    records = read_stream(make_loader(make_spec([tmp_path / "a.parquet"], shuffle=IN_ORDER)))
    assert texts_of(records) == TEXTS


def test_nulls_bad_bytes_and_large_values_are_counted_each(tmp_path: Path) -> None:
    values = [b"good", None, b"\xff\xfe", b"x" * 5000, b"", b"end"]
    pq.write_table(pa.table({"text": pa.array(values, pa.binary())}), tmp_path / "a.parquet")
    spec = make_spec([tmp_path / "a.parquet"], shuffle=IN_ORDER, record_bytes_max=1000)
    records = read_stream(make_loader(spec))
    assert [record.status for record in records] == [
        RecordStatus.OK,
        RecordStatus.FIELD_MISSING,
        RecordStatus.BAD_ENCODING,
        RecordStatus.TOO_LARGE,
        RecordStatus.EMPTY,
        RecordStatus.OK,
    ]


def test_a_missing_column_is_refused_by_check_and_counted_by_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a", "b"], "text": [[1], [2]]}), tmp_path / "a.parquet")
    for field, reason in (("content", "is there 0 times"), ("text", "not text")):
        spec = make_spec([tmp_path / "a.parquet"], text_field=field)
        assert statuses_of(read_stream(make_loader(spec))) == {RecordStatus.FIELD_MISSING: 2}
        with pytest.raises(CorruptRecordError, match=reason):
            ParquetFormat(spec, ReadMeter()).check(spec.shards[0])


def test_several_columns_are_joined_and_others_are_not_read(tmp_path: Path) -> None:
    rows = 2000
    table = pa.table({"q": ["q"] * rows, "a": ["a"] * rows, "blob": [bytes(range(256)) * 8] * rows})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="none")
    loader = make_loader(make_spec([tmp_path / "a.parquet"], text_field="q+a"))
    assert texts_of(read_stream(loader)) == ["q\na"] * rows
    assert loader.statistics().read_bytes < 100_000


def test_a_row_group_is_one_block(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=40)
    drafts = read_chunks(make_loader(make_spec([tmp_path / "a.parquet"])), 100)
    assert {draft.meta.window_blocks for draft in drafts} == {3}
    assert sum(draft.meta.is_block_end for draft in drafts) == 3


def test_a_table_without_rows_has_no_record(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert read_stream(make_loader(make_spec([tmp_path / "a.parquet"]))) == []
