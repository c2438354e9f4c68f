"""One job of all formats has one stream, to the byte, whatever serves it and from wherever it goes on.

The yardstick is a planner with loaders in this process: the state after each step, which holds the
digest over the membership of all steps so far, must be the same bytes. Rows are compared with those
that one rank got from one loader worker.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import BudgetError
from msd_client.contract.state import DRAWN_TOKENS, DROPPED_TOKENS, StreamState
from msd_daemon.core.budget import pool_sums
from tests.support.inline_planner import InlineSources, InlineStream, inline_job
from tests.support.mixed_sources import mixed_job
from tests.support.node import Node, RankRecord, global_rows, run_ranks, running_node

pytestmark = pytest.mark.processes

STEPS = 60
SEED = int(os.environ.get("MSD_TEST_SEED") or random.SystemRandom().randrange(1 << 32))


class Oracle:
    """What the stream is."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.job = job
        resolved = inline_job(job)
        sources = InlineSources(resolved)
        stream = InlineStream(resolved, sources)
        self.states: dict[int, bytes] = {}
        for step in range(STEPS):
            stream.plan_steps(1)
            self.states[step + 1] = stream.planner.state().encode()
        sources.close()
        with running_node(folder, "--loader-workers", "1") as node:
            (record,) = run_ranks(node, job, {"dp": 1}, STEPS, keep_states=True)
        self.rows = {step: sorted(rows) for step, rows in record.rows.items()}
        self.valid_tokens = record.valid_tokens
        self.check(0, [record])

    def check(self, first: int, records: list[RankRecord]) -> None:
        """See that ranks of dp groups got just this stream from step `first` on."""
        rows = global_rows(records, list(range(len(records))))
        assert list(rows) == list(range(first, first + len(rows)))
        for record in records:
            for step, state in record.states.items():
                assert state["msd"] == self.states[step], (
                    f"state after {step} steps (MSD_TEST_SEED={SEED})"
                )
            assert all(
                tokens == self.valid_tokens[step] for step, tokens in record.valid_tokens.items()
            )
        for step, got in rows.items():
            assert got == self.rows[step], f"rows of step {step} (MSD_TEST_SEED={SEED})"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    print(f"MSD_TEST_SEED={SEED}")
    folder = tmp_path_factory.mktemp("o")
    return Oracle(mixed_job(folder / "data", seed=SEED % 1000), folder / "n")


def read(
    node: Node, oracle: Oracle, dp: int, cut: int = 0, steps: int = STEPS, **options: Any
) -> None:
    """Read steps from a cut on and compare them."""
    state = {"msd": oracle.states[cut]} if cut else None
    steps = min(steps, STEPS - cut)
    records = run_ranks(
        node, oracle.job, {"dp": dp}, steps, state=state, keep_states=True, **options
    )
    assert [len(record.steps) for record in records] == [steps] * dp
    oracle.check(cut, records)


def test_the_stream_exercises_what_it_should(oracle: Oracle) -> None:
    last = StreamState.decode(oracle.states[STEPS])
    assert (last.progress[DRAWN_TOKENS] > 0).all()
    assert last.epoch.max() >= 1, last.epoch
    assert (last.dropped[:DROPPED_TOKENS].sum(axis=1) > 0).sum() >= 4
    assert any(StreamState.decode(state).carried.shape[1] for state in oracle.states.values())


@pytest.mark.parametrize("workers", [2, 4])
def test_loader_workers_change_nothing(
    start_node: Callable[..., Node], oracle: Oracle, workers: int
) -> None:
    node = start_node("--loader-workers", str(workers))
    split: list[int] = []

    def look(data: Any) -> None:
        split.append(sum(child.name() == "msd-loader" for child in node.children()))

    read(node, oracle, 1, at_end=look)
    assert split == [workers]


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_data_parallel_ranks_change_nothing(
    start_node: Callable[..., Node], oracle: Oracle, dp: int
) -> None:
    read(start_node("--loader-workers", "2"), oracle, dp)


