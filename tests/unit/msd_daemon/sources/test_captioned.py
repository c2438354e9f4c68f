"""Folders of captioned media: what is one record, what the frozen manifest holds them to."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, ShuffleRule, SourceSpec
from federation.model.recipe import SampleRecipe
from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources import folder_listing
from msd_daemon.sources.captioned import FolderFormat, open_folder
from msd_daemon.sources.folder_listing import describe_folder, list_folder
from msd_daemon.sources.record import RawRecord, ReadMeter
from tests.support.sources import DATA, make_loader, needs_data, read_stream, texts_of

OK = RecordStatus.OK
Files = dict[str, bytes | str]


def write(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def spec_of(shard: Shard, **fields: Any) -> SourceSpec:
    spec = SourceSpec("s", "folder", "none", "seekable", (shard,), "", recipe=SampleRecipe())
    return dataclasses.replace(spec, **fields)


def read(
    folder: Path, columns: tuple[str, ...] | None = None, **fields: Any
) -> tuple[list[RawRecord], FolderFormat]:
    spec = spec_of(describe_folder(folder), **fields)
    reader = open_folder(spec, columns, ReadMeter())
    blocks, records = reader.measure(spec.shards[0])
    found = [r for block in range(blocks) for r in reader.records(spec.shards[0], block)]
    assert len(found) == records
    assert [record.place for record in found] == list(range(records))
    assert list(reader.records(spec.shards[0], blocks)) == []
    return found, reader


BESIDE: Files = {
    "b.JPG": b"jpeg",
    "b.txt": "a caption\r\n\n",
    "a.x.png": b"png",
    "a.x.caption": "\ufeffmarked",
    "a.png": b"other",
    "a.json": '{"text": "of json", "tags": [1], "image": "no"}',
    "a.caption": "of caption",
    "d/c.wav": b"RIFF",
    "d/c.mp4": b"video",
    "lonely.txt": "no media",
    "README.md": "x",
    ".hidden.jpg": b"x",
    ".folder/x.jpg": b"x",
    "plain": b"x",
}


@pytest.mark.parametrize("block_records", [1, 2, 4096])
def test_files_of_one_stem_are_a_record(tmp_path: Path, block_records: int) -> None:
    write(tmp_path, BESIDE)
    (tmp_path / "loop").symlink_to(tmp_path)
    records, _ = read(tmp_path, shuffle=ShuffleRule(block_records=block_records))
    assert [record.fields for record in records] == [
        {"__key__": "a", "text": "of caption", "tags": [1], "image": b"other"},
        {"__key__": "a.x", "text": "marked", "image": b"png"},
        {"__key__": "b", "text": "a caption", "image": b"jpeg"},
        {"__key__": "d/c", "audio": b"RIFF", "video": b"video"},
    ]
    assert [record.key for record in records] == [b"a", b"a.x", b"b", b"d/c"]
    sizes = [5 + len(BESIDE["a.json"]) + 10, 3 + 9, 4 + 12, 4 + 5]
    assert [record.size_bytes for record in records] == sizes


def test_media_that_are_not_asked_for_are_not_read_but_count(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"x" * 900, "a.txt": "t"})
    (record,), reader = read(tmp_path, ("text",))
    assert record.fields == {"__key__": "a", "text": "t", "image": None}
    assert record.size_bytes == 901
    assert reader._meter.read_bytes == 1


def test_faults_are_their_records_own(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.jpg": b"1",
            "a.txt": b"\xff",
            "b.jpg": b"1",
            "b.json": "[1]",
            "c.jpg": b"1",
            "c.png": b"1",
            "d.jpg": b"x" * 2000,
            "e.jpg": b"1",
        },
    )
    records, _ = read(tmp_path, record_bytes_max=1000)
    assert [record.status for record in records] == [
        RecordStatus.BAD_ENCODING,
        RecordStatus.BAD_SYNTAX,
        RecordStatus.BAD_SYNTAX,
        RecordStatus.TOO_LARGE,
        OK,
    ]
    assert records[2].fault == "'c.png' is a second image of its stem"
    assert records[3].fault == "'d' has 2000 bytes, record_bytes_max = 1000"
    assert records[3].key == b"d"


def test_a_file_that_changed_behind_the_listing_is_its_records_fault(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": b"1", "b.jpg": b"2", "c.jpg": b"3"})
    shard = describe_folder(tmp_path)
    reader = open_folder(spec_of(shard), None, ReadMeter())
    assert reader.measure(shard) == (1, 3)
    (tmp_path / "a.jpg").write_bytes(b"longer")
    (tmp_path / "b.jpg").unlink()
    statuses = [record.status for record in reader.records(shard, 0)]
    assert statuses == [RecordStatus.UNREADABLE, RecordStatus.UNREADABLE, OK]


@pytest.mark.parametrize(
    "change",
    [
        {"c.jpg": b"new"},
        {"a.jpg": b"longer"},
        {"a.txt": b"new"},
    ],
)
def test_a_folder_that_changed_since_submit_is_damage(tmp_path: Path, change: Files) -> None:
    write(tmp_path, {"a.jpg": b"1", "b.jpg": b"2"})
    shard = describe_folder(tmp_path)
    spec = spec_of(shard, shuffle=ShuffleRule(block_records=1))
    write(tmp_path, change)
    reader = open_folder(spec, None, ReadMeter())
    with pytest.raises(CorruptRecordError, match="not those of the frozen manifest"):
        reader.measure(shard)
    with pytest.raises(CorruptRecordError, match="restore the folder"):
        list(reader.records(shard, 0))
    assert list(reader.records(shard, 1)) == []  # its loss is told once


def test_a_moved_folder_is_the_same_shard(tmp_path: Path) -> None:
    write(tmp_path / "a", BESIDE)
    before = describe_folder(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    write(tmp_path / "b", {"NOTES.md": "no part of it"})
    after = describe_folder(tmp_path / "b")
    assert (after.size_bytes, after.fingerprint) == (before.size_bytes, before.fingerprint)
    assert after.size_bytes == list_folder(str(tmp_path / "b")).size_bytes


def test_folders_that_cannot_be_shards_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        describe_folder(tmp_path / "none")
    write(tmp_path, {"a.txt": "t"})
    with pytest.raises(ConfigError, match="no image, sound or video"):
        describe_folder(tmp_path)
    monkeypatch.setattr(folder_listing, "FILES_MAX", 3)
    write(tmp_path, {f"{n}.jpg": b"" for n in range(4)})
    with pytest.raises(ConfigError, match="over 3 files"):
        describe_folder(tmp_path)


ROWS: list[dict[str, Any]] = [
    {"file_name": "d/x.jpg", "text": "first", "n": 1},
    {"file_name": "./a.wav", "text": "second", "n": 2},
    {"file_name": "d/x.jpg", "text": "the same again", "n": 3},
]


def with_metadata(folder: Path, kind: str, rows: list[Any]) -> Path:
    write(folder, {"d/x.jpg": b"jpeg", "a.wav": b"RIFF", "unnamed.jpg": b"no row"})
    if kind == "csv":
        lines = ["file_name,text,n", *(",".join(map(str, row.values())) for row in rows)]
        return write(folder, {"metadata.csv": "\n".join(lines) + "\n"})
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    return write(folder, {"metadata.jsonl": text})


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("block_records", [1, 2, 4096])
def test_rows_of_a_metadata_file_are_the_records(
    tmp_path: Path, kind: str, block_records: int
) -> None:
    with_metadata(tmp_path, kind, ROWS)
    records, _ = read(tmp_path, shuffle=ShuffleRule(block_records=block_records))
    numbers: list[Any] = [1, 2, 3] if kind == "jsonl" else ["1", "2", "3"]
    assert [record.fields for record in records] == [
        {"__key__": "d/x", **ROWS[0], "n": numbers[0], "image": b"jpeg"},
        {"__key__": "a", **ROWS[1], "n": numbers[1], "audio": b"RIFF"},
        {"__key__": "d/x", **ROWS[2], "n": numbers[2], "image": b"jpeg"},
    ]
    assert [record.key for record in records] == [b"d/x", b"a", b"d/x"]


@pytest.mark.parametrize(
    "name",
    ["../secret.jpg", "/etc/hostname", "gone.jpg", "a\0.jpg", "\ud800.jpg", "metadata.jsonl", ""],
)
def test_rows_that_name_no_file_of_the_folder_are_faults(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"secret.jpg": b"outside"})
    folder = with_metadata(tmp_path / "in", "jsonl", [{"file_name": name}, ROWS[0]])
    records, _ = read(folder)
    status = RecordStatus.BAD_ENCODING if name == "\ud800.jpg" else RecordStatus.UNREADABLE
    assert [record.status for record in records] == [status, OK]


def test_bad_rows_are_faults_of_their_own(tmp_path: Path) -> None:
    folder = with_metadata(tmp_path, "jsonl", [ROWS[0], "{", {"text": "no name"}, ROWS[1]])
    records, _ = read(folder)
    assert [record.status for record in records] == [
        OK,
        RecordStatus.BAD_SYNTAX,
        RecordStatus.FIELD_MISSING,
        OK,
    ]
    assert records[1].fault.startswith("metadata.jsonl, byte offset ")


def test_another_metadata_file_of_equal_size_is_another_shard(tmp_path: Path) -> None:
    with_metadata(tmp_path, "jsonl", ROWS)
    before = describe_folder(tmp_path)
    path = tmp_path / "metadata.jsonl"
    path.write_bytes(path.read_bytes().replace(b"first", b"worst"))
    after = describe_folder(tmp_path)
    assert after.size_bytes == before.size_bytes
    assert after.fingerprint != before.fingerprint


def test_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg"))).write_bytes(b"1")
    (record,), _ = read(tmp_path)
    assert record.fields == {"__key__": "\\xff", "image": b"1"}


@pytest.mark.parametrize("kind", ["", "jsonl"])
def test_a_source_of_folders_is_one_stream(tmp_path: Path, kind: str) -> None:
    folders = []
    for number in range(3):
        folder = tmp_path / f"f{number}"
        names = [f"{number}-{at:02}" for at in range(20)]
        write(folder, {f"{name}.jpg": b"jpeg" for name in names})
        if kind:
            rows = [json.dumps({"file_name": f"{name}.jpg", "text": name}) for name in names]
            write(folder, {"metadata.jsonl": "\n".join(rows)})
        else:
            write(folder, {f"{name}.txt": name for name in names})
        folders.append(describe_folder(folder))
    spec = spec_of(folders[0], shards=tuple(folders), max_epochs=1)
    spec = dataclasses.replace(spec, shuffle=ShuffleRule(block_records=3, window_records=2))
    whole = read_stream(make_loader(spec, index_dir=tmp_path / "index"))
    assert sorted(texts_of(whole)) == sorted(f"{n}-{at:02}" for n in range(3) for at in range(20))
    merged = [one for part in range(3) for one in read_stream(make_loader(spec, part, 3))]
    assert sorted(merged) == sorted(whole)
    for at in range(0, 60, 7):
        loader = make_loader(spec)
        loader.seek(whole[at].block_key, whole[at].index)
        assert read_stream(loader) == whole[at:]


@needs_data
def test_the_handed_images_are_read_byte_by_byte() -> None:
    folder = DATA / "images"
    records, _ = read(folder)
    good = [record for record in records if record.fields]
    assert len(good) >= 10
    for record in good:
        assert record.fields is not None
        (content,) = [v for k, v in record.fields.items() if k in ("image", "audio", "video")]
        stem = folder / record.fields["__key__"]
        assert content in [path.read_bytes() for path in stem.parent.glob(stem.name + ".*")]
