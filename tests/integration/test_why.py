"""`msdctl why` is right in ten scripted cases, each made with a real daemon and real faults."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from msd_client.msdctl import main
from tests.conftest import StartNode
from tests.support.bad_disk import BadDisk
from tests.support.bomb_format import install_bombs
from tests.support.cluster import running_cluster
from tests.support.faulty_proxy import Fault, running_server, serve_objects
from tests.support.node import Node, text_job, wait_until
from tests.support.why_case import (
    rank_process,
    stopped,
    trainer,
    wait_begun,
    wait_cause,
    wait_fine,
)

pytestmark = pytest.mark.processes


def lines(folder: Path, name: str, count: int, words: int, seed: int = 1) -> str:
    """Write documents of random words; return their path."""
    rng = random.Random(seed)
    vocabulary = [
        "".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(4000)
    ]
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.jsonl"
    with path.open("w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(rng.choices(vocabulary, k=words))}) + "\n")
    return str(path)


def job_of(sources: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": "case",
        "seed": 3,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {"rows": 16, "row_tokens": 1024, "microbatch_rows": 4},
        "sources": sources,
    } | changes


Msdctl = Callable[..., str]


@pytest.fixture
def msdctl(capsys: pytest.CaptureFixture[str]) -> Msdctl:
    def run(node: Node, *arguments: str) -> str:
        capsys.readouterr()
        assert main.run([*arguments, "--socket", str(node.socket)]) == 0
        return capsys.readouterr().out

    return run


def test_a_throttled_object_store_is_named_with_its_source(start_node: StartNode, tmp_path: Path):
    objects = {
        f"far-{n}.jsonl": Path(lines(tmp_path, f"far-{n}", 400, 60, n)).read_bytes()
        for n in range(4)
    }
    near = lines(tmp_path, "near", 2000, 60)
    with running_server(serve_objects(objects)) as server:
        environ = {
            "MSD__STORES__BLOCK_BYTES": "4Ki",
            "MSD__STORES__REQUEST_BYTES": "8Ki",
        }
        node = start_node(environ=environ)
        far = [f"{server.url}/far-{n}.jsonl" for n in range(4)]
        job = job_of({"far": {"paths": far}, "near": near})
        with trainer(node, job, {"dp": 1}, hold_s=0.05) as ranks:
            wait_fine(node)
            ranks.hold_s = 0.0
            server.choose = lambda request: (
                None if request.number % 8 == 0 else Fault(429, {"Retry-After": "1"})
            )
            found = wait_cause(node, "store_throttled")
            server.choose = lambda _: None
    assert (found["side"], found["source"], found["stage"]) == ("loader", "far", "store")
    assert "fewer requests" in found["summary"]


def test_a_slow_disk_is_told_from_a_slow_tokenizer(start_node: StartNode, tmp_path: Path):
    disk = BadDisk(tmp_path / "slow", tmp_path / "orders")
    (tmp_path / "slow").mkdir()
    slow = lines(tmp_path / "slow", "slow", 4000, 80)
    fast = lines(tmp_path, "fast", 2000, 80)
    node = start_node(environ=disk.environ)
    batch = {"rows": 64, "row_tokens": 4096, "microbatch_rows": 16}
    job = job_of({"slow": slow, "fast": fast}, batch=batch)
    with trainer(node, job, {"dp": 1}, hold_s=0.1) as ranks:
        wait_fine(node)
        disk.begin("lame_reads")
        ranks.hold_s = 0.0
        found = wait_cause(node, "disk_slow")
        disk.end("lame_reads")
    assert (found["side"], found["source"], found["stage"]) == ("loader", "slow", "read")


@pytest.mark.soak
def test_a_cpu_bound_tokenizer_is_told_from_a_slow_disk(start_node: StartNode, tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    path = lines(tmp_path, "web", 3000, 1500)
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train([path], vocab_size=2000)
    trained.save(str(tmp_path / "tok.json"))
    job = job_of(
        {"web": path}, tokenizer={"file": str(tmp_path / "tok.json")},
        batch={"rows": 64, "row_tokens": 4096, "microbatch_rows": 16},
    )  # fmt: skip
    node = start_node("--loader-workers", "1")
    with trainer(node, job, {"dp": 1}):
        found = wait_cause(node, "cpu_bound")
    assert (found["side"], found["source"], found["stage"]) == ("loader", "web", "transform")
    assert found["level"] in ("slow", "stalled")


def test_a_loader_worker_that_stands_still_is_named(start_node: StartNode, tmp_path: Path):
    node = start_node(
        "--loader-workers", "1", environ={"MSD__WORKERS__LATE_S": "60", "MSD__WORKERS__SPARES": "0"}
    )
    with trainer(node, text_job(tmp_path), {"dp": 2}, hold_s=0.01):
        wait_fine(node)
        loader = node.child("msd-loader").pid
        with stopped(loader):
            found = wait_cause(node, "worker_stuck", level="stalled")
    assert (found["side"], found["stage"], found["level"]) == ("loader", "worker", "stalled")
    assert found["command"] == f"kill -CONT {loader}"
    assert found["source"] in ("s0", "s1", "s2")


def test_a_stopped_rank_is_named_though_the_others_lack_data_too(
    start_node: StartNode, tmp_path: Path, msdctl: Msdctl
):
    job = text_job(tmp_path)
    node = start_node()
    with rank_process(node, job, tmp_path, 0, 2), rank_process(node, job, tmp_path, 1, 2) as one:
        wait_begun(node)
        with stopped(one.pid):
            found = wait_cause(node, "rank_stopped")
            text = msdctl(node, "why")
        assert (found["side"], found["rank"], found["level"]) == ("trainer", 1, "stalled")
        assert found["command"] == f"kill -CONT {one.pid}"
        assert len(text.splitlines()) <= 10
        assert "trainer (stalled): rank 1 is stopped" in text
        assert "trainer (stalled): rank 1 is stopped" in msdctl(node, "status")


@pytest.mark.soak
def test_a_collective_that_hangs_is_no_fault_of_the_loader(start_node: StartNode, tmp_path: Path):
    node = start_node()
    with trainer(node, text_job(tmp_path), {"dp": 2}, hold_s=0.01) as ranks:
        wait_fine(node)
        ranks.hang.set()
        found = wait_cause(node, "ranks_hang")
    assert (found["side"], found["level"]) == ("trainer", "stalled")
    assert found["rank"] in (0, 1)


def test_a_planner_that_is_gone_is_named_once_what_it_planned_is_served(
    start_node: StartNode, tmp_path: Path
):
    node = start_node()
    with trainer(node, text_job(tmp_path), {"dp": 1}, hold_s=0.01):
        wait_fine(node)
        planner = node.child("msd-planner").pid
        with stopped(planner):
            found = wait_cause(node, "planner_gone", level="stalled")
    assert (found["side"], found["stage"], found["level"]) == ("loader", "planner", "stalled")
    assert str(planner) in found["summary"]


@pytest.mark.soak
def test_a_poisonous_record_is_named_while_a_worker_is_at_it(start_node: StartNode, tmp_path: Path):
    environ = install_bombs(tmp_path / "site")
    bombs = [f"{number:04d} {'hang' if number == 2500 else 'fine'}\n" for number in range(5000)]
    (tmp_path / "a.bombs").write_text("".join(bombs))
    fine = lines(tmp_path, "fine", 400, 2)
    job = job_of(
        {"a": str(tmp_path / "a.bombs"), "fine": fine},
        limits={"sample_s": 12.0},
        defaults={"shuffle": False},
        batch={"rows": 4, "row_tokens": 64, "microbatch_rows": 2},
    )
    node = start_node("--loader-workers", "1", environ=environ)
    with trainer(node, job, {"dp": 1}, hold_s=0.02) as ranks:
        wait_fine(node)
        ranks.hold_s = 0.0
        found = wait_cause(node, "bad_record")
    assert (found["side"], found["source"], found["stage"]) == ("loader", "a", "record")
    assert any("record 2500 of" in line for line in found["evidence"])
    assert found["command"] == "msdctl bad case"


@pytest.mark.soak
def test_a_mixture_that_flips_to_a_heavy_source_is_why_it_is_slow(
    start_node: StartNode, tmp_path: Path
):
    (tmp_path / "heavy.py").write_text(
        "import time\ndef fn(sample, rng):\n    time.sleep(0.05)\n    return sample\n"
    )
    light, heavy = lines(tmp_path, "light", 3000, 60), lines(tmp_path, "heavy", 3000, 60)
    job = job_of(
        {"light": light, "heavy": {"paths": heavy, "transform": {"call": "heavy:fn"}}},
        mixture={"unit": "tokens", 0: {"light": 98, "heavy": 2}},
    )  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    node = start_node()
    with trainer(node, str(tmp_path / "job.json"), {"dp": 1}, hold_s=0.1) as ranks:
        wait_fine(node)
        node.request("mixture", job="case", weights={"light": 1, "heavy": 3})
        ranks.hold_s = 0.0
        found = wait_cause(node, "mixture_changed")
    assert (found["side"], found["source"]) == ("loader", "heavy")
    assert "share grew from 2 to 75 %" in found["summary"]


@pytest.mark.soak
def test_workers_that_grow_into_their_memory_cap_are_why(start_node: StartNode, tmp_path: Path):
    environ = install_bombs(tmp_path / "site")
    (tmp_path / "a.bombs").write_text("".join(f"{n:04d} leak\n" for n in range(5000)))
    job = job_of(
        {"a": str(tmp_path / "a.bombs")},
        defaults={"shuffle": False},
        batch={"rows": 4, "row_tokens": 64, "microbatch_rows": 2},
    )
    cap = {"MSD__WORKERS__MEMORY_BYTES": "128Mi", "MSD__WORKERS__SPARES": "0"}
    node = start_node("--loader-workers", "1", environ=environ | cap)
    with trainer(node, job, {"dp": 1}):
        found = wait_cause(node, "memory_full")
    assert (found["side"], found["source"], found["stage"]) == ("loader", "a", "worker")
    assert "workers.memory_bytes" in found["command"]


@pytest.mark.soak
def test_a_slow_node_is_named_by_itself_and_by_those_that_wait_for_it(tmp_path: Path):
    with running_cluster(tmp_path) as cluster:
        here = cluster.add("n0", MSD__FEDERATION__LOADS="false")
        there = cluster.add("n1", MSD__WORKERS__LATE_S="90", MSD__WORKERS__SPARES="0")
        cluster.until_joined("n0", "n1")
        with trainer(here, text_job(tmp_path), {"dp": 1}, hold_s=0.01):
            wait_fine(here)
            loaders = [it for it in there.children() if it.name() == "msd-loader"]
            with ExitStack() as stack:
                for loader in loaders:
                    stack.enter_context(stopped(loader.pid))
                own = wait_cause(there, "worker_stuck")
                found = wait_cause(here, "node_slow")
                wait_until(lambda: here.request("why")["others"] != [], "what n1 says", 20)
                (other,) = here.request("why")["others"]
    assert (own["side"], own["stage"]) == ("loader", "worker")
    assert (found["side"], found["stage"]) == ("loader", "exchange")
    assert (other["node"], other["cause"]) == ("n1", "worker_stuck")


def test_a_clusters_planner_that_is_stopped_or_killed_is_named_on_every_node(tmp_path: Path):
    def check(how: str) -> None:
        for node in cluster.nodes.values():
            found = wait_cause(node, "planner_gone", level="stalled")
            assert "planner p0 at " in found["summary"], how
            assert found["command"].startswith("systemctl status msd-planner"), how
            daemon = node.request("status")["daemon"]
            assert "planner p0 at " in daemon["waiting_for"], how

    with running_cluster(tmp_path) as cluster:
        (planner,) = cluster.planners
        for name in ("n0", "n1"):
            cluster.add(name)
        cluster.until_joined("n0", "n1")
        spread: Any = cluster.spread("n0", "n1")
        with trainer(spread, text_job(tmp_path), {"dp": 2}, hold_s=0.01):
            for node in cluster.nodes.values():
                wait_fine(node)
            assert planner.process is not None
            try:
                with stopped(planner.process.pid):
                    check("stopped")
                for node in cluster.nodes.values():
                    wait_fine(node)
                    assert not node.request("status")["daemon"]["waiting_for"]
                planner.kill()
                check("killed")
            finally:
                if planner.process is None:
                    planner.start()


def test_a_job_that_was_stopped_is_said_to_be_stopped_after_it_is_gone(
    start_node: StartNode, tmp_path: Path, msdctl: Msdctl
):
    node = start_node()
    with trainer(node, text_job(tmp_path), {"dp": 1}, hold_s=0.02):
        wait_fine(node)
        assert msdctl(node, "stop", "small") == "job small: stopped\n"
    wait_until(
        lambda: node.request("why", job="small")["verdict"]["cause"] == "job_stopped",
        "the stop in the history",
    )
    text = msdctl(node, "why", "small")
    assert "the job was stopped" in text
    assert "failed" not in text
    assert text.splitlines()[-1] == "next: msdctl jobs"
    msdctl(node, "jobs")


def test_history_says_what_held_at_a_time_and_after_the_job_is_over(
    start_node: StartNode, tmp_path: Path, msdctl: Msdctl
):
    node = start_node()
    with trainer(node, text_job(tmp_path), {"dp": 1}, hold_s=0.02):
        wait_fine(node)
        now = node.request("why")
    wait_until(lambda: not node.request("jobs")["jobs"], "the job's end")
    # It is written by a thread, a little later.
    wait_until(
        lambda: node.request("why", job="small")["verdict"]["cause"] == now["verdict"]["cause"],
        "the last verdict in the history",
    )
    assert node.request("why", job="small")["is_past"]
    text = msdctl(node, "why", "small", "--at", "0s")
    assert "as it was at" in text
