"""Partitions that change hands while they are read: the ledger is the oracle's, whatever moves when.

`msdctl scale` forces moves at steps that a seed draws (printed; MSD_TEST_SEED repeats it), into any
number of partitions, while loader workers are killed as well.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from msd_client.contract.errors import ConfigError, NotFoundError
from msd_client.joined_job import Data
from msd_client.step import Step
from tests.support.cluster import running_cluster
from tests.support.ledger import Corpus, Ledger, note, read_ledger
from tests.support.ledger_case import Case, make_case
from tests.support.node import Node, running_node

pytestmark = pytest.mark.processes

WORKERS = 4
STEPS = 120
SEED = int(os.environ.get("MSD_TEST_SEED", random.SystemRandom().randrange(1 << 30)))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Small blocks, several windows and epochs: watermarks fall everywhere."""
    rng = np.random.default_rng(8)
    lengths = {
        name: [rng.integers(0, longest, documents).tolist() for _ in range(shards)]
        for name, documents, shards, longest in (
            ("large", 300, 4, 150),
            ("middle", 120, 3, 300),
            ("small", 90, 2, 60),
        )
    }
    return make_case(
        tmp_path_factory.mktemp("moved"),
        lengths,
        {"rows": 8, "row_tokens": 256, "microbatch_rows": 2},
        shuffle={"window_shards": 2, "block_records": 24, "window_records": 8},
        mixture={"unit": "tokens", 0: {"large": 0.6, "middle": 0.3, "small": 0.1}},
    )


class Mover:
    """Has a source dealt anew behind some of a rank's steps."""

    def __init__(self, node: Node, names: list[str], chance: float = 0.4, seed: int = SEED) -> None:
        print(f"MSD_TEST_SEED={seed}")
        self._rng = random.Random(seed)
        self._node, self._names, self._chance = node, names, chance
        self.asked = 0

    def __call__(self, data: Data, step: Step) -> None:
        if data.rank or self._rng.random() > self._chance:
            return
        source, count = self._rng.choice(self._names), self._rng.randint(1, WORKERS)
        self._node.request("scale", source=source, partitions=count)
        self.asked += 1


