"""WebDataset tars that are cut or damaged: whole records before it, their number lost, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.record import RawRecord
from msd_daemon.sources.record_place import marked_place
from tests.support.sources import (
    DATA,
    make_loader,
    make_spec,
    read_chunks,
    read_stream,
    statuses_of,
)
from tests.support.tars import (
    END,
    WHOLE,
    few,
    file,
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
