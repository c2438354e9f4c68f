"""What `status` tells of a real daemon."""

from __future__ import annotations

import pytest
import yaml

from msd_client.contract.state import StreamState
from tests.support.node import text_job

pytestmark = pytest.mark.processes


def test_status_accounts_for_every_process_of_the_daemon(start_node, tmp_path):
    node = start_node()
    with node.connect(text_job(tmp_path), {"dp": 1}, 0) as data:
        for _ in zip(range(2), data.train, strict=False):
            pass
        answer = node.request("status")
        children = sorted(child.pid for child in node.children())
    daemon, (job,) = answer["daemon"], answer["jobs"]
    listed = [*daemon["processes"], *job["workers"]]
    assert {"fork_server", "planner", "loader", "constructor"} <= {row["role"] for row in listed}
    assert all(row["memory"]["pss_anon"] > 0 for row in listed)
    # No child is left out, or the memory that we show would be too small.
    assert sorted(row["pid"] for row in listed) == children


def test_the_resolved_job_lies_beside_the_journal_and_its_digest_stands_in_the_state(
    start_node, tmp_path
):
    node = start_node()
    with node.connect(text_job(tmp_path), {"dp": 1}, 0) as data:
        for _ in zip(range(2), data.train, strict=False):
            pass
        state = StreamState.decode(data.train.state_dict()["msd"])
    (path,) = node.folder.glob("state/jobs/*/resolved.yaml")
    resolved = yaml.safe_load(path.read_text())
    assert resolved["digest"] == state.job_digest == data.train.job_digest
    assert resolved["batch"]["labels"] == "shifted"  # a default, written out
    assert [source["order_class"] for source in resolved["sources"]] == [
        "seekable", "streaming", "seekable",
    ]  # fmt: skip
