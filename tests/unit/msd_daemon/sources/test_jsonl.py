"""JSONL lines: bytes in, text out (H17), whatever the block size and the compression."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import ShuffleRule
from msd_daemon.sources.json_text import parse_json, text_extractor
from msd_daemon.sources.record import RawRecord
from tests.support.sources import (
    IN_ORDER,
    compress,
    json_lines,
    make_loader,
    make_spec,
    read_chunks,
    read_stream,
    statuses_of,
    texts_of,
)

TEXTS = ["plain", "é 中 😀 mixed", 'tab\tquote"', "line\r\nbreak inside", "", "last"]


def variants() -> dict[str, bytes]:
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in TEXTS]
    return {
        "plain": b"\n".join(lines) + b"\n",
        "mark": b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n",
        "crlf": b"\r\n".join(lines) + b"\r\n",
        "no final newline": b"\n".join(lines),
        "blank lines": b"\n \t\n" + b"\n\r\n\n".join(lines) + b"\n\n",
        "escapes": json_lines(TEXTS),
    }


@pytest.mark.parametrize("variant", sorted(variants()))
@pytest.mark.parametrize("kind", ["", ".gz", ".zst", ".xz"])
@pytest.mark.parametrize("block_bytes", [1, 7, 40, 1 << 20])
def test_records_and_resumes_are_exact(
    tmp_path: Path, variant: str, kind: str, block_bytes: int
) -> None:
    data = variants()[variant]
    path = tmp_path / f"a.jsonl{kind}"
    path.write_bytes(compress(data, kind[1:], 3) if kind else data)
    rule = ShuffleRule(is_shuffled=False, block_bytes=block_bytes, stream_block_records=2)
    spec = make_spec([path], shuffle=rule)
    records = read_stream(make_loader(spec))
    assert [bytes(record.tokens).decode() for record in records] == TEXTS
    for at, record in enumerate(records):
        loader = make_loader(spec)
        loader.seek(record.block_key, record.index)
        assert read_stream(loader) == records[at:]


def test_bad_records_keep_their_place_and_name_their_byte(tmp_path: Path) -> None:
    good = json.dumps({"text": "good"}).encode()
    lines = [
        good,
        b'{"text": "\xe6A"}',
        b'{"text": "\\ud800"}',
        b'{"text": 5}',
        b'{"text": null}',
        b'{"other": "x"}',
        b'["text"]',
        b'{"text": NaN}',
        b'{"text": "x", "n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"text": "' + b"y" * 200 + b'"}',
        good,
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    spec = make_spec([path], shuffle=IN_ORDER, record_bytes_max=120_000, max_epochs=1)
    status = [record.status for record in read_stream(make_loader(spec))]
    assert status == [
        RecordStatus.OK,
        RecordStatus.BAD_ENCODING,
        RecordStatus.BAD_ENCODING,
        RecordStatus.FIELD_MISSING,
        RecordStatus.FIELD_MISSING,
        RecordStatus.FIELD_MISSING,
        RecordStatus.BAD_SYNTAX,
        RecordStatus.BAD_SYNTAX,
        RecordStatus.OK,
        RecordStatus.BAD_SYNTAX,
        RecordStatus.OK,
        RecordStatus.OK,
    ]
    loader = make_loader(spec)
    fault = next(draft.meta.fault for draft in read_chunks(loader) if draft.meta.fault)
    assert (
        fault
        == f"{path}: record at byte offset {len(good) + 1}: not UTF-8 at byte 10 of the record"
    )
    assert loader.statistics().faults == {"BAD_SYNTAX": 3, "BAD_ENCODING": 2, "FIELD_MISSING": 3}


@pytest.mark.parametrize("kind", ["", ".gz"])
def test_a_record_over_the_limit_is_one_counted_fault(tmp_path: Path, kind: str) -> None:
    data = json_lines(["a", "b" * 3_000_000, "c", "d" * 900])
    path = tmp_path / f"a.jsonl{kind}"
    path.write_bytes(compress(data, "gz") if kind else data)
    for block_bytes in (1 << 20, 300):
        rule = ShuffleRule(is_shuffled=False, block_bytes=block_bytes)
        spec = make_spec([path], shuffle=rule, record_bytes_max=1000)
        records = read_stream(make_loader(spec))
        assert texts_of(records) == ["a", "c", "d" * 900]
        assert statuses_of(records)[RecordStatus.TOO_LARGE] == 1
        assert records[1].status == RecordStatus.TOO_LARGE


def test_a_shard_that_changed_since_the_manifest_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["a", "b"]))
    spec = make_spec([path])
    path.write_bytes(json_lines(["a", "b", "c"]))
    assert statuses_of(read_stream(make_loader(spec))) == {RecordStatus.UNREADABLE: 1}
    path.unlink()  # as many as spend the budget: nothing tells how many they are
    assert statuses_of(read_stream(make_loader(spec))) == {RecordStatus.UNREADABLE: 11}


def test_several_fields_are_joined_by_a_newline() -> None:
    extract = text_extractor("question+answer")
    assert extract(RawRecord(0, b'{"answer": "4", "question": "2+2"}')).text == "2+2\n4"
    assert extract(RawRecord(0, b'{"question": "2+2"}')).status == RecordStatus.FIELD_MISSING


@pytest.mark.parametrize("raw", [b"NaN", b"[Infinity]", b"-Infinity", b"01", b"", b"\xff", b"{]"])
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(raw)
