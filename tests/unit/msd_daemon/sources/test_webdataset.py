"""WebDataset tars: which members are one record, what damage costs, how large one may be."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from webdataset import TarWriter

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import ShardFile
from msd_daemon.sources.index_build import build_index
from msd_daemon.sources.record import RawRecord, ReadMeter
from msd_daemon.sources.record_place import marked_place
from msd_daemon.sources.shard_file import open_stream
from msd_daemon.sources.webdataset import WebdatasetFormat, split_name
from tests.support.sources import (
    DATA,
    IN_ORDER,
    compress,
    make_loader,
    make_spec,
    needs_data,
    read_chunks,
    read_stream,
    statuses_of,
    texts_of,
)
from tests.support.tars import (
    END,
    few,
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


WHOLE = [sample(f"s{n}", {"json": b"{}", "jpg": bytes([n]) * 700}) for n in range(4)]


@pytest.mark.parametrize("cut", range(0, 4 * 2560 + 1, 128))
def test_a_cut_gives_whole_records_and_never_a_part(cut: int) -> None:
    data = b"".join(WHOLE)[:cut]
    records, error = read(data)
    full, rest = divmod(cut, 2560)
    header_left = rest - 1024  # of the second member
    assert [record.status for record in records] == [OK] * len(records)
    assert all(len(r.fields) == 3 for r in records[:full] if r.fields)
    if rest == 0 or header_left == 0:  # behind a whole member: an end as good as any
        assert (error, len(records)) == (None, full + (rest > 0))
    elif rest <= 512 and rest < 500 and full:  # whose header it is cannot be told
        assert error is not None
        assert len(records) == full - 1
        assert marked_place(error) == (full - 1) * 2560
    else:
        assert error is not None
        assert len(records) == full
        assert marked_place(error) == full * 2560
    if error is not None:
        assert read(data, marked_place(error) or 0)[0] == []


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


NAMED = [
    b"".join(
        pax([("path" if n % 2 else "mtime", f"s{n}.{extension}" if n % 2 else "1.5")])
        + file(f"s{n}.{extension}", b"x" * 10)
        for extension in ("json", "jpg", "txt")
    )
    for n in range(4)
]


@pytest.mark.parametrize("offset", [0, 2048, 4096])
@pytest.mark.parametrize("number", range(4))
def test_a_damaged_long_header_costs_the_record_it_belongs_to(offset: int, number: int) -> None:
    if offset == number == 0:
        return  # what begins so is no tar
    data = flip(b"".join(NAMED), number * 6144 + offset + 110) + END
    records, error = read(data)
    assert error is None
    assert [record.status == OK for record in records] == [n != number for n in range(4)]
    assert records[number].key == b"s%d" % number
    assert records[number].fault.startswith(f"sample 's{number}': the header at ")
    assert "lost too" not in records[number].fault


@pytest.mark.parametrize(
    ("place", "lost"),
    [
        (2560 + 110, "01"),  # first header of s1: whose it is cannot be told, its name may be wrong
        (2560 + 1, "01"),
        (2560 + 130, "01"),
        (2560 + 1024 + 110, "12"),  # second and last one
        (2560 + 1024 + 130, "12"),
        (3 * 2560 + 1024 + 110, "3"),  # nothing behind it: the end of the shard
    ],
)
def test_a_damaged_header_costs_the_records_it_may_belong_to(place: int, lost: str) -> None:
    data = flip(b"".join(WHOLE), place) + END
    records, error = read(data)
    good = [record.key for record in records if record.status == OK]
    assert good == [b"s%d" % n for n in range(4) if str(n) not in lost]
    if lost == "3":
        assert error is not None
        assert marked_place(error) == 3 * 2560
        return
    assert error is None
    (bad,) = [record for record in records if record.status == UNREADABLE]
    assert bad.place == int(lost[0]) * 2560
    assert bad.fault.endswith("; the sample behind it is lost too")
    for number, record in enumerate(records):
        assert read(data, record.place)[0] == records[number:]


def test_a_damaged_header_between_members_of_one_record_costs_it_alone() -> None:
    one = sample("a", {"json": b"1", "jpg": b"2", "txt": b"3"})
    records, error = read(sample("z", {"txt": b"0"}) + flip(one, 1024 + 110) + one + END)
    assert error is None
    assert [record.status for record in records] == [OK, UNREADABLE]
    other = sample("b", {"txt": b"4"})
    records, _ = read(flip(one, 1024 + 110) + other + END)
    assert [(record.key, record.status) for record in records] == [(b"a", UNREADABLE), (b"b", OK)]


def test_a_damaged_header_without_a_good_one_behind_ends_the_shard() -> None:
    records, error = read(WHOLE[0] + WHOLE[1] + b"#" * 2000)
    assert [record.key for record in records] == [b"s0"]
    assert error is not None
    assert "no good one behind it" in error.message
    assert marked_place(error) == 2560


def test_what_is_no_tar_is_damage_at_once() -> None:
    for data in (b"<html>", b"<html>" * 1000, b"\x89PNG" * 600):
        records, error = read(data)
        assert records == []
        assert error is not None
    assert read(b"") == ([], None)


def test_damage_of_the_stream_keeps_its_own_words_and_the_place_of_the_record() -> None:
    damage = CorruptRecordError("bits", byte_offset=3)
    records, error = read(b"".join(WHOLE)[:3100], damage=damage)
    assert [record.key for record in records] == [b"s0"]
    assert error is damage
    assert marked_place(error) == 2560


def h18_shard(number: int) -> bytes:
    return b"".join(
        sample(f"{number}-{at:02}", {"txt": b"%d" % at, "jpg": bytes([at]) * 5000})
        for at in range(20)
    ).ljust(143_360, b"\0")


def h18_source(folder: Path) -> list[Path]:
    paths = []
    for number in range(5):
        data = h18_shard(number)
        assert len(data) == 143_360
        paths.append(folder / f"shard-{number}.tar")
        paths[-1].write_bytes(data[:86_016] if number == 3 else data)
    return paths


def write_energon(folder: Path, name: str) -> None:
    (folder / ".nv-meta").mkdir()
    counts = {f"shard-{number}.tar": 20 for number in range(5)}
    if name.endswith("json"):
        text = json.dumps({"energon_version": "7.0", "shard_counts": counts})
    else:
        text = "shard_counts:\n" + "".join(f"  {key}: {one}\n" for key, one in counts.items())
    (folder / ".nv-meta" / name).write_text(text)


def write_wids(folder: Path) -> None:
    shards = [{"url": f"s3://b/shard-{number}.tar", "nsamples": 20} for number in range(5)]
    (folder / "shards.json").write_text(json.dumps({"wids_version": 1, "shardlist": shards}))
    (folder / "broken.json").write_text('{"shardlist"')


NOTES: dict[str, tuple[Callable[[Path], None], str]] = {
    "none": (lambda folder: None, "an unknown number of records is lost"),
    "energon": (lambda folder: write_energon(folder, ".info.json"), "8 of its 20 records are lost"),
    "energon yaml": (
        lambda folder: write_energon(folder, ".info.yaml"),
        "8 of its 20 records are lost",
    ),
    "wids": (write_wids, "8 of its 20 records are lost"),
}


@pytest.mark.parametrize("notes", NOTES)
@pytest.mark.parametrize("parts", [1, 4])
def test_h18_a_cut_shard_costs_its_lost_records_alone(
    tmp_path: Path, notes: str, parts: int
) -> None:
    paths = h18_source(tmp_path)
    NOTES[notes][0](tmp_path)
    spec = make_spec(paths, text_field="txt", max_epochs=1)
    faults: list[str] = []
    for part in range(parts):
        drafts = read_chunks(make_loader(spec, part, parts))
        faults += [draft.meta.fault for draft in drafts if UNREADABLE in draft.meta.status]
    blocks = [read_blocks(stream_spec(path, "webdataset")) for path in paths]
    counts = [statuses(block) for shard in blocks for block in shard]
    assert counts == [{OK: 20}] * 3 + [{OK: 12, UNREADABLE: 1}] + [{OK: 20}]
    lost = blocks[3][0][-1]
    assert lost.place == 12 * 6656 == 79_872
    assert lost.fault.startswith(str(paths[3]))
    assert "byte offset 80896" in lost.fault
    assert lost.fault.endswith(NOTES[notes][1])
    (fault,) = faults
    assert fault == lost.fault


def statuses(records: list[RawRecord]) -> dict[int, int]:
    found: dict[int, int] = {}
    for record in records:
        found[record.status] = found.get(record.status, 0) + 1
    return found


def test_h18_a_resume_and_other_loaders_see_the_same(tmp_path: Path) -> None:
    spec = make_spec(h18_source(tmp_path), text_field="txt", shuffle=few(8), max_epochs=1)
    whole = read_stream(make_loader(spec))
    assert statuses_of(whole) == {OK: 92, UNREADABLE: 1}
    for at in range(0, len(whole), 5):
        for index_dir in (None, tmp_path / "index"):
            loader = make_loader(spec, index_dir=index_dir)
            loader.seek(whole[at].block_key, whole[at].index)
            assert read_stream(loader) == whole[at:]
    merged = [one for part in range(4) for one in read_stream(make_loader(spec, part, 4))]
    assert sorted(merged) == sorted(whole)


def test_h19_offsets_keep_64_bits(tmp_path: Path) -> None:
    """First member 4 GiB + 1 MiB of holes on disk; the second one's data at 4,296,016,896."""
    import resource

    path = tmp_path / "big.tar"
    size = (4 << 30) + (1 << 20)
    content = b'{"second": true}'
    with path.open("wb") as opened:
        opened.write(header("a.bin", size))
        opened.truncate(512 + size)
        opened.seek(512 + size)
        opened.write(file("b.json", content) + END)
        assert opened.tell() - len(END) - 512 == 4_296_016_896
    assert os.stat(path).st_blocks * 512 <= 64 * 1024
    spec = stream_spec(path, "webdataset", shuffle=few(1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index_dir in (tmp_path / "index", tmp_path / "index", None):
        (first,), (second,) = read_blocks(spec, 0, index_dir)
        assert first.status == RecordStatus.TOO_LARGE
        assert first.fault == f"sample 'a': {size} bytes, record_bytes_max = {64 << 20}"
        assert second.place == 4_296_016_384
        assert second.fields == {"__key__": "b", "json": content}
        assert read_blocks(spec, 1, index_dir) == [[second]]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


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


def test_a_resume_reads_little_of_a_plain_tar(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(
        b"".join(sample(f"{n:05}", {"txt": b"t%d" % n, "bin": b"x" * 9000}) for n in range(600))
        + END
    )
    spec = make_spec([path], text_field="txt", shuffle=IN_ORDER, max_epochs=1)
    whole = read_stream(make_loader(spec, index_dir=tmp_path / "index"))
    assert texts_of(whole) == [f"t{n}" for n in range(600)]
    loader = make_loader(spec, index_dir=tmp_path / "index")
    loader.seek(whole[512].block_key, whole[512].index)
    assert read_stream(loader) == whole[512:]
    assert loader.statistics().read_bytes < 88 * 11_000 + (1 << 19)


@pytest.mark.parametrize("kind", ["", "gz", "zst"])
def test_an_index_that_lies_is_found_out(tmp_path: Path, kind: str) -> None:
    from msd_daemon.sources.index import IndexStore

    data = b"".join(sample(f"{n:03}", {"txt": b"%d" % n}) for n in range(64)) + END
    path = tmp_path / "a.tar"
    path.write_bytes(compress(data, kind, 4) if kind else data)
    spec = stream_spec(path, "webdataset", shuffle=few(8))
    folder = tmp_path / "index"
    whole = read_blocks(spec, 0, folder)
    (kept,) = folder.glob("*.msdindex")
    good = kept.read_bytes()
    index = IndexStore(folder, spec).load(spec.shards[0])
    assert index is not None
    for starts in (index.starts + 3, index.starts + 512, index.starts + 10**9):
        IndexStore(folder, spec).save(
            spec.shards[0], index.records, starts, list(index.seek_points)
        )
        assert read_blocks(spec, 3, folder) == whole[3:]
        assert kept.read_bytes() == good


def test_io_errors_of_the_machine_make_no_index(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"".join(WHOLE) + END)
    spec = stream_spec(path, "webdataset")
    path.unlink()
    ((record,),) = read_blocks(spec, 0, tmp_path / "index")
    assert record.status == UNREADABLE
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("kind", ["", "gz"])
def test_an_index_built_ahead_is_the_one_that_reading_makes(tmp_path: Path, kind: str) -> None:
    data = (
        b"".join(sample(f"{n:03}", {"txt": b"%d" % n, "txt.gz": b"bad"}) for n in range(70)) + END
    )
    path = tmp_path / f"a.tar{kind and '.'}{kind}"
    path.write_bytes(compress(data, kind, 3) if kind else data)
    spec = make_spec([path], shuffle=few(8))
    read_blocks(spec, 0, tmp_path / "read")
    built = build_index(spec, 0, tmp_path / "built")
    assert built is not None
    assert (built.records, built.starts.tolist()[:3]) == (70, [0, 16384, 32768])
    (read_file,) = (tmp_path / "read").iterdir()
    (built_file,) = (tmp_path / "built").iterdir()
    assert read_file.name == built_file.name
    assert read_file.read_bytes() == built_file.read_bytes()
