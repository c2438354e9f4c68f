"""A journal file on one host that several planners may open: the highest term alone writes it.

The term stands in the file itself and is claimed in a write transaction before anything is read, so
whatever a former leader still commits lies before that, or is refused.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from federation.journal import Journal, replace_damaged
from federation.journal_files import move_aside
from federation.retention import STEPS_KEPT
from msd_client.contract.errors import JournalDamagedError, LeadershipLostError

log = logging.getLogger(__name__)

_TERM = "term"


class FencedJournal(Journal):
    """A `Journal` that is written by one term.

    Args:
        path: As `Journal`.
        term: Of the planner that opens it.
        steps_kept: As `Journal`.

    Raises:
        LeadershipLostError: A later term wrote it.
        ResourceError: As `Journal`.
    """

    def __init__(self, path: Path, term: int, *, steps_kept: int = STEPS_KEPT) -> None:
        self._term = term
        super().__init__(path, steps_kept=steps_kept)
        try:
            with self._transaction():
                self._db.execute(
                    "INSERT OR REPLACE INTO meta VALUES (?, ?)", (_TERM, str(self._term))
                )
        except BaseException:
            self.close()
            raise

    def _began(self) -> None:
        written = journalled_term(self)
        if written > self._term:
            raise LeadershipLostError(
                f"journal {self.path}: term {written} writes it, this planner holds term "
                f"{self._term}: nothing was written; it stands by from here on",
                seen=self._term,
                limit=written,
            )


def journalled_term(journal: Journal) -> int:
    """Return the highest term that wrote a journal, 0 where none did or its number is damaged."""
    text = journal.meta(_TERM)
    return int(text) if text is not None and text.isdigit() else 0


class TermGuard(Protocol):
    """Keeps leadership as it is for as long as a context lasts."""

    @property
    def term(self) -> int:
        """The term that is held."""
        ...

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context in which no other planner begins to lead.

        Raises:
            LeadershipLostError: One leads already.
        """
        ...


class FencedPlace:
    """A journal's file on the leader's host.

    Args:
        path: Of the file.
        guard: Of the term that opens it.
    """

    def __init__(self, path: Path, guard: TermGuard) -> None:
        self._path = path
        self._guard = guard

    def open(self, steps_kept: int) -> Journal:
        journal = FencedJournal(self._path, self._guard.term, steps_kept=steps_kept)
        try:
            with self._guard.guarded():  # who leads later claims the file later
                return journal
        except BaseException:
            journal.close()
            raise

    def open_or_begin(self, steps_kept: int) -> Journal:
        try:
            return self.open(steps_kept)
        except JournalDamagedError as error:
            with self._guard.guarded():  # a former leader must not move away what is in use
                move_aside(self._path, error)
            return self.open(steps_kept)

    def replace(self, journal: Journal, error: JournalDamagedError) -> Journal:
        with self._guard.guarded():
            return replace_damaged(journal, error, self.open)
