"""A record whose decoder ends or hangs its worker costs itself and one restart, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import WorkerLostError
from tests.support.bomb_format import install_bombs
from tests.support.node import (
    Node,
    RankRecord,
    run_ranks,
    running_node,
    wait_until,
    write_job,
)

pytestmark = pytest.mark.processes

RECORDS = 200
PLACE = 77


def job_of(folder: Path, kinds: dict[int, str], **changes: Any) -> dict[str, Any]:
    """Return a job over a shard of lines, and another source beside it."""
    folder.mkdir(exist_ok=True)
    lines = [f"{number:03d} {kinds.get(number, 'fine')}\n" for number in range(RECORDS)]
    (folder / "a.bombs").write_text("".join(lines))
    texts = [
        json.dumps({"text": f"({number:03d})", "score": 1}) + "\n" for number in range(RECORDS)
    ]
    (folder / "b.jsonl").write_text("".join(texts))
    return {
        "name": "bombs",
        "seed": 4,
        "tokenizer": {"bytes": True},
        "batch": {"rows": 4, "row_tokens": 64, "microbatch_rows": 2},
        "sources": {"a": str(folder / "a.bombs"), "b": str(folder / "b.jsonl")},
        "defaults": {"at_exhaustion": "drop", "shuffle": {"block_records": 40}},
        "epochs": 1,
        "limits": {"sample_s": 1.0},
    } | changes


def starting(folder: Path, *arguments: str, **environ: str) -> Any:
    site = folder / "site"
    if not site.exists():
        install_bombs(site)
    environ = {
        "PYTHONPATH": f"{site}:{Path(__file__).parents[2]}",
        "MSD_TEST_LOOKS": str(folder / "looks"),
        **environ,
    }
    return running_node(folder / "node", *arguments, environ=environ)


def delivered(records: list[RankRecord]) -> list[int]:
    """Return the numbers of the records of `a` in all rows, in ascending order."""
    rows = [row for steps in records[0].rows.values() for row in steps]
    texts = [bytes(b for b in row if b) for row in rows]
    return sorted(int(n) for text in texts for n in re.findall(rb"<(\d{3})>", text))


def looks(folder: Path) -> dict[int, int]:
    """Return how often each record was looked at."""
    counts: dict[int, int] = {}
    for line in (folder / "looks").read_text().split():
        counts[int(line)] = counts.get(int(line), 0) + 1
    return counts


def loader_deaths(node: Node) -> int:
    return node.log.count(": replacing it")


@pytest.fixture(scope="module")
def tame(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankRecord]:
    """The oracle: the record is a fault that its reader tells."""
    folder = tmp_path_factory.mktemp("tame")
    job = job_of(folder / "data", {PLACE: "abort"})
    with starting(folder, MSD_TEST_TAME="1") as node:
        (record,) = run_ranks(node, job, {"dp": 1}, None, keep_states=True)
        assert loader_deaths(node) == 0
    yield record


@pytest.mark.parametrize(
    ("kind", "deaths", "told"),
    [
        ("abort", 1, "ended its loader worker by SIGABRT"),
        ("hang", 1, "took longer than limits.sample_s = 1 s"),
        ("kill", 2, "was killed twice at it, by SIGKILL"),
        ("late", 2, "ended its loader worker by SIGABRT"),
    ],
)
def test_one_record_and_one_restart(
    tmp_path: Path, tame: RankRecord, kind: str, deaths: int, told: str
) -> None:
    job = job_of(tmp_path / "data", {PLACE: kind})
    if kind == "late":
        job["fields"] = {"score": {"per": "segment"}}
    found: dict[str, Any] = {}

    def at_end(_data: Any) -> None:
        found["page"] = node.request("bad")
        found["status"] = node.request("status")["jobs"][0]["sources"]

    with starting(tmp_path) as node:
        records = run_ranks(node, job, {"dp": 1}, None, keep_states=True, at_end=at_end)
        assert loader_deaths(node) == deaths
        log = node.log
    assert records[0].rows == tame.rows
    assert delivered(records) == [number for number in range(RECORDS) if number != PLACE]
    assert looks(tmp_path)[PLACE] == deaths * (2 if kind == "late" else 1)
    (bad,) = found["page"]["records"]
    assert (bad["source"], bad["status"], bad["place"]) == ("a", "quarantined", PLACE)
    assert (bad["place_name"], bad["key"], bad["is_drawn"]) == ("line", f"k{PLACE:03d}", True)
    assert bad["shard"] == str(tmp_path / "data" / "a.bombs")
    assert told in bad["text"]
    assert found["status"][0]["dropped"] == {"quarantined": 1}
    assert found["status"][1]["dropped"] == {}
    if kind != "kill":
        # Its stack was there to be seen: in the log, and in the record's own text.
        assert "in __getitem__" in log
        assert "in __getitem__" in bad["text"]


def test_a_record_that_was_in_flight_when_somebody_killed_its_worker_is_no_bad_one(
    tmp_path: Path,
) -> None:
    job = job_of(tmp_path / "data", {PLACE: "once"})
    found: dict[str, Any] = {}

    def at_end(_data: Any) -> None:
        found["page"] = node.request("bad")

    with starting(tmp_path) as node:
        records = run_ranks(node, job, {"dp": 1}, None, at_end=at_end)
        assert loader_deaths(node) == 1
    assert delivered(records) == list(range(RECORDS))
    assert found["page"]["records"] == []


def test_a_restored_run_gives_the_same_and_never_touches_the_record(
    tmp_path: Path, tame: RankRecord
) -> None:
    job = job_of(tmp_path / "data", {PLACE: "abort", 20: "abort", 150: "abort"})
    with starting(tmp_path) as node:
        (first,) = run_ranks(node, job, {"dp": 1}, None, keep_states=True)
        assert loader_deaths(node) == 3
    (tmp_path / "looks").unlink()
    steps = sorted(first.rows)
    # Another daemon, from the beginning and from the middle.
    for begin in (0, len(steps) // 2):
        with starting(tmp_path) as node:
            already = loader_deaths(node)
            state = first.states[begin] if begin else None
            (again,) = run_ranks(node, job, {"dp": 1}, None, keep_states=True, state=state)
            assert loader_deaths(node) == already
        assert again.rows == {step: first.rows[step] for step in steps[begin:]}
        assert again.states == {n: s for n, s in first.states.items() if n > begin}
    assert not {PLACE, 20, 150} & set(looks(tmp_path))


@pytest.mark.parametrize("workers", [1, 3])
def test_later_passes_and_other_workers_know_of_it(tmp_path: Path, workers: int) -> None:
    bombs = {PLACE: "abort", 3: "abort", 160: "abort"}
    job = job_of(tmp_path / "data", bombs, epochs=3)
    job["sources"] = {"a": job["sources"]["a"]}
    with starting(tmp_path, "--loader-workers", str(workers)) as node:
        records = run_ranks(node, job, {"dp": 2}, None)
        deaths = loader_deaths(node)
    # Several may be at one record at once, each in another pass, before any death is heard of.
    assert len(bombs) <= deaths <= len(bombs) * workers
    assert sum(looks(tmp_path)[number] for number in bombs) == deaths
    rows = [row for record in records for steps in record.rows.values() for row in steps]
    texts = [bytes(b for b in row if b) for row in rows]
    found = sorted(int(n) for text in texts for n in re.findall(rb"<(\d{3})>", text))
    assert found == sorted([n for n in range(RECORDS) if n not in bombs] * 3)


def test_a_pass_of_validation_remembers(tmp_path: Path) -> None:
    """Its own folder goes with it; what it must not touch is the job's."""
    job = job_of(tmp_path / "data", {PLACE: "abort"}, epochs=None)
    job["mixture"] = {0: {"b": 1}}
    job["loaders"] = {"val": {"from": "a"}}
    passes: list[list[bytes]] = []

    def read(data: Any, _step: Any, _record: Any) -> None:
        rows = [np.array(batch.tokens).tobytes() for step in data.val.once() for batch in step]
        passes.append(rows)

    with starting(tmp_path) as node:
        run_ranks(node, job, {"dp": 1}, 2, on_step=read)
        assert loader_deaths(node) == 1
    assert len(passes) == 2
    assert passes[0] == passes[1] != []
    assert looks(tmp_path)[PLACE] == 1


