"""A user's strategy in a daemon's planner: it serves, it fails alone, it is refused among uids."""

import json

import numpy as np
import pytest

from msd_client.contract.errors import JobError, PermissionDeniedError, StrategyError
from tests.support.node import run_ranks, running_node, text_job, write_job

pytestmark = pytest.mark.processes

STRATEGY = """
from helper import VERB

def reversed_rows(graph, step, fails_at=None):
    if step == fails_at:
        raise ValueError("enough")
    graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model)
    return graph.balance(VERB)
"""


def job_file(folder, name="own", **changes):
    folder.mkdir(exist_ok=True)
    (folder / "ours.py").write_text(STRATEGY)
    (folder / "helper.py").write_text("VERB = 'greedy'")
    strategy = {"call": "ours:reversed_rows", "files": "helper.py"} | changes
    return write_job(folder / "job.yaml", text_job(folder, name=name, strategy=strategy))


def test_a_failing_strategy_ends_its_job_and_no_other(start_node, tmp_path):
    node = start_node()
    good = job_file(tmp_path / "good", "good")
    bad = job_file(tmp_path / "bad", "bad", options={"fails_at": 40})
    planner = []

    def other_fails(_data, step, _record):
        planner.append(node.child("msd-planner").pid)
        if step.number == 3:
            with pytest.raises(StrategyError, match="strategy ours:reversed_rows at step 40") as e:
                run_ranks(node, bad, {"dp": 1}, 60)
            assert e.value.attributes["step"] == 40

    (record,) = run_ranks(node, good, {"dp": 1}, 40, on_step=other_fails)
    assert record.steps == list(range(40))
    assert len(set(planner)) == 1
    # The copy is what runs, whatever became of the files.
    (tmp_path / "good" / "helper.py").write_text("raise SystemExit")
    plain = json.loads(good.read_text()) | {"strategy": "balanced"}
    (same,) = run_ranks(node, plain, {"dp": 1}, 10)
    assert [sorted(rows) for rows in same.rows.values()] == [
        sorted(record.rows[step]) for step in range(10)
    ]
    with pytest.raises(JobError, match=r"strategy.call"):
        run_ranks(node, good, {"dp": 2}, 1)


def test_a_daemon_for_several_uids_runs_no_strategy_of_a_user(tmp_path):
    environ = {"MSD__ACCESS__ALLOW_UIDS": "[12345]"}
    with running_node(tmp_path / "node", environ=environ) as node:
        job = job_file(tmp_path / "job")
        with pytest.raises(PermissionDeniedError, match="serves other uids too"):
            run_ranks(node, job, {"dp": 1}, 1)
        plain = json.loads(job.read_text()) | {"strategy": "balanced"}
        (record,) = run_ranks(node, plain, {"dp": 1}, 3)
        assert np.all(np.array(list(record.valid_tokens.values())) > 0)
