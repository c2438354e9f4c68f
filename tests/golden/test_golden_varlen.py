"""What varlen steps hold is frozen with stream version 1; where segments go may get better (E3)."""

from __future__ import annotations

from pathlib import Path

import pytest

import msd_daemon
from federation.model.job import STREAM_VERSION
from tests.support.golden_jobs import job_of

BATCH = {"packing": "varlen", "microbatch_tokens": 128, "long": "skip", "segment_multiple": 8}
GOLDEN = {
    "plain": "7e3f0807d2c0be967157d309dc0aa2b3d32a4db9867759cae6fb470df4072b58",
    "tokenized": "5631f5c7fee0a4ee0091a493a04219a517de0d05aea35f4771939a209be27f5e",
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("dp", [1, 4])
def test_a_varlen_job_gives_the_frozen_steps(tmp_path: Path, name: str, dp: int) -> None:
    job = job_of(tmp_path / name, name)
    job["batch"] = {**BATCH, "step_tokens": {"0": 1000, "60": 2500}}
    digest, steps = "", 0
    with msd_daemon.inline(job, dp=dp) as stream:
        for step in stream:
            digest, steps = step.plan.stream_digest, steps + 1
            if steps == 100:
                break
    assert STREAM_VERSION == 1
    assert (steps, digest) == (100, GOLDEN[name])
