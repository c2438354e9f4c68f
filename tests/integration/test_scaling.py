"""Partitions that change hands while they are read: the ledger is the oracle's, whatever moves when.

`msdctl scale` forces moves at steps that a seed draws (printed; MSD_TEST_SEED repeats it), into any
number of partitions, while loader workers are killed as well.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from msd_client.joined_job import Data
from msd_client.step import Step
from tests.support.ledger import Corpus, read_ledger
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

    def __init__(self, node: Node, names: list[str], chance: float = 0.4) -> None:
        print(f"MSD_TEST_SEED={SEED}")
        self._rng = random.Random(SEED)
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


def test_forced_moves_change_no_row_while_loaders_are_killed(tmp_path: Path, case: Case) -> None:
    kills = 3
    with running_node(tmp_path / "n", "--loader-workers", str(WORKERS)) as node:
        mover = Mover(node, list(case.corpus.names), chance=0.7)
        killed: list[int] = []

        def on_step(data: Data, step: Step) -> None:
            mover(data, step)
            if not data.rank and step.number % (STEPS // (kills + 1)) == 5 and len(killed) < kills:
                killed.append(kill_a_loader(node))
            if not data.rank and step.number == STEPS - 1:
                print(scaling_of(node)["moves"])

        ledger = read_ledger(node, case.corpus, case.job, {"dp": 2}, STEPS, on_step=on_step)
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
