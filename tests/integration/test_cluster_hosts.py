"""A cluster whose nodes and planners are hosts of their own: the ledger is that of one host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.host_cluster import host_cluster, read_on_one_host
from tests.support.hosts import hosts
from tests.support.mixed_sources import mixed_job

pytestmark = pytest.mark.processes

STEPS = 30


@pytest.fixture(scope="module")
def job(tmp_path_factory: Any) -> dict[str, Any]:
    """Every format and order class, documents longer than rows, some of them damaged."""
    return mixed_job(tmp_path_factory.mktemp("mixed"))


@pytest.mark.parametrize(
    ("mesh", "places"),
    [
        ({"dp": 2}, "n0 n1"),
        ({"dp": 2, "tp": 2}, "n0 n0 n1 n1"),
        ({"dp": 2, "tp": 2}, "n0 n1 n1 n0"),
    ],
)
def test_hosts_read_what_one_host_reads(
    tmp_path: Path, job: dict[str, Any], mesh: dict[str, int], places: str
) -> None:
    one = read_on_one_host(tmp_path / "one", job, mesh, STEPS)
    with hosts("p0", "n0", "n1") as network, host_cluster(tmp_path, network) as cluster:
        for name in ("n0", "n1"):
            cluster.join(name)
        run = cluster.run(tmp_path / "run", job, mesh, places.split(), STEPS)
        run.finish().check_equals(one)
        assert run.rows() == one.rows()
