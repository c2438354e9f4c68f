"""`slow_sources: substitute`: others take over from a source that can't keep up, exact on replay."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.codec import unpack_map
from msd_client.contract.state import StreamState
from msd_client.joined_job import Data
from msd_client.step import Step
from tests.integration.test_mixture import inline_states, told_apart
from tests.support.node import Node, run_ranks, text_job, wait_until, write_job

pytestmark = pytest.mark.processes

OWN_CODE = """
import time

def slow(sample, rng):
    time.sleep(0.02)
    return sample
"""
STEPS_MAX = 400


def slow_job(folder: Path, **changes: Any) -> Path:
    """Return a job whose source s0 gives 50 samples a second a loader."""
    folder.mkdir()
    (folder / "own.py").write_text(OWN_CODE)
    job = text_job(folder, texts={"sources": 2, "documents": 3000}, **changes)
    job["sources"]["s0"] = {"paths": job["sources"]["s0"], "transform": "own:slow"}
    job["mixture"] = {"unit": "tokens", 0: {"s0": 1, "s1": 1}}
    return write_job(folder / "job.yaml", job)


def told(node: Node) -> dict[str, Any]:
    (job,) = node.request("status", job="small")["jobs"]
    found: dict[str, Any] = job.get("slow_sources", {"changes": 0})
    return found


def test_others_take_over_and_a_replay_is_exact(start_node, tmp_path: Path):
    node = start_node("--loader-workers", "1")
    job = slow_job(tmp_path / "job", slow_sources={"after_s": 1, "at_most": 0.75})
    ends: list[int] = []
    first: dict[str, bytes] = {}
    states: dict[int, dict[str, bytes]] = {}

    def read(data: Data, step: Step) -> None:
        for batch in step:
            del batch
        states[step.number + 1] = data.train.state_dict()
        first.setdefault("msd", states[step.number + 1]["msd"])
        found = told(node)
        if not ends and found["changes"]:
            assert 0.25 <= found["has"]["s0"] < 1
            ends.append(found["changed_step"] + 5)
        if ends and step.number >= ends[0]:
            raise SeenEnoughError

    with pytest.raises(SeenEnoughError):
        run_ranks(node, job, {"dp": 1}, STEPS_MAX, read_step=read)
    last = max(states)
    assert StreamState.decode(states[last]["msd"]).event_number >= 1
    events = journalled(node)
    assert {kind for _, kind, _ in events} == {"substitute"}
    assert events[0][0] <= last
    shares = StreamState.decode(states[last]["msd"]).shares
    assert shares[0] < shares[1]
    check(job, events, states[last], last)

    # From before the event: what was journalled holds again, at the same steps, whatever comes beside.
    (again,) = run_ranks(
        node, job, {"dp": 1}, last - 1, state={"msd": first["msd"]}, keep_states=True
    )
    assert journalled(node)[: len(events)] == events
    check(job, journalled(node), again.states[last], last)
    (kept,) = node.folder.rglob("slow_sources.json")
    wait_until(
        lambda: json.loads(kept.read_text())["factors"][0] < 1, "what was changed to be kept"
    )


def journalled(node: Node) -> list[tuple[int, str, bytes]]:
    """Return step, kind and body of each event, in the order in which they were accepted."""
    (journal,) = node.folder.rglob("journal.db")
    with sqlite3.connect(journal) as db:
        return db.execute("SELECT step, kind, body FROM events ORDER BY number").fetchall()


def check(
    job: Path, events: list[tuple[int, str, bytes]], state: dict[str, bytes], step: int
) -> None:
    """See that a state is that of a planner in this process that was given the events alone."""
    plain = json.loads(job.read_text())
    del plain["slow_sources"]
    plain["sources"]["s0"] = plain["sources"]["s0"]["paths"]  # its samples are the same
    weights = {at: unpack_map(body) for at, _, body in events}
    wanted = StreamState.decode(told_apart(inline_states(plain, step, weights))[0][step])
    assert StreamState.decode(state["msd"]).stream_digest == wanted.stream_digest


class SeenEnoughError(Exception):
    """The rank stops."""
