"""The index: it saves reading, is made anew when it does not fit, and never changes the stream."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.model.job import ShuffleRule, SourceSpec
from msd_client.contract.errors import ResourceError
from msd_daemon.sources.byte_stream import SeekPoint
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.index_build import build_index
from tests.support.sources import (
    compress,
    json_lines,
    make_loader,
    make_spec,
    read_stream,
    write_megatron,
)

RULE = ShuffleRule(stream_block_records=64)


def random_texts(count: int) -> list[str]:
    rng = random.Random(5)
    return [rng.randbytes(600).hex() for _ in range(count)]


@pytest.fixture(params=["gz", "zst", "xz"])
def spec(tmp_path: Path, request: pytest.FixtureRequest) -> SourceSpec:
    path = tmp_path / f"a.jsonl.{request.param}"
    path.write_bytes(compress(json_lines(random_texts(3000)), request.param, pieces=6))
    return make_spec([path], shuffle=RULE)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.msdindex"))


def test_a_resume_reads_from_the_nearest_member(tmp_path: Path, spec: SourceSpec) -> None:
    folder = tmp_path / "index"
    whole = read_stream(make_loader(spec, index_dir=folder))
    position = whole[2900]
    costs = []
    for directory in (folder, None):
        loader = make_loader(spec, index_dir=directory)
        loader.seek(position.block_key, position.index)
        assert read_stream(loader) == whole[2900:]
        costs.append(loader.statistics().read_bytes)
    assert costs[0] < costs[1] / 3


def test_build_index_equals_what_reading_makes(tmp_path: Path, spec: SourceSpec) -> None:
    read_stream(make_loader(spec, index_dir=tmp_path / "read"))
    built = build_index(spec, 0, tmp_path / "built")
    assert built is not None
    assert built.records == 3000
    assert len(built.starts) == -(-3000 // 64)
    assert len(built.seek_points) == 6
    (read,), (made,) = files(tmp_path / "read"), files(tmp_path / "built")
    assert read.name == made.name
    assert read.read_bytes() == made.read_bytes()
    before = made.stat().st_mtime_ns
    build_index(spec, 0, tmp_path / "built")
    assert made.stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "header"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, spec: SourceSpec, damage: str) -> None:
    folder = tmp_path / "index"
    whole = read_stream(make_loader(spec, index_dir=folder))
    (path,) = files(folder)
    good = path.read_bytes()
    bad = bytearray(good)
    if damage == "flip":
        bad[len(bad) // 2] ^= 1
    elif damage == "header":
        bad[30] ^= 1
    else:
        del bad[len(bad) // 2 if damage == "cut" else 0 :]
    path.write_bytes(bad)
    assert IndexStore(folder, spec).load(spec.shards[0]) is None
    loader = make_loader(spec, index_dir=folder)
    loader.seek(whole[2000].block_key, whole[2000].index)
    assert read_stream(loader) == whole[2000:]
    assert path.read_bytes() == good
    assert os.listdir(folder) == [path.name]


def test_an_index_that_lies_is_found_out(tmp_path: Path, spec: SourceSpec) -> None:
    folder = tmp_path / "index"
    whole = read_stream(make_loader(spec, index_dir=folder))
    store = IndexStore(folder, spec)
    index = store.load(spec.shards[0])
    assert index is not None
    good = files(folder)[0].read_bytes()
    for starts, points in (
        (index.starts + 3, index.seek_points),
        (
            index.starts,
            [
                SeekPoint(p.compressed + bool(p.compressed), p.decompressed)
                for p in index.seek_points
            ],
        ),
        (index.starts + 10**9, index.seek_points),
    ):
        store.save(spec.shards[0], index.records, starts, list(points))
        loader = make_loader(spec, index_dir=folder)
        loader.seek(whole[2000].block_key, whole[2000].index)
        assert read_stream(loader) == whole[2000:]
        assert files(folder)[0].read_bytes() == good


def test_another_mtime_makes_it_anew(tmp_path: Path, spec: SourceSpec) -> None:
    build_index(spec, 0, tmp_path)
    store = IndexStore(tmp_path, spec)
    assert store.load(spec.shards[0]) is not None
    os.utime(spec.shards[0].path, ns=(1, 1))
    assert store.load(spec.shards[0]) is None
    build_index(spec, 0, tmp_path)
    assert store.load(spec.shards[0]) is not None


def test_offsets_keep_64_bits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(compress(json_lines(["a"]), "gz"))
    spec = make_spec([tmp_path / "a.jsonl.gz"])
    store = IndexStore(tmp_path / "index", spec)
    starts = np.array([0, (1 << 32) + 7, 1 << 45], dtype=np.int64)
    store.save(spec.shards[0], 700, starts, [SeekPoint(0, 0), SeekPoint(1 << 33, 1 << 40)])
    index = store.load(spec.shards[0])
    assert index is not None
    assert index.starts.tolist() == starts.tolist()
    assert index.point_before(1 << 45) == SeekPoint(1 << 33, 1 << 40)
    assert index.point_before((1 << 40) - 1) == SeekPoint(0, 0)


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path: Path, spec: SourceSpec) -> None:
    (tmp_path / "file").touch()
    whole = read_stream(make_loader(spec))
    assert read_stream(make_loader(spec, index_dir=tmp_path / "file")) == whole


def test_a_folder_that_cannot_be_written_is_refused_by_build_index(
    tmp_path: Path, spec: SourceSpec
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot be written"):
        build_index(spec, 0, tmp_path / "file")


def test_formats_that_find_blocks_by_themselves_need_no_index(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a"]))
    assert build_index(make_spec([tmp_path / "a.jsonl"]), 0, tmp_path) is None
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet", row_group_size=1)
    rows = build_index(make_spec([tmp_path / "a.parquet"]), 0, tmp_path)
    assert rows is not None
    assert len(rows.starts) == 2
    pair = build_index(make_spec([write_megatron(tmp_path / "b", [[[1]], [[2]]])]), 0, tmp_path)
    assert pair is not None
    assert (pair.records, pair.starts.tolist()) == (2, [0, 2])
