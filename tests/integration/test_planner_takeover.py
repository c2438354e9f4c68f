"""Planners that are killed, stopped or asked to end, and what their successors plan."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.etcd import EtcdCluster
from tests.support.planners import Planner, digests_of

pytestmark = pytest.mark.processes

Start = Callable[..., Planner]
HOUR_S = 3600.0


@pytest.fixture(params=["sqlite", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/plan.db"
    found: str = request.getfixturevalue("etcd").url(uuid4().hex)
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def started(name: str, url: str, **options: float) -> Planner:
            planner = Planner(name, url, tmp_path / name, **options)
            stack.callback(planner.close)
            return planner

        yield started


def check_stream(folder: Path, *planners: Planner) -> None:
    """See that all that planners planned is the undisturbed run, each step the same from each."""
    wanted = digests_of(folder / "undisturbed", 1 + max(max(it.steps()) for it in planners))
    seen: dict[int, str] = {}
    for planner in planners:
        for step, digest in planner.steps().items():
            assert digest == wanted[step], (step, planner.log.read_text())
            seen[step] = digest
    assert sorted(seen) == list(range(len(wanted)))


def test_a_planner_that_is_killed_is_followed_by_one_whose_clock_is_wrong(
    start: Start, url: str, tmp_path: Path
) -> None:
    first = start("a", url, skew_s=-HOUR_S)
    first.hear_steps(10)
    second = start("b", url, skew_s=HOUR_S)
    assert second.hear_standing(leads=False)["term"] == first.said[0]["term"]
    first.hear_steps(10)
    first.signal(signal.SIGKILL)
    first.end()
    led = second.hear_standing(leads=True)
    assert led["term"] > first.said[-1]["term"]
    assert second.hear_steps(20)["step"] >= 39
    third = start("a2", url)  # a planner that is started anew stands by, or leads at its turn
    third.hear_standing(leads=False)
    second.signal(signal.SIGTERM)
    assert second.end() == 0
    assert third.hear_standing(leads=True)["term"] > led["term"]
    third.hear_steps(5)
    check_stream(tmp_path, first, second, third)


def test_a_stopped_planner_that_wakes_stands_by_and_plans_nothing(
    start: Start, etcd: EtcdCluster, tmp_path: Path
) -> None:
    url = etcd.url(uuid4().hex)
    first = start("a", url)
    first.hear_steps(10)
    second = start("b", url)
    second.hear_standing(leads=False)
    first.signal(signal.SIGSTOP)
    led = second.hear_standing(leads=True)
    second.hear_steps(10)
    first.signal(signal.SIGCONT)
    stood = first.hear_standing(leads=False)
    assert stood["term"] < led["term"]
    known = first.hear_standing(leads=False)
    assert (known["term"], known["leader"]) == (led["term"], "tcp://127.0.0.1:9")
    second.hear_steps(10)
    second.signal(signal.SIGTERM)
    assert second.end() == 0
    assert first.hear_standing(leads=True)["term"] > led["term"]
    first.hear_steps(10)
    check_stream(tmp_path, first, second)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[EtcdCluster]:
    (tmp_path / "etcd").mkdir()
    cluster = EtcdCluster(tmp_path / "etcd", 3)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def test_planners_go_on_whatever_member_of_etcd_is_lost(
    start: Start, members: EtcdCluster, tmp_path: Path
) -> None:
    planner = start("a", members.url())
    planner.hear_steps(10)
    lost = members.leader()
    members.kill(lost)
    planner.hear_steps(20)
    members.start(lost)
    for member in range(3):
        members.pause(member)  # it answers nobody, and nobody says that it is gone
        planner.hear_steps(20)
        members.go_on(member)
    check_stream(tmp_path, planner)


def test_planners_wait_for_an_etcd_that_is_gone_and_go_on_once_it_is_back(
    start: Start, members: EtcdCluster, tmp_path: Path
) -> None:
    first = start("a", members.url())
    first.hear_steps(10)
    members.kill()
    first.hear_trouble()
    members.start()
    first.hear_steps(20)
    second = start("b", members.url())
    second.hear_standing(leads=False)
    first.signal(signal.SIGTERM)
    assert first.end() == 0
    second.hear_steps(20)
    check_stream(tmp_path, first, second)


@pytest.mark.parametrize(
    ("url", "exit_code", "said"),
    [
        ("etcd://a::b", 78, "the planner's configuration has 1 fault"),
        ("sqlite:///proc/version/plan.db", 3, "plan store /proc/version/plan.db"),
    ],
)
def test_a_planner_that_cant_begin_says_why(
    start: Start, url: str, exit_code: int, said: str
) -> None:
    planner = start("a", url)
    assert planner.end() == exit_code
    assert f"msd-planner: {said}" in planner.log.read_text()
    assert "Traceback" not in planner.log.read_text()
