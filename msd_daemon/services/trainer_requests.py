"""What trainers ask of their daemon: joining a job, starting, waiting, giving batches back, leaving."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol
from weakref import WeakSet

from federation.model.job import ResolvedJob
from federation.model.validation import validation_job
from federation.planner_link import PlannerWire
from msd_client.contract.batch_spec import Stage
from msd_client.contract.errors import (
    NotFoundError,
    ProtocolError,
    SessionClosedError,
    UsageError,
)
from msd_client.contract.local_messages import RingEvent
from msd_daemon.services.client_server import DEFERRED, Client
from msd_daemon.services.job_intake import JobIntake
from msd_daemon.services.job_session import JobSession
from msd_daemon.services.session_table import SessionTable
from msd_daemon.services.state_resume import StateResumes
from msd_daemon.workers.rights import Rights


class SessionOpener(Protocol):
    """Who begins sessions: the daemon."""

    @property
    def is_draining(self) -> bool:
        """Whether no rank is taken any more."""
        ...

    @property
    def keeps_ranks(self) -> bool:
        """Whether ranks may go on with the next daemon by themselves."""
        ...

    async def ready_planner(self) -> PlannerWire:
        """Wait for the planner of a new session."""
        ...

    def open_session(
        self,
        identity: str,
        job: ResolvedJob,
        mesh: list[tuple[str, int]],
        planner: PlannerWire,
        *,
        uid: int,
        stage: Stage | None = None,
        resolved_yaml: str = "",
        parent: JobSession | None = None,
        rights: Rights | None = None,
    ) -> JobSession:
        """Begin a session, in memory that jobs without ranks give up where it needs theirs.

        Raises:
            BudgetError: It does not fit though no other job waits.
        """
        ...

    def change_mesh(self, session: JobSession, mesh: list[tuple[str, int]]) -> None:
        """Give a session that waits for ranks another mesh.

        Raises:
            BudgetError: It does not fit though no other job waits.
        """
        ...


class TrainerRequests:
    """Of one daemon.

    Args:
        table: The sessions.
        intake: Resolves what jobs ranks bring.
        opener: Begins sessions.
        resumes: Adapts states of jobs that were changed since.
    """

    def __init__(
        self, table: SessionTable, intake: JobIntake, opener: SessionOpener, resumes: StateResumes
    ) -> None:
        self._table = table
        self._intake = intake
        self._opener = opener
        self._resumes = resumes
        self._attach_again: WeakSet[Client] = WeakSet()
        """Ranks that go on with the next daemon by themselves."""

    @property
    def verbs(self) -> dict[str, Any]:
        """What is answered, by its name in a request."""
        return {
            "join": self._join,
            "resume": self._resume,
            "start": self._start,
            "explain": self._explain,
            "done": self._done_reading,
            "running": self._running,
        }

    @property
    def notes(self) -> dict[str, Any]:
        """What is heard and not answered."""
        return {"report": self._report, "waiting": self._waiting}

    def attaches_again(self, session: JobSession) -> bool:
        """Return whether all ranks of a session go on with the next daemon by themselves."""
        readers = self._table.readers(session)
        return bool(readers) and self._attach_again.issuperset(readers)

    async def _join(self, client: Client, body: dict[str, Any]) -> Any:
        if self._opener.is_draining:
            raise SessionClosedError("the daemon is draining and takes no new ranks")
        if self._table.membership(client) is not None:
            raise ProtocolError("this connection already joined a job")
        mesh = [(str(axis), int(size)) for axis, size in body["mesh"]]
        stage: Stage | None = None
        resolved_yaml = ""
        parent: JobSession | None = None
        if "loader" in body:
            parent = self._parent(client, body, mesh)
            job = validation_job(parent.job, str(body["loader"]))
            stage = parent.tree.stage(int(body["rank"]))
            key = f"{parent.identity}-{body['loader']}-{stage}"
        else:
            resolution, key = await self._intake.for_rank(client, body)
            job, resolved_yaml = resolution.job, resolution.resolved_yaml
        session = self._table.get(key)
        if session is not None and session.mesh != mesh:
            await session.until_free()
            session = self._table.get(key)
        if session is None:
            self._intake.check_strategy(job)
            planner = await self._opener.ready_planner()
            session = self._table.get(key)
        rights = self._intake.rights_of(client)
        if session is None:
            session = self._opener.open_session(
                key,
                job,
                mesh,
                planner,
                uid=client.uid,
                stage=stage,
                resolved_yaml=resolved_yaml,
                parent=parent,
                rights=rights,
            )
        elif session.mesh != mesh:
            self._opener.change_mesh(session, mesh)
        if body.get("forget_events_after") is not None and parent is None:
            session.forget_after = int(body["forget_events_after"])
        deadlines = {str(name): float(value) for name, value in body.get("deadlines", {}).items()}
        assert client.peer is not None
        joined = session.join(int(body["rank"]), client.pid, client.peer, deadlines)
        self._table.joined(client, session, int(body["rank"]))
        if body.get("reattach") and self._opener.keeps_ranks:
            self._attach_again.add(client)
        if client.is_gone:
            session.left(int(body["rank"]), "left while joining")
        return joined

    def _parent(
        self, client: Client, body: dict[str, Any], mesh: list[tuple[str, int]]
    ) -> JobSession:
        """Return the training session that a pass of validation belongs to.

        A pass is a session of its own, for one kind of pipeline stage: stages that leave it out hold
        nobody up.

        Raises:
            NotFoundError: It is over.
            UsageError: A rank that the pass needs has left it.
        """
        parent = self._table.get(str(body["session"]))
        if parent is None or client.uid not in (parent.uid, 0) or parent.mesh != mesh:
            raise NotFoundError(
                f"loader {body['loader']!r} belongs to a session that is over: connect again"
            )
        gone = parent.ranks_gone(parent.tree.stage(int(body["rank"])))
        if gone:
            raise UsageError(
                f"ranks {gone[:16]} left job {parent.job.name!r}, so no pass of "
                f"{body['loader']!r} begins: restart all ranks from the last state"
            )
        return parent

    async def _resume(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """Adapt a state of a job that was changed since."""
        session, _ = self._table.member(client)
        accept = tuple(str(key) for key in body["accept"])
        resumed = await self._resumes.resume(
            session.identity, bytes(body["state"]), session.job, accept
        )
        session.adopt_job(resumed.job)
        return {
            "state": resumed.state,
            "changes": resumed.changes,
            "digest": resumed.job.digest(),
            "sample_digest": resumed.job.sample_digest(),
        }

    async def _start(self, client: Client, body: dict[str, Any]) -> Any:
        session, rank = self._table.member(client)
        held = tuple(int(generation) for generation in body.get("held", ()))
        session.starts.start(rank, int(body["id"]), bytes(body["state"]), held)
        asyncio.get_running_loop().call_later(
            session.members[rank].deadlines["join_s"] * 0.98,
            self._start_timeout,
            session,
            rank,
            client,
            body["id"],
        )
        return DEFERRED

    def _start_timeout(self, session: JobSession, rank: int, client: Client, request: int) -> None:
        member = session.members.get(rank)
        if member is None or member.start_request != request:
            return
        error = session.membership.start_timed_out(rank)
        if error is not None:
            client.refuse(request, error)

    async def _explain(self, client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        session, rank = self._table.member(client)
        text = session.explain(rank)
        for other in self._table.passes_of(session):
            waiting = [member.rank for member in other.membership.waiting()]
            if waiting:
                missing = other.membership.waiting_for()
                text += f"; ranks {waiting[:16]} wait in a pass of {other.job.name!r} for {missing[:16]}"
        return {"text": text}

    async def _done_reading(self, client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        session, rank = self._table.member(client)
        session.starts.done_reading(rank)
        return {}

    async def _running(self, client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        session, _ = self._table.member(client)
        return {"running": session.state == "running"}

    def _report(self, client: Client, body: dict[str, Any]) -> None:
        """Take how long a rank took for a step."""
        session, rank = self._table.member(client)
        values = [body["generation"], body["step"], body["nanoseconds"]]
        if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
            raise ProtocolError(f"a report of {values!r}")
        session.reported(rank, *values)

    def _waiting(self, client: Client, body: dict[str, Any]) -> None:
        """Take word of a rank that waits for its next batch."""
        found = self._table.membership(client)
        if found is not None:  # it may have left meanwhile
            told_after_ns = int(1e9 * min(max(float(body["told_after_s"]), 0.0), 3600.0))
            since_ns = time.monotonic_ns() - told_after_ns
            taken = int(body.get("taken", 0))
            found[0].waiting(found[1], int(body["generation"]), since_ns, taken)

    def released(self, client: Client, event: RingEvent) -> None:
        """Take a batch back that a rank gave back."""
        found = self._table.membership(client)
        if found is not None:
            found[0].released(found[1], event)

    def leaving(self, client: Client, held: list[tuple[int, int]]) -> bool:
        """Take leave of a rank; return False where it is none, or its session does not know it."""
        found = self._table.membership(client)
        if found is None or not found[0].leaving(found[1], held):
            return False
        self._tell_passes(*found)
        return True

    def _tell_passes(self, session: JobSession, rank: int) -> None:
        for other in self._table.passes_of(session):
            other.starts.will_not_come(rank)

    def gone(self, client: Client, reason: str) -> None:
        """Take note that a client is gone."""
        found = self._table.gone(client)
        if found is not None:
            found[0].left(found[1], reason)
            self._tell_passes(*found)
