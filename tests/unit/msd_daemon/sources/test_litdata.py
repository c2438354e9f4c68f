"""LitData: chunks as index.json lists them, trees of leaves, packed lists, chunks that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.litdata import companion_files, dataset_shards
from msd_daemon.sources.litdata_json import nested_value
from msd_daemon.sources.litdata_values import ItemReader, array, tensor
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


def leaf() -> dict[str, Any]:
    return {"type": None, "context": None, "children_spec": []}


def tree_of(root: dict[str, Any]) -> str:
    return json.dumps([1, root])


def node(kind: str, context: Any, *children: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "context": json.dumps(context), "children_spec": list(children)}


PAIR = tree_of(node("builtins.dict", ["n", "text"], leaf(), leaf()))


def item(number: int, text: bytes) -> bytes:
    return struct.pack("<2Iq", 8, len(text), number) + text


ITEMS = [item(number, f"text {number} é".encode() * (number % 4)) for number in range(40)]
FIELDS = [{"n": n, "text": f"text {n} é" * (n % 4)} for n in range(40)]


def chunk(items: list[bytes]) -> bytes:
    offsets = 4 + 4 * (len(items) + 1) + np.cumsum([0, *map(len, items)])
    return struct.pack("<I", len(items)) + offsets.astype("<u4").tobytes() + b"".join(items)


def framed(items: list[bytes], rows: int) -> bytes:
    offsets = np.cumsum([0, *map(len, items)]).astype("<u4")
    parts = [items[begin : begin + rows] for begin in range(0, len(items), rows)]
    packed = [zstandard.ZstdCompressor().compress(b"".join(part)) for part in parts]
    head = b"LDFZ01\0\0" + struct.pack("<HHIII", 1, 0, len(items), rows, len(parts))
    at = len(head) + offsets.nbytes + 24 * len(parts)
    table, first = b"", 0
    for part, data in zip(parts, packed, strict=True):
        raw_bytes = sum(map(len, part))
        table += struct.pack("<IIQII", first, len(part), at, len(data), raw_bytes)
        at, first = at + len(data), first + len(part)
    return head + offsets.tobytes() + table + b"".join(packed)


def write(
    folder: Path, files: dict[str, bytes], counts: list[int], **config: Any
) -> dict[str, Any]:
    plain = {
        "chunks": [
            {"filename": name, "chunk_size": count, "chunk_bytes": len(data), "dim": None}
            for (name, data), count in zip(files.items(), counts, strict=True)
        ],
        "config": {"data_format": ["int", "str"], "data_spec": PAIR, "compression": None, **config},
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "index.json").write_text(json.dumps(plain))
    return plain


@pytest.mark.parametrize("layout", ["classic", "framed", "sample", "chunk"])
def test_chunks_of_every_layout(tmp_path: Path, layout: str) -> None:
    compress = zstandard.ZstdCompressor().compress
    parts = [ITEMS[:25], ITEMS[25:]]
    zipped: dict[str, Any] = {"compression": "zstd", "compression_level": layout}
    made, config = {
        "classic": ([chunk(part) for part in parts], {}),
        "framed": ([framed(part, 4) for part in parts], {**zipped, "compression_level": "batch"}),
        "sample": ([chunk([compress(one) for one in part]) for part in parts], zipped),
        "chunk": ([chunk(part) for part in parts], zipped),
    }[layout]
    names = ["b.bin", "a.bin"]
    write(tmp_path, dict(zip(names, made, strict=True)), [25, 15], **config)
    if layout == "chunk":
        for name, data in zip(names, made, strict=True):
            (tmp_path / name).write_bytes(compress(data))
    assert dataset_shards(tmp_path) == [tmp_path / "b.bin", tmp_path / "a.bin"]
    assert companion_files(tmp_path / "a.bin") == [tmp_path / "index.json"]
    records = read_folder("litdata", tmp_path, shuffle=small_blocks(10))
    assert fields_of(records) == FIELDS
    assert [record.place for record in records] == [*range(25), *range(15)]
    blocks = read_blocks("litdata", tmp_path / "b.bin", shuffle=small_blocks(10))
    assert [len(block) for block in blocks] == {
        "classic": [10, 10, 5],
        "sample": [10, 10, 5],
        "framed": [8, 8, 9],
        "chunk": [25],
    }[layout]
    assert fields_of(read_folder("litdata", tmp_path, ("n",))) == [{"n": n} for n in range(40)]


@needs_data
def test_the_chunks_handed() -> None:
    records = read_folder("litdata", DATA / "shards" / "litdata")
    assert len(records) == 32
    found = fields_of(records)
    assert found[0]["id"] == "sotu/1990_george_bush_r"
    assert [row["year"] for row in found][:2] == [1990, 1991]
    corpus = {row["id"]: row for row in fields_of(read_folder("arrow", DATA / "text" / "sotu_hf"))}
    assert all(corpus[row["id"]]["text"] == row["text"] for row in found)


def test_trees_of_leaves() -> None:
    inner = node("builtins.list", None, leaf(), node("builtins.dict", ["x"], leaf()))
    for tree, expected in (
        (tree_of(node("builtins.dict", ["a", "b"], leaf(), inner)), {"a": 1, "b": [2, {"x": 3}]}),
        (tree_of(node("builtins.tuple", None, leaf(), inner)), {"0": 1, "1": [2, {"x": 3}]}),
        (
            tree_of(node("collections.OrderedDict", ["a", "b"], leaf(), inner)),
            {"a": 1, "b": [2, {"x": 3}]},
        ),
    ):
        reader = ItemReader(["int"] * 3, tree, is_tokens=False, wanted=None)
        data = struct.pack("<3I3q", 8, 8, 8, 1, 2, 3)
        assert reader.record(data, 0).fields == expected
    reader = ItemReader(["str"], tree_of(leaf()), is_tokens=False, wanted=None)
    assert reader.record(struct.pack("<I", 1) + b"a", 0).fields == {"value": "a"}
    reader = ItemReader(["no_header_numpy:1"], tree_of(leaf()), is_tokens=True, wanted=None)
    fields = reader.record(np.arange(3, dtype="<i2").tobytes(), 0).fields
    assert fields is not None
    assert fields["tokens"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "tree", ["", "[]", "[1, 2]", tree_of(node("collections.deque", 3, leaf())), "[1, {}]"]
)
def test_trees_that_are_not_read(tree: str) -> None:
    with pytest.raises(ConfigError, match="data_spec"):
        ItemReader(["int"], tree, is_tokens=False, wanted=None)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"encryption": {"algorithm": "fernet"}}, "encrypted"),
        ({"item_loader": "ParquetLoader"}, "format parquet"),
        ({"item_loader": "TemporalArrayLoader"}, "TemporalArrayLoader"),
        ({"compression": "gzip"}, "compression 'gzip'"),
        ({"data_format": None, "item_loader": "TokensLoader"}, "0 leaves"),
    ],
)
def test_folders_that_are_not_read_are_named(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    write(tmp_path, {"a.bin": chunk(ITEMS)}, [40], **config)
    with pytest.raises(ConfigError, match=reason):
        dataset_shards(tmp_path)
    (record,) = open_rows("litdata").records(shard_of(tmp_path / "a.bin"), 0)
    assert record.status == RecordStatus.UNREADABLE


@pytest.mark.parametrize("kind", ["pickle", "graph:pickle", "no_header_tensor:99", "odd"])
def test_fields_that_are_not_read_are_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path, {"a.bin": chunk(ITEMS)}, [40], data_format=["int", kind])
    with pytest.raises(ConfigError, match=f"data_format '{kind}'"):
        open_rows("litdata", [tmp_path / "a.bin"])
    found = fields_of(read_rows("litdata", tmp_path / "a.bin", ("n",)))
    assert found == [{"n": n} for n in range(40)]


def test_chunks_that_lie(tmp_path: Path) -> None:
    good = chunk(ITEMS)
    write(tmp_path, {"a.bin": good}, [41])
    path = tmp_path / "a.bin"
    with pytest.raises(CorruptRecordError, match=r"holds 40 samples, index.json says 41"):
        open_rows("litdata").measure(shard_of(path))
    write(tmp_path, {"a.bin": good}, [1 << 40])
    with pytest.raises(CorruptRecordError, match="offsets of 1099511627776 samples"):
        open_rows("litdata").measure(shard_of(path))
    write(tmp_path, {"a.bin": good}, [40])
    path.write_bytes(good[:-1])
    with pytest.raises(CorruptRecordError, match=r"index.json says"):
        open_rows("litdata").measure(shard_of(path))
    data = bytearray(good)
    data[4 + 4 * 20 : 8 + 4 * 20] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    assert count_statuses(read_rows("litdata", path)) == {0: 38, int(RecordStatus.UNREADABLE): 2}
    path.unlink()
    (record,) = open_rows("litdata").records(shard_of(path), 0)
    assert record.fault.endswith("all its 40 records are lost")


@pytest.mark.parametrize("place", range(8, 24 + 4 * 41 + 24 * 10, 3))
def test_framed_headers_that_lie_are_typed(tmp_path: Path, place: int) -> None:
    data = bytearray(framed(ITEMS, 4))
    data[place] ^= 0x55
    write(tmp_path, {"a.bin": bytes(data)}, [40], compression="zstd", compression_level="batch")
    path = tmp_path / "a.bin"
    opened = open_rows("litdata")
    try:
        blocks = opened.measure(shard_of(path))[0]
    except CorruptRecordError:
        blocks = 1
    records = [
        record for block in range(blocks) for record in opened.records(shard_of(path), block)
    ]
    assert len(records) <= 40
    assert set(count_statuses(records)) <= {0, 4, 7}


def test_arrays_with_headers() -> None:
    values = np.arange(6, dtype="<f4")
    assert tensor(struct.pack(">4I", 0, 2, 2, 3) + values.tobytes()).shape == (2, 3)
    assert array(struct.pack("<4I", 9, 2, 3, 2) + values.tobytes()).shape == (3, 2)
    brain = tensor(struct.pack(">3I", 10, 1, 2) + np.array([0x3F80, 0xC000], "<u2").tobytes())
    assert brain.tolist() == [1.0, -2.0]
    for data in (b"", struct.pack(">2I", 99, 1), struct.pack(">2I", 0, 1 << 31), bytes(12)):
        with pytest.raises(ValueError, match=r"."):
            tensor(data + b"\0" * (len(data) == 12))


@pytest.mark.parametrize(
    "data",
    [
        b"\1",
        b"\1\xff\xff\xff\xff",
        b"\2\2\0\0\0" + bytes(8),
        b"\5\1\0\0\0" * 100 + b"\x0b",
        b"\6\xff\xff\xff\xff\0\0\0\0",
        b"\x0c",
        b"\7\1\0\0\0\xff",
        b"\0\2\0\0\0{",
        b"\x0b\x0b",
        b"[" * 100_000,
    ],
)
def test_packed_lists_that_lie(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        nested_value(data)
