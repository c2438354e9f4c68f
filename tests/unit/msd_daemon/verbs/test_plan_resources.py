"""`msdctl plan resources` and `msdctl sources` of a file: what they say, and what they measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from msd_client.contract.errors import DataError
from msd_daemon.sources.profile_store import FOLDER
from msd_daemon.verbs import plan
from msd_daemon.verbs import sources as sources_verb

JOB = {
    "tokenizer": {"bytes": True},
    "batch": {"rows": 16, "row_tokens": 256, "microbatch_rows": 2},
    "sources": {"web": "web.jsonl", "books": "books.jsonl", "off": "off.jsonl"},
    "mixture": {"0": {"web": 1, "books": 1, "off": 0}, "100": {"web": 0, "books": 1, "off": 0}},
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path / "state"))
    for name in JOB["sources"]:
        lines = (json.dumps({"text": f"{name} {n}"}) for n in range(3000))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(JOB))
    return path


def asked(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(
        plan.command, ["resources", *map(str, arguments), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["schema"] == "msd.plan-resources/1"
    return answer


def test_a_slow_trainer_does_not_wait_and_a_fast_one_does(job: Path):
    slow = asked(job, "--step-time", 3600, "--mesh", "dp=2")
    assert slow["verdict"]["waits"] is False
    assert [point["from"] for point in slow["points"]] == ["step 0", "step 100"]
    assert {row["name"]: row["parts"] for row in slow["points"][0]["sources"]} == {
        "web": 1, "books": 1, "off": 0,
    }  # fmt: skip
    assert slow["profiles"]["off"] is None, "what has no weight at any point is not read"
    fast = asked(job, "--step-time", 1e-6)
    assert fast["verdict"]["waits"] is True
    assert fast["verdict"]["source"] in ("web", "books")
    assert fast["verdict"]["stage"] == "decode"


def test_profiles_are_measured_once(job: Path, tmp_path: Path):
    first = asked(job, "--step-time", 1)
    assert len(list((tmp_path / "state" / FOLDER).iterdir())) == 2
    assert asked(job, "--step-time", 1) == first
    measured = CliRunner().invoke(sources_verb.command, [str(job), "--json"])
    assert measured.exit_code == 0, measured.output
    entries = json.loads(measured.stdout)["sources"]
    assert [entry["profile"] for entry in entries] == list(first["profiles"].values())
    assert [entry["share"] for entry in entries] == [0.5, 0.0, 0.5], "by name"


def test_without_a_step_time_the_shortest_step_is_told(job: Path):
    found = asked(job, "--cpus", 2)
    assert found["step_s"] is None
    point = found["points"][0]
    assert point["step_s"] == point["shortest_step_s"]
    assert not point["verdict"]["waits"]


def test_memory_that_is_too_small_is_told_before_anything_starts(job: Path):
    found = asked(job, "--step-time", 3600, "--memory", "8Mi")
    assert (found["verdict"]["waits"], found["verdict"]["stage"]) == (True, "memory")
    assert "8388608" in found["verdict"]["reason"]


def test_a_number_of_workers_that_was_given_stays(job: Path):
    found = asked(job, "--step-time", 3600, "--workers", 3)
    assert len(found["points"][0]["workers"]) == 3


def test_people_get_a_table_and_a_verdict_for_each_point(job: Path):
    result = CliRunner().invoke(
        plan.command, ["resources", str(job), "--step-time", "3600"], catch_exceptions=False
    )
    lines = result.stdout.splitlines()
    assert lines[0].startswith("job on one rank, ")
    assert sum(line.startswith("verdict     from step") for line in lines) == 2
    assert "trainers do not wait" in lines[-1]
    shown = CliRunner().invoke(sources_verb.command, [str(job)], catch_exceptions=False)
    assert shown.stdout.splitlines()[0].split()[:3] == ["source", "share", "measured"]
    assert "never" in shown.stdout


def test_a_job_of_which_nothing_can_be_measured_is_an_error(job: Path, tmp_path: Path):
    for name in JOB["sources"]:
        (tmp_path / f"{name}.jsonl").write_text("nonsense\n" * 10)
    result = CliRunner().invoke(plan.command, ["resources", str(job), "--step-time", "1"])
    assert isinstance(result.exception, DataError)
    assert "gave no sample" in result.stderr