def scaling_of(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = node.request("status")["jobs"][0]["scaling"]
    return found


def test_forced_moves_change_no_row(tmp_path: Path, case: Case) -> None:
    with running_node(tmp_path / "n", "--loader-workers", str(WORKERS)) as node:
        moves = 0
        mover = Mover(node, list(case.corpus.names))

        def on_step(data: Data, step: Step) -> None:
            nonlocal moves
            mover(data, step)
            if not data.rank and step.number == STEPS - 1:
                moves = scaling_of(node)["moves"]

        ledger = read_ledger(node, case.corpus, case.job, {"dp": 2}, STEPS, on_step=on_step)
        ledger.check_equals(case.wanted(STEPS))
        case.settle(ledger)
    assert mover.asked > 10
    assert moves > 5


@pytest.mark.parametrize(
    "is_critical", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["", "shadowed"]
)
def test_forced_moves_change_no_row_while_loaders_are_killed(
    tmp_path: Path, case: Case, *, is_critical: bool
) -> None:
    kills = 3
    job = copy.deepcopy(case.job)
    job["sources"]["large"]["critical"] = is_critical
    with running_node(tmp_path / "n", "--loader-workers", str(WORKERS)) as node:
        mover = Mover(node, list(case.corpus.names), chance=0.7)
        killed: list[int] = []

        def on_step(data: Data, step: Step) -> None:
            mover(data, step)
            if not data.rank and step.number % (STEPS // (kills + 1)) == 5 and len(killed) < kills:
                killed.append(kill_a_loader(node))
            if not data.rank and step.number == STEPS - 1:
                print(scaling_of(node)["moves"])

        ledger = read_ledger(node, case.corpus, job, {"dp": 2}, STEPS, on_step=on_step)
        ledger.check_equals(case.wanted(STEPS))
        case.settle(ledger)
    assert len(killed) == kills


def kill_a_loader(node: Node) -> int:
    """Kill the loader worker that is killed least easily: the youngest of a random place."""
    pids = [
        row["pid"]
        for row in node.request("status")["jobs"][0]["workers"]
        if row["role"] == "loader"
    ]
    pid = int(random.Random(SEED + len(pids)).choice(pids))
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return pid


def test_nodes_of_a_cluster_move_what_is_theirs(tmp_path: Path, case: Case) -> None:
    rng = random.Random(SEED)
    print(f"MSD_TEST_SEED={SEED}")
    moves: dict[str, int] = {}
    with running_cluster(tmp_path) as cluster:
        for name in ("n0", "n1"):
            cluster.add(name, MSD__WORKERS__LOADER_WORKERS=str(WORKERS))
        cluster.until_joined("n0", "n1")

        def on_step(data: Data, step: Step) -> None:
            if data.rank or rng.random() > 0.5:
                return
            name = rng.choice(["n0", "n1"])
            source, count = rng.choice(list(case.corpus.names)), rng.randint(1, WORKERS)
            cluster.nodes[name].request("scale", source=source, partitions=count)
            moves[name] = scaling_of(cluster.nodes[name])["moves"]

        ledger = read_ledger(
            cluster.spread("n0", "n1"), case.corpus, case.job, {"dp": 2}, 80, on_step=on_step
        )
        ledger.check_equals(case.wanted(80))
    assert sum(moves.values()) > 3, moves


def test_a_run_that_begins_anew_goes_on_with_what_was_dealt(tmp_path: Path, case: Case) -> None:
    wanted = case.wanted(STEPS)
    waits = {"MSD__DEADLINES__RESTART_GRACE_S": "60"}
    with running_node(tmp_path / "n", "--loader-workers", str(WORKERS), environ=waits) as node:
        mover = Mover(node, list(case.corpus.names))
        ledger = read_ledger(node, case.corpus, case.job, {"dp": 2}, 50, on_step=mover)
        ledger.check_equals(wanted)
        for cut in (50, 35):  # behind what was read ahead, and before it
            again = read_ledger(
                node, case.corpus, case.job, {"dp": 2}, 30, on_step=mover, state=ledger.state(cut)
            )
            again.check_equals(wanted)
        (job,) = node.request("status")["jobs"]
    assert job["state"] == "waiting for ranks"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(8))
def test_many_random_moves_and_kills_change_no_row(tmp_path: Path, case: Case, number: int) -> None:
    seed = SEED + number
    rng = random.Random(seed)
    with running_node(tmp_path / "n", "--loader-workers", str(WORKERS)) as node:
        mover = Mover(node, list(case.corpus.names), chance=rng.random(), seed=seed)

        def on_step(data: Data, step: Step) -> None:
            mover(data, step)
            if not data.rank and rng.random() < 0.03:
                kill_a_loader(node)

        ledger = read_ledger(node, case.corpus, case.job, {"dp": 2}, 3 * STEPS, on_step=on_step)
        ledger.check_equals(case.wanted(3 * STEPS))


def test_lanes_of_streams_move_as_well(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    kinds = {"packed": "zst", "plain": "", "zipped": "gz"}
    corpus = Corpus({name: [rng.integers(0, 40, 400).tolist() for _ in range(5)] for name in kinds})
    shuffle = {"window_shards": 3, "stream_block_records": 64}
    job = {
        "schema": 1,
        "name": "lanes",
        "seed": 4,
        "tokenizer": {"file": str(tmp_path / "data" / "tokenizer.json")},
        "batch": {"rows": 8, "row_tokens": 256, "microbatch_rows": 2},
        "sources": corpus.write_texts(tmp_path / "data", kinds),
        "defaults": {"shuffle": shuffle},
    }
    case = Case(corpus, job, corpus.oracle_sources(kinds, **shuffle))
    with running_node(tmp_path / "n", "--loader-workers", str(WORKERS)) as node:
        mover = Mover(node, list(kinds))
        ledger = read_ledger(node, corpus, job, {"dp": 2}, 70, on_step=mover)
    ledger.check_equals(case.wanted(70))
    assert mover.asked > 10


def read_until(node: Node, data: Data, ledger: Ledger, stages: list[Callable[[], object]]) -> None:
    """Read steps until each stage in turn was reached: gave something true."""
    deadline = time.monotonic() + 60
    for step in data.train:
        note(ledger, data, step)
        if stages[0]():
            del stages[0]
        if not stages:
            return
        assert time.monotonic() < deadline, (len(stages), scaling_of(node), node.log[-4000:])


def test_loaders_are_started_and_sent_away_while_ranks_read(tmp_path: Path, case: Case) -> None:
    ledger = Ledger(case.corpus)
    settings = {"MSD__WORKERS__LOADER_WORKERS": "1", "MSD__WORKERS__LOADER_WORKERS_MAX": "3"}
    with (
        running_node(tmp_path / "n", environ=settings) as node,
        node.connect(case.job, {"dp": 1}, 0) as data,
    ):

        def scale(**fields: Any) -> bool:
            return bool(node.request("scale", **fields))

        def loaders() -> int:
            rows = node.request("status")["jobs"][0]["workers"]
            return sum(row["role"] == "loader" for row in rows)

        def readers(source: str) -> list[int]:
            sources = scaling_of(node)["sources"]
            return next((it["loaders"] for it in sources if it["name"] == source), [])

        stages: list[Callable[[], object]] = [
            lambda: loaders() == 1 and scale(source="large", partitions=3),
            lambda: loaders() == 3 and len(readers("large")) == 3,
            lambda: scale(loaders_max=1),
            lambda: loaders() == 1 and readers("large") == [0],
            lambda: True,
        ]
        read_until(node, data, ledger, stages)
        for fields, limit in (
            ({"loaders_max": 4}, "1 to 3"),
            ({"source": "large", "partitions": 2}, "1 to 1"),
        ):
            with pytest.raises(ConfigError, match=limit):
                scale(**fields)
        with pytest.raises(NotFoundError, match="large, middle, small"):
            scale(source="huge", partitions=1)
    ledger.check_equals(case.wanted(len(ledger.steps)))


def test_a_source_whose_weight_is_0_keeps_nothing_open_and_comes_back(
    tmp_path: Path, case: Case
) -> None:
    ledger = Ledger(case.corpus)
    changes: dict[int, dict[str, float]] = {}

    with (
        running_node(tmp_path / "n", "--loader-workers", "2") as node,
        node.connect(case.job, {"dp": 1}, 0) as data,
    ):

        def parked() -> list[str]:
            return [entry["name"] for entry in scaling_of(node)["sources"] if entry["is_parked"]]

        def turn(middle: float) -> bool:
            weights = {"large": 0.6, "middle": middle, "small": 0.1}
            changes[int(data.set_mixture(weights))] = weights
            return True

        stages: list[Callable[[], object]] = [
            lambda: len(ledger.steps) >= 10 and turn(0.0),
            lambda: parked() == ["middle"] and turn(2.0),
            lambda: not parked(),
            lambda: len(ledger.steps) > 10 + max(changes),
        ]
        read_until(node, data, ledger, stages)
    ledger.check_equals(case.wanted(len(ledger.steps), changes))
