"""The job key `slow_sources`: what it may say, and that a job without it is what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from federation.model.job import SlowSourcesRule, decode_job, encode_job
from federation.model.validation import validation_job
from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import resolve_job


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "a.txt").write_text("text\n")
    return {
        "tokenizer": {"bytes": True},
        "batch": {"rows": 4, "row_tokens": 64},
        "sources": {"a": str(tmp_path / "a.txt")},
        "loaders": {"val": {"from": "a", "part": "all"}},
        "mixture": {"0": {"a": 1}},
    }


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("wait", None),
        ("substitute", SlowSourcesRule(5.0, 0.5)),
        ({"after_s": 2, "at_most": 0.25}, SlowSourcesRule(2.0, 0.25)),
    ],
)
def test_what_it_says(job: dict[str, Any], tmp_path: Path, given: Any, rule: Any):
    found = resolve_job({**job, "slow_sources": given}, tmp_path)
    assert found.slow_sources == rule
    assert decode_job(encode_job(found)) == found
    assert validation_job(found, "val").slow_sources is None
    plain = resolve_job(job, tmp_path)
    assert (found.digest() == plain.digest()) == (rule is None)
    assert found.sample_digest() == plain.sample_digest(), "it moves no sample by itself"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"at_most": 1}, "slow_sources.at_most"),
        ({"at_most": 0}, "slow_sources.at_most"),
        ({"after_s": 0.5}, "slow_sources.after_s"),
        ({"after": 5}, "slow_sources.after"),
        ("sub", "slow_sources: .*neither wait nor substitute, nor a map"),
        (5, "slow_sources: .*neither wait nor substitute, nor a map"),
    ],
)
def test_what_it_may_not_say(job: dict[str, Any], tmp_path: Path, given: Any, said: str):
    with pytest.raises(JobError, match=said):
        resolve_job({**job, "slow_sources": given}, tmp_path)
