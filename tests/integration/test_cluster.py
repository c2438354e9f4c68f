"""Nodes of a cluster over loopback: the ledger of all ranks is the one host's."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from federation.key_files import generate
from msd_client.contract.errors import (
    ForkServerLostError,
    MsdError,
    NotFoundError,
    PlannerUnavailableError,
    SessionClosedError,
    UsageError,
)
from msd_daemon.history.runs import find_run
from tests.support.cluster import running_cluster
from tests.support.ledger import read_ledger
from tests.support.ledger_case import Case, large_and_little
from tests.support.node import text_job
from tests.support.sources import ROOT

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def case(tmp_path_factory: Any) -> Case:
    return large_and_little(tmp_path_factory.mktemp("cluster"))


def test_two_nodes_read_what_one_host_reads(tmp_path: Path, case: Case) -> None:
    with running_cluster(tmp_path) as cluster:
        for name in ("n0", "n1"):
            cluster.add(name)
        cluster.until_joined("n0", "n1")
        seen: list[dict[str, Any]] = []

        def act(data: Any, step: Any) -> None:
            if data.rank == 0 and step.number == 10:
                seen.extend(node.request("status")["jobs"][0] for node in cluster.nodes.values())

        ledger = read_ledger(
            cluster.spread("n0", "n0", "n1", "n1"),
            case.corpus,
            case.job,
            {"dp": 4},
            40,
            on_step=act,
        )
        ledger.check_equals(case.wanted(40))
        assert [job["waiting_for_ranks"] for job in seen] == [[], []], "all of all nodes read"
        with pytest.raises(NotFoundError, match=r"a node of a cluster.*--state-dir"):
            find_run(case.job["name"], cluster.nodes["n0"].folder / "state")
        run = find_run(case.job["name"], tmp_path)
        assert run.journal.is_file()


def test_nodes_without_ranks_load_for_one_with_all(tmp_path: Path, case: Case) -> None:
    with running_cluster(tmp_path) as cluster:
        cluster.add("n0", MSD__FEDERATION__LOADS="false")
        cluster.add("n1")
        cluster.add("n2")
        cluster.until_joined("n0", "n1", "n2")
        nodes = cluster.spread(*["n0"] * 4)
        ledger = read_ledger(nodes, case.corpus, case.job, {"dp": 4}, 40)
        ledger.check_equals(case.wanted(40))
        state = ledger.state(20)
        other = read_ledger(
            cluster.spread("n1", "n2"), case.corpus, case.job, {"dp": 2}, 19, state=state
        )
        other.check_equals(case.wanted(40))


def test_a_node_that_dies_and_one_that_joins_change_nothing(tmp_path: Path, case: Case) -> None:
    with running_cluster(tmp_path) as cluster:
        for name in ("n0", "n1", "n2"):
            cluster.add(name)
        cluster.until_joined("n0", "n1", "n2")

        def act(data: Any, step: Any) -> None:
            if data.rank == 0 and step.number == 10:
                cluster.kill("n2")
            if data.rank == 0 and step.number == 25:
                cluster.add("n3")
                cluster.until(lambda: "n3 joins" in cluster.planners[0].log, "n3 to join")

        ledger = read_ledger(
            cluster.spread("n0", "n1"), case.corpus, case.job, {"dp": 2}, 60, on_step=act
        )
        ledger.check_equals(case.wanted(60))
        assert "n2" in cluster.planners[0].log.partition("load from step")[2]


def test_a_standby_takes_over_from_a_planner_that_is_killed_or_stopped(
    tmp_path: Path, case: Case
) -> None:
    with running_cluster(tmp_path, planners=2) as cluster:
        for name in ("n0", "n1"):
            cluster.add(name)
        cluster.until_joined("n0", "n1")

        def act(data: Any, step: Any) -> None:
            if data.rank:
                return
            if step.number == 8:
                cluster.leader().kill()

        ledger = read_ledger(
            cluster.spread("n0", "n1"), case.corpus, case.job, {"dp": 2}, 60, on_step=act
        )
        ledger.check_equals(case.wanted(60))


@pytest.mark.parametrize("how", ["stop", "fork server"])
def test_ranks_of_all_nodes_are_told_at_once_that_one_can_not_go_on(
    tmp_path: Path, case: Case, how: str
) -> None:
    errors: dict[int, MsdError] = {}
    with running_cluster(tmp_path) as cluster:
        for name in ("n0", "n1", "n2"):
            cluster.add(name)
        cluster.until_joined("n0", "n1", "n2")
        nodes = cluster.spread("n0", "n1")

        def fail() -> None:
            if how == "stop":
                cluster.nodes["n2"].request("stop", job=case.job["name"])
            else:
                cluster.nodes["n1"].fork_server().kill()

        def read(rank: int) -> None:
            with nodes.connect(case.job, {"dp": 2}, rank) as data, contextlib.suppress(MsdError):
                try:
                    for step in data.train:
                        if rank == 0 and step.number == 8:
                            fail()
                except MsdError as error:
                    errors[rank] = error
                    raise

        ranks = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(60)
        assert sorted(errors) == [0, 1], cluster.story()
    wanted = SessionClosedError if how == "stop" else ForkServerLostError
    assert isinstance(errors[0], wanted), errors
    assert isinstance(errors[1], wanted), errors
    assert ("node n1: " in errors[0].message) == (how != "stop")


def test_a_loading_node_that_fails_is_replaced_while_ranks_read_on(
    tmp_path: Path, case: Case
) -> None:
    with running_cluster(tmp_path) as cluster:
        for name in ("n0", "n1", "n2"):
            cluster.add(name)
        cluster.until_joined("n0", "n1", "n2")

        def act(data: Any, step: Any) -> None:
            if data.rank == 0 and step.number == 10:
                cluster.nodes["n2"].fork_server().kill()

        ledger = read_ledger(
            cluster.spread("n0", "n1"), case.corpus, case.job, {"dp": 2}, 60, on_step=act
        )
        ledger.check_equals(case.wanted(60))


def test_a_planner_that_lost_its_store_says_so_to_the_ranks(tmp_path: Path, case: Case) -> None:
    with running_cluster(tmp_path) as cluster:
        for name in ("n0", "n1"):
            cluster.add(name)
        cluster.until_joined("n0", "n1")
        (planner,) = cluster.planners

        def act(data: Any, step: Any) -> None:
            if data.rank == 0 and step.number == 8:
                planner.kill()
                planner.forget()
                planner.start()

        with pytest.raises(PlannerUnavailableError, match="connect again with the last state"):
            read_ledger(
                cluster.spread("n0", "n1"), case.corpus, case.job, {"dp": 2}, 60, on_step=act
            )


def test_a_drained_node_loads_nothing_more_and_the_stream_is_the_same(
    tmp_path: Path, case: Case
) -> None:
    def msdctl(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [
                sys.executable, "-m", "msd_client.msdctl.main", *arguments, "--json",
                "--socket", str(cluster.nodes["n0"].socket),
            ],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return dict(json.loads(done.stdout))

    seen: list[dict[str, Any]] = []
    with running_cluster(tmp_path) as cluster:
        for name in ("n0", "n1", "n2"):
            cluster.add(name)
        cluster.until_joined("n0", "n1", "n2")

        def act(data: Any, step: Any) -> None:
            if data.rank or step.number not in (10, 30, 45):
                return
            seen.append(msdctl("cluster"))
            if step.number < 45:
                msdctl("drain", "n1", *(["--undo"] if step.number == 30 else []))

        ledger = read_ledger(
            cluster.spread("n0", "n1"), case.corpus, case.job, {"dp": 2}, 60, on_step=act
        )
        ledger.check_equals(case.wanted(60))
        owners = [set(itertools.chain(*it["jobs"][0]["owners"].values())) for it in seen]
        assert "n1" in owners[0]
        assert "n1" not in owners[1]
        assert "n1" in owners[2]
        assert [node["node"] for node in seen[0]["nodes"]] == ["n0", "n1", "n2"]
        assert seen[2]["term"] == 1
        with pytest.raises(subprocess.CalledProcessError) as caught:
            msdctl("drain", "n9")
        assert "the cluster has no node 'n9': it has n0, n1, n2" in caught.value.stderr


def test_nodes_with_keys_read_the_same_and_strangers_get_nothing(
    tmp_path: Path, case: Case
) -> None:
    with running_cluster(tmp_path, has_keys=True) as cluster:
        for name in ("n0", "n1"):
            cluster.add(name)
        cluster.until_joined("n0", "n1")
        ledger = read_ledger(cluster.spread("n0", "n1"), case.corpus, case.job, {"dp": 2}, 30)
        ledger.check_equals(case.wanted(30))
        keys = tmp_path / "stranger"
        keys.mkdir()
        generate(keys, "n7")
        (planner,) = cluster.planners
        assert planner.keys_dir is not None and cluster.keys_dir is not None
        shutil.copy(planner.keys_dir / f"{planner.name}.pub", keys)
        stranger = cluster.add("n7", MSD__FEDERATION__KEYS_DIR=str(keys))
        with pytest.raises(PlannerUnavailableError):
            stranger.request("cluster")
        assert "n7" not in planner.log.replace("n7.", "")
        nodes = cluster.nodes["n0"].request("cluster")["nodes"]
        assert [node["node"] for node in nodes] == ["n0", "n1"]


def test_passes_of_validation_over_nodes_and_ranks_that_left(tmp_path: Path) -> None:
    job = text_job(
        tmp_path, batch={"rows": 8, "row_tokens": 128}, defaults={"hold_out": 0.2, "key": "id"},
        loaders={"train": {}, "val": {"from": ["s0", "s1"], "rows": 8}},
    )  # fmt: skip
    passes: dict[int, list[dict[int, list[bytes]]]] = {0: [], 1: []}
    told: list[str] = []

    def one_pass(data: Any) -> dict[int, list[bytes]]:
        return {
            step.number: [row.tobytes() for batch in step for row in batch.tokens]
            for step in data.val.once()
        }

    with running_cluster(tmp_path) as cluster:
        for name in ("n0", "n1", "n2"):
            cluster.add(name)
        cluster.until_joined("n0", "n1", "n2")
        nodes = cluster.spread("n0", "n1")

        def read(rank: int) -> None:
            with nodes.connect(job, {"dp": 2}, rank) as data:
                passes[rank].append(one_pass(data))  # before training began, too
                for step in data.train:
                    for _ in step:
                        pass
                    if step.number in (3, 6):
                        passes[rank].append(one_pass(data))
                    if step.number == 8 and rank:
                        return
                    if step.number == 9:
                        with pytest.raises(UsageError) as caught:
                            one_pass(data)
                        told.append(caught.value.message)
                        return

        ranks = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        assert [len(found) for found in passes.values()] == [3, 3], cluster.story()
        for found in passes.values():
            assert found[0] == found[1] == found[2]
        assert passes[0][0].keys() == passes[1][0].keys()
        (refusal,) = told
        assert refusal.startswith("ranks [1] left the job, so no pass of 'small.val' begins: ")
        cluster.until(
            lambda: not any(node.request("jobs")["jobs"] for node in cluster.nodes.values()),
            "all jobs to end",
        )


def test_ranks_come_back_to_a_node_that_only_loads_for_those_that_read(
    tmp_path: Path, case: Case
) -> None:
    with running_cluster(tmp_path) as cluster:
        for name in ("n0", "n1"):
            cluster.add(name)
        came: list[Any] = []
        job = case.job | {"name": "moves"}

        def move(data: Any, step: Any) -> None:
            if step.number != 5:
                return
            # The launcher starts the rank elsewhere before this one is seen to be gone.
            with cluster.nodes["n1"].connect(job, {"dp": 1}, 0) as other:
                other.train.load_state_dict(data.train.state_dict())
                closing = threading.Timer(0.5, data.close)
                closing.start()
                came.extend(step.number for step in itertools.islice(other.train, 3))
                closing.join()

        with pytest.raises(SessionClosedError):
            read_ledger(cluster.spread("n0"), case.corpus, job, {"dp": 1}, 40, on_step=move)
        assert came == [6, 7, 8]
