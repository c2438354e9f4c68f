"""Which ranks that wait on several nodes may be of one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from federation.core.gathering import find_conflicts


@dataclass
class Report:
    ranks: list[int]
    waiting: list[int] = field(default_factory=list)
    reading: list[int] = field(default_factory=list)
    mesh: list[list[Any]] = field(default_factory=lambda: [["dp", 4]])
    job_digest: str = "a"


def conflicts(**reports: Report) -> dict[str, str]:
    return {it.node: it.other for it in find_conflicts(list(reports.items()))}


def test_ranks_of_one_mesh_and_job_that_are_each_on_one_node_go_together() -> None:
    assert not conflicts(n0=Report([0, 1], [0, 1]), n1=Report([2], [], [2]), n2=Report([3], [3]))


def test_who_came_first_is_there_and_who_reads_was_there_before() -> None:
    first, second = Report([0], [0]), Report([0, 1], [0, 1])
    assert conflicts(n0=first, n1=second) == {"n1": "n0"}
    assert conflicts(n1=second, n0=first) == {"n0": "n1"}
    assert conflicts(n0=first, n1=Report([0, 1], [], [0, 1])) == {"n0": "n1"}


def test_another_mesh_or_job_is_told_by_name() -> None:
    old = Report([0], [], [0])
    for other, what in (
        (Report([1], [1], mesh=[["dp", 2]]), "mesh"),
        (Report([1], [1], job_digest="b"), "job"),
    ):
        (found,) = find_conflicts([("new", other), ("old", old)])
        assert (found.node, found.other) == ("new", "old")
        assert f"bring another {what} than ranks [0] on node old" in found.why


def test_ranks_that_only_read_are_nobodys_newcomers() -> None:
    assert not conflicts(n0=Report([0], [], [0]), n1=Report([0], [], [0]))


def test_of_two_runs_that_begin_at_once_one_is_whole() -> None:
    found = conflicts(
        n0=Report([0], [0]), n1=Report([0], [0], mesh=[["dp", 2]]), n2=Report([1], [1]),
        n3=Report([1], [1], mesh=[["dp", 2]]),
    )  # fmt: skip
    assert found == {"n1": "n0", "n3": "n0"}
