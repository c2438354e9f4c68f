"""Shards that are away while a job runs: for a moment they cost nothing, for good all their records."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import ErrorBudgetExceededError
from msd_client.contract.state import DROPPED_COLUMNS, RECORD_ORDER, StreamState
from tests.support.ledger import read_ledger
from tests.support.ledger_case import Case, large_and_little
from tests.support.node import Node, wait_until
from tests.support.told import run_msdctl

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return large_and_little(tmp_path / "data")


def test_shards_that_come_back_change_nothing(
    start_node: StartNode, case: Case, tmp_path: Path
) -> None:
    node = start_node("--loader-workers", "1")
    moved = tmp_path / "moved"
    shards = sorted((tmp_path / "data").glob("large*.bin"))
    assert len(shards) == 3

    def bring_back() -> None:
        wait_until(lambda: "cannot be opened" in node.log, "a worker that waits for a shard")
        for path in shards:
            (moved / path.name).rename(path)

    returning = threading.Thread(target=bring_back)

    def act(data: Any, step: Any) -> None:
        if step.number == 0 and data.rank == 0:
            moved.mkdir()
            for path in shards:
                path.rename(moved / path.name)
            returning.start()

    job = case.job | {"limits": {"open_s": 120}}
    ledger = read_ledger(node, case.corpus, job, {"dp": 2}, 300, on_step=act)
    returning.join()
    ledger.check_equals(case.wanted(300))
    assert "cannot be opened (No such file or directory), it is tried again for 120 s" in node.log


def read_without(node: Node, job: dict[str, Any], path: Path) -> StreamState:
    """Read a job to its end, a shard of which goes before its first step; return the last state."""
    with node.connect(job, {"dp": 1}, 0) as data:
        path.unlink()
        for _ in data.train:
            pass
        return StreamState.decode(data.train.state_dict()["msd"])


def test_a_shard_that_is_gone_counts_with_all_its_records(
    start_node: StartNode, case: Case, tmp_path: Path
) -> None:
    node = start_node()
    job = case.job | {"limits": {"open_s": 0}, "epochs": 1}
    job["defaults"] = job["defaults"] | {"at_exhaustion": "drop"}
    path = tmp_path / "data" / "large-001.bin"
    with pytest.raises(ErrorBudgetExceededError) as caught:
        read_without(node, job, path)
    assert f"{path} cannot be read: No such file or directory" in caught.value.message
    assert "all its 150 records are lost" in caught.value.message
    for name, on_error in (("a", "quarantine"), ("b", {"policy": "skip", "budget_ratio": 0.02})):
        case.corpus.write_tokens(tmp_path / "data")
        job["name"] = name
        job["defaults"] = job["defaults"] | {"on_error": on_error}
        state = read_without(node, job, path)
        dropped = dict(zip(DROPPED_COLUMNS, state.dropped.tolist(), strict=True))
        assert dropped["unreadable"] == [150, 0]
        assert state.progress[RECORD_ORDER].tolist()[0] >= 440
        assert any(str(path) in line and "all its 150" in line for line in node.log.splitlines())


def test_what_was_lost_stays_lost_once_the_shard_is_back(
    start_node: StartNode, case: Case, tmp_path: Path, capsys: Any
) -> None:
    node = start_node()
    job = case.job | {"name": "noted", "limits": {"open_s": 0}, "epochs": 1}
    job["defaults"] = job["defaults"] | {"at_exhaustion": "drop", "on_error": "quarantine"}
    path = tmp_path / "data" / "large-001.bin"
    without = read_without(node, job, path)
    wait_until(node.is_at_rest, node.holdings)
    (file,) = node.folder.glob("state/jobs/*/quarantine.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(entry["records"] for entry in entries) == 150
    assert {(entry["cause"], entry["shard"], entry["epoch"]) for entry in entries} == {
        ("lost", 1, 0)
    }
    case.corpus.write_tokens(tmp_path / "data")
    ledger = read_ledger(node, case.corpus, job, {"dp": 2}, None)
    assert ledger.last_state.stream_digest == without.stream_digest
    steps = f"0:{without.step}"
    code, found, _ = run_msdctl(
        capsys, "verify", "noted", "--steps", steps, "--state-dir", node.folder / "state"
    )
    assert (code, found["verified"]) == (0, without.step)
