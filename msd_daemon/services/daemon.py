"""The daemon's services joined: sessions by job, the planner's process and link, verbs of clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from federation.cluster_messages import BeginGeneration
from federation.messages import Envelope, JobFailed
from federation.model.job import ResolvedJob
from federation.model.validation import validation_job
from federation.planner_link import PlannerLink
from federation.service_manager import ServiceManager
from msd_client.contract.batch_spec import Stage
from msd_client.contract.codec import pack
from msd_client.contract.errors import (
    BudgetError,
    ConfigError,
    ForkServerLostError,
    InternalError,
    MsdError,
    NotFoundError,
    PermissionDeniedError,
    PlannerUnavailableError,
    ProtocolError,
    SessionClosedError,
    UsageError,
    decode_error,
)
from msd_client.contract.local_messages import RingEvent
from msd_client.contract.step_numbers import STEP_MAX
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.lateness import LoopWatch
from msd_daemon.observe.json_log import caused_by
from msd_daemon.observe.observer import Observer
from msd_daemon.observe.past import waits_of_others, why_then
from msd_daemon.observe.snapshot import node_snapshot
from msd_daemon.observe.tracing import trace_steps
from msd_daemon.services.bad_records import page_of_folder
from msd_daemon.services.client_server import DEFERRED, Client, ClientServer
from msd_daemon.services.cluster_node import ClusterNode
from msd_daemon.services.cluster_session import ClusterSession
from msd_daemon.services.dashboard_process import DashboardProcess
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.services.job_folder import named_folders
from msd_daemon.services.job_memory import validation_bytes
from msd_daemon.services.job_resolver import Resolution, resolve
from msd_daemon.services.job_session import JobSession
from msd_daemon.services.job_status import session_status
from msd_daemon.services.planner_process import PlannerProcess
from msd_daemon.services.processes import MemoryLately, MemoryOf, memory_of, process_row
from msd_daemon.services.reloader import ConfigSource, Reloader
from msd_daemon.services.rewinds import RewindOrder, rewind_at_rest, rewind_running, step_run
from msd_daemon.services.state_resume import StateResumes
from msd_daemon.workers.rights import Rights, rights_for

log = logging.getLogger(__name__)

T = TypeVar("T")
TICK_S = 1.0
DRAIN_TIMEOUT_S = 20.0
GENERATIONS_KNOWN_MAX = 4096


class Daemon:
    """All services of one node. `run` returns once the daemon should end."""

    def __init__(
        self,
        config: DaemonConfig,
        fork_sock: Any,
        fork_pid: int,
        source: ConfigSource = ConfigSource(),  # noqa: B008 - frozen
    ) -> None:
        self._config = config
        self._fork_pid = fork_pid
        self._forks = ForkClient(fork_sock, self._child_ended, self._fork_server_lost)
        self._sessions: dict[str, JobSession] = {}
        self._session_of: dict[Client, tuple[JobSession, int]] = {}
        self._attach_again: WeakSet[Client] = WeakSet()
        """Ranks that go on with the next daemon by themselves."""
        self._last_generations: dict[str, int] = {}
        """Of sessions that are over, by identity."""
        self._joining: dict[str, asyncio.Future[Resolution]] = {}
        self._submitted: dict[str, tuple[int, Resolution]] = {}
        self._planner = PlannerProcess(self, self._forks, Path(config.runtime_dir))
        self._cluster: ClusterNode | None = None
        """None: this node plans its jobs itself."""
        if config.federation is not None:
            self._cluster = ClusterNode(config.federation, config, self._forks, self)
        self._dashboard = DashboardProcess(config.socket)
        self._resumes = StateResumes(Path(config.state_dir) / "jobs")
        self._stop = asyncio.Event()
        self._drained = asyncio.Event()
        self._signals = 0
        self._manager = ServiceManager()
        self._reloader = Reloader(source, self._manager, lambda: self._config, self._take_config)
        self._started = time.time()
        self._idle_since = time.monotonic()
        self._loop_watch = LoopWatch(TICK_S)
        self._observer = Observer(config, self)
        self._memory_lately = MemoryLately()
        self._server = ClientServer(
            config.socket,
            self._is_allowed,
            {
                "ping": self._ping,
                "join": self._join,
                "resume": self._resume,
                "start": self._start,
                "explain": self._explain,
                "done": self._done_reading,
                "running": self._running,
                "mixture": self._mixture,
                "skip": self._skip,
                "rewind": self._rewind,
                "loss": self._loss,
                "scale": self._scale,
                "status": self._status,
                "snapshot": self._snapshot,
                "why": self._why,
                "trace": self._trace,
                "bad": self._bad,
                "sources": self._sources,
                "submit": self._submit,
                "jobs": self._jobs,
                "cluster": self._ask_cluster,
                "drain": self._drain_node,
                "reload": self._reload,
                "stop": self._stop_job,
                "shutdown": self._shutdown,
            },
            {"report": self._report, "waiting": self._waiting},
            self._released,
            self._leaving,
            self._gone,
        )

    async def run(self) -> None:
        """Serve until told to stop, then drain: sessions end or the grace period does."""
        asyncio.get_running_loop().set_exception_handler(self._fault)
        if self._cluster is not None:
            self._cluster.begin()
        self._dashboard.take(self._config.dashboard)
        self._manager.ready()
        try:
            while not self._stop.is_set():
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._stop.wait()
                except TimeoutError:
                    self._tick()
            self._manager.stopping()
            await self._drain()
        finally:
            self._close()

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Tell ranks of a fault of the daemon's own: they would wait for ever for what it lost."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is None:
            return
        for session in list(self._sessions.values()):
            session.failed(
                InternalError(
                    f"a fault of the daemon itself ({type(error).__name__}: {error}), see its log: save "
                    "state_dict() and connect again"
                )
            )

    def ask_to_stop(self) -> None:
        """SIGTERM or Ctrl-C: stop once sessions ended; a second one stops at once.

        A drain that was asked for by message is no signal: a job's end may bring both.
        """
        self._signals += 1
        if self._signals > 1:
            self._drained.set()
        self._stop.set()

    def ask_to_reload(self) -> None:
        """SIGHUP: read the configuration again."""
        self._reloader.ask()

    def _take_config(self, config: DaemonConfig) -> None:
        self._config = config
        logging.getLogger().setLevel(config.log_level.upper())
        self._dashboard.take(config.dashboard)

    def stop_now(self) -> None:
        """Stop without waiting for sessions: who started the daemon is gone."""
        self._drained.set()
        self._stop.set()

    async def _drain(self) -> None:
        for session in [s for s in self._sessions.values() if s.is_waiting]:
            session.close("the daemon ends")
        for session in self._sessions.values():
            readers = [client for client, (own, _) in self._session_of.items() if own is session]
            if (
                session.generation is not None
                and readers
                and self._attach_again.issuperset(readers)
            ):
                session.ask_to_attach_again()
        if self._sessions:
            log.info("draining: %d jobs still have ranks", len(self._sessions))
        if self._sessions:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_TIMEOUT_S):
                    await self._drained.wait()

    def _close(self) -> None:
        for session in list(self._sessions.values()):
            session.failed(
                SessionClosedError("the daemon ends: save state_dict() and connect again")
            )
            session.close("the daemon ends")
        self._server.close()
        self._dashboard.close()
        if self._cluster is not None:
            self._cluster.close()
        self._planner.close()
        self._forks.close()
        self._observer.close()

    def _tick(self) -> None:
        now = time.monotonic_ns()
        self._manager.alive()
        waits = f", waits for {self._waiting_for}" if self._waiting_for else ""
        self._manager.status(
            f"{len(self._sessions)} jobs, {len(self._server.clients)} clients{waits}"
        )
        stood_s = self._loop_watch.tick(now)
        if stood_s:
            log.warning(
                "the daemon stood still for %.1f s (stopped, or a machine that is too busy): nobody is "
                "declared late for that",
                stood_s,
            )
        self._planner.watch(now, self._config.late_s)
        if self._cluster is not None:
            self._cluster.report(self._observer.waits(self._sessions.values()))
        for session in list(self._sessions.values()):
            session.check_stuck(now)
        self._observer.tick(self._sessions.values(), now)
        if self._server.clients or any(not s.is_waiting for s in self._sessions.values()):
            self._idle_since = time.monotonic()
        idle_exit_s = self._config.idle_exit_s
        if idle_exit_s and time.monotonic() - self._idle_since > idle_exit_s:
            log.info("idle for %g s: ending", idle_exit_s)
            self._stop.set()

    def _is_allowed(self, uid: int, gids: tuple[int, ...]) -> bool:
        config = self._config
        own = (os.getuid(), 0)
        return (
            uid in own or uid in config.allow_uids or any(gid in config.allow_gids for gid in gids)
        )

    def _check_strategy(self, job: ResolvedJob) -> None:
        """Refuse to run a user's strategy in a planner that others depend on, or under another's uid.

        Raises:
            PermissionDeniedError: This daemon serves several uids.
        """
        config = self._config
        if not (config.allow_uids or config.allow_gids):
            return
        if job.mixture_hook is not None:
            raise PermissionDeniedError(
                f"mixture.hook {job.mixture_hook.call.call}: it would run under uid {os.getuid()}, and "
                "this daemon serves other uids too (access.allow_uids, allow_gids): use a daemon of "
                "your own, or set weights by data.set_mixture"
            )
        if job.strategy_call is not None:
            raise PermissionDeniedError(
                f"strategy {job.strategy}: the planner runs under uid {os.getuid()}, and this daemon "
                "serves other uids too (access.allow_uids, allow_gids), so it runs no strategy of a "
                "user: use a daemon of your own, or a built-in strategy",
                strategy=job.strategy,
            )

    # -- planner -----------------------------------------------------------------------------------

    @property
    def _waiting_for(self) -> str:
        """What this node can't do without, and why it has it not; empty: nothing."""
        if self._cluster is None:
            return ""
        return self._cluster.waiting_for

    @property
    def needs_planner(self) -> bool:
        """See PlannerOwner."""
        return bool(self._sessions) and not self._stop.is_set()

    def planner_envelope(self, envelope: Envelope) -> None:
        """See PlannerOwner."""
        session = self._sessions.get(envelope.job)
        if session is not None:
            session.planner_message(envelope)
        elif isinstance(envelope.message, JobFailed):
            log.error("planner: %s", decode_error(**envelope.message.error))

    async def planner_replaced(self, link: PlannerLink) -> None:
        """See PlannerOwner."""
        # At once: no job waits for the answer to another's order.
        sessions = list(self._sessions.values())
        await asyncio.gather(*(self._restart_planning(session, link) for session in sessions))

    async def _restart_planning(self, session: JobSession, link: PlannerLink) -> None:
        try:
            await session.planner_restarted(link)
        except (MsdError, TimeoutError) as error:
            self._fail_for_planner(session, str(error))

    def planner_missing(self, reason: str) -> None:
        """See PlannerOwner."""
        for session in list(self._sessions.values()):
            self._fail_for_planner(session, reason)

    def _fail_for_planner(self, session: JobSession, reason: str) -> None:
        session.failed(
            PlannerUnavailableError(
                f"the planner is gone and no other could take over ({reason}): connect again with "
                "the last state"
            )
        )

    def _fork_server_lost(self) -> None:
        """End: without it no worker can be replaced and no job begins; the next daemon has one."""
        if self._stop.is_set():
            return
        log.error("the fork server is gone: ending, start msd-daemon again")
        for session in list(self._sessions.values()):
            session.failed(
                ForkServerLostError(
                    "the daemon's fork server ended, and the daemon with it: save state_dict() and "
                    "connect again"
                )
            )
        self._drained.set()
        self._stop.set()

    def _child_ended(self, child: Child) -> None:
        with caused_by("child_ended"):
            if self._planner.child_ended(child):
                return
            if self._cluster is not None and self._cluster.child_ended(child):
                return
            for session in list(self._sessions.values()):
                session.child_ended(child)

    # -- trainers ------------------------------------------------------------------------------------

    async def _ping(self, _client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid(), "uptime_s": time.time() - self._started}

    async def _join(self, client: Client, body: dict[str, Any]) -> Any:
        if self._stop.is_set():
            raise SessionClosedError("the daemon is draining and takes no new ranks")
        if client in self._session_of:
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
            resolution, key = await self._resolution(client, body)
            job, resolved_yaml = resolution.job, resolution.resolved_yaml
        session = self._sessions.get(key)
        if session is not None and session.mesh != mesh:
            await session.until_free()
            session = self._sessions.get(key)
        if session is None:
            self._check_strategy(job)
            planner = await (self._cluster or self._planner).ready()
            session = self._sessions.get(key)
        reserved_bytes = validation_bytes(job, mesh, self._config)
        rights = self._rights_of(client)
        if session is None:
            session = self._in_room_of(
                lambda used_bytes: self._session_kind(
                    job,
                    mesh,
                    self._config,
                    self._forks,
                    planner,
                    identity=key,
                    uid=client.uid,
                    host=self,
                    stage=stage,
                    used_bytes=used_bytes,
                    reserved_bytes=reserved_bytes,
                    resolved_yaml=resolved_yaml,
                    parent=parent,
                    last_generation=self._last_generations.pop(key, 0),
                    rights=rights,
                )
            )
            self._sessions[key] = session
        elif session.mesh != mesh:
            known = session
            self._in_room_of(
                lambda used_bytes: known.change_mesh(mesh, used_bytes, reserved_bytes), known
            )
        if body.get("forget_events_after") is not None and parent is None:
            session.forget_after = int(body["forget_events_after"])
        deadlines = {str(name): float(value) for name, value in body.get("deadlines", {}).items()}
        assert client.peer is not None
        joined = session.join(int(body["rank"]), client.pid, client.peer, deadlines)
        self._session_of[client] = (session, int(body["rank"]))
        if body.get("reattach") and self._cluster is None:
            self._attach_again.add(client)
        if client.is_gone:
            session.left(int(body["rank"]), "left while joining")
        return joined

    @property
    def _session_kind(self) -> Callable[..., JobSession]:
        """Return what makes a session here."""
        if self._cluster is None:
            return JobSession
        cluster = self._cluster
        return partial(ClusterSession, exchange=cluster.exchange, node=cluster.options.node)

    # -- the cluster ---------------------------------------------------------------------------------

    def cluster_sessions(self) -> list[ClusterSession]:
        """See ClusterOwner."""
        return [it for it in self._sessions.values() if isinstance(it, ClusterSession)]

    def cluster_session(self, identity: str) -> ClusterSession | None:
        """See ClusterOwner."""
        found = self._sessions.get(identity)
        return found if isinstance(found, ClusterSession) else None

    def open_loading_session(
        self, identity: str, job: ResolvedJob, message: BeginGeneration
    ) -> ClusterSession:
        """See ClusterOwner."""
        assert self._cluster is not None and self._cluster.link is not None
        mesh = [(str(axis), int(size)) for axis, size in message.mesh]
        link = self._cluster.link
        made = self._in_room_of(
            lambda used_bytes: self._session_kind(
                job,
                mesh,
                self._config,
                self._forks,
                link,
                identity=identity,
                uid=os.getuid(),
                host=self,
                stage=message.stage or None,
                used_bytes=used_bytes,
                last_generation=self._last_generations.pop(identity, 0),
            )
        )
        assert isinstance(made, ClusterSession)
        self._sessions[identity] = made
        return made

    def _in_room_of(self, take: Callable[[int], T], taking: JobSession | None = None) -> T:
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
        """See SessionHost."""
        return sum(other.needed_bytes for other in self._sessions.values() if other is not session)

    def may_wait(self, session: JobSession) -> bool:
        """See SessionHost. What its ranks say from now on is of no interest."""
        for client in [c for c, (own, _) in self._session_of.items() if own is session]:
            del self._session_of[client]
        return self._config.restart_grace_s > 0 and not self._stop.is_set()

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
        parent = self._sessions.get(str(body["session"]))
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

    async def _resolution(self, client: Client, body: dict[str, Any]) -> tuple[Resolution, str]:
        run = str(body.get("run", ""))
        if "submitted" in body:
            owner, found = self._submitted_job(str(body["submitted"]), client)
            return found, _session_key(owner, run, found.job)
        request = _resolve_request(body)
        key = hashlib.sha256(pack([client.uid, run, request])).hexdigest()[:24]
        pending = self._joining.get(key)
        if pending is None:
            pending = asyncio.ensure_future(self._resolve(client, request))
            self._joining[key] = pending
            pending.add_done_callback(lambda _: self._joining.pop(key, None))
        resolution = await asyncio.shield(pending)
        return resolution, _session_key(client.uid, run, resolution.job)

    async def _resolve(self, client: Client, request: dict[str, Any]) -> Resolution:
        """Resolve a job with the rights of who brings it.

        Raises:
            PermissionDeniedError: The daemon may not take them, or his job needs what only its own
                user may have here.
        """
        config, rights = self._config, self._rights_of(client)
        return await resolve(request, config.stores, config.content_dir, rights, config.roots)

    def _rights_of(self, client: Client) -> Rights | None:
        rights = rights_for(client.uid, client.gids, os.getuid())
        if rights is not None and self._cluster is not None:
            raise PermissionDeniedError(
                f"the nodes of a cluster load for their own user alone, this one for uid {os.getuid()}: "
                "use a daemon of your own (msdctl up), or this node without federation.planners",
                uid=client.uid,
            )
        return rights

    def _submitted_job(self, name: str, client: Client) -> tuple[int, Resolution]:
        found = self._submitted.get(name)
        if found is None:
            raise NotFoundError(
                f"no job {name!r} was submitted to this daemon: give a job file, or msdctl submit it"
            )
        if found[0] not in (client.uid, 0) and client.uid != 0:
            raise PermissionDeniedError(f"job {name!r} belongs to uid {found[0]}")
        return found

    async def _resume(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """Adapt a state of a job that was changed since."""
        session, _ = self._membership(client)
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
        session, rank = self._membership(client)
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

    def _membership(self, client: Client) -> tuple[JobSession, int]:
        found = self._session_of.get(client)
        if found is None:
            raise ProtocolError("join comes first")
        return found

    async def _explain(self, client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        session, rank = self._membership(client)
        text = session.explain(rank)
        for other in self._passes_of(session):
            waiting = [member.rank for member in other.membership.waiting()]
            if waiting:
                missing = other.membership.waiting_for()
                text += f"; ranks {waiting[:16]} wait in a pass of {other.job.name!r} for {missing[:16]}"
        return {"text": text}

    def _passes_of(self, session: JobSession) -> list[JobSession]:
        return [other for other in self._sessions.values() if other.parent is session]

    async def _done_reading(self, client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        session, rank = self._membership(client)
        session.starts.done_reading(rank)
        return {}

    async def _running(self, client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        session, _ = self._membership(client)
        return {"running": session.state == "running"}

    def _report(self, client: Client, body: dict[str, Any]) -> None:
        """Take how long a rank took for a step."""
        session, rank = self._membership(client)
        values = [body["generation"], body["step"], body["nanoseconds"]]
        if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
            raise ProtocolError(f"a report of {values!r}")
        session.reported(rank, *values)

    def _waiting(self, client: Client, body: dict[str, Any]) -> None:
        """Take word of a rank that waits for its next batch."""
        found = self._session_of.get(client)
        if found is not None:  # it may have left meanwhile
            told_after_ns = int(1e9 * min(max(float(body["told_after_s"]), 0.0), 3600.0))
            since_ns = time.monotonic_ns() - told_after_ns
            taken = int(body.get("taken", 0))
            found[0].waiting(found[1], int(body["generation"]), since_ns, taken)

    def _released(self, client: Client, event: RingEvent) -> None:
        found = self._session_of.get(client)
        if found is not None:
            found[0].released(found[1], event)

    def _leaving(self, client: Client, held: list[tuple[int, int]]) -> bool:
        found = self._session_of.get(client)
        if found is None or not found[0].leaving(found[1], held):
            return False
        self._tell_passes(*found)
        return True

    def _tell_passes(self, session: JobSession, rank: int) -> None:
        for other in self._passes_of(session):
            other.starts.will_not_come(rank)

    def _gone(self, client: Client, reason: str) -> None:
        found = self._session_of.pop(client, None)
        if found is not None:
            found[0].left(found[1], reason)
            self._tell_passes(*found)

    def session_closed(self, session: JobSession) -> None:
        """See SessionHost."""
        self._sessions.pop(session.identity, None)
        self._last_generations[session.identity] = session.last_generation
        while len(self._last_generations) > GENERATIONS_KNOWN_MAX:
            del self._last_generations[next(iter(self._last_generations))]
        self._resumes.forget(session.identity)
        if not self._sessions and self._stop.is_set():
            self._drained.set()

    # -- what is looked at beside sessions (LookedAt) ---------------------------------------------------

    @property
    def node(self) -> str:
        """See LookedAt."""
        return socket.gethostname() if self._cluster is None else self._cluster.options.node

    @property
    def planner_pid(self) -> int | None:
        """See LookedAt."""
        return None if self._cluster is not None else self._planner.pid

    @property
    def planner_silence(self) -> str:
        """See LookedAt."""
        if self._cluster is not None:
            return self._cluster.planner_silence
        is_needed = any(s.generation is not None for s in self._sessions.values())
        return "it ended, another starts" if is_needed and self._planner.pid is None else ""

    @property
    def planner_away_ns(self) -> int:
        """See LookedAt."""
        return 0 if self._cluster is None else self._cluster.planner_away_ns

    @property
    def planner_place(self) -> str:
        """See LookedAt."""
        return "" if self._cluster is None else self._cluster.planner_place

    def peer_states(self) -> dict[str, str]:
        """See LookedAt."""
        return {} if self._cluster is None else dict(self._cluster.peers)

    # -- operators -------------------------------------------------------------------------------------

    async def _ask_cluster(self, _client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        return await self._in_cluster.ask()

    async def _drain_node(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        if client.uid not in (os.getuid(), 0):
            raise PermissionDeniedError("nodes are drained by the daemon's own user, or by root")
        return await self._in_cluster.ask((str(body["node"]), bool(body["drained"])))

    @property
    def _in_cluster(self) -> ClusterNode:
        if self._cluster is None:
            raise UsageError(
                "this daemon is of no cluster: federation.planners in daemon.toml names its planners"
            )
        return self._cluster

    async def _mixture(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        session = self._find_session(client, body.get("job"))
        weights = {str(name): weight for name, weight in body["weights"].items()}
        for source, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)):
                raise ConfigError(f"mixture: source {source}: weight {weight!r} is not a number")
        at = body.get("at")
        if at is not None and not (type(at) is int and 0 <= at <= STEP_MAX):
            raise ConfigError(f"mixture: at is {at!r}: write the number of a step that is to come")
        step, known_from = await session.changes.change_mixture(weights, at)
        name = session.job.name
        return {"job": name, "step": step, "known_from": known_from, "weights": weights}

    async def _skip(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        session = self._find_session(client, body.get("job"))
        first, end = step_run(body.get("steps"))
        return {"job": session.job.name} | await session.changes.skip_steps(first, end)

    async def _rewind(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """Rewind a job that runs, or one whose folder is there; or take rewinds back."""
        order = RewindOrder.of(body)
        name = body.get("job")
        try:
            session = self._find_session(client, name)
        except NotFoundError:
            found = []
            if not any(name in (None, known.job.name) for known in self._sessions.values()):
                found = await asyncio.to_thread(
                    named_folders, Path(self._config.state_dir), str(name), client.uid
                )
            if not found:
                raise
            journal = found[0].folder.journal
            return {"job": found[0].name} | await asyncio.to_thread(rewind_at_rest, journal, order)
        told = {"job": session.job.name}
        if session.generation is None or not order.changes_running:
            return told | await asyncio.to_thread(rewind_at_rest, session.folder.journal, order)
        return told | await rewind_running(session.changes, order)

    async def _loss(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        losses = {str(name): float(loss) for name, loss in body["losses"].items()}
        self._find_session(client, body.get("job")).changes.report_loss(int(body["step"]), losses)
        return {}

    async def _scale(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """Have a source read in a number of partitions, or as the scaler finds; or limit the loaders."""
        session = self._find_session(client, body.get("job"))
        loaders_max = body.get("loaders_max")
        if loaders_max is not None:
            if type(loaders_max) is not int:
                raise ConfigError(f"scale: loaders_max is {loaders_max!r}: write a whole number")
            return session.allow_loaders(loaders_max)
        partitions = body.get("partitions")
        if partitions is not None and (type(partitions) is not int or partitions < 1):
            raise ConfigError(
                f"scale: partitions is {partitions!r}: write a whole number above 0, or auto"
            )
        loaders = body.get("loaders", [])
        if not isinstance(loaders, list) or any(type(it) is not int for it in loaders):
            raise ConfigError(f"scale: loaders is {loaders!r}: write a list of numbers")
        return session.scale(str(body.get("source")), partitions, loaders)

    def _find_session(self, client: Client, name: Any) -> JobSession:
        own = self._session_of.get(client)
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

    async def _status(
        self, client: Client, body: dict[str, Any], memory: MemoryOf = memory_of
    ) -> dict[str, Any]:
        name = body.get("job")
        sessions = list(self._sessions.values())
        if name is not None:
            sessions = [self._find_session(client, name)]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        jobs = [session_status(session) | self._observer.status(session) for session in sessions]
        for job in jobs:
            job["workers"] = [process_row(w["role"], w["pid"], memory) for w in job["workers"]]
        children = [process_row("fork_server", self._fork_pid, memory)]
        if self._planner.pid is not None:
            children.append(process_row("planner", self._planner.pid, memory))
        if self._dashboard.pid is not None:
            children.append(process_row("dashboard", self._dashboard.pid, memory))
        return {
            "daemon": {
                "pid": os.getpid(),
                "version": _version(),
                "socket": str(self._config.socket),
                "state_dir": str(self._config.state_dir),
                "uptime_s": time.time() - self._started,
                "cpu_s": usage.ru_utime + usage.ru_stime,
                "observe_cpu_s": self._observer.cpu_s,
                "memory": memory(os.getpid()),
                "memory_budget_bytes": self._config.memory_bytes,
                "stalls": self._loop_watch.stalls_total,
                "stall_longest_s": round(self._loop_watch.longest_s, 1),
                "is_draining": self._stop.is_set(),
                "waiting_for": self._waiting_for,
                "dashboard_error": self._dashboard.error,
                "clients": len(self._server.clients),
                "processes": children,
            },
            "jobs": jobs,
        }

    async def _snapshot(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """See observe/snapshot.py."""
        status = await self._status(client, body, self._memory_lately.of)
        return await node_snapshot(
            self._observer,
            status,
            {session.identity: session for session in self._sessions.values()},
            node=self.node,
            ask_cluster=None if self._cluster is None else self._cluster.ask,
            history_s=float(body.get("history_s", 0.0)),
            uid=self._history_uid(client),
        )

    async def _why(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """Say who waits for whom, now or at a time (Unix seconds) of the last day."""
        name, at, uid = body.get("job"), body.get("at"), self._history_uid(client)
        if at is not None:
            return await why_then(self._observer, name, float(at), self.node, uid)
        try:
            session = self._find_session(client, name)
        except NotFoundError:
            if name is None or any(name == s.job.name for s in self._sessions.values()):
                raise
            return await why_then(self._observer, name, None, self.node, uid)
        about = {"job": session.job.name, "id": session.identity, "node": self.node}
        told = self._observer.status(session)
        ask = None if self._cluster is None else self._cluster.ask
        others = await waits_of_others(ask, session.job.name, self.node)
        return about | {"at": time.time(), "is_past": False, "others": others} | told

    async def _trace(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """See observe/tracing.py."""
        session = self._find_session(client, body.get("job"))
        steps, wait_s = int(body["steps"]), float(body["wait_s"])
        return await trace_steps(session, steps, wait_s, self.planner_pid)

    def _history_uid(self, client: Client) -> int:
        """Return whose history a client may see; 0: everybody's."""
        return 0 if client.uid == os.getuid() else client.uid

    async def _bad(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """List bad records of a job that runs, or of one whose folder is there."""
        name, source = body.get("job"), body.get("source")
        wanted = (
            None if source is None else str(source),
            int(body.get("offset", 0)),
            int(body.get("limit", 1000)),
        )
        try:
            session = self._find_session(client, name)
        except NotFoundError:
            if any(name in (None, known.job.name) for known in self._sessions.values()):
                raise  # several match: which is to be said
            page = await asyncio.to_thread(
                page_of_folder, Path(self._config.state_dir), name, client.uid, wanted
            )
            if page is None:
                raise
            return page
        page = await session.bad_page(*wanted)
        return page | {"job": session.job.name, "folder": str(session.folder.path)}

    async def _sources(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """Tell what the sources of a running job cost, and what their loaders do."""
        session = self._find_session(client, body.get("job"))
        return {"job": session.job.name, "sources": session.sources_page()}

    async def _submit(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        resolution = await self._resolve(client, _resolve_request(body))
        self._check_strategy(resolution.job)
        self._submitted[resolution.job.name] = (client.uid, resolution)
        return {
            "name": resolution.job.name,
            "digest": resolution.job.digest(),
            "resolved_yaml": resolution.resolved_yaml,
        }

    async def _jobs(self, _client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        rows = [
            {
                "name": s.job.name,
                "id": s.identity,
                "state": s.state,
                "digest": s.job.digest(),
                "uid": s.uid,
                "ranks": len(s.members),
            }
            for s in self._sessions.values()
        ]
        running = {row["digest"] for row in rows}
        rows += [
            {"name": name, "state": "submitted", "digest": r.job.digest(), "uid": uid, "ranks": 0}
            for name, (uid, r) in self._submitted.items()
            if r.job.digest() not in running
        ]
        return {"jobs": rows}

    async def _stop_job(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        name = str(body.get("job"))
        removed = self._submitted.pop(name, None)
        try:
            session = self._find_session(client, name)
        except NotFoundError:
            if removed is None:
                raise
            return {"job": name, "state": "removed"}
        session.stop()
        if session.parent is None:
            self._observer.last_look(session, time.monotonic_ns())
        session.close("stopped by msdctl")
        name = session.job.name
        note = "" if self._cluster is None else self._cluster.stop_note(name)
        return {"job": name, "state": "stopped", "note": note}

    async def _reload(self, client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        if client.uid not in (0, os.getuid()):
            raise PermissionDeniedError(
                "only the daemon's own user may have it read its configuration"
            )
        found = await self._reloader.run()
        return {"changed": {effect: list(keys) for effect, keys in found.changed.items()}}

    async def _shutdown(self, client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        if client.uid not in (0, os.getuid()):
            raise PermissionDeniedError("only the daemon's own user may end it")
        self._stop.set()
        return {"pid": os.getpid()}


def _resolve_request(body: dict[str, Any]) -> dict[str, Any]:
    return {"text": body["text"], "base_dir": body["base_dir"], "name": body["name"]}


def _session_key(uid: int, run: str, job: ResolvedJob) -> str:
    """Return what ranks of one run have in common: two jobs that differ in name alone are two runs."""
    return hashlib.sha256(pack([uid, run, job.name, job.digest()])).hexdigest()[:16]


@functools.cache
def _version() -> str:
    from importlib.metadata import version  # what it imports is of use to nobody else here

    return version("msd")
