"""A cluster whose nodes and planner are hosts of their own: every rank is given what one host gives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_cluster import HostCluster, HostRun, host_cluster, read_on_one_host
from tests.support.hosts import hosts, needs_hosts
from tests.support.ledger_case import large_and_little
from tests.support.media_corpus import corpus_job
from tests.support.media_writers import write_corpus
from tests.support.mixed_sources import mixed_job
from tests.support.node import Node, running_node

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(needs_hosts()), reason=needs_hosts()),
]

STEPS = 24
NODES = ("n0", "n1", "n2", "n3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: Any) -> Iterator[HostCluster]:
    """A planner and four nodes; the last loads and has no ranks where a test names it nowhere."""
    folder = tmp_path_factory.mktemp("hosts")
    with hosts("p0", *NODES) as network, host_cluster(folder, network, is_v6=True) as made:
        for name in NODES:
            made.join(name)
        yield made


@pytest.fixture(scope="module")
def here(tmp_path_factory: Any) -> Iterator[Node]:
    """The one host."""
    with running_node(tmp_path_factory.mktemp("here")) as node:
        yield node


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: Any) -> dict[str, Any]:
    """Every format and order class, documents longer than rows, some of them damaged."""
    return mixed_job(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def media(tmp_path_factory: Any) -> dict[str, Any]:
    """Images and sounds of eight formats, for meshes with pipeline and context axes."""
    folder = tmp_path_factory.mktemp("media")
    sources, _ = write_corpus(folder, 5)
    batch = {"cp_layout": "zigzag_row", "segment_multiple": 4, "rows": 8}
    return corpus_job(folder, sources, batch=batch)


def both(
    cluster: HostCluster, here: Node, folder: Path, job: Any, mesh: Mapping[str, int], places: str,
    **more: Any,
) -> tuple[HostRun, HostRun]:  # fmt: skip
    """Return the finished runs of one host and of the cluster."""
    one = read_on_one_host(here, folder / "one", job, mesh, STEPS, **more)
    run = cluster.run(folder / "run", job, mesh, places.split(), STEPS, **more)
    return one, run.finish()


@pytest.mark.parametrize(
    ("mesh", "places"),
    [
        pytest.param({"dp": 2}, "n0 n1", marks=pytest.mark.soak),
        pytest.param({"dp": 4}, "n0 n1 n2 n3", marks=pytest.mark.soak),
        pytest.param({"dp": 2, "tp": 2}, "n0 n0 n1 n1", marks=pytest.mark.soak),
        ({"dp": 2, "tp": 2}, "n0 n1 n2 n0"),
        pytest.param({"dp": 4}, "n2 n0 n2 n1", marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_text_of_every_format(
    cluster: HostCluster, here: Node, tmp_path: Path, mixed: Any, mesh: Any, places: str
) -> None:
    one, run = both(cluster, here, tmp_path, mixed, mesh, places)
    run.check_equals(one)
    assert run.rows() == one.rows()


@pytest.mark.parametrize(
    ("mesh", "places"),
    [
        pytest.param(
            {"pp": 2, "dp": 2, "cp": 2}, "n0 n0 n1 n1 n0 n0 n1 n1", marks=pytest.mark.soak
        ),
        pytest.param(
            {"pp": 2, "dp": 2, "cp": 2}, "n0 n1 n2 n3 n3 n2 n1 n0", marks=pytest.mark.soak
        ),
        # Nodes with a last stage alone: units of media stay where they are.
        ({"pp": 2, "dp": 2, "cp": 2}, "n0 n1 n1 n0 n2 n3 n3 n2"),
    ],
    ids=str,
)
def test_media_over_pipeline_and_context_groups(
    cluster: HostCluster, here: Node, tmp_path: Path, media: Any, mesh: Any, places: str
) -> None:
    one, run = both(cluster, here, tmp_path, media, mesh, places)
    run.check_equals(one)


def test_events_and_validation(
    cluster: HostCluster, here: Node, tmp_path: Path, mixed: dict[str, Any]
) -> None:
    job = mixed | {
        "defaults": mixed["defaults"] | {"hold_out": 0.2},
        "loaders": {"train": {}, "val": {"from": ["lines", "streams"], "rows": 16, "steps": 3}},
        "name": "events",
    }
    weights = {"lines": 1.0, "streams": 5.0, "table": 0.0, "ids": 2.0, "plain": 1.0}
    one, run = both(
        cluster, here, tmp_path, job, {"dp": 2}, "n0 n1", passes=[2, 6],
        changes={3: [weights, 20]}, skips={1: [15, 17]},
    )  # fmt: skip
    run.check_equals(one, but_states=range(1, 21))
    assert [len(line.get("passes", ())) for line in run.lines(1)][:7] == [0, 0, 3, 0, 0, 0, 3]
    assert run.lines(0)[-1]["plan_step"] == STEPS + 1


def test_a_state_of_one_host_goes_on_over_many_as_the_oracle_says(
    cluster: HostCluster, here: Node, tmp_path: Path
) -> None:
    case = large_and_little(tmp_path / "files")
    one = read_on_one_host(here, tmp_path / "one", case.job, {"dp": 2}, STEPS, keep_state=9)
    later = cluster.run(
        tmp_path / "run", case.job, {"dp": 4}, ["n3", "n1", "n0", "n1"], STEPS,
        state=str(one.folder / "state"),
    )  # fmt: skip
    rows = later.finish().rows()
    assert rows == {step: found for step, found in one.rows().items() if step >= 9}
    assert rows == {step: case.digests(STEPS)[step] for step in rows}
