"""Text in every compression, and what a run over it must give: what tests of chaos are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.chaos_rank import row_digest
from tests.support.ledger import Corpus
from tests.support.node import write_job
from tests.support.oracle import Oracle

KINDS = {"plain": "", "packed": "zst", "zipped": "gz", "short": ""}


@dataclass
class ChaosCase:
    """A job and what its stream must be."""

    job: Path
    wanted: dict[int, list[str]]
    """Each step's rows by the oracle, as `chaos_rank` names them."""


def make_chaos_case(folder: Path, steps: int) -> ChaosCase:
    """Write sources whose documents are cut over rows; plan them by the oracle."""
    rng = np.random.default_rng(7)
    shards = {"plain": 5, "packed": 4, "zipped": 3, "short": 2}
    longest = {"plain": 90, "packed": 60, "zipped": 40, "short": 12}
    corpus = Corpus(
        {
            name: [rng.integers(0, longest[name], rng.integers(80, 160)).tolist() for _ in range(n)]
            for name, n in shards.items()
        }
    )
    shuffle: dict[str, Any] = {
        "window_shards": 2, "window_records": 16, "block_bytes": 4096,
        "stream_block_records": 13, "interleave": 3,
    }  # fmt: skip
    job: dict[str, Any] = {
        "schema": 1,
        "name": "chaos",
        "seed": 11,
        "tokenizer": {"file": str(folder / "c" / "tokenizer.json")},
        "batch": {"rows": 8, "row_tokens": 64, "microbatch_rows": 2},
        "sources": corpus.write_texts(folder / "c", KINDS),
        "mixture": {"unit": "tokens", 0: {"plain": 4, "packed": 3, "zipped": 2, "short": 1}},
        "defaults": {"shuffle": shuffle},
    }
    job["sources"]["zipped"]["critical"] = True  # a hot shadow reads it too
    oracle = Oracle(job, corpus.oracle_sources(KINDS, **shuffle))
    wanted = {
        step.number: sorted(row_digest(row.tokens, row.labels, row.position_ids) for row in step.rows)
        for step in oracle.steps(steps)
    }  # fmt: skip
    return ChaosCase(write_job(folder / "chaos.yaml", job), wanted)
