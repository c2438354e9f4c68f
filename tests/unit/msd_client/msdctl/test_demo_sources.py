"""Where the demo's text comes from: made folders, and this machine."""

from __future__ import annotations

import gzip
import json
import lzma

import pytest

from msd_client.contract.errors import NotFoundError
from msd_client.msdctl import demo_sources
from msd_client.msdctl.demo_sources import DemoSource, folder_sources, system_sources

BIG = "a line of text with some length\n" * 4000


def by_name(found) -> dict[str, DemoSource]:
    return {source.name: source for source in found.sources}


def lines(**record) -> bytes:
    return b"".join(json.dumps(record | {"id": n}).encode() + b"\n" for n in range(40))


def test_files_of_one_kind_in_one_folder_are_one_source(tmp_path):
    (tmp_path / "web").mkdir()
    for name in ("a", "b"):
        (tmp_path / "web" / f"{name}.jsonl").write_bytes(lines(text=BIG[:4000]))
    (tmp_path / "notes.txt").write_text(BIG)
    found = by_name(folder_sources(tmp_path))
    assert set(found) == {"web.jsonl", "notes"}
    assert found["web.jsonl"].files == 2
    assert found["web.jsonl"].section["text"] == "text"
    assert found["notes"].section["format"] == "text"


def test_files_with_other_text_fields_are_other_sources(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(text=BIG[:4000]))
    (tmp_path / "b.jsonl").write_bytes(lines(url="x", story=BIG[:4000]))
    assert {s.section["text"] for s in folder_sources(tmp_path).sources} == {"text", "story"}


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_compressed_json_lines_tell_their_field(tmp_path, suffix):
    plain = lines(content=BIG[:4000])
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        data = zstandard.ZstdCompressor().compress(plain)
    else:
        data = gzip.compress(plain) if suffix == ".gz" else lzma.compress(plain)
    (tmp_path / f"c.jsonl{suffix}").write_bytes(data)
    (source,) = folder_sources(tmp_path).sources
    assert source.section["text"] == "content"
    assert f"jsonl{suffix}" in source.what


def test_parquet_with_the_longest_column_of_text(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"n": [1], "kind": ["x"], "page": ["long " * 99]}), tmp_path / "p.parquet"
    )
    pq.write_table(pa.table({"n": [1]}), tmp_path / "numbers.parquet")
    found = folder_sources(tmp_path)
    assert [s.section["text"] for s in found.sources] == ["page"]
    assert "without a column of text" in found.notes[0]


def test_long_plain_files_are_split_at_blank_lines(tmp_path):
    (tmp_path / "book.txt").write_text(BIG * 3)
    (tmp_path / "short.md").write_text(BIG)
    found = by_name(folder_sources(tmp_path))
    assert found["book"].section["document"] == "blank_line"
    assert "document" not in found["short"].section


def test_binary_empty_hidden_and_tiny_files_are_left_out(tmp_path):
    for name in ("one.txt", "two.md"):
        (tmp_path / name).write_text(BIG)
    (tmp_path / "tiny.rst").write_text("hello")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden.txt").write_text(BIG)
    found = folder_sources(tmp_path)
    assert set(by_name(found)) == {"one", "two"}
    notes = " ".join(found.notes)
    assert ".png is no text" in notes
    assert "empty" in notes
    assert "under 64 KiB" in notes


def test_small_files_are_taken_where_there_is_nothing_else(tmp_path):
    (tmp_path / "tiny.txt").write_text("hello")
    assert [s.name for s in folder_sources(tmp_path).sources] == ["tiny"]


def test_utf8_cut_in_the_looked_at_head_is_still_text(tmp_path):
    (tmp_path / "cut.txt").write_text("x" + "é" * 60000)
    assert [s.name for s in folder_sources(tmp_path).sources] == ["cut"]


def test_at_most_the_largest_groups_are_taken(tmp_path):
    for number in range(6):
        folder = tmp_path / f"d{number}"
        folder.mkdir()
        (folder / f"f{number}.txt").write_text(BIG * (number + 1))
    found = folder_sources(tmp_path, sources_max=2)
    assert [s.name for s in found.sources] == ["f5", "f4"]
    assert "4 smallest" in found.notes[-1]


@pytest.mark.parametrize("content", [None, b"\0\1\2"])
def test_nothing_to_read_is_told(tmp_path, content):
    if content is not None:
        (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(NotFoundError, match="no text found"):
        folder_sources(tmp_path)


def test_a_missing_folder_is_told(tmp_path):
    with pytest.raises(NotFoundError, match="no such folder"):
        folder_sources(tmp_path / "no")


def test_names_are_valid_and_differ(tmp_path):
    for folder in ("a b", "a_b"):
        (tmp_path / folder).mkdir()
        for number in range(2):
            (tmp_path / folder / f"{number}.txt").write_text(BIG)
    names = [source.name for source in folder_sources(tmp_path).sources]
    assert sorted(names) == ["a_b.txt", "a_b.txt-2"]


def test_this_machine_has_at_least_its_python_source(tmp_path):
    found = by_name(system_sources(tmp_path))
    assert {"code", "docstrings"} <= set(found)
    for source in found.values():
        assert 0 < source.size_bytes <= demo_sources.SOURCE_BYTES_MAX
    first = found["docstrings"].section["paths"]
    assert first.startswith(str(tmp_path))


def test_a_machine_without_text_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_sources, "_python_files", lambda _: [])
    monkeypatch.setattr(demo_sources, "_packages", lambda _: None)
    monkeypatch.setattr(demo_sources, "_manuals", lambda _: None)
    monkeypatch.setattr(demo_sources, "_documents", lambda _: None)
    with pytest.raises(NotFoundError, match="--data DIR"):
        system_sources(tmp_path)
