"""Damaged and hostile row files in a process with bounded memory: a typed fault, never a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.sources import DATA, ROOT, needs_data

PEAK_MIB_MAX = 300


def read_apart(name: str, paths: list[Path], flips: int = 0) -> dict[str, dict[str, Any]]:
    """Return by file name what was read of it, in a process of its own."""
    arguments = [sys.executable, str(ROOT / "tests/support/hostile_reader.py"), name, str(flips)]
    done = subprocess.run(
        [*arguments, *map(str, paths)], check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(paths)
    return {Path(line["path"]).name: line for line in lines}


def outcome(found: dict[str, Any]) -> tuple[int, int, str]:
    """Return good rows, faults, and the first fault without the path."""
    counts = {int(status): count for status, count in found["counts"].items()}
    return counts.get(0, 0), sum(counts.values()) - counts.get(0, 0), found["fault"]


PARQUET = {
    "ARROW-GH-41317.parquet": (2, 1, "row group 0 gave 0 of 3 rows"),
    "ARROW-GH-41321.parquet": (0, 2, "Invalid or corrupted bit_width 254"),
    "ARROW-GH-43605.parquet": (21186, 0, ""),
    "ARROW-GH-45185.parquet": (0, 1, "repetition level at the start of a record"),
    "ARROW-RS-GH-6229-DICTHEADER.parquet": (0, 1, "Invalid column metadata"),
    "PARQUET-1481.parquet": (0, 1, "Invalid physical column type"),
    "datapage_v1-corrupt-checksum.parquet": (0, 1, "CRC checksum verification failed"),
    "nation.dict-malformed.parquet": (25, 0, ""),
    "rle-dict-uncompressed-corrupt-checksum.parquet": (0, 1, "CRC checksum verification failed"),
    "clusterfuzz-testcase-5913005913407488": (0, 1, "claims -25 rows"),
    "clusterfuzz-testcase-6606237035003904": (0, 1, "must be multiple of 128"),
    "clusterfuzz-testcase-dictbitwidth-4680774947569664": (0, 1, "is no readable parquet file"),
    "clusterfuzz-testcase-dictbitwidth-5882232959270912": (0, 1, "Cannot decrypt"),
    "clusterfuzz-testcase-minimized-parquet-arrow-fuzz-4570087119192064": (
        0,
        1,
        "truncated PLAIN-encoded",
    ),
    "clusterfuzz-testcase-minimized-parquet-arrow-fuzz-4577763874111488": (
        0,
        1,
        "is no readable parquet file",
    ),
    "clusterfuzz-testcase-minimized-parquet-arrow-fuzz-4612343993794560": (
        0,
        3,
        "Couldn't deserialize thrift",
    ),
    "clusterfuzz-testcase-minimized-parquet-arrow-fuzz-4656328221196288": (
        0,
        1,
        "Unsupported compression codec",
    ),
    "clusterfuzz-testcase-minimized-parquet-arrow-fuzz-4705426173394944": (
        0,
        1,
        "Unsupported compression codec",
    ),
    "clusterfuzz-testcase-minimized-parquet-arrow-fuzz-4738122420715520": (
        0,
        1,
        "negative string delta length",
    ),
    "clusterfuzz-testcase-minimized-parquet-arrow-fuzz-4740205688193024": (0, 0, ""),
    "enwiki_bitflip.parquet": (0, 1, "ZSTD decompression failed"),
    "enwiki_cut.parquet": (0, 1, "magic bytes not found in footer"),
    "large_string_map.brotli.parquet": (0, 1, "2147483827 bytes in 2 rows, over record_bytes_max"),
}

ARROW = {
    "clusterfuzz-testcase-arrow-ipc-stream-fuzz-4561555323944960": (0, 1, "has column '' 2 times"),
    "clusterfuzz-testcase-arrow-ipc-stream-fuzz-4895056843112448": (0, 1, "Invalid flatbuffers"),
    "clusterfuzz-testcase-arrow-ipc-stream-fuzz-4904988668854272": (0, 1, "Invalid flatbuffers"),
    "clusterfuzz-testcase-arrow-ipc-stream-fuzz-5077390980284416": (0, 1, "union type id out of"),
    "clusterfuzz-testcase-arrow-ipc-stream-fuzz-5085285868371968": (0, 1, "union type id out of"),
    "clusterfuzz-testcase-arrow-ipc-stream-fuzz-5151909853528064": (0, 1, "codec can't decode"),
    "clusterfuzz-testcase-arrow-ipc-stream-fuzz-5183543628791808": (0, 1, "codec can't decode"),
    "clusterfuzz-testcase-arrow-ipc-stream-fuzz-5435281763467264": (0, 1, "union type id out of"),
    "file_clusterfuzz-testcase-arrow-ipc-file-fuzz-4778515122946048": (0, 1, "1085101824 bytes"),
    "file_clusterfuzz-testcase-arrow-ipc-file-fuzz-4983476816314368": (0, 1, "1426096448 bytes"),
    "file_clusterfuzz-testcase-arrow-ipc-file-fuzz-5125323032887296": (0, 1, "a header of 5120"),
    "file_clusterfuzz-testcase-arrow-ipc-file-fuzz-5168303072608256": (0, 1, "4294967085 bytes"),
    "file_clusterfuzz-testcase-arrow-ipc-file-fuzz-5298734406172672": (0, 1, "3221225472 bytes"),
    "file_clusterfuzz-testcase-arrow-ipc-file-fuzz-5390465250951168": (7, 1, "File too short"),
    "file_clusterfuzz-testcase-arrow-ipc-file-fuzz-5502930036326400": (0, 1, "a header of 24299"),
    "moby_cut.feather": (40, 1, "is damaged at byte 250176"),
}


def files_named(names: dict[str, Any], *folders: str) -> list[Path]:
    found = [path for folder in folders for path in (DATA / folder).iterdir() if path.name in names]
    assert len(found) == len(names)
    return sorted(found)


@needs_data
@pytest.mark.parametrize(
    ("name", "expected", "folders"),
    [
        (
            "parquet",
            PARQUET,
            ("broken/parquet", "broken/parquet_fuzz", "broken/derived", "shards/parquet_testing"),
        ),
        ("arrow", ARROW, ("broken/arrow", "broken/derived")),
    ],
    ids=["parquet", "arrow"],
)
def test_broken_files_have_their_outcomes(
    name: str, expected: dict[str, tuple[int, int, str]], folders: tuple[str, ...]
) -> None:
    found = read_apart(name, files_named(expected, *folders))
    for file, (rows, faults, reason) in expected.items():
        good, bad, fault = outcome(found[file])
        assert (good, bad) == (rows, faults), (file, fault)
        assert reason in fault, file
        assert found[file]["peak_mib"] < PEAK_MIB_MAX, file


@needs_data
def test_odd_but_valid_parquet_is_read() -> None:
    expected = json.loads((DATA / "shards" / "expected.json").read_text())["parquet_testing"]
    rows = {
        Path(name).name: entry["tools"]["pyarrow"]["rows"]
        for name, entry in expected["files"].items()
        if "rows" in (entry["tools"]["pyarrow"] or {})
    }
    rows |= {"repeated_no_annotation.parquet": 6}
    paths = [DATA / "shards" / "parquet_testing" / name for name in rows]
    found = read_apart("parquet", paths)
    assert {name: outcome(one)[:2] for name, one in found.items()} == {
        name: (count, 0) for name, count in rows.items()
    }
    assert len(rows) == 25


def test_changed_bytes_of_arrow_never_end_the_process(tmp_path: Path) -> None:
    dictionary = pa.array(["a", "bb", None, "a"]).dictionary_encode()
    batch = pa.record_batch(
        {
            "n": [1, 2, None, 4],
            "t": ["é", None, "", "abc"],
            "d": dictionary,
            "l": [[1], [], None, [2, 3]],
            "s": [{"x": "a"}, None, {"x": None}, {"x": "b"}],
            "v": pa.array(["long enough for no inline view", "b", None, "c"], pa.string_view()),
        }
    )
    run = pa.RunEndEncodedArray.from_arrays(pa.array([3, 4], pa.int32()), ["a", "b"])
    plain = batch.drop_columns(["d"])
    paths = []
    for name, made, compression in (
        ("plain", plain, None),
        ("dictionary", batch, None),
        ("zstd", plain, "zstd"),
        ("lz4", batch, "lz4"),
        ("run", pa.record_batch({"r": run}), None),
    ):
        for kind, writer in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
            path = tmp_path / f"{name}.{kind}"
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with (
                pa.OSFile(str(path), "wb") as sink,
                writer(sink, made.schema, options=options) as out,
            ):
                out.write_batch(made)
                out.write_batch(made)
            paths.append(path)
    read_apart("arrow", paths, 150)


def test_changed_bytes_of_parquet_never_end_the_process(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"n": range(100), "t": ["é" * (n % 9) for n in range(100)]})
    pq.write_table(table, path, row_group_size=40, compression="zstd")
    read_apart("parquet", [path], 400)


@needs_data
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("mds", "shards/mds_vlm/shard.00001.mds"),
        ("mds", "shards/mds_text/shard.00004.mds.zstd"),
        ("litdata", "shards/litdata/chunk-0-2.bin"),
    ],
)
def test_changed_bytes_of_samples_never_end_the_process(name: str, path: str) -> None:
    read_apart(name, [DATA / path], 100)
