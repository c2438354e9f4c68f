"""The tar walker: every kind of header that writers make, and those that only attackers make."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import ShardFile
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_stream
from msd_daemon.sources.stream_cursor import StreamCursor
from msd_daemon.sources.tar_header import META_BYTES_MAX, TarFieldError, read_number, read_pax
from msd_daemon.sources.tar_members import ArchiveEnd, Member, TarMembers, Wound
from msd_daemon.sources.tar_sparse import MapInData, SparseMap, decimal
from tests.support.sources import DATA, needs_data
from tests.support.tars import END, Pieces, file, header, pad, pax, tarfile_files

LONG = "folder/" * 30 + "name.txt"


def walk(data: bytes, piece_bytes: int = 700) -> list[Member | Wound | ArchiveEnd]:
    return walk_members(TarMembers(StreamCursor(Pieces(data, piece_bytes), 0)))[0]


def walk_members(
    members: TarMembers,
) -> tuple[list[Member | Wound | ArchiveEnd], list[tuple[bytes, bytes]]]:
    found, files = [], []
    while (one := members.next()) is not None:
        found.append(one)
        if isinstance(one, Member):
            if one.is_file and not one.fault:
                files.append((one.name, members.read(one)))
            else:
                members.skip(one)
    return found, files


def files_of(data: bytes, piece_bytes: int = 700) -> list[tuple[bytes, bytes]]:
    return walk_members(TarMembers(StreamCursor(Pieces(data, piece_bytes), 0)))[1]


@pytest.mark.parametrize("kind", ["USTAR_FORMAT", "GNU_FORMAT", "PAX_FORMAT"])
@pytest.mark.parametrize("piece_bytes", [1, 511, 512, 513, 100_000])
def test_what_tarfile_writes_is_read(kind: str, piece_bytes: int) -> None:
    made = io.BytesIO()
    names = ["a.txt", "d/" * 45 + "b.txt"] + ([] if kind == "USTAR_FORMAT" else [LONG, "é中.txt"])
    with tarfile.open(fileobj=made, mode="w", format=getattr(tarfile, kind)) as archive:
        for number, name in enumerate(names):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = 600 * number, 1.5
            archive.addfile(entry, io.BytesIO(bytes([number]) * entry.size))
            link = tarfile.TarInfo(name + ".link")
            link.type, link.linkname = tarfile.SYMTYPE, LONG if kind != "USTAR_FORMAT" else "x"
            archive.addfile(link)
    data = made.getvalue()
    assert files_of(data, piece_bytes) == tarfile_files(data)
    assert [name.decode() for name, _ in files_of(data)] == names


@needs_data
@pytest.mark.parametrize(
    ("name", "members", "files", "size_bytes"),
    [
        ("7z_long_path.tar", 2, 1, 0),
        ("biguid_gnu.tar", 1, 1, 14),
        ("directory.tar", 3, 1, 2),
        ("duplicate_dirs.tar", 2, 0, 0),
        ("empty_filename.tar", 1, 0, 0),
        ("file_times.tar", 1, 1, 0),
        ("link.tar", 2, 1, 14),
        ("pax.tar", 2, 2, 3150),
        ("pax2.tar", 5, 2, 32),
        ("pax_size.tar", 1, 1, 4),
        ("reading_files.tar", 2, 2, 44),
        ("simple.tar", 3, 3, 0),
        ("simple_missing_last_header.tar", 3, 3, 0),
        ("spaces.tar", 1, 1, 2),
        ("sparse.tar", 4, 4, 77646),
        ("testtar.tar", 39, 26, 570300),
        ("testtar.tar.xz", 1, 1, 0),
    ],
)
def test_odd_tars_have_the_members_that_their_readme_states(
    name: str, members: int, files: int, size_bytes: int
) -> None:
    path = DATA / "broken" / "tar_odd" / name
    opened = ShardFile(path, ReadMeter())
    found, contents = walk_members(TarMembers(StreamCursor(open_stream(opened), 0)))
    opened.close()
    kept = [one for one in found if isinstance(one, Member)]
    assert (len(kept), len(contents)) == (members, files)
    assert sum(len(content) for _, content in contents) == size_bytes
    assert [one.fault for one in kept if one.fault] == []
    if path.suffix == ".tar":
        expected = tarfile_files(path.read_bytes())
        assert [content for _, content in contents] == [content for _, content in expected]


@needs_data
def test_a_header_that_loops_in_naive_readers_is_damage() -> None:
    data = (DATA / "broken" / "tar_odd" / "recursion.tar").read_bytes()
    with pytest.raises(CorruptRecordError, match="PAX record at byte 0 is none"):
        walk(data)


def test_names_of_all_kinds_in_their_order_of_precedence() -> None:
    long_name = header("././@LongLink", len(LONG) + 1, b"L") + pad(LONG.encode() + b"\0")
    long_link = header("././@LongLink", 3, b"K") + pad(b"ab\0")
    data = (
        long_link
        + long_name
        + file("short", b"1")
        + pax([("path", "of/pax"), ("comment", "x")])
        + file("short", b"2")
        + file("in-prefix", b"3", prefix=b"folder")
        + file("old", b"4", kind=b"\0", magic=b"", prefix=b"no prefix in v7")
        + file("contiguous", b"5", kind=b"7")
        + pax([("path", "global")], b"g")
        + file("plain", b"6")
        + long_name * 3  # the last one holds, however many there are
        + header("././@LongLink", 4, b"L")
        + pad(b"last")
        + file("short", b"7")
    )
    assert files_of(data) == [
        (LONG.encode(), b"1"),
        (b"of/pax", b"2"),
        (b"folder/in-prefix", b"3"),
        (b"old", b"4"),
        (b"contiguous", b"5"),
        (b"plain", b"6"),
        (b"last", b"7"),
    ]


def test_what_is_no_file_is_passed_over_with_its_data_or_without() -> None:
    data = (
        b"".join(header("x", 9999, kind) for kind in (b"1", b"2", b"3", b"4", b"5", b"6"))
        + file("V", b"label", kind=b"V")
        + header("old-folder/", 700, b"\0", magic=b"")
        + file("end", b"e")
    )
    assert files_of(data) == [(b"end", b"e")]


def test_sizes_beyond_octal_digits() -> None:
    big = (9 << 30).to_bytes(11, "big")
    found = TarMembers(StreamCursor(Pieces(header("a", b"\x80" + big)), 0)).next()
    assert isinstance(found, Member)
    assert found.size_bytes == 9 << 30
    data = pax([("size", str(1 << 40))]) + header("a")
    found = TarMembers(StreamCursor(Pieces(data), 0)).next()
    assert isinstance(found, Member)
    assert (found.offset, found.size_bytes) == (0, 1 << 40)


@pytest.mark.parametrize(
    "field",
    [
        b"\xff" * 12,  # -1 in base 256
        b"\x80" + b"\xff" * 11,  # beyond 63 bits
        b"-0000000001\0",
        b"00000000009\0",
        b"0x000000001\0",
    ],
)
def test_sizes_that_are_none_are_damage(field: bytes) -> None:
    good = file("good", b"1")
    found = walk(good + header("bad", field) + good)
    assert [type(one) for one in found] == [Member, Wound, Member]
    with pytest.raises(CorruptRecordError, match="no tar header where one belongs"):
        walk(header("bad", field) + good)


@pytest.mark.parametrize("size", ["-1", "1" * 30, "ten", ""])
def test_pax_sizes_that_are_none_are_damage(size: str) -> None:
    good = file("good", b"1")
    found = walk(good + pax([("size", size)]) + file("a", b"x") + good)
    assert [type(one) for one in found] == [Member, Wound, Member, Member]


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_long_headers_are_bounded(kind: bytes) -> None:
    good = file("good", b"1")
    bad = header("meta", META_BYTES_MAX + 1, kind) + bytes(META_BYTES_MAX + 512)
    found = walk(good + bad + good, 1 << 16)
    assert [type(one) for one in found] == [Member, Wound, Member]
    assert isinstance(found[1], Wound)
    assert f"{META_BYTES_MAX} fit" in found[1].reason


@pytest.mark.parametrize(
    "data",
    [b"0 a=b\n", b"9 a=b\n", b"6 a=b", b"6 abc\n", b" a=b\n", b"-6 a=b\n", b"6 a=b\n7x a=b\n"],
)
def test_pax_records_that_are_none(data: bytes) -> None:
    with pytest.raises(TarFieldError):
        read_pax(data)


def test_pax_values_may_hold_anything() -> None:
    assert read_pax(b"8 a=b\n=\n6 c=d\n\0\0\0") == [(b"a", b"b\n="), (b"c", b"d")]


def test_numbers() -> None:
    assert read_number(b"  17 \0 junk", "x") == 15
    assert read_number(b"\0" * 8, "x") == 0
    assert read_number(b"\xff" * 7 + b"\xfe", "x") == -2


def sparse_header(pieces: list[tuple[int, int]], size: int, *, is_extended: bool = False) -> bytes:
    tail = bytearray(512 - 345)
    for place, (offset, count) in enumerate(pieces):
        begin = 386 - 345 + 24 * place
        tail[begin : begin + 24] = b"%011o\0%011o\0" % (offset, count)
    tail[482 - 345] = is_extended
    tail[483 - 345 : 495 - 345] = b"%011o\0" % size
    stored = sum(count for _, count in pieces)
    return header("s", stored, b"S", magic=b"ustar  \0", tail=bytes(tail))


def test_sparse_files_are_filled_with_holes() -> None:
    old = sparse_header([(2, 3), (10, 1)], 12) + pad(b"abcd")
    maps = [("GNU.sparse.size", "12"), ("GNU.sparse.name", "s")]
    first = pax([*maps, *(("GNU.sparse." + k, v) for k, v in pairs(2, 3, 10, 1))])
    second = pax([*maps, ("GNU.sparse.map", "2,3,10,1")])
    third = pax([("GNU.sparse.major", "1"), ("GNU.sparse.realsize", "12"), maps[1]])
    inner = file("x", b"abcd")
    in_data = file("x", pad(b"2\n2\n3\n10\n1\n") + b"abcd")
    want = [(b"s", b"\0\0abc\0\0\0\0\0d\0")]
    for data in (old, first + inner, second + inner, third + in_data):
        assert files_of(data + END) == want


def pairs(*numbers: int) -> list[tuple[str, str]]:
    return [("offset" if at % 2 == 0 else "numbytes", str(one)) for at, one in enumerate(numbers)]


@pytest.mark.parametrize(
    ("pieces", "size"),
    [([(2, 3), (4, 1)], 12), ([(10, 3)], 12), ([(1 << 62, 1 << 62)], 1 << 62)],
)
def test_sparse_maps_that_do_not_fit_are_the_members_own_fault(
    pieces: list[tuple[int, int]], size: int
) -> None:
    keywords = [("GNU.sparse.size", str(size))]
    keywords.append(("GNU.sparse.map", ",".join(str(one) for piece in pieces for one in piece)))
    found = walk(pax(keywords) + file("x", b"abcd") + file("good", b"1"))
    assert isinstance(found[0], Member)
    assert "sparse map" in found[0].fault
    assert isinstance(found[1], Member)
    assert (found[1].name, found[1].fault) == (b"good", "")


def test_sparse_maps_are_bounded() -> None:
    reader = MapInData()
    with pytest.raises(TarFieldError, match="pieces"):
        reader.feed(b"99999999\n" + bytes(503))
    with pytest.raises(TarFieldError, match="none"):
        MapInData().feed(b"1" * 512)
    endless = sparse_header([(0, 0)] * 4, 0, is_extended=True)
    extension = (b"%011o\0%011o\0" % (0, 0)) * 21 + b"\x01" + bytes(7)
    good = file("good", b"1")
    found = walk(good + endless + extension * 4000 + good, 1 << 16)
    assert [type(one) for one in found] == [Member, Wound, Member]
    with pytest.raises(TarFieldError):
        SparseMap(10, [(0, 5)]).check(6)
    with pytest.raises(TarFieldError):
        decimal(b"9" * 19)


@pytest.mark.parametrize("cut", range(0, 2048, 64))
def test_a_cut_anywhere_is_damage_or_the_end(cut: int) -> None:
    data = file("a", b"x" * 600) + END
    if cut == 0 or cut >= 512 + 1024:
        assert len(files_of(data[:cut])) == (cut > 0)
    else:
        with pytest.raises(CorruptRecordError, match="cut"):
            walk(data[:cut])


def test_ends_of_archives() -> None:
    one = file("a", b"1")
    assert [type(found) for found in walk(one + END + one + END)] == [
        Member,
        ArchiveEnd,
        Member,
        ArchiveEnd,
    ]
    assert [type(found) for found in walk(one + bytes(512) + one)] == [Member, Member]  # a lone one
    assert walk(b"") == []
    assert [type(found) for found in walk(END)] == [ArchiveEnd]
    assert [type(found) for found in walk(END + bytes(100))] == [ArchiveEnd]


def test_behind_the_end_its_record_is_undefined_and_more_is_damage() -> None:
    whole = (file("a", b"1") + END).ljust(10240, b"#")
    assert [type(found) for found in walk(whole)] == [Member, ArchiveEnd]
    assert len(walk(whole + file("b", b"2"))) == 3
    with pytest.raises(CorruptRecordError, match=r"what is no tar; byte offset 10240"):
        walk(whole + b"#" * 600)
    with pytest.raises(CorruptRecordError, match=r"what is no tar; byte offset 10240"):
        walk(whole + b"#" * 60)


def test_a_meta_header_without_its_member_is_damage() -> None:
    for end in (b"", END):
        with pytest.raises(CorruptRecordError, match="tells of a member"):
            walk(file("a", b"1") + pax([("path", "b")]) + end)


def test_a_damaged_header_says_whose_it_is_where_that_is_sure() -> None:
    good = file("a", b"1")

    def wound(middle: bytes) -> Wound:
        found = [one for one in walk(good + middle + good) if isinstance(one, Wound)]
        assert len(found) == 1
        assert found[0].offset == 1024
        return found[0]

    def flip(data: bytes, place: int) -> bytes:
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    named = pax([("path", "e.txt")]) + flip(file("b.txt", b"2" * 700), 110)
    assert wound(named).owner == b"e.txt"
    assert wound(flip(file("b.txt", b"2" * 700), 110)).owner is None  # its name may be wrong too
    assert wound(flip(pax([("path", "c.txt")]), 110) + file("d", b"3")).owner == b"c.txt"
    assert wound(flip(pax([("mtime", "1")]), 110) + file("d", b"3")).owner == b""
    assert wound(flip(file("b.txt", b"2" * 700), 130)).owner is None  # its size
    assert wound(flip(header("l", 0, b"2"), 110)).owner is None
    assert wound(b"#" * 512 * 3).owner is None


def test_a_tar_in_a_stream_that_is_damaged_raises_what_the_stream_raises(tmp_path: Path) -> None:
    members = TarMembers(
        StreamCursor(Pieces(header("a", 900) + b"x" * 500, 300, CorruptRecordError("bits")), 0)
    )
    member = members.next()
    assert isinstance(member, Member)
    with pytest.raises(CorruptRecordError, match="bits"):
        members.read(member)
