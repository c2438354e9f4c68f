"""A job over a corpus with what its stream must be: what ledger tests are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.chaos_rank import row_digest
from tests.support.ledger import Account, Corpus, Ledger, rows_of
from tests.support.oracle import Oracle, Source


@dataclass
class Case:
    """A job over a corpus, and what its stream must be."""

    corpus: Corpus
    job: dict[str, Any]
    sources: list[Source]

    def wanted(
        self, steps: int | None = None, changes: Mapping[int, Mapping[str, float]] | None = None
    ) -> dict[int, list[bytes]]:
        """Return each step's rows by the oracle."""
        oracle = Oracle(self.job, self.sources, changes)
        return {step.number: rows_of(step.rows) for step in oracle.steps(steps)}

    def digests(self, steps: int) -> dict[int, list[str]]:
        """Return short names of each step's rows by the oracle, as ranks of chaos write them."""
        oracle = Oracle(self.job, self.sources)
        return {
            step.number: sorted(
                row_digest(row.tokens, row.labels, row.position_ids) for row in step.rows
            )
            for step in oracle.steps(steps)
        }

    def settle(self, ledger: Ledger) -> dict[tuple[str, int], Account]:
        return ledger.settle(self.job, self.sources)


def make_case(
    folder: Path,
    lengths: Mapping[str, list[list[int]]],
    batch: Mapping[str, Any],
    *,
    shuffle: Mapping[str, Any] | None = None,
    ends: Mapping[str, str] | None = None,
    **changes: Any,
) -> Case:
    """Write a corpus as .bin/.idx and make a job of it; `ends` is at_exhaustion by source."""
    corpus = Corpus(lengths)
    job: dict[str, Any] = {
        "schema": 1,
        "name": folder.name,
        "seed": 12,
        "tokenizer": {"vocabulary": corpus.vocabulary},
        "batch": dict(batch),
        "sources": corpus.write_tokens(folder),
        "defaults": {"shuffle": dict(shuffle or {})},
    } | changes
    for name, end in (ends or {}).items():
        job["sources"][name]["at_exhaustion"] = end
    sources = corpus.oracle_sources(**(shuffle or {}))
    sources = [
        replace(source, at_exhaustion=(ends or {}).get(source.name, "repeat")) for source in sources
    ]
    return Case(corpus, job, sources)


def large_and_little(folder: Path) -> Case:
    """Return a case of two sources, one of long and one of short documents; rows of 128."""
    rng = np.random.default_rng(33)
    lengths = {
        "large": [rng.integers(0, 300, 150).tolist() for _ in range(3)],
        "little": [rng.integers(0, 20, 900).tolist() for _ in range(3)],
    }
    batch = {"rows": 8, "row_tokens": 128, "microbatch_rows": 1}
    return make_case(folder, lengths, batch)
