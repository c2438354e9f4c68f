"""Tokenizers, threads and forks: workers come from a process without threads (H16)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.ledger import Corpus
from tests.support.node import Node, RankRecord, read_steps, run_ranks, wait_until

pytestmark = pytest.mark.processes

STEPS = 30
KILLS_A_RUN = 5
"""A job stands six deaths in twenty seconds."""
BATCH_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("words")
    corpus = Corpus({"words": [[30] * 300 for _ in range(4)]})
    sources = corpus.write_texts(folder, {"words": ""})
    return {
        "schema": 1,
        "name": "words",
        "tokenizer": {"file": str(folder / "tokenizer.json")},
        "batch": {"rows": 8, "row_tokens": 64, "microbatch_rows": 2},
        "sources": sources,
    }


@pytest.fixture
def busy_process(job: dict[str, Any]) -> Iterator[None]:
    """Make this process one that nobody should fork: tokenizer threads, one of ours, a loop."""
    import asyncio

    import tokenizers
    import zmq

    tokenizer = tokenizers.Tokenizer.from_file(job["tokenizer"]["file"])
    tokenizer.encode_batch(["1 2 3"] * 500)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    loop = asyncio.new_event_loop()
    with zmq.Context() as context:
        assert not context.closed
        yield
    loop.close()
    stop.set()
    thread.join()


def threads_of(process: psutil.Process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/task"))


def check_parents(node: Node) -> None:
    """Check that workers are children of fork servers, which have one thread each."""
    children = node.children()
    servers = {child.pid for child in children if child.name() == "msd-fork_server"}
    workers = [c for c in children if c.name() in ("msd-loader", "msd-constructor", "msd-planner")]
    assert len(servers) == 2  # the first one, and the loaders' with their libraries
    assert len(workers) >= 3
    for child in children:
        if child.pid in servers:
            assert threads_of(child) == 1, "a fork server with threads"
    for worker in workers:
        assert worker.ppid() in servers


@pytest.mark.parametrize(
    "kills", [5, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("parallelism", [None, "true", "false"])
def test_workers_and_their_successors_start_whatever_tokenized_before(
    start_node: Any,
    job: dict[str, Any],
    busy_process: None,
    monkeypatch: pytest.MonkeyPatch,
    parallelism: str | None,
    kills: int,
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    environ = {} if parallelism is None else {"TOKENIZERS_PARALLELISM": parallelism}
    node = start_node("--loader-workers", "4", environ=environ)
    (oracle,) = run_ranks(node, job, {"dp": 1}, STEPS)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("the client forks"))
    for _ in range(kills // KILLS_A_RUN):
        killed: list[int] = []

        def kill(_data: Any, step: Any, _record: RankRecord, killed: list[int] = killed) -> None:
            if step.number == 1:
                check_parents(node)
            if step.number % 5 == 3 and len(killed) < KILLS_A_RUN:
                child = node.child("msd-loader")
                child.kill()
                killed.append(child.pid)

        record = RankRecord()
        began = time.monotonic()
        with node.connect(job, {"dp": 1}, 0) as data:
            read_steps(data, record, 1, keep_states=False, on_step=None)
            assert time.monotonic() - began < BATCH_WITHIN_S
            read_steps(data, record, STEPS, keep_states=False, on_step=kill)
        assert len(killed) == KILLS_A_RUN
        assert record.rows == oracle.rows
        assert max(stats["wait_s"] for stats in record.stats) < BATCH_WITHIN_S
        wait_until(node.is_at_rest, node.holdings)
