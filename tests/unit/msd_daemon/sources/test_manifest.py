"""Manifests: what paths stand for, and files that are not what their name says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from msd_client.contract.errors import ConfigError
from msd_daemon.sources.manifest import detect_format, expand_paths, resolve_source
from tests.support.sources import compress, json_lines, write_megatron


def touch(path: Path, data: bytes = b'{"text": "a"}\n') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_globs_folders_and_files_give_each_file_once_in_path_order(tmp_path: Path) -> None:
    for name in ("d/lang=b/p-1.jsonl", "d/lang=a/p-0.jsonl", "d/_SUCCESS", "d/.hidden.jsonl"):
        touch(tmp_path / name)
    touch(tmp_path / "d" / "notes.csv")
    touch(tmp_path / "d" / "_temporary" / "x.jsonl")
    want = [tmp_path / "d/lang=a/p-0.jsonl", tmp_path / "d/lang=b/p-1.jsonl"]
    assert expand_paths(["d"], tmp_path) == want
    assert expand_paths(["d/**/p-*.jsonl"], tmp_path) == want
    assert expand_paths(["d/lang=*"], tmp_path) == want
    assert expand_paths(["d/lang=b/p-1.jsonl", str(tmp_path / "d")], tmp_path) == want[::-1]


def test_a_megatron_pair_is_one_shard_however_it_is_named(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a_text_document", [[[1, 2]]])
    for name in ("a_text_document", "a_text_document.bin", "a_text_document.idx", "*", "."):
        manifest = resolve_source([name], tmp_path)
        assert [shard.path for shard in manifest.shards] == [str(path)]
        assert (manifest.format, manifest.order_class) == ("megatron", "seekable")


def test_fingerprint_is_of_size_and_both_ends_and_moves_with_the_file(tmp_path: Path) -> None:
    data = bytes(range(256)) * 1000
    path = touch(tmp_path / "a.txt", data)
    (shard,) = resolve_source(["a.txt"], tmp_path).shards
    edges = len(data).to_bytes(8, "little") + data[:65536] + data[-65536:]
    assert shard.fingerprint == hashlib.sha256(edges).hexdigest()[:32]
    before = resolve_source(["a.txt"], tmp_path)
    path.rename(tmp_path / "b.txt")
    assert resolve_source(["b.txt"], tmp_path).digest == before.digest
    touch(tmp_path / "b.txt", data[:-1] + b"!")
    assert resolve_source(["b.txt"], tmp_path).digest != before.digest


def test_the_idx_counts_in_a_megatron_fingerprint(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[[1, 2], [3]]])
    before = resolve_source(["a.bin"], tmp_path).digest
    write_megatron(tmp_path / "a", [[[1, 2]], [[3]]])
    assert resolve_source(["a.bin"], tmp_path).digest != before


@pytest.mark.parametrize(
    ("name", "data", "want"),
    [
        ("a.jsonl", b"{}", ("jsonl", "none")),
        ("a.v2.ndjson.GZ", b"", ("jsonl", "gz")),
        ("a.json.zst", b"", ("jsonl", "zst")),
        ("a.txt.xz", b"", ("text", "xz")),
        ("a.parquet", b"PAR1", ("parquet", "none")),
        ("a.jsonl.gz", b"{}", ("jsonl", "gz")),
    ],
)
def test_format_and_compression_by_name(
    tmp_path: Path, name: str, data: bytes, want: tuple[str, str]
) -> None:
    assert detect_format(touch(tmp_path / name, data)) == want


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.xls", b"x", "unknown extension '.xls'"),
        ("a", b"x", "unknown extension ''"),
        ("a.jsonl.bz2", b"x", "only .gz, .zst and .xz"),
        ("a.parquet.gz", b"x", "unpack it"),
        ("a.parquet", b"not it", "starts with b'not '"),
        ("a.jsonl", compress(b"x", "gz"), "is gzip by its first bytes"),
        ("a.jsonl", compress(b"x", "zst"), "is zstd by its first bytes"),
        ("a.txt", compress(b"x", "xz"), "is xz by its first bytes"),
        ("a.txt", b"PAR1....", "is parquet by its first bytes"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    touch(tmp_path / name, data)
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve_source([name], tmp_path)
    assert str(tmp_path / name) in caught.value.message


def test_mixed_formats_and_missing_paths_are_refused(tmp_path: Path) -> None:
    touch(tmp_path / "a.jsonl")
    touch(tmp_path / "b.jsonl.gz", compress(json_lines(["a"]), "gz"))
    with pytest.raises(ConfigError, match="make two sources"):
        resolve_source(["a.jsonl", "b.jsonl.gz"], tmp_path)
    for paths in (["c*.jsonl"], ["c.jsonl"], [], ["ftp://host/x.jsonl"]):
        with pytest.raises(ConfigError, match=r"matches no file|at least one|unknown scheme"):
            resolve_source(paths, tmp_path)


def test_an_idx_without_bin_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[[1]]]).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve_source(["a.idx"], tmp_path)


def test_a_name_that_is_no_utf_8_is_refused_with_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a\udcff.jsonl").write_text("{}")
    (tmp_path / "b.jsonl").write_text("{}")
    for paths in (["*.jsonl"], [str(tmp_path)], ["a*"]):
        with pytest.raises(ConfigError, match=r"a\\xff\.jsonl is not UTF-8: rename it"):
            expand_paths(paths, tmp_path)
    assert expand_paths(["b*"], tmp_path) == [tmp_path / "b.jsonl"]
