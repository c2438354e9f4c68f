"""Exclude lists: keys and hashes of contents from texts and parquet, sorted within bounds, mapped."""

from __future__ import annotations

import gzip
import hashlib
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from msd_client.contract.errors import ConfigError
from msd_daemon.sources import exclude
from msd_daemon.sources.exclude import ExcludeList, build_exclude_list, record_hash

KEYS = [f"key-{number}é".encode() for number in range(2000)]


def written(path: Path, keys: list[bytes], end: bytes = b"\n") -> Path:
    data = end.join(keys) + end
    pack = {
        ".gz": lambda raw: gzip.compress(raw, mtime=0),
        ".zst": zstandard.ZstdCompressor().compress,
    }
    path.write_bytes(pack.get(path.suffix, lambda raw: raw)(data))
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.gz", "a.txt.zst"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lists_of_keys(tmp_path: Path, name: str, end: bytes) -> None:
    path = written(tmp_path / name, [*KEYS[:1000], b"", KEYS[0]], end)
    rule = build_exclude_list([path], tmp_path / "made")
    listed = ExcludeList(rule.path)
    assert len(listed) == 1000
    assert [listed.has(key) for key in KEYS] == [True] * 1000 + [False] * 1000
    assert listed.are_listed(KEYS).tolist() == [True] * 1000 + [False] * 1000
    assert not listed.has(b"")
    assert rule.by == "key"
    assert [one.name for one in (tmp_path / "made").iterdir()] == [Path(rule.path).name]


def test_the_fingerprint_is_of_the_set(tmp_path: Path) -> None:
    keys = KEYS[:50]
    rules = []
    for number in range(2):
        random.Random(number).shuffle(keys)
        cut = 20 + number
        files = [written(tmp_path / "a", keys[:cut]), written(tmp_path / "b", keys[cut - 5 :])]
        rules.append(build_exclude_list(files, tmp_path / "made"))
    assert rules[0] == rules[1]
    other = build_exclude_list([written(tmp_path / "c", KEYS[:51])], tmp_path / "made")
    assert other.fingerprint != rules[0].fingerprint


def test_a_list_beyond_memory_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.txt", [b"%d" % (n % 150_000) for n in range(200_000)])
    whole = build_exclude_list([path], tmp_path / "made")
    monkeypatch.setattr(exclude, "_SORTED_AT_ONCE", 1 << 16)
    assert build_exclude_list([path], tmp_path / "made") == whole
    listed = ExcludeList(whole.path)
    assert len(listed) == 150_000
    assert listed.has(b"149999")
    assert not listed.has(b"150000")


def test_parquet_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, None, 3], "t": ["a", "b", "c"]}), path, row_group_size=2)
    listed = ExcludeList(build_exclude_list([path], tmp_path, column="id").path)
    assert [listed.has(key) for key in (b"1", b"2", b"3")] == [True, False, True]
    with pytest.raises(ConfigError, match="has the columns id, t: name one"):
        build_exclude_list([path], tmp_path)
    pq.write_table(pa.table({"t": ["a", "b"]}), path)
    assert len(ExcludeList(build_exclude_list([path], tmp_path).path)) == 2
    pq.write_table(pa.table({"t": [[1]]}), path)
    with pytest.raises(ConfigError, match="not keys"):
        build_exclude_list([path], tmp_path)


def test_hashes_of_contents(tmp_path: Path) -> None:
    contents = [b"first", "zweite é".encode()]
    lines = [hashlib.sha256(content).hexdigest().encode() for content in contents]
    path = written(tmp_path / "a.txt", [lines[0], lines[1][:32]])
    rule = build_exclude_list([path], tmp_path, "content")
    listed = ExcludeList(rule.path)
    assert rule.by == "content"
    assert [listed.has(one) for one in (*contents, b"third")] == [True, True, False]
    assert record_hash(b"first") == bytes.fromhex(lines[0].decode())[:16]
    for bad in (b"not hex", b"abcd", "é".encode() * 16):
        written(path, [lines[0], bad])
        with pytest.raises(ConfigError, match=r"entry 1 of .* not the sha256"):
            build_exclude_list([path], tmp_path, "content")


def test_hashes_that_share_their_upper_half(tmp_path: Path) -> None:
    keys = [bytes(8) + bytes([number]) * 8 for number in range(5)]
    path = written(tmp_path / "a.txt", [key.hex().encode() for key in keys])
    listed = ExcludeList(build_exclude_list([path], tmp_path, "content").path)
    original = exclude.record_hash
    try:
        exclude.record_hash = bytes  # type: ignore[assignment]
        assert listed.are_listed([*keys, bytes(8) + b"\x09" * 8]).tolist() == [True] * 5 + [False]
        assert [listed.has(key) for key in (keys[4], bytes(8) + b"\x09" * 8)] == [True, False]
    finally:
        exclude.record_hash = original


def test_lists_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        build_exclude_list([tmp_path / "no.txt"], tmp_path)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"a\nb\n" * 1000)[:-10])
    with pytest.raises(ConfigError, match="mend or leave out the list"):
        build_exclude_list([cut], tmp_path)
    (tmp_path / "long.txt").write_bytes(b"x" * 100_000)
    with pytest.raises(ConfigError, match="over 65536 bytes"):
        build_exclude_list([tmp_path / "long.txt"], tmp_path)
    for content in (b"", b"MSDEXCL1" + (5).to_bytes(8, "little"), b"x" * 32):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(ConfigError, match="exclude list"):
            ExcludeList(tmp_path / "bad")


def test_an_empty_list_excludes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n\n")
    listed = ExcludeList(build_exclude_list([tmp_path / "a.txt"], tmp_path).path)
    assert len(listed) == 0
    assert not listed.has(b"")
    assert listed.are_listed([b"a", b""]).tolist() == [False, False]
