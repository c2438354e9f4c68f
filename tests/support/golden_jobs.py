"""Eight jobs over made data whose streams are frozen: every format, packing, tail and order class.

The data is plain arithmetic, so that it is the same on every machine and with every library
version; containers may differ in their bytes, what they hold does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.ledger import write_pair
from tests.support.sources import compress

Job = dict[str, Any]
WORDS = ("loss", "spike", "Ωmega", "naïve", "token", "层", "gradient", "é", "mesh", "🙂", "row")


def numbers(seed: int, count: int, bound: int) -> list[int]:
    """Return numbers below a bound by a fixed linear congruence."""
    state = seed * 2 + 1
    found = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        found.append((state >> 33) % bound)
    return found


def texts(seed: int, count: int, words_max: int) -> list[str]:
    """Return documents of 0 to `words_max` words, now and then one ten times as long."""
    found = []
    for document, length in enumerate(numbers(seed, count, words_max + 1)):
        size = length * (10 if document % 37 == 5 else 1)
        found.append(
            " ".join(WORDS[word] for word in numbers(seed * 1000 + document, size, len(WORDS)))
        )
    return found


def write_lines(path: Path, documents: list[str], kind: str = "", **fields: Any) -> str:
    """Write JSONL with ids; fields: name to a function of the document's number."""
    lines = []
    for number, text in enumerate(documents):
        record = {"id": f"{path.stem}-{number}", "text": text}
        record |= {name: value(number) for name, value in fields.items()}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    data = "".join(lines).encode()
    path.write_bytes(compress(data, kind) if kind else data)
    return str(path)


def job_of(folder: Path, name: str) -> Job:
    """Write the data of a golden job and return the job."""
    folder.mkdir(parents=True, exist_ok=True)
    job = GOLDEN_JOBS[name](folder)
    return {"schema": 1, "stream": 1, "name": name} | job


def _plain(folder: Path) -> Job:
    for shard in range(5):
        write_lines(folder / f"web-{shard}.jsonl", texts(shard, 120, 40))
    return {
        "seed": 11,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {"rows": 8, "row_tokens": 256, "microbatch_rows": 2},
        "sources": {"web": f"{folder}/web-*.jsonl"},
    }


def _streams(folder: Path) -> Job:
    for shard in range(6):
        write_lines(folder / f"z-{shard}.jsonl.zst", texts(20 + shard, 300, 30), "zst")
    for shard in range(2):
        write_lines(folder / f"g-{shard}.jsonl.gz", texts(30 + shard, 90, 60), "gz")
    return {
        "seed": 12,
        "tokenizer": {"bytes": True, "eos": "end", "bos": "start"},
        "documents": "joined",
        "batch": {"rows": 8, "row_tokens": 192, "microbatch_rows": 4, "packing": "concat"},
        "sources": {"z": f"{folder}/z-*.zst", "g": f"{folder}/g-*.gz"},
        "mixture": {"unit": "tokens", 0: {"z": 3, "g": 1}},
    }


def _tables(folder: Path) -> Job:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for shard in range(3):
        table = pa.table({"body": texts(40 + shard, 200, 50)})
        pq.write_table(table, folder / f"p-{shard}.parquet", row_group_size=48)
    return {
        "seed": 13,
        "tokenizer": {"bytes": True},
        "labels": "aligned",
        "batch": {
            "rows": 12, "row_tokens": 200, "microbatch_rows": 3, "packing": "padded",
            "long": "truncate",
        },
        "sources": {"p": {"paths": f"{folder}/p-*.parquet", "text": "body"}},
    }  # fmt: skip


