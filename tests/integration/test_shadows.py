"""Spares and shadows: whoever loads, the stream is the uninterrupted run's, to the byte."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from msd_daemon.config.resolve import resolve_job
from tests.support.node import (
    Node,
    RankRecord,
    read_steps,
    run_ranks,
    running_node,
    text_job,
    wait_until,
)

pytestmark = pytest.mark.processes

STEPS = 40
SOURCES = {"sources": 4, "documents": 1200}


def with_critical(job: dict[str, Any], *critical: str) -> dict[str, Any]:
    sources = {
        name: {"paths": [path], "critical": True} if name in critical else path
        for name, path in job["sources"].items()
    }
    return job | {"sources": sources}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return text_job(tmp_path_factory.mktemp("data"), texts=SOURCES)


@pytest.fixture(scope="module")
def oracle(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankRecord]:
    with running_node(tmp_path_factory.mktemp("o")) as node:
        (record,) = run_ranks(node, job, {"dp": 1}, STEPS, keep_states=True)
    yield record


def named(node: Node, name: str) -> list[psutil.Process]:
    found = []
    for child in node.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def stands(node: Node, name: str, count: int) -> None:
    """Wait for so many processes; those that stand by are set up then: others are not taken."""

    def is_so() -> bool:
        standby = node.request("status")["jobs"][0]["standby"]
        set_up = {"msd-spare": standby["spares"], "msd-shadow": standby["shadows"]}
        return len(named(node, name)) == set_up.get(name, count) == count

    wait_until(is_so, f"{count} of {name}")


def reading(
    node: Node, job: dict[str, Any], act: Callable[[int], None], steps: int = STEPS
) -> RankRecord:
    """Read with one rank; `act` is called behind each step."""

    def on_step(_data: Any, step: Any, _record: RankRecord) -> None:
        act(step.number)

    (record,) = run_ranks(node, job, {"dp": 1}, steps, keep_states=True, on_step=on_step)
    return record


def test_a_spare_takes_the_place_of_a_dead_loader_and_another_spare_is_started(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord
) -> None:
    with running_node(tmp_path / "n", "--loader-workers", "2") as node:
        seen: dict[str, set[int]] = {}

        def act(step: int) -> None:
            if step != 6:
                return
            stands(node, "msd-spare", 1)
            (spare,) = named(node, "msd-spare")
            victim = named(node, "msd-loader")[0]
            victim.kill()
            wait_until(lambda: spare.name() == "msd-loader", "the spare to be a loader")
            stands(node, "msd-spare", 1)
            seen["loaders"] = {child.pid for child in named(node, "msd-loader")}
            assert spare.pid in seen["loaders"]
            roles = [row["role"] for row in node.request("status")["jobs"][0]["workers"]]
            assert sorted(roles) == ["constructor", "fork_server", "loader", "loader", "spare"]

        record = reading(node, job, act)
        assert len(seen["loaders"]) == 2
    assert record.rows == oracle.rows
    assert record.states == oracle.states


def test_a_dead_spare_costs_nobody_anything(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord
) -> None:
    with running_node(tmp_path / "n", "--loader-workers", "1") as node:

        def act(step: int) -> None:
            if step in (4, 8):
                stands(node, "msd-spare", 1)
                (spare,) = named(node, "msd-spare")
                spare.kill()
                wait_until(lambda: spare not in named(node, "msd-spare"), "its end")

        assert reading(node, job, act).rows == oracle.rows
        assert node.log.count("another will stand by") == 2


def test_no_spare_where_none_is_wanted(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord
) -> None:
    environ = {"MSD__WORKERS__SPARES": "0"}
    with running_node(tmp_path / "n", "--loader-workers", "2", environ=environ) as node:

        def act(step: int) -> None:
            if step == 6:
                named(node, "msd-loader")[0].kill()
            assert named(node, "msd-spare") == []

        assert reading(node, job, act).rows == oracle.rows


@pytest.mark.parametrize("workers", [1, 2])
def test_the_shadow_of_a_killed_loader_takes_over(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord, workers: int
) -> None:
    """Twice: the shadow that took over has a shadow, too."""
    shadowed = with_critical(job, "s0", "s1", "s2", "s3")
    with running_node(tmp_path / "n", "--loader-workers", str(workers)) as node:

        def act(step: int) -> None:
            if step not in (5, 15):
                return
            stands(node, "msd-shadow", workers)
            shadows = {child.pid for child in named(node, "msd-shadow")}
            wait_until(lambda: shadow_bytes(node) > 0, "a chunk that is ready")
            named(node, "msd-loader")[0].kill()
            wait_until(
                lambda: bool(shadows & {child.pid for child in named(node, "msd-loader")}),
                "a shadow to be a loader",
            )

        record = reading(node, shadowed, act)
        assert node.log.count("its shadow (pid") == 2
    assert record.rows == oracle.rows
    assert record.states == oracle.states


def shadow_bytes(node: Node) -> int:
    return int(node.request("status")["jobs"][0]["standby"]["shadow_bytes"])


def test_a_killed_shadow_is_replaced_and_changes_nothing(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord
) -> None:
    with running_node(tmp_path / "n", "--loader-workers", "1") as node:

        def act(step: int) -> None:
            if step in (5, 9):
                stands(node, "msd-shadow", 1)
                (shadow,) = named(node, "msd-shadow")
                shadow.kill()
                wait_until(lambda: shadow not in named(node, "msd-shadow"), "its end")
            if step == 14:
                stands(node, "msd-shadow", 1)
                (loader,) = named(node, "msd-loader")
                loader.kill()

        record = reading(node, with_critical(job, "s1", "s2"), act)
    assert record.rows == oracle.rows
    assert record.states == oracle.states


def test_a_new_generation_has_shadows_again(
    tmp_path: Path, job: dict[str, Any], oracle: RankRecord
) -> None:
    shadowed = with_critical(job, "s0", "s1", "s2", "s3")
    with running_node(tmp_path / "n", "--loader-workers", "2") as node:

        def on_step(_data: Any, step: Any, _record: RankRecord) -> None:
            if step.number == 8:
                stands(node, "msd-shadow", 2)
                wait_until(lambda: shadow_bytes(node) > 0, "a chunk that is ready")
                named(node, "msd-loader")[1].kill()

        with node.connect(shadowed, {"dp": 1}, 0) as data:
            for begin in (0, 5, 5):
                if begin:
                    data.train.load_state_dict(oracle.states[begin])
                record = RankRecord()
                read_steps(data, record, 20 - begin, keep_states=True, on_step=on_step)
                assert record.rows == {step: oracle.rows[step] for step in range(begin, 20)}


def test_critical_says_nothing_about_content(job: dict[str, Any], tmp_path: Path) -> None:
    plain = resolve_job(json.dumps(job), tmp_path, "job")
    shadowed = resolve_job(json.dumps(with_critical(job, "s0")), tmp_path, "job")
    assert [source.is_critical for source in shadowed.sources] == [True, False, False, False]
    assert plain.digest() == shadowed.digest()
    assert plain.sample_digest() == shadowed.sample_digest()