def test_indexes_change_nothing(
    start_node: Callable[..., Node], oracle: Oracle, tmp_path: Path
) -> None:
    node = start_node(folder=tmp_path / "n")
    index = tmp_path / "n" / "state" / "index"
    read(node, oracle, 1)
    cold = sorted(path.name for path in index.iterdir())
    assert len(cold) >= 3
    read(node, oracle, 2, steps=30)  # warm
    assert sorted(path.name for path in index.iterdir()) == cold
    shutil.rmtree(index)
    read(node, oracle, 1, steps=30)
    assert index.exists()


def test_a_restore_at_any_step_goes_on(start_node: Callable[..., Node], oracle: Oracle) -> None:
    rng = random.Random(SEED)
    node = start_node("--loader-workers", "2")
    for cut in sorted(rng.sample(range(1, STEPS), 8)):
        dp = rng.choice([1, 2, 4])
        print(f"restore after {cut} steps with dp {dp} (MSD_TEST_SEED={SEED})")
        read(node, oracle, dp, cut, steps=12)


def test_a_loader_rewinds_in_place(start_node: Callable[..., Node], oracle: Oracle) -> None:
    """A later load_state_dict on living connections begins another generation of the same job."""
    node = start_node("--loader-workers", "2")
    cuts = random.Random(SEED + 1).sample(range(1, STEPS - 10), 3)
    with node.connect(oracle.job, {"dp": 1}, 0) as data:
        for cut in cuts:
            data.train.load_state_dict({"msd": oracle.states[cut]})
            record = RankRecord()
            for step in data.train:
                record.rows[step.number] = [row.tobytes() for batch in step for row in batch.tokens]
                record.steps.append(step.number)
                record.valid_tokens[step.number] = step.valid_tokens
                record.states[step.number + 1] = data.train.state_dict()
                if len(record.steps) == 8:
                    break
            oracle.check(cut, [record])


def least_pool_bytes(job: dict[str, Any], horizon_steps: int) -> int:
    """Return the smallest pool that the sums of core/budget.py allow."""
    resolved = inline_job(job)
    size = 4096
    while True:
        try:
            pool_sums(resolved, horizon_steps, len(resolved.sources), size)
        except BudgetError:
            size += 4096
        else:
            return size


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("c")
    # Always the same: how often room runs out depends on its records.
    return Oracle(mixed_job(folder / "data", seed=5, is_coarse=True), folder / "n")


@pytest.fixture(scope="module")
def tight_environ(coarse: Oracle) -> dict[str, str]:
    """Settings of a daemon whose pool has no room for read-ahead."""
    return {
        "MSD__MEMORY__POOL_BYTES": str(least_pool_bytes(coarse.job, 4)),
        "MSD__PLANNER__HORIZON_STEPS": "4",
    }


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_pool_without_room_to_read_ahead_changes_nothing(
    start_node: Callable[..., Node], coarse: Oracle, tight_environ: dict[str, str], workers: int
) -> None:
    node = start_node("--loader-workers", str(workers), environ=tight_environ)
    pools: list[dict[str, Any]] = []

    def look(data: Any) -> None:
        pools.append(node.request("status", job="mixed")["jobs"][0]["pool"])

    read(node, coarse, 2, at_end=look)
    # Who gets room first is a matter of timing: one run in two has to take some back.
    while workers == 8 and not pools[-1]["revocations"] and len(pools) < 12:
        read(node, coarse, 2, at_end=look)
    print(f"{workers} workers: {pools[-1]['revocations']} chunks revoked")
    assert str(pools[0]["capacity_bytes"]) == tight_environ["MSD__MEMORY__POOL_BYTES"]
    if workers == 8:  # 19 source loaders: more than the pool has chunks
        assert pools[-1]["revocations"] >= 1


def test_restores_into_a_pool_without_room_change_nothing(
    start_node: Callable[..., Node], coarse: Oracle, tight_environ: dict[str, str]
) -> None:
    rng = random.Random(SEED + 2)
    node = start_node("--loader-workers", "4", environ=tight_environ)
    for cut in sorted(rng.sample(range(1, STEPS), 4)):
        dp = rng.choice([1, 2, 8])
        print(f"restore after {cut} steps with dp {dp} (MSD_TEST_SEED={SEED})")
        read(node, coarse, dp, cut, steps=12)
