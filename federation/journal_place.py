"""Where a job's journal lies, and how it is opened to write."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from federation.journal import Journal, open_journal, replace_damaged
from msd_client.contract.errors import JournalDamagedError


class JournalPlace(Protocol):
    """Opens one job's journal."""

    def open(self, steps_kept: int) -> Journal:
        """Open the journal as it is.

        Raises:
            JournalDamagedError: It is not what was written; it is left where it is.
            JournalUnavailableError: It can't be opened now.
            LeadershipLostError: Another planner leads.
            ResourceError: It is of another schema.
        """
        ...

    def open_or_begin(self, steps_kept: int) -> Journal:
        """Open the journal; a damaged one is put aside and a new one begun.

        Raises:
            JournalUnavailableError: It can't be opened or made now.
            LeadershipLostError: Another planner leads.
            ResourceError: It is of another schema.
        """
        ...

    def replace(self, journal: Journal, error: JournalDamagedError) -> Journal:
        """Put a journal that turned out damaged aside, and begin a new one with its readable events.

        Raises:
            JournalUnavailableError: That is not possible now.
            LeadershipLostError: Another planner leads.
        """
        ...


class LocalPlace:
    """A file on this machine that one planner alone writes.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, steps_kept: int) -> Journal:
        return Journal(self._path, steps_kept=steps_kept)

    def open_or_begin(self, steps_kept: int) -> Journal:
        return open_journal(self._path, steps_kept=steps_kept)

    def replace(self, journal: Journal, error: JournalDamagedError) -> Journal:
        return replace_damaged(journal, error)
