"""Limits of one sample, and the policy without a budget, as a job file has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import resolve_job


def resolved(folder: Path, **changes: Any):
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    job = {
        "tokenizer": {"bytes": True},
        "batch": {"rows": 4, "row_tokens": 64},
        "sources": {"a": "a.jsonl"},
    }
    return resolve_job(job | changes, folder)


def test_a_limit_is_part_of_the_stream_and_of_no_sample(tmp_path):
    plain, same = resolved(tmp_path), resolved(tmp_path, limits={"sample_s": 60.0})
    other = resolved(tmp_path, limits={"sample_s": 5.0})
    assert (plain.limits.sample_s, other.limits.sample_s) == (60.0, 5.0)
    assert plain.digest() == same.digest() != other.digest()
    assert plain.sample_digest() == other.sample_digest()


@pytest.mark.parametrize("value", [0, -1.0, 86_401.0, "60", True, float("inf"), float("nan")])
def test_what_is_no_limit_is_refused(tmp_path, value):
    with pytest.raises(JobError, match=r"limits\.sample_s"):
        resolved(tmp_path, limits={"sample_s": value})


def test_quarantine_is_a_policy_without_a_budget(tmp_path):
    assert resolved(tmp_path, defaults={"on_error": "quarantine"}).sources[0].on_error.policy == (
        "quarantine"
    )
    both = {"policy": "quarantine", "budget_ratio": 0.5}
    with pytest.raises(JobError, match="quarantine has no budget; remove budget_ratio"):
        resolved(tmp_path, defaults={"on_error": both})
    # A source may differ from defaults that have one.
    own = {"paths": "a.jsonl", "on_error": "quarantine"}
    job = resolved(tmp_path, defaults={"on_error": {"budget_ratio": 0.5}}, sources={"a": own})
    assert job.sources[0].on_error.policy == "quarantine"
