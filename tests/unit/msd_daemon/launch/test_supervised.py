"""Children that are kept running, and when that is given up."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_client.contract.errors import ConfigError, ResourceError
from msd_daemon.launch import supervised
from msd_daemon.launch.supervised import RestartLimit, Supervised
from tests.support.node import wait_until


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 6))
def test_never_more_starts_in_the_window_than_allowed(pauses: list[int], most: int) -> None:
    limit = RestartLimit(starts_max=most, within_s=120.0, pause_s=1.0)
    now, starts = 0, []
    for pause in pauses:
        now += pause
        if limit.due(now) and limit.may_start(now):
            limit.started(now)
            starts.append(now)
    for at in starts:
        assert sum(at - 120.0 < other <= at for other in starts) <= most
    assert all(later - before >= 1.0 for before, later in itertools.pairwise(starts))
    assert not starts or limit.may_start(starts[-1] + 120.0)


def made(code: str) -> Supervised:
    return Supervised("a child", [sys.executable, "-c", code], os.environ)


def until_it_ended(child: Supervised) -> None:
    child.keep_running()
    wait_until(lambda: child.has_ended, "the child to end")


def test_a_child_that_died_is_started_again() -> None:
    child = made("import os, sys; sys.stdin.read()")
    child._limit.pause_s = 0.0
    assert child.keep_running()
    first = child.pid
    assert first is not None
    assert not child.keep_running()
    os.kill(first, 9)
    wait_until(child.keep_running, "another start")
    assert child.pid != first
    assert child.starts == 2
    child.end()
    assert child.has_ended


def test_a_fault_of_configuration_is_not_tried_again() -> None:
    child = made("raise SystemExit(78)")
    until_it_ended(child)
    with pytest.raises(ConfigError, match="a child refuses its configuration"):
        child.keep_running()


def test_a_child_that_ends_again_and_again_is_given_up() -> None:
    child = made("raise SystemExit(3)")
    child._limit.pause_s = 0.0
    for _ in range(supervised.STARTS_MAX):
        until_it_ended(child)
    with pytest.raises(ResourceError, match="ended 5 times in 120 s, the last time with status 3"):
        child.keep_running()


def test_one_that_does_not_end_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    child = made(
        f"import subprocess, sys; p = subprocess.Popen(['sleep', '100']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); p.wait()"
    )
    child.keep_running()
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", "it")
    child.end(timeout_s=0.1)
    grandchild = int((tmp_path / "pid").read_text())
    wait_until(lambda: not _lives(grandchild), "its child to end")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
