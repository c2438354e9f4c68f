"""Corpora that benches make: web-like document lengths, pre-tokenized and as parquet text."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

MEDIAN_TOKENS = 420
SIGMA = 1.1
LENGTH_MAX = 60_000


def document_lengths(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Log-normal lengths (median 420, mean about 770 tokens) that add up to about `tokens`."""
    lengths = np.exp(rng.normal(np.log(MEDIAN_TOKENS), SIGMA, tokens // 600 + 8)).astype(np.int64)
    lengths = np.clip(lengths, 16, LENGTH_MAX)
    count = int(np.searchsorted(np.cumsum(lengths), tokens)) + 1
    return lengths[:count]


def make_tokenized(folder: Path, sources: int, tokens_each: int) -> list[Path]:
    """Write `sources` Megatron `.bin/.idx` pairs of uint16 ids; return their prefixes."""
    folder.mkdir(parents=True, exist_ok=True)
    prefixes = []
    for number in range(sources):
        rng = np.random.default_rng(number)
        lengths = document_lengths(rng, tokens_each)
        prefix = folder / f"source{number:02d}"
        ids = rng.integers(1, 50_000, int(lengths.sum()), dtype=np.uint16)
        ids.tofile(prefix.with_suffix(".bin"))
        write_index(prefix.with_suffix(".idx"), lengths)
        prefixes.append(prefix)
    return prefixes


def write_index(path: Path, lengths: np.ndarray) -> None:
    """Write a Megatron MMIDIDX version 1 index of uint16 documents of one sequence each."""
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1] * 2, out=pointers[1:])
    with path.open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(pointers.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def make_parquet(folder: Path, sources: int, bytes_each: int) -> list[Path]:
    """Write `sources` zstd parquet files of text in row groups of about 8 MiB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    words = [f"word{n:x}" for n in range(4096)]
    paths = []
    for number in range(sources):
        rng = np.random.default_rng(1000 + number)
        lengths = document_lengths(rng, bytes_each // 6)
        texts = [" ".join(words[w] for w in rng.integers(0, 4096, n // 2 + 1)) for n in lengths]
        path = folder / f"source{number:02d}.parquet"
        rows = max(1, len(texts) * (8 << 20) // max(bytes_each, 1))
        table = pa.table({"id": [str(n) for n in range(len(texts))], "text": texts})
        pq.write_table(table, path, compression="zstd", row_group_size=rows)
        paths.append(path)
    return paths
