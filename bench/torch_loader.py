"""The peer: a PyTorch DataLoader as a careful user writes it for a weighted mixture.

Memory-mapped: GPT rows of row_tokens + 1 ids cut from each source's token stream (Megatron style),
sources drawn by weight with a seeded generator per worker, whole microbatches made in the worker
(`batch_size=None`) so that the collate is one array and one copy. Parquet: one row group at a time per
source, text tokenized in the worker, rows cut from the concatenation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class MappedRows(IterableDataset):
    """Microbatches of rows from memory-mapped token files."""

    def __init__(
        self, prefixes: list[Path], rows: int, row_tokens: int, rank: int, ranks: int
    ) -> None:
        self.paths = [prefix.with_suffix(".bin") for prefix in prefixes]
        self.rows, self.row_tokens, self.rank, self.ranks = rows, row_tokens, rank, ranks

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        shard, shards = self.rank * workers + worker, self.ranks * workers
        maps = [np.memmap(path, np.uint16, "r") for path in self.paths]
        rng = np.random.default_rng(17 + shard)
        counts = [(len(m) - 1) // self.row_tokens for m in maps]
        orders = [
            np.random.default_rng(s).permutation(n)[shard::shards] for s, n in enumerate(counts)
        ]
        at = [0] * len(maps)
        width = self.row_tokens + 1
        while True:
            block = np.empty((self.rows, width), np.int64)
            for row, source in enumerate(rng.integers(0, len(maps), self.rows)):
                order = orders[source]
                start = int(order[at[source] % len(order)]) * self.row_tokens
                at[source] += 1
                block[row] = maps[source][start : start + width]
            data = torch.from_numpy(block)
            yield {"tokens": data[:, :-1], "labels": data[:, 1:]}


class ParquetRows(IterableDataset):
    """Microbatches of rows from parquet text, tokenized in the worker."""

    def __init__(
        self, paths: list[Path], tokenizer: Path, rows: int, row_tokens: int, rank: int, ranks: int
    ) -> None:
        self.paths, self.tokenizer = paths, tokenizer
        self.rows, self.row_tokens, self.rank, self.ranks = rows, row_tokens, rank, ranks

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        import pyarrow.parquet as pq
        from tokenizers import Tokenizer

        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        shard, shards = self.rank * workers + worker, self.ranks * workers
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        rng = np.random.default_rng(17 + shard)

        def stream(path: Path) -> Iterator[str]:
            while True:
                file = pq.ParquetFile(path)
                for batch in file.iter_batches(batch_size=256, columns=["text"]):
                    yield from batch.column(0).to_pylist()[shard::shards]

        streams = [stream(path) for path in self.paths]
        rests: list[list[int]] = [[] for _ in streams]
        width = self.row_tokens + 1
        while True:
            block = np.empty((self.rows, width), np.int64)
            for row, source in enumerate(rng.integers(0, len(streams), self.rows)):
                rest = rests[source]
                while len(rest) < width:
                    rest += tokenizer.encode(next(streams[source]), add_special_tokens=False).ids
                block[row] = rest[:width]
                del rest[: self.row_tokens]
            data = torch.from_numpy(block)
            yield {"tokens": data[:, :-1], "labels": data[:, 1:]}


def loader(dataset: IterableDataset, workers: int) -> DataLoader:
    return DataLoader(
        dataset, batch_size=None, num_workers=workers, prefetch_factor=2, persistent_workers=True
    )
