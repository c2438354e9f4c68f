"""A job's folder below the daemon's state: its journal and what it was resolved to."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

log = logging.getLogger(__name__)


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
        return self.path / "journal.db"

    def keep_resolved(self, text: str) -> None:
        """Write `resolved.yaml`: what the digest in every state is the digest of (E2). Blocks."""
        temporary = self.path / "resolved.yaml.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path / "resolved.yaml")
        except OSError as error:  # the planner says so too, as its journal lies there
            log.warning("%s can't be written: %s", temporary, error)

    def remove(self) -> None:
        """Remove the folder with all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
