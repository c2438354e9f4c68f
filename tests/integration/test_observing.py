"""What a real daemon shows: snapshot, metrics, trace, report, top; and that others' jobs stay theirs."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from msd_client.msdctl import main
from tests.conftest import StartNode
from tests.support.node import Node, text_job, wait_until
from tests.support.screen import on_screen
from tests.support.sources import ROOT
from tests.support.why_case import trainer, verdict_of, wait_fine

pytestmark = pytest.mark.processes


@pytest.fixture
def msdctl(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(node: Node, *arguments: str) -> str:
        capsys.readouterr()
        assert main.run([*arguments, "--socket", str(node.socket)]) == 0
        return capsys.readouterr().out

    return run


def test_a_running_job_is_seen_in_every_way(
    start_node: StartNode, tmp_path: Path, msdctl: Callable[..., str]
):
    pytest.importorskip("prometheus_client")
    node = start_node()
    with trainer(node, text_job(tmp_path), {"dp": 2}, hold_s=0.005) as ranks:
        wait_fine(node)
        _see_snapshot(node)
        _see_metrics(node, msdctl)
        _see_trace(node, tmp_path, msdctl)
        _see_top(node, tmp_path, msdctl)
        # History points come every ten seconds: a report of a young job has few.
        page = tmp_path / "report.html"
        msdctl(node, "report", "small", "--out", str(page))
        text = page.read_text()
        assert verdict_of(node)["side"] in text
        assert "<script" not in text
        assert not re.search(r"(src|href)=|url\(", text)
    assert not ranks.errors


def _see_snapshot(node: Node) -> None:
    wait_until(lambda: node.request("snapshot")["jobs"][0]["now"] != {}, "two looks")
    found = node.request("snapshot", history_s=600)
    (job,) = found["jobs"]
    assert found["schema"] == 1
    assert found["cluster"] is None
    assert [rank["rank"] for rank in job["ranks_now"]] == [0, 1]
    assert max(rank["load"] for rank in job["ranks_now"]) == 1.0
    assert {row["name"] for row in job["sources_now"]} == {"s0", "s1", "s2"}
    step = job["step"]
    assert sum(group["tokens"] for group in step["groups"]) == sum(row[2] for row in step["flow"])
    assert job["now"]["wait_ratio"] <= job["now"]["wait_ratio_max"] <= 1.0
    assert json.loads(json.dumps(found)) == found


def _see_metrics(node: Node, msdctl: Callable[..., str]) -> None:
    text = msdctl(node, "metrics")
    assert 'msd_rank_batches_total{job="small",rank="1"}' in text
    assert re.search(
        r'msd_verdict\{cause="\w+",job="small",level="fine",side="\w+",stage="\w*"\} 1\.0', text
    )
    assert 'msd_source_tokens_total{job="small",source="s0"}' in text


def _see_trace(node: Node, folder: Path, msdctl: Callable[..., str]) -> None:
    out = folder / "trace.json.gz"
    told = json.loads(msdctl(node, "trace", "--steps", "6", "--out", str(out), "--json"))
    assert told["is_complete"]
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    lanes = {it["args"]["name"]: it["pid"] for it in events if it.get("name") == "process_name"}
    assert {"constructor 0", "rank 0", "rank 1", "planner 0", "daemon 0"} <= set(lanes)
    assert len(set(lanes.values())) == len(lanes)
    spans = [it for it in events if it["ph"] == "X"]
    assert all(it["dur"] >= 0 for it in spans)
    batches = [it for it in spans if it["pid"] == lanes["rank 0"] and it["name"] != "waits"]
    assert len(batches) >= 6
    ends = [it["ts"] + it["dur"] for it in batches]
    assert ends == sorted(ends)


def _see_top(node: Node, folder: Path, msdctl: Callable[..., str]) -> None:
    looks = [
        json.loads(line)
        for line in msdctl(node, "top", "--json", "--count", "2", "--every", "0.2").splitlines()
    ]
    assert looks[1]["jobs"][0]["tokens_per_s"] >= 0
    for view in ("overview", "sources", "ranks", "nodes", "workers", "why"):
        picture = folder / f"{view}.svg"
        msdctl(node, "top", "--view", view, "--svg", str(picture))
        assert picture.read_text().startswith("<svg")
    assert "small" in msdctl(node, "top", "--plain", "--count", "1")


def test_a_trace_of_a_job_that_ends_gives_what_there_is(start_node: StartNode, tmp_path: Path):
    node = start_node()
    with trainer(node, text_job(tmp_path, steps=40), {"dp": 1}, hold_s=0.005):
        wait_until(
            lambda: any(job["state"] == "running" for job in node.request("jobs")["jobs"]),
            "the job",
            60,
        )
        found = node.request("trace", steps=1000, wait_s=3.0)
    assert not found["is_complete"]
    assert 0 <= found["steps"] <= 40


def test_one_id_in_the_log_runs_from_a_workers_death_to_its_successor(
    start_node: StartNode, tmp_path: Path
):
    node = start_node(environ={"MSD__DAEMON__LOG_FORMAT": "json"})
    with trainer(node, text_job(tmp_path), {"dp": 1}, hold_s=0.005):
        wait_fine(node)
        pid = node.child("msd-loader").pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "has a successor" in node.log, "its successor", 30)
    lines = [json.loads(line) for line in node.log.splitlines()]
    (death,) = [line for line in lines if f"(pid {pid})" in line["message"]]
    story = [line["message"] for line in lines if line.get("cause_id") == death["cause_id"]]
    assert death["cause"] == "worker_lost"
    assert any("has a successor" in message for message in story)


def test_top_takes_keys_and_leaves_the_terminal_as_it_was(start_node: StartNode, tmp_path: Path):
    node = start_node()
    code = "from msd_client.msdctl.main import main; main()"
    with trainer(node, text_job(tmp_path), {"dp": 1}, hold_s=0.01):
        wait_fine(node)
        command = [sys.executable, "-c", code, "top", "--socket", str(node.socket)]
        with on_screen(command, ROOT, os.environ) as screen:
            before = termios.tcgetattr(screen.inner)
            screen.until("tokens/s")
            screen.types("r")
            screen.until("gave back")
            screen.types("q")
            screen.until("\x1b[?1049l")  # the alternate screen is left
            assert screen.process.wait(30) == 0
            assert termios.tcgetattr(screen.inner) == before
