"""WebDataset tars: which members are one record, what damage costs, how large one may be."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from webdataset import TarWriter

from federation.model.chunk import RecordStatus
from msd_daemon.sources.byte_stream import ShardFile
from msd_daemon.sources.record import RawRecord, ReadMeter
from msd_daemon.sources.shard_file import open_stream
from msd_daemon.sources.webdataset import WebdatasetFormat, split_name
from tests.support.sources import (
    DATA,
    IN_ORDER,
    make_loader,
    make_spec,
    needs_data,
    read_chunks,
)
from tests.support.tars import (
    END,
    file,
    header,
    pad,
    pax,
    read,
    read_blocks,
    sample,
    stream_spec,
)

OK = RecordStatus.OK
UNREADABLE = RecordStatus.UNREADABLE
WDS = DATA / "shards"
BROKEN = DATA / "broken" / "derived"


def read_path(path: Path, **arguments: Any) -> list[RawRecord]:
    opened = ShardFile(path, ReadMeter())
    try:
        reader = WebdatasetFormat(arguments.pop("limit", 64 << 20), arguments.pop("columns", None))
        return list(reader.records(open_stream(opened), 0))
    finally:
        opened.close()


def keys_and_extensions(records: list[RawRecord]) -> list[tuple[str, list[str]]]:
    return [
        (r.fields["__key__"], [n for n in r.fields if n != "__key__"]) for r in records if r.fields
    ]


def expected_counts() -> dict[str, int]:
    rows = json.loads((WDS / "expected.json").read_text())
    return {
        name: checks["verify"]["webdataset_keys"]
        for row in rows.values()
        for name, checks in (row.get("files") or {}).items()
        if name.endswith((".tar", ".tgz")) and checks["verify"]
    }


@needs_data
def test_every_good_shard_has_the_records_that_its_readme_states() -> None:
    counts = expected_counts()
    assert len(counts) == 9
    for name, count in counts.items():
        records = read_path(WDS / name)
        assert [record.status for record in records] == [OK] * count, name
        assert [record.place % 512 for record in records] == [0] * count


@needs_data
def test_images_and_captions_are_those_of_the_expected_list() -> None:
    lines = (WDS / "vlm_wds" / "expected.jsonl").read_text().splitlines()
    expected = [json.loads(line) for line in lines]
    for name in ("anthro-000000.tar", "anthro-000001.tar", "anthro-000002.tar"):
        records = read_path(WDS / "vlm_wds" / name)
        rows = [row for row in expected if row["tar"] == name]
        assert [(row["key"], sorted(row["members"])) for row in rows] == [
            (key, sorted(names)) for key, names in keys_and_extensions(records)
        ]
        for row, record in zip(rows, records, strict=True):
            assert record.fields is not None
            assert record.key == row["key"].encode()
            images = [record.fields[m] for m in row["members"] if m.endswith(("jpg", "png"))]
            hashes = [hashlib.sha256(image).hexdigest() for image in images]
            assert hashes == row.get("image_sha256", [row.get("sha256")])
            if "txt" in row["members"]:
                assert record.fields["txt"].decode() == row["alt"]
            size = sum(len(value) for name, value in record.fields.items() if name != "__key__")
            assert record.fields_bytes == size == record.size_bytes


@needs_data
def test_the_dirty_shard_groups_as_its_list_says() -> None:
    """20 records; webdataset 1.0.2 makes 22 of it, as `./` parts two of them."""
    lines = (WDS / "vlm_wds" / "expected.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if '"anthro-000003.tar"' in line]
    records = read_path(WDS / "vlm_wds" / "anthro-000003.tar")
    for row, record in zip(rows, records, strict=True):
        assert record.fields is not None
        parts = [split_name(name.encode()) for name in row["names"]]
        assert [record.key] * len(parts) == [part[0] for part in parts if part]
        names = [part[1] for part in parts if part]
        assert list(record.fields) == ["__key__", *names]
        assert hashlib.sha256(record.fields[names[0]]).hexdigest() == row["sha256"]
    ours = keys_and_extensions(records)
    assert ours[3] == ("d0003", ["jpg", "txt", "json"])
    assert [key for key, _ in ours].count("img") == 3
    reference = json.loads((WDS / "expected.json").read_text())["_per_sample"]
    theirs = reference["webdataset_reference_anthro-000003"]["keys"]
    assert [key for key, _ in ours] == [key for key in theirs if not key.startswith("./")]


@needs_data
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("fsdd_cut.tar", {OK: 45, UNREADABLE: 1}),
        ("fsdd_no_eof_blocks.tar", {OK: 80}),
        ("fsdd_concatenated.tar", {OK: 180}),
        ("fsdd_badheader.tar", {OK: 79, UNREADABLE: 1}),
    ],
)
def test_broken_shards_cost_what_their_readme_states(name: str, counts: dict[int, int]) -> None:
    field = "cls;mp" if "concat" in name else "cls"
    spec = make_spec([BROKEN / name], shuffle=IN_ORDER, text_field=field)
    loader = make_loader(spec)
    drafts = read_chunks(loader)
    seen: dict[int, int] = {}
    for draft in drafts:
        for status in draft.meta.status.tolist():
            seen[status] = seen.get(status, 0) + 1
    if "concat" in name:
        assert sum(seen.values()) == 180  # msgpack is no text
        return
    assert seen == counts
    faults = [draft.meta.fault for draft in drafts if draft.meta.fault]
    if counts.get(UNREADABLE):
        assert str(BROKEN / name) in faults[0]
        where = {"fsdd_cut.tar": "585728", "fsdd_badheader.tar": "522240"}[name]
        assert where in faults[0]
        if "badheader" in name:
            assert "'5_theo_7'" in faults[0]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.txt", ("a", "txt")),
        ("./a.TXT", ("a", "txt")),
        (".//./a.txt", ("a", "txt")),
        ("d.x/a.0.JPG", ("d.x/a", "0.jpg")),
        ("a.seg.png", ("a", "seg.png")),
        ("/abs/a.txt", ("/abs/a", "txt")),
        ("../a.txt", ("../a", "txt")),
        ("a", None),
        ("d.x/a", None),
        ("a.", None),
        (".hidden.txt", None),
        ("d/._a.jpg", None),
        ("__meta__/a.txt", None),
        ("./__x__", None),
        ("d/__x__/a.txt", ("d/__x__/a", "txt")),
        ("__.txt", ("__", "txt")),
        ("", None),
    ],
)
def test_names(name: str, parts: tuple[str, str] | None) -> None:
    found = split_name(name.encode())
    assert found == (None if parts is None else (parts[0].encode(), parts[1]))


def test_names_that_are_not_utf8_are_escaped_and_told_apart() -> None:
    records, error = read(file(b"\xff.txt", b"1") + file(b"\xfe.txt", b"2") + END)
    assert error is None
    assert [(r.key, r.fields["__key__"]) for r in records if r.fields] == [
        (b"\xff", "\\xff"),
        (b"\xfe", "\\xfe"),
    ]


def test_members_that_are_no_part_of_a_record_do_not_part_one() -> None:
    data = (
        file("a.txt", b"1")
        + header("d/", 0, b"5")
        + file("README", b"x" * 700)
        + header("a.link", 0, b"2")
        + header("a.hard", 0, b"1")
        + header("a.dev", 0, b"3")
        + file("a.jpg", b"2")
        + END
    )
    records, error = read(data)
    assert (error, len(records)) == (None, 1)
    assert records[0].fields == {"__key__": "a", "txt": b"1", "jpg": b"2"}


def test_a_key_that_comes_again_is_another_record() -> None:
    a, b = sample("a", {"txt": b"1"}), sample("b", {"txt": b"2"})
    records, _ = read(a + b + a + END + a + END)
    assert [record.key for record in records] == [b"a", b"b", b"a", b"a"]
    assert [record.place for record in records] == [0, 1024, 2048, 4096]


def test_places_lie_before_long_headers() -> None:
    data = file("a.txt", b"1") + pax([("path", "b.txt")]) + file("x", b"2") + END
    records, _ = read(data)
    assert [(record.key, record.place) for record in records] == [(b"a", 0), (b"b", 1024)]
    assert read(data, 1024)[0] == records[1:]


def test_an_extension_that_stands_twice_is_a_fault_of_its_record_alone() -> None:
    data = sample("a", {"jpg": b"1", "JPG": b"2", "txt": b"3"}) + sample("b", {"txt": b"4"}) + END
    records, error = read(data)
    assert [record.status for record in records] == [RecordStatus.BAD_SYNTAX, OK]
    assert "'a.JPG' stands in it twice" in records[0].fault
    assert (records[0].key, error) == (b"a", None)


def test_packed_members_are_unpacked_within_the_limit() -> None:
    packed = gzip.compress(b"text") + gzip.compress(b" more")
    bomb = gzip.compress(bytes(3 << 20))
    data = (
        sample("a", {"txt.gz": packed})
        + sample("b", {"txt.gz": bomb})
        + sample("c", {"txt.gz": packed[:-3]})
        + sample("d", {"txt.gz": b""})
        + sample("e", {"txt": b"1", "txt.gz": packed})
        + sample("f", {"gz": packed})
    )
    records, error = read(data)
    assert error is None
    assert records[0].fields == {"__key__": "a", "txt": b"text more"}
    assert [record.status for record in records] == [
        OK,
        RecordStatus.TOO_LARGE,
        UNREADABLE,
        UNREADABLE,
        RecordStatus.BAD_SYNTAX,
        OK,
    ]
    assert read(data, columns=("txt.gz",))[0][0].fields == {"__key__": "a", "txt.gz": b"text more"}


def test_what_is_not_asked_for_is_not_read_but_counts() -> None:
    data = sample("a", {"json": b"{}", "jpg": b"x" * 900, "txt": b"t"}) + END
    every, some = read(data)[0][0], read(data, columns=("json.caption", "txt"))[0][0]
    assert some.fields == {"__key__": "a", "json": b"{}", "txt": b"t"}
    assert every.size_bytes == some.size_bytes == 903
    limited = read(data, columns=("txt",), limit=902)[0][0]
    assert limited.status == RecordStatus.TOO_LARGE


def test_a_record_over_the_limit_is_one_fault_that_names_it() -> None:
    data = (
        sample("a", {"txt": b"1"})
        + sample("big", {"bin": b"x" * 600_000, "txt": b"2", "jpg": b"y" * 600_000})
        + sample("c", {"txt": b"3"})
        + END
    )
    records, error = read(data)
    assert [record.status for record in records] == [OK, RecordStatus.TOO_LARGE, OK]
    assert records[1].fault == "sample 'big': 1200001 bytes, record_bytes_max = 1048576"
    assert (records[1].size_bytes, records[1].key, error) == (0, b"big", None)


def test_countless_members_and_endless_names_of_one_record_are_bounded() -> None:
    many = b"".join(header(f"a.{number}") for number in range(70_000))
    records, _ = read(many + sample("b", {"txt": b"1"}), piece_bytes=1 << 20)
    assert [record.status for record in records] == [RecordStatus.TOO_LARGE, OK]
    long_name = b"a." + b"n" * 1_000_000
    data = b"".join(
        header("L", len(long_name), b"L") + pad(long_name[:-1] + b"%d" % at) + file("x", b"")
        for at in range(6)
    )
    records, _ = read(data, piece_bytes=1 << 20)
    assert [record.status for record in records] == [RecordStatus.TOO_LARGE]


def test_what_webdataset_writes_is_read_back_exactly(tmp_path: Path) -> None:
    samples = [
        {
            "__key__": f"dir/{number:05}",
            "txt": f"text {number} é",
            "json": {"n": number},
            "seg.png": os.urandom(number * 7),
            "0.jpg": os.urandom(3),
        }
        for number in range(600)
    ]
    for name in ("a.tar", "b.tar.gz"):
        path = tmp_path / name
        with TarWriter(str(path), encoder=True) as writer:
            for one in samples:
                writer.write(
                    {k: v for k, v in one.items() if not k.endswith(("png", "jpg"))}
                    | {"seg.bin": one["seg.png"], "0.bin": one["0.jpg"]}
                )
        for index_dir in (tmp_path / "index", tmp_path / "index"):
            blocks = read_blocks(stream_spec(path, "webdataset"), 0, index_dir)
            assert [len(block) for block in blocks] == [256, 256, 88]
        records = [record for block in blocks for record in block]
        for one, record in zip(samples, records, strict=True):
            assert record.fields == {
                "__key__": one["__key__"],
                "txt": one["txt"].encode(),
                "json": json.dumps(one["json"]).encode(),
                "seg.bin": one["seg.png"],
                "0.bin": one["0.jpg"],
            }
