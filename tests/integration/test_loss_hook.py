"""`mixture.hook`: weights by losses, as journalled events; its failures are told, training goes on."""

import json
import math
import sqlite3

import pytest

from msd_client.contract.errors import ConfigError, UsageError
from msd_client.contract.state import StreamState
from tests.integration.test_mixture import inline_states, saved, told_apart
from tests.support.node import run_ranks, text_job, wait_until, write_job

pytestmark = pytest.mark.processes

HOOK = """
def by_loss(step, losses, weights, fails_at=None, gives=None):
    if step == fails_at:
        raise ValueError("no idea")
    if gives is not None:
        return gives
    if "s0" not in losses:
        return None
    assert set(weights) == {"s0", "s1"} and abs(sum(weights.values()) - 1) < 1e-9
    return {name: losses.get(name, 0.0) for name in weights}
"""


def job_file(folder, **hook):
    folder.mkdir(exist_ok=True)
    (folder / "hooks.py").write_text(HOOK)
    mixture = {0: {"s0": 1, "s1": 1}, "hook": {"call": "hooks:by_loss", "every": 5} | hook}
    return write_job(folder / "job.yaml", text_job(folder, texts={"sources": 2}, mixture=mixture))


def asked(node, calls):
    """Wait until the hook gave so many answers; return the step that its last change holds from."""

    def hook():
        return node.request("status", job="small")["jobs"][0].get("mixture_hook", {"calls": 0})

    wait_until(lambda: hook()["calls"] >= calls, "the hook's answer")
    return hook()["changed_step"]


def test_weights_follow_losses_as_journalled_events_that_a_resume_replays(start_node, tmp_path):
    node = start_node()
    job = job_file(tmp_path / "job")
    steps = []

    def report(data, step, _record):
        with pytest.raises(ConfigError, match="no source is named 'wbe'"):
            data.train.report_loss({"wbe": 1.0})
        if data.rank == 0 and step.number <= 8:
            data.train.report_loss({"s0": 3.0 if step.number % 2 else 1.0, "s1": 6.0})
            data.train.report_loss({"s0": math.nan})
            if step.number == 5:
                steps.append(asked(node, 1))

    records = run_ranks(node, job, {"dp": 2}, 40, keep_states=True, on_step=report)
    states = saved(records[0])
    assert states == saved(records[1])
    (at,) = steps
    assert 5 < at < 20
    # The mean of steps 0 to 5, each reported once: s0 2, s1 6.
    weights = {"s0": 2.0, "s1": 6.0}
    plain = json.loads(job.read_text())
    del plain["mixture"]["hook"]
    expected = inline_states(plain, 40, {at: weights})
    for step, state in told_apart(states)[0].items():
        found, wanted = StreamState.decode(state), StreamState.decode(told_apart(expected)[0][step])
        assert found.stream_digest == wanted.stream_digest
    (journal,) = node.folder.rglob("journal.db")
    with sqlite3.connect(journal) as db:
        assert db.execute("SELECT step, kind FROM events").fetchall() == [(at, "hook")]
    # Resumed before the event takes effect, with nothing reported: the same stream.
    (again,) = run_ranks(
        node, job, {"dp": 1}, 40 - at, state=records[0].states[at], keep_states=True
    )
    assert saved(again)[40] == states[40]


def test_a_hook_that_fails_is_told_once_and_weights_stay(start_node, tmp_path):
    node = start_node()
    job = job_file(tmp_path / "job", options={"fails_at": 5})
    told = []

    def report(data, step, _record):
        if step.number == 5:
            data.train.report_loss({"s0": 1.0, "s1": 6.0})
            wait_until(lambda: "no idea" in node.log, "the hook's failure")
        else:
            try:
                data.train.report_loss({"s0": 1.0, "s1": 6.0})
            except ConfigError as error:
                told.append((step.number, str(error)))

    (record,) = run_ranks(node, job, {"dp": 1}, 9, keep_states=True, on_step=report)
    ((step, text),) = told
    assert step == 6
    assert "mixture.hook hooks:by_loss at step 5" in text
    assert "ValueError: no idea" in text
    assert StreamState.decode(saved(record)[9]).event_number == 0


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (3, "gave int, no map of weights"),
        ({"s0": "x"}, "gave 'x' as the weight of s0"),
        ({"s0": 1}, "s1: no weight is given"),
        ({"s0": -1, "s1": 1}, "s0: weight -1.0 is negative"),
    ],
)
def test_what_a_hook_may_not_give(start_node, tmp_path, gives, said):
    node = start_node()
    job = job_file(tmp_path / "job", options={"gives": gives}, every=1)
    told = []

    def report(data, step, _record):
        try:
            data.train.report_loss({"s0": 1.0})
        except ConfigError as error:
            told.append(str(error))
        if step.number == 1:
            wait_until(lambda: said in node.log, "the hook's failure")

    run_ranks(node, job, {"dp": 1}, 4, on_step=report)
    assert said in told[0]


def test_a_job_without_a_hook_takes_no_losses(start_node, tmp_path):
    def report(data, _step, _record):
        with pytest.raises(UsageError, match=r"has no mixture.hook"):
            data.train.report_loss({"s0": 1.0})

    run_ranks(start_node(), text_job(tmp_path), {"dp": 1}, 1, on_step=report)
