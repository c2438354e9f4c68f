"""What `status` tells of a real daemon."""

from __future__ import annotations

import pytest

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
