"""A job's folder below the daemon's state: its journal and what it was resolved to."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger(__name__)

ABOUT_FILE = "about.json"
JOURNAL_FILE = "journal.db"
QUARANTINE_FILE = "quarantine.jsonl"
DIGEST_PART_MIN = 6


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

    def keep_resolved(self, text: str, about: dict[str, str]) -> None:
        """Write `resolved.yaml`: what the digest in every state is the digest of (E2). Blocks.

        Args:
            text: The job with all defaults written out.
            about: Its `job`, `digest` and `uid`, for verbs that look for it once it is over.
        """
        temporary = self.path / "resolved.yaml.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path / "resolved.yaml")
            temporary.write_text(json.dumps(about), encoding="utf-8")
            temporary.replace(self.path / ABOUT_FILE)
        except OSError as error:  # the planner says so too, as its journal lies there
            log.warning("%s can't be written: %s", temporary, error)

    def remove(self) -> None:
        """Remove the folder with all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)


def find_folder(state_dir: Path, name: str, uid: int) -> tuple[JobFolder, str] | None:
    """Return the folder of the newest job of a name that has run, and its name; None for none.

    Args:
        state_dir: The daemon's.
        name: Of the job, its folder, or the beginning of its digest.
        uid: Who asks: owners see their own.
    """
    found: list[tuple[float, str, str]] = []
    for path in (state_dir / "jobs").glob(f"*/{ABOUT_FILE}"):
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            changed = path.stat().st_mtime
        except (OSError, ValueError):
            continue
        is_named = name in (about.get("job"), path.parent.name)
        is_digest = len(name) >= DIGEST_PART_MIN and str(about.get("digest", "")).startswith(name)
        if (is_named or is_digest) and str(uid) in (about.get("uid"), "0", str(os.getuid())):
            found.append((changed, path.parent.name, str(about.get("job"))))
    if not found:
        return None
    _, identity, job = max(found)
    return JobFolder(state_dir, identity), job
