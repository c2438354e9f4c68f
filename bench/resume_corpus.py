"""Sources of every order class for the resume bench, and states that stand deep in their epochs."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.corpus import document_lengths, write_index
from federation.model.job import ResolvedJob
from federation.planning.step_change import first_state
from msd_client.contract.position import pack_block_key, unpack_block_key
from msd_client.contract.state import (
    CURSOR_BLOCK_KEY,
    CURSOR_INDEX,
    CURSOR_OFFSET,
    DELIVERED_SAMPLES,
    DELIVERED_TOKENS,
    DRAWN_SAMPLES,
    DRAWN_TOKENS,
    RECORD_ORDER,
    VALID_TOKENS,
    StreamState,
)
from msd_daemon.sources.index_build import build_index
from msd_daemon.sources.loader import SourceLoader, open_source_loader
from msd_daemon.transforms import open_tokenizer

KINDS = ("jsonl", "gz", "zst", "parquet", "bin")
SHARDS = 2
SMALL_BYTES, LARGE_BYTES = 160 << 10, 24 << 20
"""Text of a shard. A large one has seek points inside: they lie 16 MiB apart."""
CHUNK_BYTES = 1 << 20


def make_sources(folder: Path, count: int, large: int) -> dict[str, Any]:
    """Write sources of all kinds in turn; return the job's section of them.

    Args:
        folder: For them.
        count: How many.
        large: How many of the compressed ones are large.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    words = np.array([f"word{n:x}" for n in range(4096)])
    sections: dict[str, Any] = {}
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        is_large = kind in ("gz", "zst") and large > 0
        large -= is_large
        size = LARGE_BYTES if is_large else SMALL_BYTES
        name = f"{kind}{number:03d}"
        paths = [
            _write(folder / f"{name}-{shard}", kind, rng, words, size) for shard in range(SHARDS)
        ]
        sections[name] = {"paths": [str(path) for path in paths]}
    return sections


def _write(stem: Path, kind: str, rng: np.random.Generator, words: Any, size: int) -> Path:
    lengths = document_lengths(rng, size // 7)
    if kind == "bin":
        path = stem.with_suffix(".bin")
        rng.integers(97, 122, int(lengths.sum()), dtype=np.uint16).tofile(path)
        write_index(stem.with_suffix(".idx"), lengths)
        return path
    drawn = words[rng.integers(0, 4096, int(lengths.sum()) + 1)].tolist()
    texts, at = [], 0
    for length in lengths.tolist():
        texts.append(" ".join(drawn[at : at + length]))
        at += length
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = stem.with_suffix(".parquet")
        table = pa.table({"text": texts})
        pq.write_table(table, path, compression="zstd", row_group_size=64)
        return path
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if kind == "gz":
        path = stem.with_suffix(".jsonl.gz")
        path.write_bytes(gzip.compress(lines, 1))
    elif kind == "zst":
        import zstandard

        path = stem.with_suffix(".jsonl.zst")
        path.write_bytes(zstandard.ZstdCompressor(level=1).compress(lines))
    else:
        path = stem.with_suffix(".jsonl")
        path.write_bytes(lines)
    return path


def build_indexes(job: ResolvedJob, index_dir: Path) -> None:
    """Make the index of every shard, as a pass over the source or `msdctl index` does."""
    for source in job.sources:
        for shard in range(len(source.shards)):
            build_index(source, shard, index_dir)


class Positions:
    """Where a source's records lie in the order of any pass: all that a state says of it.

    Args:
        job: The resolved job.
        index_dir: Of the daemon.
    """

    def __init__(self, job: ResolvedJob, index_dir: Path) -> None:
        self._job = job
        self._index_dir = index_dir
        self._tokenizer = open_tokenizer(job.tokenizer)
        self._passes = [
            self._read(self._loader(source), 0, None) for source in range(len(job.sources))
        ]
        """Of each source: records and tokens of a pass."""

    def _loader(self, source: int) -> SourceLoader:
        return open_source_loader(self._job, source, self._tokenizer, index_dir=self._index_dir)

    def _read(
        self, loader: SourceLoader, epoch: int, records: int | None
    ) -> tuple[int, int, tuple[int, int, int]]:
        """Return records and tokens of the first `records` of a pass, and where the last one lies."""
        loader.seek(pack_block_key(epoch, 0, 0), 0)
        count = tokens = 0
        last = (0, 0, 0)
        while (draft := loader.next_chunk(CHUNK_BYTES)) is not None:
            meta = draft.meta
            if unpack_block_key(meta.block_key).epoch != epoch:
                break
            lengths = meta.lengths
            if records is not None:
                lengths = lengths[: records - count]
            if len(lengths):
                place = len(lengths) - 1
                last = (meta.block_key, meta.first_index + place, int(lengths[place]))
            count += len(lengths)
            tokens += int(lengths.sum())
            if count == records:
                break
        loader.close()
        return count, tokens, last

    def state(self, step: int, epoch: int, share: float) -> StreamState:
        """Return a state of a step that stands in a pass of each source, a share of it behind it."""
        state = first_state(self._job)
        progress = state.progress.copy()
        for source, (records, tokens, _) in enumerate(self._passes):
            before = max(1, int(records * share))
            count, drawn, (key, index, length) = self._read(self._loader(source), epoch, before)
            assert count == before and length
            column = progress[:, source]
            column[[CURSOR_BLOCK_KEY, CURSOR_INDEX, CURSOR_OFFSET]] = key, index, length
            column[RECORD_ORDER] = epoch * records + before - 1
            column[[DRAWN_TOKENS, DELIVERED_TOKENS]] = epoch * tokens + drawn
            column[[DRAWN_SAMPLES, DELIVERED_SAMPLES]] = epoch * records + before
            column[VALID_TOKENS] = column[DELIVERED_TOKENS] - column[DELIVERED_SAMPLES]
        return replace(state, step=step, progress=progress)
