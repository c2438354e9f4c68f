"""Streams of records with fields: one stream from wherever it is begun, with an index and without."""

from __future__ import annotations

import csv
import io
import json
import random
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.model.chunk import RecordStatus
from msd_daemon.sources.csv_cutter import cut_records
from msd_daemon.sources.record import RawRecord
from tests.support.sources import compress
from tests.support.tars import Pieces, few, read, read_blocks, stream_spec

FORMATS = ("webdataset", "csv", "jsonl", "nemo_manifest")
COMPRESSIONS = ("", "gz", "zst", "xz")
TAR_KINDS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
TEXTS = ("", "x", 'a "quoted" one', "two\nlines", "é 中", ",;\t", "\r\n")

settings.register_profile(
    "field streams", max_examples=20, deadline=None, suppress_health_check=list(HealthCheck)
)
few_examples = settings.get_profile("field streams")


def make_tar(rng: random.Random, count: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=rng.choice(TAR_KINDS)) as archive:
        for number in range(count):
            folder = rng.choice(["", "./", "d/", "d/" * 48])
            for extension in rng.sample(
                ["jpg", "json", "txt", "0.png", "TXT.x"], rng.randint(1, 4)
            ):
                entry = tarfile.TarInfo(f"{folder}k{number // 2}.{number}{extension}")
                entry.size, entry.mtime = rng.randrange(1500), rng.choice([0, 1.5])
                archive.addfile(entry, io.BytesIO(rng.randbytes(entry.size)))
            if rng.random() < 0.2:
                entry = tarfile.TarInfo("folder")
                entry.type = rng.choice([tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE])
                archive.addfile(entry)
    return made.getvalue() * rng.randint(1, 2)


def make_csv(rng: random.Random, count: int) -> bytes:
    made = io.StringIO(newline="")
    end = rng.choice(["\n", "\r\n"])
    texts = TEXTS if end == "\r\n" else TEXTS[:-1]
    writer = csv.writer(made, delimiter=rng.choice(",\t;"), lineterminator=end)
    writer.writerow(["id", "text", "more"])
    for number in range(count):
        writer.writerow([number, rng.choice(texts), rng.choice(texts)][: rng.choice([2, 3, 3, 3])])
    return rng.choice([b"", b"\xef\xbb\xbf"]) + made.getvalue().encode()


def make_lines(rng: random.Random, count: int) -> bytes:
    lines = [
        rng.choice([b"", b"{", b'"x"'])
        if rng.random() < 0.2
        else json.dumps(
            {"n": number, "text": rng.choice(TEXTS), "audio_filepath": "a.wav"}
        ).encode()
        for number in range(count)
    ]
    return b"\n".join(lines) + rng.choice([b"", b"\n"])


def make(source_format: str, seed: int, count: int) -> bytes:
    makers = {"webdataset": make_tar, "csv": make_csv}
    return makers.get(source_format, make_lines)(random.Random(seed), count)


CASES = st.tuples(st.integers(0, 10**6), st.integers(0, 40), st.integers(1, 9), st.integers(1, 4))


@pytest.mark.parametrize("source_format", FORMATS)
@pytest.mark.parametrize("kind", COMPRESSIONS)
@given(case=CASES)
@few_examples
def test_every_block_is_what_the_whole_reading_has_there(
    source_format: str, kind: str, case: tuple[int, int, int, int]
) -> None:
    seed, count, block_records, pieces = case
    data = make(source_format, seed, count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        path.write_bytes(compress(data, kind, pieces) if kind else data)
        check_blocks(path, source_format, block_records)


def check_blocks(path: Path, source_format: str, block_records: int) -> list[RawRecord]:
    spec = stream_spec(path, source_format, shuffle=few(block_records))
    whole = read_blocks(spec)
    folder = path.parent / "index"
    for index_dir in (folder, folder, None):
        for block in range(len(whole) + 1):
            assert read_blocks(spec, block, index_dir) == whole[block:]
    assert all(len(block) == block_records for block in whole[:-1])
    records = [record for block in whole for record in block]
    places = [record.place for record in records]
    assert places == sorted(places)
    assert len(set(places)) >= len(places) - 1  # the end of a damaged stream may share one
    narrow = [record for block in read_blocks(spec, columns=("txt",)) for record in block]
    assert [(one.place, one.size_bytes) for one in narrow if not one.status] == [
        (one.place, one.size_bytes) for one in records if not one.status
    ]
    return records


@pytest.mark.parametrize("source_format", FORMATS)
@pytest.mark.parametrize("kind", COMPRESSIONS)
@given(case=CASES, at=st.floats(0, 1, exclude_max=True), mask=st.integers(0, 255))
@few_examples
def test_damage_is_one_stream_from_wherever_it_is_begun(
    source_format: str, kind: str, case: tuple[int, int, int, int], at: float, mask: int
) -> None:
    seed, count, block_records, pieces = case
    data = make(source_format, seed, count)
    packed = bytearray(compress(data, kind, pieces) if kind else data)
    place = int(at * len(packed))
    if mask and packed:
        packed[place] ^= mask
    else:
        del packed[place:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        path.write_bytes(packed)
        check_blocks(path, source_format, block_records)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 12), cut=st.integers(0, 1 << 20))
@settings(max_examples=150, deadline=None)
def test_a_cut_tar_gives_whole_records_only(seed: int, count: int, cut: int) -> None:
    data = make_tar(random.Random(seed), count)
    whole, error = read(data)
    assert error is None
    cut %= len(data)
    records, error = read(data[:cut], piece_bytes=1 + seed % 2000)
    good = [record for record in records if record.status == RecordStatus.OK]
    assert good == [record for record in whole if record.status == RecordStatus.OK][
        : len(good)
    ] or (
        cut % 512 == 0  # between two members of one record nothing tells
    )
    if any(data[cut // 512 * 512 : cut]):  # zero bytes are padding
        assert error is not None


@given(data=st.binary(max_size=3000), seed=st.integers(0, 100))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_read_to_an_end(data: bytes, seed: int) -> None:
    tar = make_tar(random.Random(seed), 5)
    place = seed * 37 % len(tar)
    read(tar[:place] + data + tar[place:])
    read(tar[: place // 512 * 512] + data)
    read(data)


@given(
    rows=st.lists(st.lists(st.text('ab",\n;\té', max_size=5), min_size=2, max_size=2), max_size=12),
    piece_bytes=st.integers(1, 40),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
@settings(max_examples=200, deadline=None)
def test_csv_is_cut_where_the_csv_module_cuts_it(
    rows: list[list[str]], piece_bytes: int, quoting: int
) -> None:
    made = io.StringIO(newline="")
    writer = csv.writer(made, quoting=quoting, lineterminator="\n")
    for row in rows:
        writer.writerow(row)
    data = made.getvalue().encode()
    cut = list(cut_records(Pieces(data, piece_bytes), 5, b",", 1 << 20))
    assert [next(csv.reader([one.content.decode()])) for one in cut if one.content] == rows
    assert b"".join(one.content or b"" for one in cut) == data
    assert [one.offset for one in cut] == [5, *(one.next_offset for one in cut)][: len(cut)]
    small = list(cut_records(Pieces(data, piece_bytes), 5, b",", 8))
    assert [one[::2] for one in small] == [one[::2] for one in cut]
    assert all((one.content is None) == (one.next_offset - one.offset > 8) for one in small)
