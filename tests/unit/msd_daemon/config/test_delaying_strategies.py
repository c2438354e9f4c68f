"""Strategies that let documents wait are refused where they could not plan."""

import pytest

from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import resolve_job

ROWS = "{rows: 8, row_tokens: 64%s}"
JOB = """
schema: 1
tokenizer: {bytes: true}
strategy: long_context
batch: %s
sources: {web: {paths: web.jsonl%s}}
"""


def resolved(tmp_path, batch, source=""):
    (tmp_path / "web.jsonl").write_text('{"text": "abc", "prompt": "p"}\n')
    return resolve_job(JOB % (batch, source), tmp_path, "job")


def test_rows_of_best_fit_are_taken(tmp_path):
    assert resolved(tmp_path, ROWS % "").strategy == "long_context"


@pytest.mark.parametrize(
    ("batch", "source"),
    [
        (ROWS % ", packing: concat", ""),
        ("{packing: varlen, step_tokens: 512, microbatch_tokens: 64}", ""),
        (ROWS % "", ", group: {field: prompt}"),
    ],
)
def test_what_cannot_wait_is_a_fault_of_the_strategy(tmp_path, batch, source):
    with pytest.raises(JobError, match=r"strategy: .*lets long documents wait.*write balanced"):
        resolved(tmp_path, batch, source)
