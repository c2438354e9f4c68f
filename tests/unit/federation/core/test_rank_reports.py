"""What nodes say of their ranks makes a generation, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import pytest

from federation.cluster_messages import RanksStarted
from federation.core.rank_reports import (
    CONFLICT_WAIT_NS,
    Awaited,
    Complete,
    RankReports,
    Refused,
)
from federation.model.job import BatchRule, encode_job
from msd_client.contract.codec import pack
from msd_client.contract.errors import MeshMismatchError, ProtocolError, StateMismatchError
from tests.support.metadata import make_job, make_spec

JOB = make_job([make_spec("a", 1)], BatchRule(4, 32))
MESH = [["dp", 4]]


def report(waiting: list[int], digest: str = "s", **more: Any) -> RanksStarted:
    ranks = more.pop("ranks", waiting)
    reading = [rank for rank in ranks if rank not in waiting]
    return RanksStarted(
        "job", JOB.digest(), more.pop("mesh", MESH), "", ranks, waiting, reading,
        [digest] * len(waiting), 0, 4, 100, **more,
    )  # fmt: skip


def heard(state: bytes = b"state") -> tuple[bytes, bytes]:
    return pack(encode_job(JOB)), state


def settle(reports: RankReports, now_ns: int = 0, silent: str = "") -> list[Any]:
    return list(reports.settle(now_ns, lambda node: node == silent))


def test_ranks_that_are_missing_are_told_once() -> None:
    reports = RankReports()
    reports.take("n0", report([0, 1]), heard())
    assert settle(reports) == [Awaited([2, 3])]
    assert settle(reports) == [], "no news"
    reports.take("n1", report([2]), heard())
    assert settle(reports) == [Awaited([3])]
    reports.take("n1", report([2, 3]), heard())
    (complete,) = settle(reports)
    assert isinstance(complete, Complete)
    assert complete.state == b"state"
    assert reports.awaited == []


def test_ranks_that_begin_read_and_their_jobs_are_let_go() -> None:
    reports = RankReports()
    reports.take("n0", report([0, 1, 2, 3]), heard())
    offer = reports.offer(JOB.digest())
    assert offer is not None
    assert offer.job == JOB
    reports.begun()
    assert reports.offer(JOB.digest()) is None
    own = reports.of("n0")
    assert own is not None
    assert (own.waiting, own.reading) == ([], [0, 1, 2, 3])
    assert settle(reports) == []


def test_ranks_with_another_state_are_refused() -> None:
    reports = RankReports()
    reports.take("n0", report([0, 1, 2]), heard())
    reports.take("n1", report([3], "other"), heard(b"other"))
    (refused,) = settle(reports)
    assert isinstance(refused.error, StateMismatchError)
    assert "ranks [3]" in refused.error.message
    reports.refuse_waiting()
    assert not reports


def test_ranks_of_another_run_wait_for_those_before_to_leave_and_are_refused_in_the_end() -> None:
    reports = RankReports()
    reports.take("n0", report([], ranks=[0, 1, 2, 3]), ())
    reports.take("n1", report([0, 1, 2, 3]), heard())
    assert settle(reports, 10) == []
    assert "are on node n0, too" in reports.conflict
    assert settle(reports, 10 + CONFLICT_WAIT_NS, silent="n0") == [], "it may be lost soon"
    assert settle(reports, 9 + 2 * CONFLICT_WAIT_NS) == []
    (refused,) = settle(reports, 10 + 2 * CONFLICT_WAIT_NS)
    assert isinstance(refused, Refused)
    assert (refused.node, type(refused.error)) == ("n1", MeshMismatchError)
    assert not reports.conflict
    # Those that leave in time make way.
    reports.take("n1", report([0, 1, 2, 3]), heard())
    assert settle(reports, 0) == []
    reports.take("n0", report([]), ())
    assert reports.is_without("n0")
    (complete,) = settle(reports, 1)
    assert isinstance(complete, Complete)


def test_a_pass_of_validation_whose_ranks_left_is_refused_by_name() -> None:
    reports = RankReports()
    reports.take("n0", report([0, 1], parent="train"), heard())
    settle(reports)
    assert reports.will_not_come(frozenset({1})) is None
    refused = reports.will_not_come(frozenset({3}))
    assert refused is not None
    assert "ranks [3] left the job" in refused.error.message
    assert reports.will_not_come(frozenset({3})) is None, "said"


def test_frames_that_are_missing_are_named() -> None:
    with pytest.raises(ProtocolError, match="has 1 frames"):
        RankReports().take("n0", report([0]), (b"job",))
