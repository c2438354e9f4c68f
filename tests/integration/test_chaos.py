"""Kills, stops, full and slow disks, cut state files, from a seed: the ledger equals the oracle.

Loader workers, constructor, planner, daemon and trainers alike; ranks come back with another dp each
time. A handful of schedules with short stops in `make test`, 200 with stops of 10-30 s in
`make soak`. The seed is printed; MSD_TEST_SEED repeats it.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.chaos import Chaos, draw_schedule
from tests.support.chaos_rank import row_digest
from tests.support.ledger import Corpus
from tests.support.node import write_job
from tests.support.oracle import Oracle

pytestmark = pytest.mark.processes

STEPS = 240
SEED = int(os.environ.get("MSD_TEST_SEED") or random.SystemRandom().randrange(1 << 30))
KINDS = {"plain": "", "packed": "zst", "zipped": "gz", "short": ""}


@dataclass
class Case:
    """A job and what its stream must be."""

    job: Path
    wanted: dict[int, list[str]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    print(f"MSD_TEST_SEED={SEED}")
    folder = tmp_path_factory.mktemp("chaos")
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
        for step in oracle.steps(STEPS)
    }  # fmt: skip
    return Case(write_job(folder / "chaos.yaml", job), wanted)


def run_schedule(case: Case, folder: Path, key: str, stop_s: tuple[float, float]) -> None:
    rng = random.Random(f"{SEED}{key}")
    schedule = draw_schedule(rng, STEPS, stop_s)
    print(f"MSD_TEST_SEED={SEED} {key}:", "; ".join(map(str, schedule)))
    chaos = Chaos(folder, case.job, schedule, rng, STEPS)
    chaos.run()
    chaos.check(case.wanted)
    print(f"{key}: {chaos.attempts} attempts; {'; '.join(chaos.done)}; told: {chaos.told}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(5))
def test_the_ledger_equals_the_oracle_whatever_fails(
    case: Case, tmp_path: Path, number: int
) -> None:
    run_schedule(case, tmp_path, f"short {number}", (0.2, 1.5))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(200))
def test_long_stops_change_nothing_either(case: Case, tmp_path: Path, number: int) -> None:
    run_schedule(case, tmp_path, f"long {number}", (10.0, 30.0))
