"""Runs beside each other on one daemon, and ranks that come or go out of turn."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from msd_client.contract.errors import DeadlineError, SourceExhaustedError, UsageError
from tests.support.node import DEADLINES, RankRecord, read_steps, text_job, wait_until

pytestmark = pytest.mark.processes

LOADERS = {"defaults": {"hold_out": 0.2}, "loaders": {"val": {"from": "s0", "rows": 16}}}


def test_two_jobs_that_differ_in_name_alone_are_two_runs(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path)
    records = {name: RankRecord() for name in ("first", "second")}
    with (
        node.connect(job | {"name": "first"}, {"dp": 1}, 0) as first,
        node.connect(job | {"name": "second"}, {"dp": 1}, 0) as second,
    ):
        for count in (1, 2, 3):  # in turn: neither waits for the other
            read_steps(first, records["first"], count, keep_states=False, on_step=None)
            read_steps(second, records["second"], count, keep_states=False, on_step=None)
        assert len(node.request("jobs")["jobs"]) == 2
    assert records["first"].rows == records["second"].rows
    assert records["first"].steps == [0, 1, 2]


def test_a_pass_that_a_lost_rank_was_needed_for_is_refused_at_once(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path, **LOADERS)
    told: list[BaseException] = []
    data = [node.connect(job, {"dp": 2}, rank) for rank in range(2)]

    def go_through() -> None:
        try:
            list(data[0].val.once())
        except UsageError as error:
            told.append(error)

    waiting = threading.Thread(target=go_through)
    waiting.start()
    wait_until(lambda: starting(node) == ["small.val"], "rank 0 to wait in its pass")
    data[1].close()
    waiting.join(20)
    assert "rank 1 left the job" in str(told[0])
    with pytest.raises(UsageError, match=r"ranks \[1\] left job 'small'"):
        next(iter(data[0].val.once()))
    data[0].close()


def starting(node: Any) -> list[str]:
    jobs = node.request("status")["jobs"]
    return [job["name"] for job in jobs if job["state"] == "starting"]


def test_a_rank_that_waits_for_one_in_a_pass_of_validation_is_told_so(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path, **LOADERS)
    deadlines = DEADLINES | {"next_batch_s": 3.0, "join_s": 12.0}
    errors: dict[int, BaseException] = {}

    def train(rank: int) -> None:
        try:
            with node.connect(job, {"dp": 2}, rank, deadlines=deadlines) as data:
                for step in data.train:
                    for batch in step:
                        del batch
                    if rank == 0:
                        list(data.val.once())  # rank 1 never does
        except (DeadlineError, UsageError) as error:
            errors[rank] = error

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert "ranks [0] wait in a pass of 'small.val' for [1]" in str(errors[1])


def joined(node: Any, job: Any, found: list[Any]) -> bool:
    with contextlib.suppress(UsageError):
        found.append(node.connect(job, {"dp": 2}, 1))
    return bool(found)


@pytest.mark.soak
def test_a_rank_that_comes_back_alone_is_told_before_its_deadline(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path)
    over = threading.Event()

    def train() -> None:
        with node.connect(job, {"dp": 2}, 0) as data:
            for step in data.train:
                for batch in step:
                    del batch
                if over.wait(0.01):
                    return

    thread = threading.Thread(target=train)
    thread.start()
    try:
        with node.connect(job, {"dp": 2}, 1) as data:
            kept = list(next(iter(data.train)))[-1:]
        with pytest.raises(UsageError, match="views of its batches are alive"):
            node.connect(job, {"dp": 2}, 1)
        kept.clear()
        found: list[Any] = []
        wait_until(lambda: joined(node, job, found), "the daemon to hear of the last view")
        with (
            found[0] as data,
            pytest.raises(UsageError, match=r"ranks \[0\] train on without it"),
        ):
            next(iter(data.train))
    finally:
        over.set()
        thread.join(30)


def test_a_stream_without_a_step_says_what_became_of_the_records(start_node, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": 5}\n' * 6)
    job = {
        "name": "none",
        "tokenizer": {"bytes": True},
        "batch": {"rows": 2, "row_tokens": 8},
        "sources": {"t": str(tmp_path / "t.jsonl")},
        "epochs": 1,
    }
    with (
        start_node().connect(job, {"dp": 1}, 0) as data,
        pytest.raises(SourceExhaustedError, match=r"before its first step.*field_missing 6"),
    ):
        next(iter(data.train))
