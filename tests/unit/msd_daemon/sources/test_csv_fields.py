"""CSV and TSV: quoted line ends, bad rows that cost themselves alone, headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from federation.model.recipe import SampleRecipe
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.csv_fields import HEADER_BYTES_MAX, CsvFormat, open_csv
from msd_daemon.sources.record import MediaPath, RawRecord, ReadMeter
from tests.support.sources import IN_ORDER, compress, make_loader, make_spec, read_stream, texts_of
from tests.support.tars import few, read_blocks, read_format, stream_spec

OK = RecordStatus.OK
BAD_SYNTAX = RecordStatus.BAD_SYNTAX


def make_format(**fields: object) -> CsvFormat:
    spec = SourceSpec("s", "csv", "none", "streaming", (), "", **fields)  # type: ignore[arg-type]
    return open_csv(spec, None, ReadMeter())


def rows_of(data: bytes, piece_bytes: int = 1000) -> list[tuple[int, dict[str, str] | None]]:
    records = read_format(make_format(), data, piece_bytes=piece_bytes)
    return [(r.place, None if r.fields is None else dict(r.fields)) for r in records]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 1000])
def test_quotes_line_ends_and_marks(end: bytes, mark: bytes, piece_bytes: int) -> None:
    lines = [b"id,text", b'1,"a, ""b""' + end + end + b'c"', b"", b"2,", b'"3","\xc3\xa9"']
    data = mark + end.join(lines)
    got = rows_of(data, piece_bytes)
    break_ = end.decode()
    assert [fields for _, fields in got] == [
        {"id": "1", "text": f'a, "b"{break_}{break_}c'},
        {"id": "2", "text": ""},
        {"id": "3", "text": "é"},
    ]
    assert [data[place : place + 1] for place, _ in got] == [b"1", b"2", b'"']
    assert rows_of(data + end, piece_bytes) == got


@pytest.mark.parametrize(
    ("header", "row"),
    [
        (b"a\tb,c", b"1\t2,3"),
        (b"a,b;c", b"1,2;3"),
        (b"a;b c", b"1;2 3"),
        (b'"a\tb",c', b"1,2"),
    ],
)
def test_the_header_tells_the_delimiter(header: bytes, row: bytes) -> None:
    (fields,) = [fields for _, fields in rows_of(header + b"\n" + row + b"\n")]
    assert fields is not None
    assert len(fields) == 2


def test_one_column_and_blank_lines_before_the_header() -> None:
    assert rows_of(b"\n\r\ntext\none\n\ntwo words\n") == [
        (8, {"text": "one"}),
        (13, {"text": "two words"}),
    ]
    assert rows_of(b"") == rows_of(b"\n") == rows_of(b"a,b\n") == []


def test_bad_rows_cost_themselves_alone() -> None:
    data = (
        b'a,b\n1\n1,2,3\n"x"y,1\n\xff,2\n"' + b"z" * 5000 + b'\n,",1\n5" pipe,x\n7,8\n"open,\n9,9\n'
    )
    records = read_format(make_format(record_bytes_max=4000), data)
    assert [record.status for record in records] == [
        BAD_SYNTAX,
        BAD_SYNTAX,
        BAD_SYNTAX,
        RecordStatus.BAD_ENCODING,
        RecordStatus.TOO_LARGE,
        OK,
        OK,
        BAD_SYNTAX,
    ]
    assert [record.fault for record in records[:2]] == [
        "1 fields, the header has 2",
        "3 fields, the header has 2",
    ]
    assert records[5].fields == {"a": '5" pipe', "b": "x"}
    assert "unexpected end of data" in records[-1].fault
    assert all(record.raw == data[record.place :][: len(record.raw)] for record in records)


def test_fields_over_the_limit_of_the_library_are_read() -> None:
    data = b'a,b\n1,"' + b"x" * 300_000 + b'"\n'
    ((_, fields),) = rows_of(data, 1 << 16)
    assert fields is not None
    assert len(fields["b"]) == 300_000


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"a,a\n1,2\n", "'a' twice"),
        (b"a,\n1,2\n", "'' twice, or not at all"),
        (b"\xff,b\n1,2\n", "header that is none"),
        (b'"a,b\n1,2\n', "header that is none"),
        (b"a" * (HEADER_BYTES_MAX + 1) + b"\n1\n", "header of over"),
    ],
)
def test_a_header_that_is_none_is_damage_of_the_shard(
    tmp_path: Path, data: bytes, what: str
) -> None:
    with pytest.raises(CorruptRecordError, match=what):
        read_format(make_format(), data)
    (tmp_path / "a.csv").write_bytes(data)
    ((record,),) = read_blocks(stream_spec(tmp_path / "a.csv", "csv"))
    assert record.status == RecordStatus.UNREADABLE
    assert str(tmp_path / "a.csv") in record.fault


def test_columns_of_media_are_paths() -> None:
    reader = make_format(recipe=SampleRecipe(image_field="file"))
    (record,) = read_format(reader, b"file,text\na.jpg,b\n")
    assert record.fields == {"file": MediaPath("a.jpg"), "text": "b"}


def test_the_middle_of_a_shard_is_read_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a\tb\n1\t2\n3\t4\n")
    shard = Shard(str(path), 12, "")
    reader = make_format().at(shard)
    data = path.read_bytes()
    assert read_format(reader, data, 8) == read_format(reader, data)[1:]
    with pytest.raises(CorruptRecordError, match="without its header"):
        read_format(make_format(), data, 8)


@pytest.mark.parametrize("kind", ["", "gz", "zst", "xz"])
def test_a_source_of_csv_is_one_stream(tmp_path: Path, kind: str) -> None:
    texts = [f'text "{n}"\nsecond line, of {n}' for n in range(300)]
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    data = "id,text\n" + "".join(f"{n},{text}\n" for n, text in enumerate(quoted))
    path = tmp_path / (f"a.csv.{kind}" if kind else "a.csv")
    path.write_bytes(compress(data.encode(), kind, 3) if kind else data.encode())
    spec = make_spec([path], shuffle=few(16), max_epochs=1)
    whole = read_stream(make_loader(spec, index_dir=tmp_path / "index"))
    assert texts_of(whole) == texts
    for at in (0, 15, 16, 100, 299):
        for index_dir in (None, tmp_path / "index"):
            loader = make_loader(spec, index_dir=index_dir)
            loader.seek(whole[at].block_key, whole[at].index)
            assert read_stream(loader) == whole[at:]


def test_a_damaged_stream_gives_whole_rows(tmp_path: Path) -> None:
    data = b"id,text\n" + b"".join(b'%d,"x\ny"\n' % n for n in range(2000))
    packed = compress(data, "gz", 4)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(packed[: len(packed) // 2])
    spec = make_spec([path], shuffle=IN_ORDER, max_epochs=1)
    records = read_stream(make_loader(spec))
    assert [record.status for record in records[:-1]] == [OK] * (len(records) - 1)
    assert records[-1].status == RecordStatus.UNREADABLE
    assert 900 <= len(records) <= 1100


def test_records_keep_their_bytes(tmp_path: Path) -> None:
    (record,) = read_format(make_format(), b"a,b\r\n1,2\r\n")
    assert record == RawRecord(5, b"1,2", fields={"a": "1", "b": "2"})
