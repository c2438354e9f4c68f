"""The sessions of one daemon: by identity, by the client that is a rank there, and by what people call them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from msd_client.contract.errors import (
    BudgetError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
)
from msd_daemon.services.client_server import Client
from msd_daemon.services.job_resolver import Resolution
from msd_daemon.services.job_session import JobSession

T = TypeVar("T")
GENERATIONS_KNOWN_MAX = 4096


class SessionTable:
    """Which sessions there are, and who takes part in which."""

    def __init__(self) -> None:
        self._sessions: dict[str, JobSession] = {}
        self._of_client: dict[Client, tuple[JobSession, int]] = {}
        self._last_generations: dict[str, int] = {}
        """Of sessions that are over, by identity."""
        self.submitted: dict[str, tuple[int, Resolution]] = {}
        """Jobs that wait for ranks, with the uid of who brought them, by name."""

    @property
    def sessions(self) -> list[JobSession]:
        """All sessions, those that wait for ranks among them."""
        return list(self._sessions.values())

    def get(self, identity: str) -> JobSession | None:
        """Return a session by its identity."""
        return self._sessions.get(identity)

    def opened(self, session: JobSession) -> None:
        """Take a session in."""
        self._sessions[session.identity] = session
        self._last_generations.pop(session.identity, None)

    def closed(self, session: JobSession) -> None:
        """Let a session go; the numbers of its generations stay known."""
        self._sessions.pop(session.identity, None)
        self._last_generations[session.identity] = session.last_generation
        while len(self._last_generations) > GENERATIONS_KNOWN_MAX:
            del self._last_generations[next(iter(self._last_generations))]

    def last_generation(self, identity: str) -> int:
        """Return the last generation of the latest session of this identity that is over; 0: none was."""
        return self._last_generations.get(identity, 0)

    # -- clients that are ranks ------------------------------------------------------------------------

    def joined(self, client: Client, session: JobSession, rank: int) -> None:
        """Take a client as a rank of a session."""
        self._of_client[client] = (session, rank)

    def membership(self, client: Client) -> tuple[JobSession, int] | None:
        """Return the session of a client and its rank there; None: it joined none, or left it."""
        return self._of_client.get(client)

    def member(self, client: Client) -> tuple[JobSession, int]:
        """Return the session of a client and its rank there.

        Raises:
            ProtocolError: It joined none.
        """
        found = self._of_client.get(client)
        if found is None:
            raise ProtocolError("join comes first")
        return found

    def gone(self, client: Client) -> tuple[JobSession, int] | None:
        """Forget a client; return what it was a rank of."""
        return self._of_client.pop(client, None)

    def readers(self, session: JobSession) -> list[Client]:
        """Return the clients that are ranks of a session."""
        return [client for client, (own, _) in self._of_client.items() if own is session]

    def passes_of(self, session: JobSession) -> list[JobSession]:
        """Return the passes of validation that belong to a session."""
        return [other for other in self._sessions.values() if other.parent is session]

    # -- what people call them -------------------------------------------------------------------------

    def find(self, client: Client, name: Any) -> JobSession:
        """Return the session that a client means: by name, identity or digest; None: its own, or the only one.

        Raises:
            NotFoundError: None matches, or several do.
        """
        own = self._of_client.get(client)
        if own is not None and name in (None, own[0].job.name):
            return own[0]
        found = [
            session
            for session in self._sessions.values()
            if (
                name in (None, session.job.name, session.identity)
                or (len(str(name)) >= 6 and session.job.digest().startswith(str(name)))
            )
            and client.uid in (session.uid, 0, os.getuid())
        ]
        if len(found) > 1:  # one that waits for ranks is meant by name alone
            found = [session for session in found if not session.is_waiting] or found
        if len(found) != 1:
            names = ", ".join(
                sorted(
                    f"{s.job.name} (id {s.identity}, {s.state})"
                    for s in found or self._sessions.values()
                )
            )
            if name is None:
                what = f"{len(found)} jobs run" if found else "no job runs"
            else:
                what = f"{len(found)} jobs match {name!r}" if found else f"no job matches {name!r}"
            hint = "; name one by its id" if found else ""
            raise NotFoundError(f"{what}; running: {names or 'none'}{hint}")
        return found[0]

    def submitted_job(self, name: str, client: Client) -> tuple[int, Resolution]:
        """Return a job that was brought by `msdctl submit`, with its owner's uid.

        Raises:
            NotFoundError: There is none of that name.
            PermissionDeniedError: It is another user's.
        """
        found = self.submitted.get(name)
        if found is None:
            raise NotFoundError(
                f"no job {name!r} was submitted to this daemon: give a job file, or msdctl submit it"
            )
        if found[0] not in (client.uid, 0) and client.uid != 0:
            raise PermissionDeniedError(f"job {name!r} belongs to uid {found[0]}")
        return found

    # -- memory ---------------------------------------------------------------------------------------

    def in_room_of(self, take: Callable[[int], T], taking: JobSession | None = None) -> T:
        """Let a job take memory; jobs that wait for ranks end where it needs theirs, oldest first.

        Args:
            take: Given the bytes of all other jobs; called again when there are fewer.
            taking: The job, where it is known already.

        Raises:
            BudgetError: It does not fit though no other job waits.
        """
        while True:
            others = [other for other in self._sessions.values() if other is not taking]
            try:
                return take(sum(other.needed_bytes for other in others))
            except BudgetError:
                waiting = [other for other in others if other.is_waiting]
                if not waiting:
                    raise
                waiting[0].close("another job needs its memory")

    def used_bytes(self, session: JobSession) -> int:
        """Return the shared memory of all other jobs."""
        return sum(other.needed_bytes for other in self._sessions.values() if other is not session)
