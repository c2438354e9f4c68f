"""What steps of groups hold, in which order and which rows, is frozen with stream version 1 (E3)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import msd_daemon
from federation.model.job import STREAM_VERSION

BATCHES: dict[str, dict[str, Any]] = {
    "best_fit": {"rows": 8, "row_tokens": 256, "segment_multiple": 4},
    "best_fit_even": {"rows": 8, "row_tokens": 256, "row_segments_max": 8},
    "varlen": {"step_tokens": 2000, "microbatch_tokens": 256, "row_segments_max": 8},
}
GOLDEN = {
    "best_fit": "59a8692bd3a8e1a0c9469e7eb4b0e9c5b039176fe62b37bf82af716b9083e937",
    "best_fit_even": "9f00b042a237cc63f39f09e4a2227dc00027fe09f4b28e4b4306b07926a5c223",
    "varlen": "0e71882b29bec2f1b1e55360eca2fe06719bd1a237bc494667c5d6522c201ccb",
}


def job_of(folder: Path, packing: str) -> dict[str, Any]:
    rng = random.Random(8)
    for name, kind in (("lines", "jsonl"), ("rows", "parquet")):
        rows: list[dict[str, Any]] = []
        for number in range(400):
            for member in range(rng.choice([1, 2, 2, 3, 6])):
                text = f"{name} {number} {member} " + "x" * rng.randint(0, 80)
                rows.append({"text": text, "pair": number})
        if kind == "jsonl":
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "lines.jsonl").write_text(text)
        else:
            pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=97)
    shuffle = {"block_bytes": 4096, "window_records": 32}
    return {
        "seed": 11,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": BATCHES[packing] | {"packing": packing},
        "defaults": {"group": {"field": "pair"}, "shuffle": shuffle},
        "sources": {
            "lines": str(folder / "lines.jsonl"),
            "rows": {"paths": str(folder / "rows.parquet"), "hold_out": 0.1},
        },
        "mixture": {"unit": "samples", 0: {"lines": 2, "rows": 1}},
    }


@pytest.mark.parametrize("packing", GOLDEN)
@pytest.mark.parametrize("dp", [1, 4])
def test_a_job_of_groups_gives_the_frozen_steps(tmp_path: Path, packing: str, dp: int) -> None:
    digest, steps = "", 0
    with msd_daemon.inline(job_of(tmp_path, packing), dp=dp) as stream:
        for step in stream:
            digest, steps = step.plan.stream_digest, steps + 1
            if steps == 60:
                break
    assert STREAM_VERSION == 1
    assert (steps, digest) == (60, GOLDEN[packing])
