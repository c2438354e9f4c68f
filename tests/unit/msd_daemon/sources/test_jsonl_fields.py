"""JSONL with fields: the lines, blocks, places and faults of JSONL read for its texts alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, ShuffleRule, SourceSpec
from federation.model.recipe import InterleaveRule, SampleRecipe
from msd_daemon.sources.jsonl import JsonlFormat
from msd_daemon.sources.jsonl_fields import (
    JsonlBlocks,
    JsonlStream,
    LineFields,
    open_jsonl,
    open_nemo_manifest,
)
from msd_daemon.sources.record import MediaPath, RawRecord, ReadMeter
from tests.support.sources import DATA, make_loader, make_spec, needs_data, read_stream
from tests.support.tars import few, read_blocks, stream_spec

OK = RecordStatus.OK
BAD_SYNTAX = RecordStatus.BAD_SYNTAX
BAD_ENCODING = RecordStatus.BAD_ENCODING


def plain_spec(path: Path, recipe: SampleRecipe | None = None, **fields: Any) -> SourceSpec:
    shard = Shard(str(path), path.stat().st_size, "0" * 32)
    spec = SourceSpec("s", "jsonl", "none", "seekable", (shard,), "")
    return dataclasses.replace(spec, recipe=recipe or SampleRecipe(), **fields)


def read_plain(spec: SourceSpec, columns: tuple[str, ...] | None = None) -> list[RawRecord]:
    reader = open_jsonl(spec, columns, ReadMeter())
    assert isinstance(reader, JsonlBlocks)
    count, records = reader.measure(spec.shards[0])
    assert records == -1
    return [r for block in range(count) for r in reader.records(spec.shards[0], block)]


def write(path: Path, *lines: bytes | dict[str, Any]) -> Path:
    raw = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


LINES: list[bytes | dict[str, Any]] = [
    {"text": "a", "n": 1 << 62, "deep": {"list": [1.5, None, True]}},
    b'\xef\xbb\xbf{"text": "mark"}\r',
    b"  ",
    b"{",
    b"[1]",
    b'{"text": "\xff"}',
    b'{"text": "\\ud800"}',
    b'{"other": "\\udc00x", "text": "t"}',
    b'{"text": "\\ud83d\\ude00"}',
    b'{"text": NaN}',
    {"text": "x" * 3000},
    {"text": "end"},
]


@pytest.mark.parametrize("block_bytes", [1, 40, 1 << 20])
def test_places_raws_and_blocks_are_those_of_texts(tmp_path: Path, block_bytes: int) -> None:
    path = write(tmp_path / "a.jsonl", *LINES)
    rule = ShuffleRule(block_bytes=block_bytes)
    spec = plain_spec(path, shuffle=rule, record_bytes_max=2000)
    reader, lines = open_jsonl(spec, None, ReadMeter()), JsonlFormat(spec, ReadMeter())
    assert isinstance(reader, JsonlBlocks)
    shard = spec.shards[0]
    assert reader.measure(shard)[0] == lines.block_count(shard)
    for block in range(lines.block_count(shard)):
        ours, theirs = list(reader.records(shard, block)), list(lines.records(shard, block))
        assert [(r.place, r.raw, r.size_bytes) for r in ours] == [
            (r.place, r.raw, r.size_bytes) for r in theirs
        ]


def test_faults_are_those_of_texts_and_fields_are_the_objects(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *LINES)
    spec = plain_spec(path, record_bytes_max=2000)
    records = read_plain(spec)
    statuses = [OK, OK, *[BAD_SYNTAX] * 2, *[BAD_ENCODING] * 3, OK, BAD_SYNTAX]
    assert [r.status for r in records] == [*statuses, RecordStatus.TOO_LARGE, OK]
    assert records[0].fields == LINES[0]
    assert type((records[0].fields or {})["n"]) is int
    assert [(r.fields or {}).get("text") for r in records if not r.status] == [
        "a",
        "mark",
        "\U0001f600",
        "end",
    ]
    extract = JsonlFormat(spec, ReadMeter()).extract
    for record in read_plain(spec, ("text",)):
        if record.status != RecordStatus.TOO_LARGE:
            assert record.status == extract(RawRecord(0, record.raw)).status


def test_only_fields_that_are_asked_for_must_be_encodable(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"a": {"b": ["\\ud800"]}, "c": "x"}')
    assert read_plain(plain_spec(path), ("c",))[0].status == OK
    assert read_plain(plain_spec(path), ("a.b",))[0].status == BAD_ENCODING
    assert read_plain(plain_spec(path))[0].fault == "a lone surrogate escape in field 'a'"


def test_compressed_lines_are_a_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *LINES)
    plain = [(r.place, r.raw, r.status, r.fields) for r in read_plain(plain_spec(path))]
    spec = stream_spec(path, "jsonl", shuffle=few(3))
    assert isinstance(open_jsonl(spec, None, ReadMeter()), JsonlStream)
    records = [r for block in read_blocks(spec) for r in block]
    assert [(r.place, r.raw, r.status, r.fields) for r in records] == plain


def test_media_columns_are_paths(tmp_path: Path) -> None:
    line = {
        "img": "a.jpg",
        "imgs": ["b.jpg", None, {"path": "c.jpg"}],
        "alt": 5,
        "audio": "d.wav",
        "key": "e.jpg",
        "text": "t",
    }
    path = write(tmp_path / "a.jsonl", line)
    recipe = SampleRecipe(image_field="img;imgs;alt;key;*.png", audio_field="audio")
    (record,) = read_plain(plain_spec(path, recipe, key_field="key"))
    assert record.fields == line | {
        "img": MediaPath("a.jpg"),
        "imgs": [MediaPath("b.jpg"), None, {"path": "c.jpg"}],
        "audio": MediaPath("d.wav"),
    }
    interleave = SampleRecipe(interleave=InterleaveRule("text", "imgs"))
    (record,) = read_plain(plain_spec(path, interleave))
    assert (record.fields or {})["imgs"][0] == MediaPath("b.jpg")


def test_nemo_manifests_name_sounds(tmp_path: Path) -> None:
    line = {"audio_filepath": "wavs/a.wav", "offset": 1.25, "duration": 3, "text": "hello"}
    path = write(tmp_path / "manifest.json", line, b"{")
    spec = dataclasses.replace(plain_spec(path), format="nemo_manifest")
    reader = open_nemo_manifest(spec, None, ReadMeter())
    assert isinstance(reader, JsonlBlocks)
    good, bad = reader.records(spec.shards[0], 0)
    assert good.fields == line | {"audio_filepath": MediaPath("wavs/a.wav")}
    assert bad.status == BAD_SYNTAX
    streamed = read_blocks(stream_spec(path, "nemo_manifest"))
    assert [r.fields for r in streamed[0]] == [good.fields, None]


def test_a_shard_that_is_gone_is_one_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *LINES)
    spec = plain_spec(path, shuffle=ShuffleRule(block_bytes=40))
    path.unlink()
    (record,) = read_plain(spec)
    assert record.status == RecordStatus.UNREADABLE


def test_fields_of_lines_are_those_that_a_recipe_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": f"t{n}", "q": n} for n in range(50)))
    plain = make_spec([path], shuffle=ShuffleRule(block_bytes=200), max_epochs=1)
    with_recipe = dataclasses.replace(plain, recipe=SampleRecipe())
    assert read_stream(make_loader(with_recipe)) == read_stream(make_loader(plain))


@needs_data
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("blank_lines.jsonl", 30, 0),
        ("bom_crlf.jsonl", 50, 0),
        ("mixed_bad_lines.jsonl", 600, 60),
        ("no_final_newline_cut.jsonl", 175, 1),
    ],
)
def test_broken_files_cost_what_their_readme_states(name: str, good: int, bad: int) -> None:
    path = DATA / "broken" / "json" / name
    for records in (
        read_plain(plain_spec(path)),
        [r for block in read_blocks(stream_spec(path, "jsonl")) for r in block],
    ):
        assert sum(r.status == OK for r in records) == good
        assert sum(r.status in (BAD_SYNTAX, BAD_ENCODING) for r in records) == bad
        if bad == 60:
            expected = json.loads((DATA / "broken" / "expected.json").read_text())
            lines = expected[f"json/{name}"]["expected"]["bad_lines"]
            assert [at for at, r in enumerate(records, 1) if r.status] == lines


@needs_data
@pytest.mark.parametrize("name", ["pretty_array.json", "utf16le.jsonl"])
def test_what_is_not_jsonl_is_faults_only(name: str) -> None:
    records = read_plain(plain_spec(DATA / "broken" / "json" / name))
    assert {r.status for r in records} <= {BAD_SYNTAX, BAD_ENCODING}


@needs_data
def test_the_conformance_suite_is_taken_and_refused_as_it_says() -> None:
    path = DATA / "broken" / "json" / "jsontestsuite_test_parsing.tar.gz"
    fields = [r for block in read_blocks(stream_spec(path, "webdataset")) for r in block]
    assert len(fields) >= 300  # each file of the suite is a record of the tar
    lines = LineFields(stream_spec(path, "jsonl"), ())
    wrong = []
    for record in fields:
        name = str(record.key).rsplit("/", 1)[-1]
        content = next(v for k, v in (record.fields or {}).items() if k.endswith("json"))
        if name[0] not in "yn" or b"\n" in content.strip():
            continue
        line = RawRecord(0, b'{"value": ' + content + b"}")
        if (lines.fill(line).status == OK) != (name[0] == "y"):
            wrong.append((name, content[:40]))
    assert wrong == []
