"""Bad records of a running job: policies, what msdctl bad lists and export-bad writes, and its counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from msd_client.contract.errors import CorruptRecordError, ErrorBudgetExceededError, MsdError
from msd_client.msdctl import bad as bad_verb
from msd_daemon.verbs import export_bad
from tests.support.node import Node, run_ranks, text_job, wait_until

pytestmark = pytest.mark.processes

BROKEN = {7: '{"id": "cut', 50: '{"id": "no text"}', 51: "\\ud800 no json", 120: '{"text": 5}'}


def broken_job(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a job whose source s0 has four bad lines."""
    job = text_job(folder, epochs=1, **changes)
    path = Path(job["sources"]["s0"])
    lines = path.read_text().splitlines()
    for number, line in BROKEN.items():
        lines[number] = line
    path.write_text("\n".join(lines) + "\n")
    return job


def invoke(command: Any, node: Node, *arguments: str) -> Any:
    found = CliRunner().invoke(command, [*arguments, "--socket", str(node.socket)])
    assert found.exit_code == 0, (found.output, found.exception)
    return found


@pytest.mark.parametrize(
    ("on_error", "error", "passed"),
    [
        ("fail", CorruptRecordError, 0),
        ({"policy": "skip", "budget_ratio": 0.0002}, ErrorBudgetExceededError, 2),
        ({"policy": "skip", "budget_ratio": 0.0004}, None, 4),
        ("quarantine", None, 4),
    ],
)
def test_what_bad_records_cost_and_that_all_are_listed(
    start_node: Any, tmp_path: Path, on_error: Any, error: type[MsdError] | None, passed: int
) -> None:
    node = start_node()
    job = broken_job(tmp_path, defaults={"on_error": on_error})
    found: dict[str, Any] = {}

    def at_end(_data: Any) -> None:
        found["status"] = node.request("status")["jobs"][0]["sources"]
        found["page"] = json.loads(invoke(bad_verb.command, node, "small", "--json").stdout)
        found["text"] = invoke(bad_verb.command, node, "small", "--source", "s0").stdout

    if error is not None:
        with pytest.raises(error, match="source s0"):
            run_ranks(node, job, {"dp": 1}, None)
    else:
        run_ranks(node, job, {"dp": 1}, None, at_end=at_end)
        page = found["page"]
        kinds = Counter((record["source"], record["status"]) for record in page["records"])
        told = Counter(
            {
                (source["name"], reason): count
                for source in found["status"]
                for reason, count in source["dropped"].items()
            }
        )
        assert kinds == told == {("s0", "bad_syntax"): 2, ("s0", "field_missing"): 2}
        assert (page["schema"], page["total"], page["unlisted"]) == ("msd.bad/1", 4, {})
        assert all(record["is_drawn"] for record in page["records"])
        assert found["text"].count("drawn") == 1 + 4
    # It is over: its folder still says what was read, and what was reached before it failed.
    wait_until(lambda: not node.request("jobs")["jobs"], "the job's end")
    page = node.request("bad", job="small")
    assert {record["place"] for record in page["records"]} == places(tmp_path)
    assert [record["is_drawn"] for record in page["records"]] == [n < passed for n in range(4)]


def places(folder: Path) -> set[int]:
    lines = (folder / "texts" / "s0.jsonl").read_text().splitlines()
    return {sum(len(line) + 1 for line in lines[:number]) for number in BROKEN}


def test_records_are_written_out_as_they_lie(start_node: Any, tmp_path: Path) -> None:
    node = start_node()
    job = broken_job(tmp_path, defaults={"on_error": "quarantine"})
    out = tmp_path / "out"

    def at_end(_data: Any) -> None:
        invoke(export_bad.command, node, "small", "--out", str(out))

    run_ranks(node, job, {"dp": 1}, None, at_end=at_end)
    told = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert [line["error"] for line in told] == [""] * 4
    written = {(out / line["files"][0]).read_text() for line in told}
    assert written == set(BROKEN.values())
    assert {line["place"] for line in told} == places(tmp_path)


def test_records_ahead_of_the_draw_are_told_apart_and_listed_once(
    start_node: Any, tmp_path: Path
) -> None:
    """A run that stops early, restores and goes on lists every record once."""
    job = broken_job(tmp_path, batch={"rows": 2, "row_tokens": 128, "microbatch_rows": 1})
    node = start_node()
    found: dict[str, Any] = {}

    def at_end(_data: Any) -> None:
        found["page"] = node.request("bad")
        found["status"] = node.request("status")["jobs"][0]["sources"]

    (first,) = run_ranks(node, job, {"dp": 1}, 3, keep_states=True, at_end=at_end)
    drawn = sum(record["is_drawn"] for record in found["page"]["records"])
    assert drawn == sum(found["status"][0]["dropped"].values())
    wait_until(lambda: not node.request("jobs")["jobs"], "the job's end")
    for state in (first.states[2], None):
        run_ranks(node, job, {"dp": 1}, None, state=state, at_end=at_end)
        assert [record["is_drawn"] for record in found["page"]["records"]] == [True] * 4
        assert sum(found["status"][0]["dropped"].values()) == 4
        wait_until(lambda: not node.request("jobs")["jobs"], "the job's end")


def test_no_bad_record_and_no_such_job(start_node: Any, tmp_path: Path) -> None:
    node = start_node()
    job = text_job(tmp_path, epochs=1)
    found: dict[str, Any] = {}

    def at_end(_data: Any) -> None:
        found["text"] = invoke(bad_verb.command, node).stdout

    run_ranks(node, job, {"dp": 1}, 2, at_end=at_end)
    assert found["text"] == "job small: no bad record was read\n"
    wait_until(lambda: not node.request("jobs")["jobs"], "the job's end")
    assert invoke(bad_verb.command, node, "small").stdout == found["text"]
    for name, message in (
        (["other"], "no job matches 'other'; running: none"),
        (["small", "--source", "nope"], "job small has no source 'nope': name one of "),
    ):
        refused = CliRunner().invoke(bad_verb.command, [*name, "--socket", str(node.socket)])
        assert isinstance(refused.exception, MsdError)
        assert message in refused.exception.message
