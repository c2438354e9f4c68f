"""Which folder a job's name means: the one whose run began last, whatever reads them meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from msd_daemon.services import job_folder
from msd_daemon.services.job_folder import ABOUT_FILE, JobFolder, known_folders, named_folders


def begin(state_dir: Path, identity: str, name: str = "app", uid: int = 1000) -> JobFolder:
    """Note that a run of a job begins, as a session does."""
    folder = JobFolder(state_dir, identity)
    folder.keep_resolved("", {"job": name, "digest": f"{identity}9999", "uid": str(uid)})
    folder.journal.touch()
    return folder


def identities(state_dir: Path, name: str | None, uid: int | None = None) -> list[str]:
    return [known.identity for known in named_folders(state_dir, name, uid)]


def test_the_run_that_began_last_comes_first(tmp_path: Path) -> None:
    for identity in ("bbbbbb", "aaaaaa", "cccccc"):
        begin(tmp_path, identity)
    assert identities(tmp_path, "app") == ["cccccc", "aaaaaa", "bbbbbb"]
    begin(tmp_path, "bbbbbb")  # gone on with
    assert identities(tmp_path, "app") == ["bbbbbb", "cccccc", "aaaaaa"]
    # What a reader, a copy or a touch leaves says nothing of when a job ran.
    for file in ("journal.db", "journal.db-wal", ABOUT_FILE):
        path = tmp_path / "jobs" / "aaaaaa" / file
        path.touch()
        os.utime(path, (4e9, 4e9))
    assert identities(tmp_path, "app") == ["bbbbbb", "cccccc", "aaaaaa"]


def test_a_job_is_called_by_name_folder_or_digits_of_its_digest(tmp_path: Path) -> None:
    begin(tmp_path, "abcdef")
    begin(tmp_path, "fedcba", "other")
    assert identities(tmp_path, "app") == ["abcdef"]
    assert identities(tmp_path, "abcdef") == ["abcdef"]
    assert identities(tmp_path, "abcdef99") == ["abcdef"]
    assert identities(tmp_path, "abcde") == []
    assert identities(tmp_path, None) == ["fedcba", "abcdef"]


def test_owners_see_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 5)
    begin(tmp_path, "abcdef", uid=1000)
    assert identities(tmp_path, "app", 1000) == ["abcdef"]
    assert identities(tmp_path, "app", 1001) == []
    assert identities(tmp_path, "app", 0) == identities(tmp_path, "app", 5) == ["abcdef"]


def test_a_pass_of_validation_is_meant_by_its_own_folder_alone(tmp_path: Path) -> None:
    begin(tmp_path, "abcdef")
    begin(tmp_path, "abcdef-val-0")
    assert identities(tmp_path, "app") == ["abcdef"]
    assert identities(tmp_path, "abcdef-val-0") == ["abcdef-val-0"]


def test_a_folder_of_an_earlier_release_counts_from_its_about(tmp_path: Path) -> None:
    begin(tmp_path, "abcdef")
    old = begin(tmp_path, "fedcba")
    about = json.loads((old.path / ABOUT_FILE).read_text())
    del about["used_ns"]
    (old.path / ABOUT_FILE).write_text(json.dumps(about))
    os.utime(old.path / ABOUT_FILE, (1, 1))
    assert identities(tmp_path, "app") == ["abcdef", "fedcba"]
    assert known_folders(tmp_path)[1].used_ns == 10**9


def test_what_says_nothing_of_a_job_is_passed_over(tmp_path: Path) -> None:
    begin(tmp_path, "abcdef")
    for identity, text in (("a", "{"), ("b", "[]"), ("c", "{}"), ("d", None)):
        path = tmp_path / "jobs" / identity
        path.mkdir()
        (path / job_folder.JOURNAL_FILE).write_bytes(b"no journal")
        if text is not None:
            (path / ABOUT_FILE).write_text(text)
    assert identities(tmp_path, None) == ["abcdef"]