def _tokenized(folder: Path) -> Job:
    sources = {}
    for place, (name, dtype) in enumerate((("a", "<u2"), ("b", "<i4"), ("c", "<u2"))):
        for shard in range(2):
            seed = 50 + 10 * place + shard
            lengths = [1 + length for length in numbers(seed, 150, 90 * (place + 1))]
            ids = np.array(numbers(seed + 7, sum(lengths), 5000), np.int64)
            write_pair(folder / f"{name}-{shard}", ids, lengths, dtype)
        sources[name] = {"paths": f"{folder}/{name}-*.bin"}
    return {
        "seed": 14,
        "tokenizer": {"vocabulary": 5000},
        "batch": {"rows": 16, "row_tokens": 128, "microbatch_rows": 2},
        "sources": sources,
        "mixture": {0: {"a": 1, "b": 1}, "20": {"a": 5, "b": 1, "c": 2}, "60": {"c": 1}},
    }


def _ending(folder: Path) -> Job:
    files = {}
    for place, name in enumerate("xyz"):
        path = folder / f"{name}.txt"
        blocks = texts(80 + place, 400, 12 * (place + 1))
        path.write_text("\n\n".join(block for block in blocks if block) + "\n", encoding="utf-8")
        files[name] = {"paths": str(path), "document": "blank_line", "at_exhaustion": "drop"}
    files["z"] |= {"shuffle": False, "max_epochs": 2}
    return {
        "seed": 15,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {"rows": 8, "row_tokens": 64, "microbatch_rows": 1, "long": "skip"},
        "sources": files,
        "mixture": {"unit": "samples", 0: {"x": 1, "y": 1, "z": 1}},
    }


def _growing(folder: Path) -> Job:
    for shard in range(4):
        write_lines(folder / f"w-{shard}.jsonl", texts(90 + shard, 200, 40))
    return {
        "seed": 16,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {
            "rows": {"0": 4, "30": 8, "50": 6},
            "row_tokens": {"0": 64, "0.02M": 160, "0.05M": 96},
            "microbatch_rows": 2,
            "row_segments_max": 24,
        },
        "sources": {"w": f"{folder}/w-*.jsonl"},
    }


def _columns(folder: Path) -> Job:
    for shard in range(3):
        lengths = numbers(110 + shard, 160, 70)
        lines = []
        for number, length in enumerate(lengths):
            ids = numbers(1000 * shard + number, length + 1, 300)
            advantage = [value / 8 for value in numbers(number, length + 1, 64)]
            line = {"id": number, "ids": ids, "adv": advantage, "reward": number % 5}
            lines.append(json.dumps(line) + "\n")
        (folder / f"r-{shard}.jsonl").write_text("".join(lines))
    write_lines(
        folder / "t.jsonl", texts(120, 300, 20), adv=lambda _: 0.0, reward=lambda number: number
    )
    return {
        "seed": 17,
        "tokenizer": {"vocabulary": 300},
        "ignore": "loss_mask",
        "batch": {"rows": 8, "row_tokens": 128, "microbatch_rows": 2, "segment_multiple": 8},
        "sources": {
            "r": {"paths": f"{folder}/r-*.jsonl", "tokens": "ids"},
            "half": {"paths": f"{folder}/r-0.jsonl", "tokens": "ids", "loss_weight": 0.5},
        },
        "fields": {"advantage": {"from": "adv"}, "reward": {"per": "segment", "dtype": "int32"}},
    }


def _held(folder: Path) -> Job:
    for shard in range(3):
        write_lines(folder / f"h-{shard}.jsonl", texts(130 + shard, 150, 50))
    return {
        "seed": 18,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {"rows": 8, "row_tokens": 320, "microbatch_rows": 4},
        "sources": {"h": {"paths": f"{folder}/h-*.jsonl", "hold_out": 0.25, "key": "id"}},
        "epochs": 2,
        "end": "wrap",
    }


GOLDEN_JOBS: dict[str, Callable[[Path], Job]] = {
    "plain": _plain,
    "streams": _streams,
    "tables": _tables,
    "tokenized": _tokenized,
    "ending": _ending,
    "growing": _growing,
    "columns": _columns,
    "held": _held,
}
