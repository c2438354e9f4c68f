"""Faults of links, nodes, planners and their store from a seed: the ledger equals the oracle.

A few schedules with short faults and many with longer ones, all in `make soak`. The seed is printed;
MSD_TEST_SEED repeats it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.chaos_case import ChaosCase, make_chaos_case
from tests.support.cluster_chaos import NODES, PLANNERS, SLOW, ClusterChaos, draw_faults
from tests.support.etcd import EtcdCluster
from tests.support.host_cluster import HostCluster, host_cluster
from tests.support.hosts import hosts, needs_hosts

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(needs_hosts()), reason=needs_hosts()),
]

STEPS = 160
SEED = int(os.environ.get("MSD_TEST_SEED") or random.SystemRandom().randrange(1 << 30))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ChaosCase:
    print(f"MSD_TEST_SEED={SEED}")
    return make_chaos_case(tmp_path_factory.mktemp("chaos"), STEPS)


@contextmanager
def running(folder: Path, *, has_etcd: bool) -> Iterator[tuple[HostCluster, EtcdCluster | None]]:
    with hosts("s0", *PLANNERS, *NODES, slow=SLOW) as network:
        store = None
        if has_etcd:
            store = EtcdCluster(folder, host=network[0].address, prefix=network[0].prefix)
            store.start()
        try:
            with host_cluster(
                folder, network, planners=PLANNERS, store="" if store is None else store.url()
            ) as cluster:
                for name in NODES:
                    cluster.join(name)
                yield cluster, store
        finally:
            if store is not None:
                store.close()


def run_schedule(case: ChaosCase, folder: Path, key: str, seconds: tuple[float, float]) -> None:
    rng = random.Random(f"{SEED}{key}")
    has_etcd = rng.random() < 0.5
    faults = draw_faults(rng, STEPS, seconds)
    print(f"MSD_TEST_SEED={SEED} {key}: etcd {has_etcd}", "; ".join(map(str, faults)))
    with running(folder, has_etcd=has_etcd) as (cluster, store):
        chaos = ClusterChaos(folder / "run", cluster, store, case.job, faults, rng, STEPS)
        chaos.run()
    chaos.check(case.wanted)


@pytest.mark.soak
@pytest.mark.parametrize("key", ["a", "b"])
def test_a_cluster_under_faults_gives_the_oracles_stream(
    case: ChaosCase, tmp_path: Path, key: str
) -> None:
    run_schedule(case, tmp_path, key, (0.5, 4.0))


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(60))
def test_a_cluster_under_long_faults_gives_the_oracles_stream(
    case: ChaosCase, tmp_path: Path, number: int
) -> None:
    run_schedule(case, tmp_path, f"long{number}", (1.0, 20.0))
