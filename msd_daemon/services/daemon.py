"""The daemon's services joined: its life, its planner and its cluster; what clients ask is in *_requests.py."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from federation.cluster_messages import BeginGeneration
from federation.messages import Envelope, JobFailed
from federation.model.job import ResolvedJob
from federation.model.place_tree import STAGES
from federation.planner_link import PlannerLink, PlannerWire
from federation.service_manager import ServiceManager
from msd_client.contract.batch_spec import Stage
from msd_client.contract.errors import (
    ForkServerLostError,
    InternalError,
    MsdError,
    PlannerUnavailableError,
    ProtocolError,
    SessionClosedError,
    decode_error,
)
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.lateness import LoopWatch
from msd_daemon.observe.json_log import caused_by
from msd_daemon.observe.observer import Observer
from msd_daemon.services.client_server import ClientServer
from msd_daemon.services.cluster_node import ClusterNode
from msd_daemon.services.cluster_session import ClusterSession
from msd_daemon.services.dashboard_process import DashboardProcess
from msd_daemon.services.fork_client import Child, ForkClient
from msd_daemon.services.job_intake import JobIntake
from msd_daemon.services.job_memory import validation_bytes
from msd_daemon.services.job_session import JobSession
from msd_daemon.services.operator_requests import OperatorRequests
from msd_daemon.services.planner_process import PlannerProcess
from msd_daemon.services.reloader import ConfigSource, Reloader
from msd_daemon.services.session_table import SessionTable
from msd_daemon.services.state_resume import StateResumes
from msd_daemon.services.trainer_requests import TrainerRequests
from msd_daemon.workers.rights import Rights

log = logging.getLogger(__name__)

TICK_S = 1.0
DRAIN_TIMEOUT_S = 20.0


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
        self._table = SessionTable()
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
        self._reloader = Reloader(source, self._manager, self._config_now, self._take_config)
        self._idle_since = time.monotonic()
        self._loop_watch = LoopWatch(TICK_S)
        self._observer = Observer(config, self)
        intake = JobIntake(self._config_now, self._table)
        self._trainers = TrainerRequests(self._table, intake, self, self._resumes)
        operators = OperatorRequests(
            self._config_now,
            self._table,
            intake,
            self,
            self._observer,
            self._loop_watch,
            self._reloader,
            self._cluster,
        )
        self._server = ClientServer(
            config.socket,
            self._is_allowed,
            self._trainers.verbs | operators.verbs,
            self._trainers.notes,
            self._trainers.released,
            self._trainers.leaving,
            self._trainers.gone,
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
        for session in self._table.sessions:
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

    def _config_now(self) -> DaemonConfig:
        return self._config

    def _take_config(self, config: DaemonConfig) -> None:
        self._config = config
        logging.getLogger().setLevel(config.log_level.upper())
        self._dashboard.take(config.dashboard)

    def stop_now(self) -> None:
        """Stop without waiting for sessions: who started the daemon is gone."""
        self._drained.set()
        self._stop.set()

    async def _drain(self) -> None:
        for session in [s for s in self._table.sessions if s.is_waiting]:
            session.close("the daemon ends")
        for session in self._table.sessions:
            if session.generation is not None and self._trainers.attaches_again(session):
                session.ask_to_attach_again()
        if self._table.sessions:
            log.info("draining: %d jobs still have ranks", len(self._table.sessions))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_TIMEOUT_S):
                    await self._drained.wait()

    def _close(self) -> None:
        for session in self._table.sessions:
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
        waits = f", waits for {self.waiting_for}" if self.waiting_for else ""
        self._manager.status(
            f"{len(self._table.sessions)} jobs, {len(self._server.clients)} clients{waits}"
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
            self._cluster.report(self._observer.waits(self._table.sessions))
        for session in self._table.sessions:
            session.check_stuck(now)
        self._observer.tick(self._table.sessions, now)
        if self._server.clients or any(not s.is_waiting for s in self._table.sessions):
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

    # -- planner -----------------------------------------------------------------------------------

    @property
    def needs_planner(self) -> bool:
        """See PlannerOwner."""
        return bool(self._table.sessions) and not self._stop.is_set()

    def planner_envelope(self, envelope: Envelope) -> None:
        """See PlannerOwner."""
        session = self._table.get(envelope.job)
        if session is not None:
            session.planner_message(envelope)
        elif isinstance(envelope.message, JobFailed):
            log.error("planner: %s", decode_error(**envelope.message.error))

    async def planner_replaced(self, link: PlannerLink) -> None:
        """See PlannerOwner."""
        # At once: no job waits for the answer to another's order.
        restarts = [self._restart_planning(session, link) for session in self._table.sessions]
        await asyncio.gather(*restarts)

    async def _restart_planning(self, session: JobSession, link: PlannerLink) -> None:
        try:
            await session.planner_restarted(link)
        except (MsdError, TimeoutError) as error:
            self._fail_for_planner(session, str(error))

    def planner_missing(self, reason: str) -> None:
        """See PlannerOwner."""
        for session in self._table.sessions:
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
        for session in self._table.sessions:
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
            for session in self._table.sessions:
                session.child_ended(child)

    # -- the cluster ---------------------------------------------------------------------------------

    def cluster_sessions(self) -> list[ClusterSession]:
        """See ClusterOwner."""
        return [it for it in self._table.sessions if isinstance(it, ClusterSession)]

    def cluster_session(self, identity: str) -> ClusterSession | None:
        """See ClusterOwner."""
        found = self._table.get(identity)
        return found if isinstance(found, ClusterSession) else None

    def open_loading_session(
        self, identity: str, job: ResolvedJob, message: BeginGeneration
    ) -> ClusterSession:
        """See ClusterOwner."""
        assert self._cluster is not None and self._cluster.link is not None
        mesh = [(str(axis), int(size)) for axis, size in message.mesh]
        stage = next((it for it in STAGES if it == message.stage), None)
        if message.stage and stage is None:
            raise ProtocolError(
                f"a generation of pipeline stage {message.stage!r}, none of {STAGES}"
            )
        link = self._cluster.link
        made = self.open_session(
            identity, job, mesh, link, uid=os.getuid(), stage=stage, has_ranks=False
        )
        assert isinstance(made, ClusterSession)
        return made

    # -- sessions (SessionOpener, SessionHost) ----------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """See SessionOpener, LookedOver."""
        return self._stop.is_set()

    @property
    def keeps_ranks(self) -> bool:
        """See SessionOpener."""
        return self._cluster is None

    async def ready_planner(self) -> PlannerWire:
        """See SessionOpener."""
        return await (self._cluster or self._planner).ready()

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
        has_ranks: bool = True,
    ) -> JobSession:
        """See SessionOpener. Without `has_ranks` it loads for other nodes, and validates nothing."""
        reserved_bytes = validation_bytes(job, mesh, self._config) if has_ranks else 0
        make: Callable[..., JobSession] = JobSession
        if self._cluster is not None:
            options = self._cluster.options
            make = partial(ClusterSession, exchange=self._cluster.exchange, node=options.node)
        session = self._table.in_room_of(
            lambda used_bytes: make(
                job,
                mesh,
                self._config,
                self._forks,
                planner,
                identity=identity,
                host=self,
                used_bytes=used_bytes,
                last_generation=self._table.last_generation(identity),
                uid=uid,
                stage=stage,
                resolved_yaml=resolved_yaml,
                parent=parent,
                rights=rights,
                reserved_bytes=reserved_bytes,
            )
        )
        self._table.opened(session)
        return session

    def change_mesh(self, session: JobSession, mesh: list[tuple[str, int]]) -> None:
        """See SessionOpener."""
        reserved_bytes = validation_bytes(session.job, mesh, self._config)
        self._table.in_room_of(
            lambda used_bytes: session.change_mesh(mesh, used_bytes, reserved_bytes), session
        )

    def used_bytes(self, session: JobSession) -> int:
        """See SessionHost."""
        return self._table.used_bytes(session)

    def may_wait(self, session: JobSession) -> bool:
        """See SessionHost. What its ranks say from now on is of no interest."""
        for client in self._table.readers(session):
            self._table.gone(client)
        return self._config.restart_grace_s > 0 and not self._stop.is_set()

    def session_closed(self, session: JobSession) -> None:
        """See SessionHost."""
        self._table.closed(session)
        self._resumes.forget(session.identity)
        if not self._table.sessions and self._stop.is_set():
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
        is_needed = any(s.generation is not None for s in self._table.sessions)
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

    # -- what people see of the daemon itself (LookedOver) ----------------------------------------------

    @property
    def waiting_for(self) -> str:
        """See LookedOver."""
        return "" if self._cluster is None else self._cluster.waiting_for

    @property
    def helpers(self) -> list[tuple[str, int]]:
        """See LookedOver."""
        found = [
            ("fork_server", self._fork_pid),
            ("planner", self._planner.pid),
            ("dashboard", self._dashboard.pid),
        ]
        return [(role, pid) for role, pid in found if pid is not None]

    @property
    def dashboard_error(self) -> str:
        """See LookedOver."""
        return self._dashboard.error

    @property
    def clients(self) -> int:
        """See LookedOver."""
        return len(self._server.clients)

    def end(self) -> None:
        """See LookedOver."""
        self._stop.set()
