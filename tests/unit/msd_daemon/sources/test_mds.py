"""MDS: shards as index.json lists them, encodings, hashes, offsets that lie."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.mds import companion_files, dataset_shards
from msd_daemon.sources.mds_values import MdsColumn, decoder_of
from msd_daemon.sources.packed_values import Decode
from tests.support.records import (
    count_statuses,
    fields_of,
    open_rows,
    read_blocks,
    read_folder,
    read_rows,
    shard_of,
    small_blocks,
)
from tests.support.sources import DATA, needs_data

PACK = {
    "": lambda data: data,
    "zstd": zstandard.ZstdCompressor().compress,
    "gz": lambda data: gzip.compress(data, mtime=0),
}


def raw_shard(samples: list[bytes]) -> bytes:
    config = b'{"format": "mds"}'
    first = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = first + np.cumsum([0, *map(len, samples)])
    head = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + config
    return head + b"".join(samples)


def sample(number: int, text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + struct.pack("<i", number) + text


def write_mds(
    folder: Path, shards: list[list[bytes]], packed_as: str = "", **changes: Any
) -> list[Path]:
    """Write shards of the columns n (int32) and text (str); `changes` go into their entries."""
    folder.mkdir(exist_ok=True)
    entries, paths = [], []
    for number, samples in enumerate(shards):
        raw, name = raw_shard(samples), f"shard.{number:05d}.mds"
        packed = PACK[packed_as](raw)

        def described(data: bytes, file: str) -> dict[str, Any]:
            sha1 = hashlib.sha1(data).hexdigest()
            return {"basename": file, "bytes": len(data), "hashes": {"sha1": sha1}}

        zipped = f"{name}.{packed_as}" if packed_as else ""
        entries.append(
            {
                "column_encodings": ["int32", "str"],
                "column_names": ["n", "text"],
                "column_sizes": [4, None],
                "compression": packed_as or None,
                "format": "mds",
                "hashes": ["sha1"],
                "raw_data": described(raw, name),
                "samples": len(samples),
                "version": 2,
                "zip_data": described(packed, zipped) if packed_as else None,
                **changes,
            }
        )
        path = folder / (zipped or name)
        path.write_bytes(packed)
        paths.append(path)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return paths


SAMPLES = [sample(number, f"text {number} é".encode() * (number % 4)) for number in range(40)]
FIELDS = [{"n": n, "text": f"text {n} é" * (n % 4)} for n in range(40)]


@pytest.mark.parametrize("compression", ["", "zstd", "gz"])
def test_shards_in_the_order_of_the_index(tmp_path: Path, compression: str) -> None:
    paths = write_mds(tmp_path, [SAMPLES[:15], SAMPLES[15:]], compression)
    assert dataset_shards(tmp_path) == paths
    assert companion_files(paths[0]) == [tmp_path / "index.json"]
    records = read_folder("mds", tmp_path)
    assert fields_of(records) == FIELDS
    assert [record.place for record in records] == [*range(15), *range(25)]
    assert records[5].fields_bytes == 4 + len(FIELDS[5]["text"].encode())
    assert fields_of(read_folder("mds", tmp_path, ("n",))) == [{"n": n} for n in range(40)]


def test_blocks_of_raw_shards_are_capped_in_samples_and_bytes(tmp_path: Path) -> None:
    (path,) = write_mds(tmp_path, [[sample(0, b"x" * size) for size in (10, 10, 10, 90, 2, 2)]])
    blocks = read_blocks("mds", path, shuffle=small_blocks(3, 40))
    assert [[len(r["text"]) for r in fields_of(block)] for block in blocks] == [
        [10, 10],
        [10],
        [90],
        [2, 2],
    ]


def test_a_merged_index_lists_streams_below(tmp_path: Path) -> None:
    paths = write_mds(tmp_path / "a", [SAMPLES])
    index = json.loads((tmp_path / "a" / "index.json").read_text())
    index["shards"][0]["raw_data"]["basename"] = "a/shard.00000.mds"
    (tmp_path / "a" / "index.json").unlink()
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert dataset_shards(tmp_path) == paths
    assert fields_of(read_rows("mds", paths[0])) == FIELDS


@needs_data
def test_shards_of_texts_and_images() -> None:
    expected = json.loads((DATA / "shards" / "expected.json").read_text())["_per_sample"]
    assert len(read_folder("mds", DATA / "shards" / "mds_text")) == 600
    counts = [
        len(read_rows("mds", path)) for path in dataset_shards(DATA / "shards/mds_text") or ()
    ]
    assert counts == [120, 117, 110, 189, 64]
    found = fields_of(read_folder("mds", DATA / "shards" / "mds_vlm"))
    assert len(found) == 11
    assert {type(row["size"]) for row in found} == {np.ndarray}
    assert all(row["image"][:2] in (b"\xff\xd8", b"\x89P") for row in found)
    assert expected is not None


@needs_data
def test_broken_folders_cost_what_is_broken() -> None:
    folder = DATA / "broken/derived/mds_truncated_shard"
    first, *others = dataset_shards(folder) or ()
    with pytest.raises(CorruptRecordError, match=r"has 64698 bytes, index.json says 129396"):
        open_rows("mds").measure(shard_of(first))
    (record,) = open_rows("mds").records(shard_of(first), 0)
    assert record.status == RecordStatus.UNREADABLE
    assert record.fault.endswith("all its 120 records are lost")
    assert sum(len(read_rows("mds", path)) for path in others) == 480
    paths = dataset_shards(DATA / "broken/derived/mds_missing_shard") or []
    assert [path.exists() for path in paths] == [True, False, True, True, True]
    (record,) = open_rows("mds").records(shard_of(paths[1]), 0)
    assert record.status == RecordStatus.UNREADABLE
    assert record.fault.endswith("all its 117 records are lost")


@pytest.mark.parametrize("compression", ["", "zstd"])
def test_a_hash_that_differs_costs_the_shard(tmp_path: Path, compression: str) -> None:
    (path,) = write_mds(tmp_path, [SAMPLES], compression)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    (record,) = open_rows("mds").records(shard_of(path), 0)
    assert "has sha1 " in record.fault
    assert record.fault.endswith("all its 40 records are lost")


def unhashed(path: Path, change: Any) -> None:
    """Change a shard, and take its hashes and sizes into the index."""
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    index = path.parent / "index.json"
    plain = json.loads(index.read_text())
    plain["shards"][0]["raw_data"] |= {"bytes": len(data), "hashes": {}}
    index.write_text(json.dumps(plain))


def put(place: int, value: int) -> Any:
    def change(data: bytearray) -> None:
        data[place : place + 4] = value.to_bytes(4, "little")

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(0, 39), "holds 39 samples, index.json says 40"),
        (put(4, 0), "has samples at bytes 0 to"),
        (put(4 + 4 * 40, 1 << 31), "has samples at bytes"),
    ],
)
def test_offsets_that_lie_cost_the_shard(tmp_path: Path, change: Any, reason: str) -> None:
    (path,) = write_mds(tmp_path, [SAMPLES])
    unhashed(path, change)
    with pytest.raises(CorruptRecordError, match=reason):
        open_rows("mds").measure(shard_of(path))


@pytest.mark.parametrize("value", [(1 << 32) - 1, 0, 400])
def test_one_offset_that_lies_costs_its_samples(tmp_path: Path, value: int) -> None:
    (path,) = write_mds(tmp_path, [SAMPLES])
    unhashed(path, put(4 + 4 * 20, value))
    counts = count_statuses(read_rows("mds", path))
    assert counts[0] == 38
    assert counts[int(RecordStatus.UNREADABLE)] == 2


def test_samples_that_contradict_their_sizes(tmp_path: Path) -> None:
    samples = [sample(1, b"abc"), struct.pack("<I", 9) + bytes(5), b"\1", sample(2, b"\xff"), b""]
    (path,) = write_mds(tmp_path, [samples])
    records = read_rows("mds", path)
    unreadable, encoding = RecordStatus.UNREADABLE, RecordStatus.BAD_ENCODING
    assert [r.status for r in records] == [0, unreadable, unreadable, encoding, unreadable]
    assert records[1].fault == "a sample of 9 bytes, its columns take 17"
    records = read_rows("mds", path, record_bytes_max=9)
    assert records[0].status == RecordStatus.TOO_LARGE


def test_a_shard_that_unpacks_to_more_than_it_states(tmp_path: Path) -> None:
    raw = raw_shard(SAMPLES)
    (path,) = write_mds(tmp_path, [SAMPLES], "zstd")
    packed = zstandard.ZstdCompressor().compress(raw + bytes(100 << 20))
    path.write_bytes(packed)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["zip_data"] |= {"bytes": len(packed), "hashes": {}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    records = read_rows("mds", path)
    assert records[-1].status == RecordStatus.UNREADABLE
    assert "unpacks to more than the" in records[-1].fault


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 1}, "version 1"),
        ({"format": "csv"}, "csv"),
        ({"compression": "lz4", "zip_data": {"basename": "a", "bytes": 1}}, "compression 'lz4'"),
        ({"samples": -1}, "-1 is no count"),
        ({"raw_data": {"basename": "../a", "bytes": 1}}, "no file of the folder"),
        ({"raw_data": {"basename": "/a", "bytes": 1}}, "no file of the folder"),
        ({"column_names": ["n"]}, "zip"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    (path,) = write_mds(tmp_path, [SAMPLES], **changes)
    with pytest.raises(ConfigError, match=reason):
        dataset_shards(tmp_path)
    with pytest.raises(CorruptRecordError, match=reason):
        open_rows("mds").measure(shard_of(path))


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    (path,) = write_mds(tmp_path, [SAMPLES], column_encodings=["int32", "pkl"])
    with pytest.raises(ConfigError, match="column 'text' is pickled"):
        open_rows("mds", [path])
    assert fields_of(read_rows("mds", path, ("n",))) == [{"n": n} for n in range(40)]
    (path,) = write_mds(tmp_path, [SAMPLES], column_encodings=["int32", "tiff"])
    with pytest.raises(ConfigError, match="encoding 'tiff', known are bytes"):
        open_rows("mds", [path])


def decode(encoding: str) -> Decode:
    return decoder_of(MdsColumn("x", encoding, 0))


def test_arrays_of_every_header_form() -> None:
    values = np.arange(6, dtype="<i2")
    for encoding, head, shape in (
        ("ndarray", b"\x11\x08\x02\x03", (2, 3)),
        ("ndarray", b"\x11\x05\x06\x00", (6,)),
        ("ndarray:int16", b"\x06\x06\x00\x00\x00", (6,)),
        ("ndarray:int16:3,2", b"", (3, 2)),
    ):
        found = decode(encoding)(head + values.tobytes())
        assert found.shape == shape
        assert found.dtype == np.int16
        assert found.ravel().tolist() == values.tolist()


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("ndarray", b""),
        ("ndarray", b"\x63\x04\x01" + bytes(2)),
        ("ndarray", b"\x11\xff" + bytes(3)),
        ("ndarray", b"\x11\x08\xff\xff" + bytes(9)),
        ("ndarray:int16", b"\x07" + b"\xff" * 8),
        ("ndarray:int16:2", bytes(3)),
        ("int32", bytes(3)),
        ("str_int", b"1" * 5000),
        ("str_int", b"x"),
        ("str_float", b""),
        ("json", b"[" * 100_000),
        ("json", b"{"),
        ("pil", bytes(4)),
        ("pil", struct.pack("<3I", 1 << 30, 1 << 30, 3) + b"RGB"),
        ("pil", struct.pack("<3I", 1, 1, 1) + b"P\0"),
        ("jpeg_array", b"\xff\xff\xff\xff"),
        ("jpeg_array", struct.pack("<2I", 1, 9) + b"x"),
        ("list[png]", bytes(7)),
        ("str", b"\xff"),
    ],
)
def test_values_that_are_cut_or_lie(encoding: str, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(encoding)(data)
