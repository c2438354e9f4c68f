"""Raw text to chunks of tokens: the loader against the tokenizer's own batch rate on one core.

JSON lines in zstd (documentation, code, prose, many languages), read by a source loader as a loader
worker runs it, and the same texts given to the tokenizer's library in batches, in turn in one
process. `rate_over_tokenizer` is the loader's rate as a part of the library's, of the worst
tokenizer; medians of the rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.node import middle
from bench.processes import ROOT
from bench.text_corpus import make_shards, tokenizers

Say = Callable[..., None]


def run(*, is_quick: bool, say: Say, only: str | None) -> dict[str, float]:
    """Return the figures; `only` takes the name of a tokenizer."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="msd-bench-text-") as name:
        folder = Path(name)
        paths, texts = make_shards(folder, (4 << 20) if is_quick else (16 << 20))
        size_bytes = sum(len(text.encode()) for text in texts)
        found = tokenizers(folder, texts)
        if only not in (None, *found):
            raise SystemExit(f"--only {only}: the tokenizers here are {', '.join(found)}")
        ratios = []
        for key, path in found.items():
            if only in (None, key):
                job = write_job(folder / f"{key}.yaml", paths, path)
                rounds = measure(job, texts, 3 if is_quick else 5)
                ratios.append(middle(one["library_s"] / one["loader_s"] for one in rounds))
                own = {
                    f"{key}_mb_per_cpu_s": size_bytes / 1e6 / middle_of(rounds, "loader_s"),
                    f"{key}_library_mb_per_cpu_s": size_bytes
                    / 1e6
                    / middle_of(rounds, "library_s"),
                    f"{key}_rate_over_tokenizer": ratios[-1],
                    f"{key}_rate_over_fastest_call": middle(
                        one["fastest_s"] / one["loader_s"] for one in rounds
                    ),
                }
                say(", ".join(f"{name} {value:.3f}" for name, value in own.items()))
                figures |= own
        figures["rate_over_tokenizer"] = min(ratios)
    return {key: round(value, 4) for key, value in figures.items()}


def middle_of(rounds: list[dict[str, Any]], key: str) -> float:
    return middle(one[key] for one in rounds)


def write_job(path: Path, shards: list[Path], tokenizer: Path) -> Path:
    key = "tiktoken" if tokenizer.suffix == ".tiktoken" else "file"
    job = {
        "schema": 1,
        "seed": 17,
        "tokenizer": {key: str(tokenizer)},
        "batch": {"rows": 8, "row_tokens": 4096, "microbatch_rows": 1},
        "sources": {"text": {"paths": [str(shard) for shard in shards]}},
    }
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


def measure(job: Path, texts: list[str], rounds: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "bench.text_rates", "--job", str(job), "--rounds", str(rounds)]
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)
