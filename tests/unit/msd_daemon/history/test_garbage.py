"""What gc takes, and what it leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from msd_daemon.history.garbage import find_garbage, remove
from msd_daemon.services.job_folder import JobFolder
from msd_daemon.verbs.gc import parse_age

DAY_S = 86_400.0


def made(path: Path, at_s: float, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at_s, at_s))
    return path


def run(
    state: Path, identity: str, job: str, age_days: float, now_s: float, text: str = ""
) -> Path:
    folder = JobFolder(state, identity)
    folder.keep_resolved(text, {"job": job, "digest": "d" * 8, "uid": "0"})
    at_s = now_s - age_days * DAY_S
    about = folder.path / "about.json"
    about.write_text(
        about.read_text().replace('"used_ns": ', f'"used_ns": {int(at_s * 1e9)}, "was": ')
    )
    for path in folder.path.iterdir():
        os.utime(path, (at_s, at_s))
    os.utime(folder.path, (at_s, at_s))
    return folder.path


NOW_S = 2_000_000_000.0


@pytest.fixture
def state(tmp_path: Path) -> Path:
    run(tmp_path, "aaaa", "web", 90, NOW_S, "python: 0123abcd")
    run(tmp_path, "bbbb", "web", 60, NOW_S)
    run(tmp_path, "cccc", "web", 1, NOW_S, "python: feedbeef")
    run(tmp_path, "dddd", "code", 400, NOW_S)
    run(tmp_path, "cccc-val-all", "val", 300, NOW_S)
    made(tmp_path / "index/old.msdindex", NOW_S - 40 * DAY_S)
    made(tmp_path / "index/new.msdindex", NOW_S - 4 * DAY_S)
    made(tmp_path / "content/feedbeef", NOW_S - 99 * DAY_S)
    made(tmp_path / "content/0123abcd", NOW_S - 99 * DAY_S)
    made(tmp_path / "content/.staging-x/code.py", NOW_S - 99 * DAY_S)
    os.utime(tmp_path / "content/.staging-x", (NOW_S - 99 * DAY_S,) * 2)
    made(tmp_path / "index/half.tmp", NOW_S - 2 * DAY_S)
    made(tmp_path / "index/now.tmp", NOW_S)
    return tmp_path


def names(state: Path, running: set[str], keep_runs: int, days: float = 30) -> set[str]:
    found = find_garbage(state, NOW_S, days * DAY_S, running, keep_runs)
    return {f"{it.kind} {it.path.name}" for it in found}


def test_old_runs_go_but_for_the_newest_of_each_job(state: Path) -> None:
    assert names(state, set(), 1) == {
        "run aaaa", "run bbbb", "index old.msdindex", "copy 0123abcd", "leftover half.tmp", "leftover .staging-x"
    }  # fmt: skip


def test_jobs_that_run_stay_with_their_passes_however_old(state: Path) -> None:
    assert names(state, {"aaaa", "cccc"}, 0) == {
        "run bbbb", "run dddd", "index old.msdindex", "leftover half.tmp", "leftover .staging-x"
    }  # fmt: skip


def test_what_is_taken_is_gone_and_nothing_else(state: Path) -> None:
    found = find_garbage(state, NOW_S, 30 * DAY_S, set(), 1)
    for one in found:
        remove(one)
        remove(one._replace(path=state / "no such file"))
    assert names(state, set(), 1) == set()
    assert (state / "jobs/cccc/resolved.yaml").exists()
    assert (state / "content/feedbeef").exists()


def test_ages_are_read() -> None:
    assert parse_age("12h") == 43_200
    assert parse_age("2w") == 14 * DAY_S
    for wrong in ("", "d", "3", "-1d", "1.5d", "3y"):
        with pytest.raises(ValueError, match="no age"):
            parse_age(wrong)