def test_a_reader_that_crashes_ends_the_job_and_the_shard_is_named(tmp_path: Path) -> None:
    """No reader can be told to leave out what it has not reached: this is no loop without end."""
    job = job_of(tmp_path / "data", {PLACE: "reader"})
    with starting(tmp_path, "--loader-workers", "1") as node:
        shard = re.escape(str(tmp_path / "data" / "a.bombs"))
        with pytest.raises(WorkerLostError, match=f"It was at source a, {shard}: reading it"):
            run_ranks(node, job, {"dp": 1}, None)


def test_a_record_that_a_users_transform_hangs_on_is_waited_for_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    job = job_of(data, {})
    (data / "mine.py").write_text(
        "import threading\n"
        "def fn(sample, rng, looks):\n"
        "    if '(077)' in sample['text']:\n"
        "        with open(looks, 'a') as file: file.write('77 ')\n"
        "        threading.Event().wait()\n"
        "    return sample\n"
    )
    transform = {"call": "mine:fn", "sample_s": 1.0, "options": {"looks": str(data / "looks")}}
    job["sources"] = {"b": {"paths": str(data / "b.jsonl"), "transform": transform}}
    job["name"] = "hung"
    rows = []
    with starting(tmp_path) as node:
        for number in range(2):
            records = run_ranks(node, write_job(data / "job.yaml", job), {"dp": 1}, None)
            rows.append(records[0].rows)
            wait_until(lambda: not node.request("jobs")["jobs"], "the job's end")
            assert looks(data) == {77: 1}, number
            (path,) = (tmp_path / "node" / "state" / "jobs").glob("*/quarantine.jsonl")
            (entry,) = map(json.loads, path.read_text().splitlines())
            assert (entry["cause"], entry["source"], entry["epoch"]) == ("user", "b", 0)
            assert "took longer than 1 s" in entry["text"]
        (listed,) = node.request("bad", job="hung")["records"]
    assert rows[0] == rows[1]
    assert (listed["status"], listed["text"]) == ("quarantined", entry["text"])
