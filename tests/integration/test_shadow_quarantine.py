"""A record that kills its worker, where two workers read it: it costs itself, and the stream goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_quarantine import (
    PLACE,
    RECORDS,
    delivered,
    job_of,
    loader_deaths,
    looks,
    starting,
)
from tests.integration.test_shadows import named, stands
from tests.support.node import RankRecord, run_ranks

pytestmark = pytest.mark.processes


def shadowed(job: dict[str, Any]) -> dict[str, Any]:
    sources = {name: {"paths": [path], "critical": True} for name, path in job["sources"].items()}
    return job | {"sources": sources}


@pytest.fixture(scope="module")
def tame(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankRecord]:
    folder = tmp_path_factory.mktemp("tame")
    with starting(folder, MSD_TEST_TAME="1") as node:
        job = job_of(folder / "data", {PLACE: "abort"})
        (record,) = run_ranks(node, job, {"dp": 1}, None, keep_states=True)
    yield record


def shadow_deaths(log: str) -> int:
    return log.count("another will stand by")


@pytest.mark.parametrize(("kind", "looks_max"), [("abort", 2), ("hang", 2), ("kill", 3)])
def test_a_shadow_and_its_active_loader_meet_a_record_that_kills(
    tmp_path: Path, tame: RankRecord, kind: str, looks_max: int
) -> None:
    """Both may be at it before any death is heard of; who hears of it in time passes it over."""
    job = shadowed(job_of(tmp_path / "data", {PLACE: kind}))
    found: dict[str, Any] = {}

    def act(_data: Any, step: Any, _record: Any) -> None:
        if step.number == 1:
            stands(node, "msd-shadow", 1)

    def at_end(_data: Any) -> None:
        found["page"] = node.request("bad")

    with starting(tmp_path, "--loader-workers", "1") as node:
        records = run_ranks(
            node, job, {"dp": 1}, None, keep_states=True, on_step=act, at_end=at_end
        )
        deaths = loader_deaths(node) + shadow_deaths(node.log)
    assert records[0].rows == tame.rows
    assert delivered(records) == [number for number in range(RECORDS) if number != PLACE]
    assert 1 <= looks(tmp_path)[PLACE] <= looks_max
    assert looks(tmp_path)[PLACE] == deaths
    (bad,) = found["page"]["records"]
    assert (bad["source"], bad["status"], bad["place"]) == ("a", "quarantined", PLACE)
    # Replayed by other workers, without any death.
    (tmp_path / "looks").unlink()
    with starting(tmp_path, "--loader-workers", "1") as node:
        before = loader_deaths(node)
        state = records[0].states[2]
        (again,) = run_ranks(node, job, {"dp": 1}, None, state=state)
        assert loader_deaths(node) == before
    assert again.rows == {n: rows for n, rows in tame.rows.items() if n >= 2}
    assert PLACE not in looks(tmp_path)


def test_a_spare_that_was_set_up_before_knows_of_the_record(
    tmp_path: Path, tame: RankRecord
) -> None:
    bombs = {PLACE: "abort", 20: "broken"}
    job = job_of(tmp_path / "data", bombs, epochs=2)
    found: dict[str, Any] = {}

    def act(_data: Any, step: Any, _record: Any) -> None:
        if step.number == 8 and "killed" not in found:
            stands(node, "msd-spare", 1)
            (loader,) = named(node, "msd-loader")
            loader.kill()
            found["killed"] = True

    with starting(tmp_path, "--loader-workers", "1") as node:
        records = run_ranks(node, job, {"dp": 1}, None, on_step=act)
        assert found["killed"]
    assert looks(tmp_path)[PLACE] == 1
    wanted = [number for number in range(RECORDS) if number not in bombs]
    assert delivered(records) == sorted(wanted * 2)
