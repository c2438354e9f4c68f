"""Nodes of a cluster over loopback: the ledger of all ranks is the one host's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import running_cluster
from tests.support.ledger import read_ledger
from tests.support.ledger_case import Case, large_and_little

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def case(tmp_path_factory: Any) -> Case:
    return large_and_little(tmp_path_factory.mktemp("cluster"))


def test_two_nodes_read_what_one_host_reads(tmp_path: Path, case: Case) -> None:
    with running_cluster(tmp_path) as cluster:
        for name in ("n0", "n1"):
            cluster.add(name)
        ledger = read_ledger(
            cluster.spread("n0", "n0", "n1", "n1"), case.corpus, case.job, {"dp": 4}, 40
        )
        ledger.check_equals(case.wanted(40))
