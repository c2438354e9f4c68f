"""What newcomers did to it: each ends at once with an error that says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from bench.corpus import write_index
from msd_client.contract.errors import (
    BudgetError,
    CorruptRecordError,
    JobError,
    LeaseExhausted,
    MeshMismatchError,
    SessionClosedError,
    UsageError,
)
from msd_client.mesh import find_place
from tests.support.node import run_ranks, text_job, wait_until
from tests.support.sources import ROOT

pytestmark = pytest.mark.processes


def test_a_document_larger_than_half_the_pool_is_refused_with_the_remedy(start_node, tmp_path):
    (tmp_path / "large.txt").write_text("word " * 2_400_000)
    job = {
        "schema": 1,
        "tokenizer": {"bytes": True},
        "batch": {"rows": 4, "row_tokens": 4096},
        "sources": {"a": str(tmp_path / "large.txt")},
    }
    with pytest.raises(BudgetError, match=r"memory\.pool_bytes"):
        run_ranks(start_node(), job, {"dp": 1}, 2)


def test_a_record_larger_than_the_limit_is_dropped_and_named_not_waited_for(start_node, tmp_path):
    """H19: a line beyond record_bytes_max, and one document of many ring slots."""
    lines = [json.dumps({"text": f"short {number}"}) for number in range(200)]
    lines[7] = json.dumps({"text": "x" * 400_000})
    lines[9] = json.dumps({"text": "y" * 60_000})
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(lines) + "\n")
    job = {
        "schema": 1,
        "tokenizer": {"bytes": True},
        "batch": {"rows": 2, "row_tokens": 1024, "microbatch_rows": 1},
        "sources": {"lines": {"paths": str(path), "record_bytes_max": "100Ki"}},
        "defaults": {"on_error": {"budget_ratio": 0.5}},
        "epochs": 1,
    }
    node = start_node()
    (record,) = run_ranks(node, job, {"dp": 1}, None)
    rows = b"".join(row for rows in record.rows.values() for row in rows)
    assert rows.count(b"y\0\0\0") == 60_000  # tokens are int32
    assert b"x\0\0\0" not in rows
    assert "400013" in node.log or "record_bytes_max" in node.log


def test_keeping_every_slot_over_steps_raises_too(start_node, tmp_path):
    job = text_job(tmp_path, batch={"rows": 2, "row_tokens": 128, "microbatch_rows": 2})
    with start_node().connect(job, {"dp": 1}, 0) as data:
        kept = []
        with pytest.raises(LeaseExhausted):
            for step in data.train:
                kept.extend(step)
        assert len(kept) == 4


def test_ids_beyond_the_declared_vocabulary_fail_the_job(start_node, tmp_path):
    np.arange(1, 601, dtype=np.uint16).tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", np.array([300, 300]))
    job = {
        "schema": 1,
        "tokenizer": {"vocabulary": 500},
        "batch": {"rows": 1, "row_tokens": 64},
        "sources": {"a": str(tmp_path / "a.bin")},
    }
    with pytest.raises(CorruptRecordError, match="600"):
        run_ranks(start_node(), job, {"dp": 1}, 1)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_state_folder_that_cannot_be_written_stops_the_daemon_at_start(tmp_path):
    (tmp_path / "state").mkdir(mode=0o500)
    ended = subprocess.run(
        [sys.executable, "-m", "msd_daemon", "--socket", str(tmp_path / "s"), "--runtime-dir", str(tmp_path),
         "--state-dir", str(tmp_path / "state")],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert ended.returncode == 78
    assert "state_dir" in ended.stderr


def test_a_journal_that_cannot_be_made_fails_the_job_and_not_the_planner(start_node, tmp_path):
    node = start_node(folder=tmp_path / "n")
    (tmp_path / "n" / "state" / "jobs").write_text("in the way")
    with pytest.raises(Exception, match="journal") as caught:
        run_ranks(node, text_job(tmp_path), {"dp": 1}, 1)
    assert caught.type.__name__ == "JournalUnavailableError"


def test_a_closed_loader_says_so(start_node, tmp_path):
    data = start_node().connect(text_job(tmp_path), {"dp": 1}, 0)
    steps = iter(data.train)
    step = next(steps)
    data.close()
    with pytest.raises(SessionClosedError):
        next(steps)
    with pytest.raises(SessionClosedError):
        list(step)


def test_wrong_arguments_are_named(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path)
    with pytest.raises(UsageError, match="jax"):
        node.connect(job, {"dp": 1}, 0, as_="jax")
    with pytest.raises(UsageError, match="next_s"):
        node.connect(job, {"dp": 1}, 0, deadlines={"next_s": 1.0})
    with pytest.raises(MeshMismatchError, match="'a'"):
        find_place({"dp": "a"}, 0)


def test_small_numbers_of_a_dict_job_reach_the_daemon_as_numbers(start_node, tmp_path):
    weights = {"s0": 5e-3, "s1": 1e-5, "s2": 1e-5}
    job = text_job(tmp_path, mixture={0: weights})
    node = start_node()
    with node.connect(job, {"dp": 1}, "0") as data:
        assert repr(data) == "Data('small', rank 0, loaders train)"
        step = next(iter(data.train))
        step.skip_rest()
        assert step.stats["wanted_shares"] == pytest.approx([w / 5.02e-3 for w in weights.values()])
        changed = data.set_mixture({"s0": 1, "s1": np.float32(1), "s2": 2})
        assert 0 <= changed.known_from <= changed
        assert changed > step.number
    with pytest.raises(JobError, match=r"mixture\.0\.s1.*a weight is finite"):
        node.connect({**job, "mixture": {0: {"s0": 1, "s1": float("nan")}}}, {"dp": 1}, 0)


def test_two_jobs_of_one_name_are_told_apart_by_their_ids(start_node, tmp_path):
    node = start_node()
    first = text_job(tmp_path)
    with node.connect(first, {"dp": 1}, 0), node.connect({**first, "seed": 9}, {"dp": 1}, 0):
        with pytest.raises(LookupError, match="by its id"):
            node.request("stop", job="small")
        ids = [job["id"] for job in node.request("status")["jobs"]]
        assert node.request("stop", job=ids[0])["state"] == "stopped"
        wait_until(lambda: len(node.request("jobs")["jobs"]) == 1, "one job to end")


def test_no_planner_socket_is_left(start_node, tmp_path):
    node = start_node(folder=tmp_path / "n")
    run_ranks(node, text_job(tmp_path), {"dp": 1}, 1)
    node.process.terminate()
    assert node.process.wait(20) == 0
    assert not list((tmp_path / "n").glob("*.sock"))
