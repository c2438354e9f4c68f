"""A job's folder below the daemon's state: its journal and what it was resolved to."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msd_client.contract.errors import MsdError

log = logging.getLogger(__name__)

ABOUT_FILE = "about.json"
JOURNAL_FILE = "journal.db"
QUARANTINE_FILE = "quarantine.jsonl"
DIGEST_PART_MIN = 6
"""Digits of a digest that name a job."""


class JobFolder:
    """Paths and files of one job; made when first written to.

    Args:
        state_dir: The daemon's state folder.
        identity: Names the job's session.
    """

    def __init__(self, state_dir: Path, identity: str) -> None:
        self.path = state_dir / "jobs" / identity

    @property
    def journal(self) -> Path:
        """The planner's journal."""
        return self.path / JOURNAL_FILE

    @property
    def quarantine(self) -> Path:
        """The records that no worker touches."""
        return self.path / QUARANTINE_FILE

    def keep_resolved(self, text: str, about: dict[str, str], sources: Sequence[str] = ()) -> None:
        """Write `resolved.yaml`: what the digest in every state is the digest of (E2). Blocks.

        Args:
            text: The job with all defaults written out.
            about: Its `job`, `digest` and `uid`, for verbs that look for it once it is over.
            sources: Their names.
        """
        temporary = self.path / "resolved.yaml.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path / "resolved.yaml")
            told = about | {"used_ns": time.time_ns(), "sources": list(sources)}
            temporary.write_text(json.dumps(told), encoding="utf-8")
            temporary.replace(self.path / ABOUT_FILE)
        except OSError as error:  # the planner says so too, as its journal lies there
            log.warning("%s can't be written: %s", temporary, error)

    def remove(self) -> None:
        """Remove the folder with all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)


class KnownFolder(NamedTuple):
    """A folder of a job that has run, or runs."""

    folder: JobFolder
    name: str
    """Of the job."""
    digest: str
    uid: str
    """Of its owner; empty where nothing says so."""
    used_ns: int
    """When its last run began; nothing that reads changes it."""
    sources: tuple[str, ...] = ()
    """Names of its sources; none where nothing says so."""

    @property
    def identity(self) -> str:
        """The folder's name, which `msdctl status` shows as `id`."""
        return self.folder.path.name


def named_folders(state_dir: Path, name: str | None, uid: int | None = None) -> list[KnownFolder]:
    """Return the folders of a job, the one that ran last first. Blocks.

    Args:
        state_dir: The daemon's.
        name: Of the job, its folder, or at least DIGEST_PART_MIN first digits of its digest; None:
            of any.
        uid: Who asks: owners see their own; None: all that can be read.
    """
    all_seers = (None, 0, os.getuid())
    found = [
        known
        for known in known_folders(state_dir)
        if _is_called(known, name) and (uid in all_seers or known.uid == str(uid))
    ]
    # A pass of validation has a folder of its own, called after its run's.
    runs = {known.identity for known in found}
    return [
        known
        for known in found
        if known.identity == name or not any(known.identity.startswith(f"{run}-") for run in runs)
    ]


def known_folders(state_dir: Path) -> list[KnownFolder]:
    """Return all folders of jobs that say whose they are, the one that ran last first. Blocks."""
    found = []
    for path in (state_dir / "jobs").glob("*/"):
        try:
            about = _about(path)
        except (OSError, ValueError):
            continue
        if about is None:
            continue
        folder = JobFolder(state_dir, path.name)
        found.append(
            KnownFolder(
                folder,
                str(about["job"]),
                str(about["digest"]),
                str(about.get("uid", "")),
                int(about["used_ns"]),
                tuple(map(str, about.get("sources", ()))),
            )
        )
    found.sort(key=lambda known: (-known.used_ns, known.identity))
    return found


def _is_called(known: KnownFolder, name: str | None) -> bool:
    if name in (None, known.name, known.identity):
        return True
    return len(name) >= DIGEST_PART_MIN and known.digest.startswith(name)


def _about(path: Path) -> dict[str, Any] | None:
    """Return what a folder says of its job: `job`, `digest`, `uid`, `used_ns`; None for nothing.

    Raises:
        OSError: It can't be read.
        ValueError: It is no JSON.
    """
    file = path / ABOUT_FILE
    if file.is_file():
        about = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(about, dict) or "job" not in about or "digest" not in about:
            return None
        used_ns = about.get("used_ns")
        if not isinstance(used_ns, int):  # of an earlier release: it is written as a run begins
            used_ns = file.stat().st_mtime_ns
        return about | {"used_ns": used_ns}
    journal = path / JOURNAL_FILE
    if not journal.is_file():
        return None
    from federation.journal_reader import JournalReader  # the daemon does without SQLite

    try:
        with JournalReader(journal) as reader:
            name, digest = reader.newest_job()
    except (MsdError, zlib.error):
        return None  # of another release, or not begun yet
    return {"job": name, "digest": digest, "used_ns": journal.stat().st_mtime_ns}
