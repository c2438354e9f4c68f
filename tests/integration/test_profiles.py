"""Profiles on a real daemon: kept from what loaders tell, and what the next start makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from federation.model.source_profile import decode_profile
from msd_daemon.sources.profile_store import FOLDER
from msd_daemon.verbs.sources import command as sources_verb
from tests.support.node import Node, run_ranks, text_job, wait_until

pytestmark = pytest.mark.processes

STEPS = 30


def profiled_job(folder: Path) -> dict[str, Any]:
    """Return a job whose source s2 is drawn from step 10,000 on, and s3 never."""
    weights = {"s0": 3, "s1": 1, "s2": 0, "s3": 0}
    return text_job(
        folder,
        texts={"sources": 4, "documents": 2000},
        mixture={"unit": "tokens", 0: weights, 10_000: weights | {"s2": 1}},
    )


def profiles_of(node: Node) -> dict[str, Any]:
    files = (node.folder / "state" / FOLDER).glob("[0-9a-f]*.json")
    found = [json.loads(path.read_text()) for path in files]
    return {plain["fingerprint"]: decode_profile(plain) for plain in found}


def pages_of(node: Node) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in node.request("sources", job="small")["sources"]}


def test_a_second_start_goes_by_what_the_first_one_measured(start_node, tmp_path: Path):
    job, folder = profiled_job(tmp_path), tmp_path / "node"
    node = start_node(folder=folder)
    pages: list[dict[str, dict[str, Any]]] = []

    def later_is_measured() -> bool:
        pages.append(pages_of(node))
        return pages[-1]["s2"]["profile"] is not None

    first = run_ranks(
        node, job, {"dp": 1}, STEPS,
        at_end=lambda _: wait_until(later_is_measured, "s2 to be measured", 60),
    )  # fmt: skip
    page = pages[-1]
    assert page["s2"]["profile"]["origin"] == "probe"
    assert page["s3"]["profile"] is None, "what has no weight at any point is not read"
    assert page["s2"]["live"]["records"] == page["s3"]["live"]["loaders"] == 0
    assert page["s0"]["profile"] is None, "it tells by itself"
    assert page["s0"]["live"]["records"] > page["s1"]["live"]["records"] > 0
    assert page["s0"]["live"]["cpu_s"] > 0
    wait_until(lambda: len(profiles_of(node)) == 3, lambda: f"profiles {profiles_of(node)}")
    assert sorted(it.origin for it in profiles_of(node).values()) == ["live", "live", "probe"]
    node.process.terminate()
    node.process.wait(30)

    node = start_node(folder=folder)
    seen: list[dict[str, Any]] = []

    def look(_: object) -> None:
        seen.append(pages_of(node))
        shown = CliRunner().invoke(sources_verb, ["small", "--socket", str(node.socket)])
        assert "live" in shown.output, shown.output

    second = run_ranks(node, job, {"dp": 1}, STEPS, at_end=look)
    assert "loaders by the sources' profiles" in node.log
    assert seen[0]["s0"]["profile"]["origin"] == "live"
    assert seen[0]["s0"]["live"]["loaders"] >= 1
    assert seen[0]["s3"]["live"]["loaders"] == 0
    assert [it.rows for it in second] == [it.rows for it in first], "the stream is what it was"


def test_a_configured_number_of_loaders_stays(start_node, tmp_path: Path):
    job, folder = profiled_job(tmp_path), tmp_path / "node"
    roles: list[str] = []

    def look(node: Node) -> None:
        (told,) = node.request("status")["jobs"]
        roles[:] = [worker["role"] for worker in told["workers"]]

    for _ in range(2):
        node = start_node("--loader-workers", "3", folder=folder)
        run_ranks(node, job, {"dp": 1}, STEPS, at_end=lambda _, node=node: look(node))
        assert roles.count("loader") == 3
        node.process.terminate()
        node.process.wait(30)
    assert "3 loaders by the sources' profiles" in node.log


def test_what_is_measured_before_a_start_lies_where_the_answering_daemon_looks(
    start_node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path / "own"))
    node = start_node()
    file = tmp_path / "job.json"
    file.write_text(json.dumps(profiled_job(tmp_path)))
    measured = CliRunner().invoke(sources_verb, [str(file), "--socket", str(node.socket)])
    assert measured.exit_code == 0, measured.output
    assert len(profiles_of(node)) == 3
    assert not (tmp_path / "own").exists()
    elsewhere = tmp_path / "elsewhere"
    measured = CliRunner().invoke(sources_verb, [str(file), "--state-dir", str(elsewhere)])
    assert measured.exit_code == 0, measured.output
    assert len(list((elsewhere / FOLDER).iterdir())) == 3
    assert not (tmp_path / "own").exists()
