"""A job of every format and order class with documents of all sizes, some of them damaged."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from tests.support.sources import compress, write_megatron

SHARDS = 5


def _texts(rng: random.Random, name: str, count: int) -> list[str]:
    """Return texts from a few bytes up to several rows; each tells source and number."""
    made = []
    for number in range(count):
        size = int(rng.paretovariate(0.9) * 20)
        made.append(f"<{name}:{number}>" + "".join(rng.choices("abcdefgh \n", k=min(size, 3000))))
    return made


def _lines(rng: random.Random, texts: list[str]) -> bytes:
    lines = []
    for text in texts:
        lines.append(json.dumps({"text": text}))
        if rng.random() < 0.02:
            lines.append(rng.choice(['{"text": 1}', "{no json", '{"other": "x"}', '{"text": ""}']))
    return "\n".join(lines).encode() + b"\n"


def _shards(texts: list[str]) -> list[list[str]]:
    cuts = [len(texts) * place // SHARDS for place in range(SHARDS + 1)]
    return [texts[begin:end] for begin, end in itertools.pairwise(cuts)]


def write_mixed_sources(folder: Path, seed: int) -> dict[str, Any]:
    """Write five sources; return the job's `sources` section."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    folder.mkdir(exist_ok=True)
    for number, texts in enumerate(_shards(_texts(rng, "lines", 900))):
        (folder / f"lines-{number}.jsonl").write_bytes(_lines(rng, texts))
    for number, texts in enumerate(_shards(_texts(rng, "streams", 900))):
        packed = compress(_lines(rng, texts), "zst", pieces=1 + number)
        if number == 2:
            packed = packed[: len(packed) * 3 // 4]
        (folder / f"streams-{number}.jsonl.zst").write_bytes(packed)
    for number, texts in enumerate(_shards(_texts(rng, "table", 300))):
        pq.write_table(
            pa.table({"text": texts, "n": range(len(texts))}),
            folder / f"table-{number}.parquet",
            row_group_size=48,
        )
    documents = [[list(text.encode())] for text in _texts(rng, "ids", 150)]
    write_megatron(folder / "ids", documents)
    plain = "\n\n".join(text.replace("\n", "") for text in _texts(rng, "plain", 150))
    (folder / "plain.txt").write_text(plain)
    return {
        "lines": str(folder / "lines-*.jsonl"),
        "streams": str(folder / "streams-*.jsonl.zst"),
        "table": str(folder / "table-*.parquet"),
        "ids": str(folder / "ids.bin"),
        "plain": {"paths": str(folder / "plain.txt"), "document": "blank_line"},
    }


def mixed_job(
    folder: Path, seed: int = 5, *, is_coarse: bool = False, **changes: Any
) -> dict[str, Any]:
    """Return a job over `write_mixed_sources` whose blocks, windows and chunks are all small.

    Two sources, a seekable and a streaming one, weigh enough to be split over all loader workers.

    Args:
        folder: Where the files go.
        seed: Of files and job.
        is_coarse: Make blocks larger than the smallest chunks, so that a small pool is soon full.
        changes: Keys of the job.
    """
    small: dict[str, Any] = {"window_shards": 2, "window_records": 32}
    small |= {
        "block_bytes": "32Ki" if is_coarse else "8Ki",
        "block_records": 150 if is_coarse else 50,
    }
    small |= {"stream_block_records": 120 if is_coarse else 24, "interleave": 4}
    job: dict[str, Any] = {
        "schema": 1,
        "name": "mixed",
        "seed": seed,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {"rows": 16, "row_tokens": 512, "microbatch_rows": 2},
        "defaults": {
            "shuffle": small,
            "on_error": {"policy": "skip", "budget_ratio": 0.2},
        },
        "sources": write_mixed_sources(folder, seed),
        "mixture": {
            "unit": "tokens",
            0: {"lines": 42, "streams": 41, "table": 7, "ids": 5, "plain": 5},
        },
    }
    return job | changes
