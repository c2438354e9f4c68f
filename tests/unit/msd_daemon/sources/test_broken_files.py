"""Broken files behave as broken/README.md states: what can be had is given, the rest is counted."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.json_text import parse_json
from msd_daemon.sources.manifest import describe_shard, resolve_source
from msd_daemon.sources.megatron import check_megatron
from msd_daemon.sources.parquet import ParquetFormat
from msd_daemon.sources.record import ReadMeter
from tests.support.sources import (
    DATA,
    IN_ORDER,
    Placed,
    make_loader,
    make_spec,
    needs_data,
    read_chunks,
    read_stream,
    statuses_of,
    texts_of,
)

pytestmark = needs_data

BROKEN = DATA / "broken"
OK = RecordStatus.OK
UNREADABLE = RecordStatus.UNREADABLE


def expected(name: str) -> dict[str, Any]:
    rows = json.loads((BROKEN / "expected.json").read_text())
    found: dict[str, Any] = rows[name]["expected"]
    return found


def read(name: str, **fields: Any) -> list[Placed]:
    spec = make_spec([BROKEN / name], shuffle=IN_ORDER, **fields)
    return read_stream(make_loader(spec))


def first_fault(name: str, **fields: Any) -> str:
    spec = make_spec([BROKEN / name], shuffle=IN_ORDER, **fields)
    return next(draft.meta.fault for draft in read_chunks(make_loader(spec)) if draft.meta.fault)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("derived/bible_cut_multiframe.jsonl.zst", "text"),
        ("derived/shakespeare_cut60.jsonl.zst", "text"),
        ("derived/gsm_cut.jsonl.gz", "question"),
    ],
)
def test_cut_stream_gives_its_complete_lines_and_one_unreadable(name: str, field: str) -> None:
    records = read(name, text_field=field)
    lines = expected(name)["full_lines_before_error"]
    assert statuses_of(records) == {OK: lines, UNREADABLE: 1}
    assert records[-1].status == UNREADABLE
    fault = first_fault(name, text_field=field)
    assert name in fault
    assert "byte offset" in fault


def test_bit_flip_gives_the_lines_that_gzip_gives() -> None:
    name = "derived/gsm_bitflip.jsonl.gz"
    counts = statuses_of(read(name, text_field="question"))
    assert counts.pop(UNREADABLE) == 1
    assert sum(counts.values()) == expected(name)["full_lines_before_error"]
    assert counts[OK] >= 990  # behind the flip lines are garbage, before it they are whole


@pytest.mark.parametrize("name", ["gsm_badcrc", "gsm_trailing_garbage"])
def test_fault_behind_the_last_line_costs_no_line(name: str) -> None:
    name = f"derived/{name}.jsonl.gz"
    records = read(name, text_field="question")
    assert statuses_of(records) == {OK: expected(name)["lines"], UNREADABLE: 1}


def test_plain_file_named_gz_is_read_by_its_first_bytes() -> None:
    name = "derived/not_gzip.jsonl.gz"
    records = read(name, text_field="question")
    assert statuses_of(records) == {OK: expected(name)["rows_if_sniffed"]}


@pytest.mark.parametrize(("name", "rows"), [("blank_lines", 30), ("bom_crlf", 50)])
def test_marks_line_ends_and_blank_lines_are_no_text(name: str, rows: int) -> None:
    records = read(f"json/{name}.jsonl", text_field="question")
    assert statuses_of(records) == {OK: rows}
    train = (DATA / "text" / "gsm8k" / "train.jsonl").read_text().splitlines()
    assert texts_of(records) == [json.loads(line)["question"] for line in train[:rows]]


def test_bad_lines_among_good_ones_are_counted_where_they_stand() -> None:
    want = expected("json/mixed_bad_lines.jsonl")
    records = read("json/mixed_bad_lines.jsonl", text_field="question")
    assert [at for at, r in enumerate(records, 1) if r.status] == want["bad_lines"]
    assert statuses_of(records)[OK] == want["good"]


def test_line_cut_at_the_end_is_one_bad_record() -> None:
    counts = statuses_of(read("json/no_final_newline_cut.jsonl", text_field="question"))
    assert counts == {OK: 175, RecordStatus.BAD_SYNTAX: 1}


@pytest.mark.parametrize("name", ["pretty_array.json", "utf16le.jsonl"])
def test_what_is_not_jsonl_is_faults_only(name: str) -> None:
    counts = statuses_of(read(f"json/{name}", text_field="question"))
    assert set(counts) <= {RecordStatus.BAD_SYNTAX, RecordStatus.BAD_ENCODING}
    assert sum(counts.values()) >= 25


def test_json_conformance_suite() -> None:
    archive = BROKEN / "json" / "jsontestsuite_test_parsing.tar.gz"
    wrong = []
    with tarfile.open(archive) as members:
        for member in members:
            file = members.extractfile(member)
            verdict = Path(member.name).name[0]
            if file is None or verdict not in "yn":
                continue
            try:
                parse_json(file.read())
                is_taken = True
            except ValueError:
                is_taken = False
            if is_taken != (verdict == "y"):
                wrong.append(member.name)
    assert wrong == []


def test_text_in_another_encoding_is_one_bad_record() -> None:
    assert statuses_of(read("text/install.ru.txt.gz")) == {RecordStatus.BAD_ENCODING: 1}
    assert statuses_of(read("text/blns.txt")) == {OK: 1}


@pytest.mark.parametrize("name", ["enwiki_bitflip", "enwiki_cut"])
def test_damaged_parquet_is_one_unreadable_record(name: str) -> None:
    assert statuses_of(read(f"derived/{name}.parquet")) == {UNREADABLE: 1}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("datapage_v1-corrupt-checksum", "a"),
        ("rle-dict-uncompressed-corrupt-checksum", "binary_field"),
    ],
)
def test_page_checksums_are_verified(name: str, field: str) -> None:
    counts = statuses_of(read(f"parquet/{name}.parquet", text_field=field))
    assert set(counts) <= {UNREADABLE, RecordStatus.FIELD_MISSING}


@pytest.mark.parametrize(
    "path",
    [
        *sorted((BROKEN / "parquet_fuzz").glob("clusterfuzz*")),
        *sorted((BROKEN / "parquet").glob("*.parquet")),
    ],
    ids=lambda path: path.name[-24:],
)
def test_hostile_parquet_is_counted_never_a_crash(path: Path) -> None:
    shard = describe_shard(path, "parquet", "none")
    base = make_spec([BROKEN / "derived" / "enwiki_cut.parquet"], shuffle=IN_ORDER)
    for field in _column_names(path):
        spec = make_spec(
            [BROKEN / "derived" / "enwiki_cut.parquet"],
            shuffle=IN_ORDER,
            shards=(shard,),
            text_field=field,
        )
        assert len(read_chunks(make_loader(spec), 1 << 16)) >= 1
    with pytest.raises(CorruptRecordError):
        ParquetFormat(base, ReadMeter()).check(shard)


def _column_names(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.ParquetFile(path).schema_arrow.names)[:4] or ["text"]
    except (pa.ArrowException, OSError, ValueError):
        return ["text"]


@pytest.mark.parametrize("name", ["bad_magic", "bin_short", "idx_cut"])
def test_damaged_megatron_pair_is_refused_at_open(name: str) -> None:
    spec = make_spec([BROKEN / "derived" / f"megatron_{name}.bin"])
    with pytest.raises(CorruptRecordError, match="byte offset"):
        check_megatron(spec, spec.shards[0])
    assert statuses_of(read_stream(make_loader(spec))) == {UNREADABLE: 1}


@pytest.mark.parametrize("path", sorted((BROKEN / "zstd_bad").glob("*")), ids=lambda p: p.name)
def test_bad_zstd_frames_are_unreadable(path: Path) -> None:
    records = read(f"zstd_bad/{path.name}", source_format="text")
    assert statuses_of(records) == {UNREADABLE: 1}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("block-128k.zst", 131068),
        ("empty-block.zst", 0),
        ("rle-first-block.zst", 1048576),
        ("zeroSeq_2B.zst", 13),
    ],
)
def test_odd_but_valid_zstd_frames_decode(name: str, size: int) -> None:
    records = read(f"zstd_odd_valid/{name}", source_format="text")
    assert sum(len(record.tokens) for record in records) == size
    assert all(record.status == OK for record in records)


def test_wrong_magic_is_refused_before_start() -> None:
    fuzz = (
        BROKEN
        / "parquet_fuzz"
        / ("clusterfuzz-testcase-minimized-parquet-arrow-fuzz-4577763874111488")
    )
    with pytest.raises(ConfigError, match="no parquet file"):
        resolve_source([str(fuzz)], BROKEN, "parquet")
