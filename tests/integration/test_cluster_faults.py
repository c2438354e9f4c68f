"""What goes wrong between hosts: links, planners, the store, nodes, clocks. The stream stays one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.etcd import EtcdCluster
from tests.support.host_cluster import HostCluster, HostRun, host_cluster, read_on_one_host
from tests.support.hosts import hosts, needs_hosts
from tests.support.mixed_sources import mixed_job
from tests.support.node import running_node
from tests.support.wrong_clock import WrongClock

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(needs_hosts()), reason=needs_hosts()),
]

STEPS = 60
MESH = {"dp": 2}
HOUR_S = 3600


@pytest.fixture(scope="module")
def one(tmp_path_factory: Any) -> HostRun:
    """The run that no fault meets."""
    folder = tmp_path_factory.mktemp("faults")
    with running_node(folder / "node") as node:
        return read_on_one_host(node, folder / "one", mixed_job(folder / "sources"), MESH, STEPS)


@contextmanager
def nodes(
    folder: Path, *names: str, others: tuple[str, ...] = (), slow: tuple[str, ...] = (), **more: Any
) -> Iterator[HostCluster]:
    """Start a cluster of these nodes; `others` are hosts where nothing runs yet."""
    planners = more.get("planners", ("p0",))
    with (
        hosts(*planners, *names, *others, slow=slow) as network,
        host_cluster(folder, network, **more) as cluster,
    ):
        for name in names:
            cluster.join(name)
        yield cluster


def read(cluster: HostCluster, one: HostRun, places: str, **more: Any) -> HostRun:
    return cluster.run(
        cluster.folder / "run", one.job, MESH, places.split(), STEPS, **{"step_s": 0.05, **more}
    )


def said(cluster: HostCluster, node: str, what: str) -> bool:
    return any(what in line for line in cluster.happened(node))


def test_a_link_that_is_cut_and_restored_is_waited_for(tmp_path: Path, one: HostRun) -> None:
    with nodes(tmp_path, "n0", "n1") as cluster:
        run = read(cluster, one, "n0 n1")
        run.until(10)
        cluster.host("n1").cut()
        cluster.until(lambda: said(cluster, "n0", "node n1 is not heard"), "n1 to be missed")
        cluster.host("n1").heal()
        cluster.until(lambda: said(cluster, "n0", "node n1 is heard again"), "n1 to be heard")
        run.finish().check_equals(one)


@pytest.mark.soak
def test_a_loading_node_whose_link_stays_cut_is_replaced_and_comes_back(
    tmp_path: Path, one: HostRun
) -> None:
    with nodes(tmp_path, "n0", "n1", "n2") as cluster:
        run = read(cluster, one, "n0 n1")
        run.until(10)
        cluster.host("n2").cut()
        cluster.until(lambda: said(cluster, "n0", "node n2 was lost: not heard"), "n2 to be lost")
        run.until(run.reached + 5)
        cluster.host("n2").heal()
        cluster.until(lambda: said(cluster, "n0", "node n2 joined"), "n2 to come back")
        run.finish().check_equals(one)


@pytest.mark.soak
def test_nodes_that_hear_each_other_one_way_only_wait(tmp_path: Path, one: HostRun) -> None:
    with nodes(tmp_path, "n0", "n1") as cluster:
        run = read(cluster, one, "n0 n1")
        run.until(10)
        cluster.host("n0").block(cluster.host("n1"))
        cluster.until(
            lambda: any(row.get("silent_peers") for row in cluster.status("n0")["nodes"]),
            "a silent peer to be named",
        )
        cluster.host("n0").heal()
        run.finish().check_equals(one)


@pytest.mark.soak
def test_a_planner_that_hears_a_node_but_is_not_heard(tmp_path: Path, one: HostRun) -> None:
    with nodes(tmp_path, "n0", "n1") as cluster:
        run = read(cluster, one, "n0 n1")
        run.until(10)
        cluster.host("n1").block(cluster.host("p0"))
        cluster.until(lambda: "is silent" in cluster.nodes["n1"].log, "n1 to miss its planner")
        cluster.host("n1").heal()
        run.finish().check_equals(one)


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.soak)])
def test_a_standby_takes_over_and_the_old_leader_is_obeyed_no_more(
    tmp_path: Path, one: HostRun, how: str
) -> None:
    with nodes(tmp_path, "n0", "n1", planners=("p0", "p1")) as cluster:
        run = read(cluster, one, "n0 n1")
        run.until(10)
        old = cluster.leader()
        assert old.process is not None
        if how == "killed":
            old.kill()
        else:
            os.kill(old.process.pid, signal.SIGSTOP)
        cluster.until(lambda: "leads, term 2" in cluster.other(old).log, "the standby to lead")
        run.until(run.reached + 20)
        if how == "stopped":
            os.kill(old.process.pid, signal.SIGCONT)
            cluster.until(lambda: not old.says_that_it_leads, "the old leader to stand by")
        cluster.until(lambda: said(cluster, "n1", "leads with term 2"), "n1 to be told of it")
        run.finish().check_equals(one)


@contextmanager
def with_etcd(folder: Path) -> Iterator[tuple[HostCluster, EtcdCluster]]:
    """Start two planners that share a store on a host of its own, and two nodes."""
    with hosts("s0", "p0", "p1", "n0", "n1") as network:
        etcd = EtcdCluster(folder, host=network[0].address, prefix=network[0].prefix)
        etcd.start()
        try:
            with host_cluster(folder, network, planners=("p0", "p1"), store=etcd.url()) as cluster:
                for name in ("n0", "n1"):
                    cluster.join(name)
                yield cluster, etcd
        finally:
            etcd.close()


@pytest.mark.soak
def test_a_store_that_dies_and_comes_back(tmp_path: Path, one: HostRun) -> None:
    with with_etcd(tmp_path) as (cluster, etcd):
        run = read(cluster, one, "n0 n1")
        run.until(10)
        etcd.kill()
        leader = cluster.leader()
        cluster.until(lambda: "gives no orders" in leader.log, "the leader to doubt")
        etcd.start()
        run.finish().check_equals(one)


@pytest.mark.soak
def test_a_leader_that_is_cut_off_is_replaced_and_stands_by_when_it_is_back(
    tmp_path: Path, one: HostRun
) -> None:
    with with_etcd(tmp_path) as (cluster, _):
        run = read(cluster, one, "n0 n1")
        run.until(10)
        old = cluster.leader()
        cluster.host(old.name).cut()
        term = cluster.status("n0")["term"]
        other = cluster.other(old)
        cluster.until(lambda: other.says_that_it_leads, "the standby to lead")
        run.until(run.reached + 20)
        cluster.host(old.name).heal()
        cluster.until(lambda: not old.says_that_it_leads, "the old leader to stand by")
        run.finish().check_equals(one)
        assert cluster.status("n0")["term"] > term


def test_a_host_that_loses_power_is_replaced(tmp_path: Path, one: HostRun) -> None:
    with nodes(tmp_path, "n0", "n1", "n2") as cluster:
        run = read(cluster, one, "n0 n1")
        run.until(10)
        cluster.host("n2").die()
        cluster.nodes.pop("n2")
        cluster.until(lambda: said(cluster, "n0", "node n2 was lost"), "n2 to be lost")
        run.finish().check_equals(one)


@pytest.mark.soak
def test_ranks_that_die_with_their_host_start_again_elsewhere(tmp_path: Path, one: HostRun) -> None:
    with nodes(tmp_path, "n0", "n1", "n2") as cluster:
        saves = {"states": str(tmp_path / "states"), "save_every": 5}
        run = read(cluster, one, "n0 n1", attempt=1, **saves)
        run.until(22)
        cluster.host("n1").die()
        cluster.nodes.pop("n1")
        cluster.until(lambda: said(cluster, "n0", "node n1 was lost"), "n1 to be lost")
        run.kill()  # as a launcher does where ranks are gone
        again = read(cluster, one, "n0 n2", attempt=2, **saves)
        again.finish().check_equals(one)
        assert again.lines(0)[0]["step"] >= 20


@pytest.mark.soak
def test_a_node_that_joins_in_mid_run_loads_too(tmp_path: Path, one: HostRun) -> None:
    with nodes(tmp_path, "n0", "n1", others=("n2",)) as cluster:
        run = read(cluster, one, "n0 n1")
        run.until(10)
        cluster.join("n2")
        cluster.until(lambda: said(cluster, "n0", "node n2 joined"), "n2 to join")
        run.finish().check_equals(one)


@pytest.mark.soak
def test_clocks_that_are_wrong_by_an_hour_change_nothing(tmp_path: Path, one: HostRun) -> None:
    clocks = {name: WrongClock(tmp_path / f"{name}.clock") for name in ("p0", "n1")}
    clocks["n1"].set(HOUR_S)
    with hosts("p0", "p1", "n0", "n1") as network:
        environ = {"p0": clocks["p0"].environ}
        with host_cluster(
            tmp_path, network, planners=("p0", "p1"), planner_environ=environ
        ) as cluster:
            cluster.join("n0")
            cluster.join("n1", **clocks["n1"].environ)
            run = read(cluster, one, "n0 n1")
            run.until(10)
            clocks["p0"].set(-HOUR_S)
            run.until(25)
            clocks["p0"].set(HOUR_S)
            run.finish().check_equals(one)
            assert cluster.msdctl("n1", "cluster")["term"] == 1


@pytest.mark.soak
def test_a_slow_and_lossy_link_costs_time_only(tmp_path: Path, one: HostRun) -> None:
    with nodes(tmp_path, "n0", "n1", slow=("n1",)) as cluster:
        run = read(cluster, one, "n0 n1")
        run.until(10)
        cluster.host("n1").slow_down(0.5, 0.05)
        run.until(25)
        cluster.host("n1").slow_down(0, 0)
        run.finish().check_equals(one)
