"""What people ask of a daemon, through msdctl or a trainer: looks, changes of a run, stops."""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from msd_client.contract.errors import (
    ConfigError,
    NotFoundError,
    PermissionDeniedError,
    UsageError,
)
from msd_client.contract.step_numbers import STEP_MAX
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.lateness import LoopWatch
from msd_daemon.observe.observer import Observer
from msd_daemon.observe.past import waits_of_others, why_then
from msd_daemon.observe.snapshot import node_snapshot
from msd_daemon.observe.tracing import trace_steps
from msd_daemon.services.bad_records import page_of_folder
from msd_daemon.services.client_server import Client
from msd_daemon.services.cluster_node import ClusterNode
from msd_daemon.services.job_folder import named_folders
from msd_daemon.services.job_intake import JobIntake, resolve_request
from msd_daemon.services.job_status import session_status
from msd_daemon.services.processes import MemoryLately, MemoryOf, memory_of, process_row
from msd_daemon.services.reloader import Reloader
from msd_daemon.services.rewinds import RewindOrder, rewind_at_rest, rewind_running, step_run
from msd_daemon.services.session_table import SessionTable


class LookedOver(Protocol):
    """What people see of the daemon itself, beside its sessions."""

    @property
    def node(self) -> str:
        """This node's name."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether it ends."""
        ...

    @property
    def waiting_for(self) -> str:
        """What this node can't do without, and why it has it not; empty: nothing."""
        ...

    @property
    def planner_pid(self) -> int | None:
        """Of this node's own planner; None where none runs, or the cluster's plans."""
        ...

    @property
    def helpers(self) -> list[tuple[str, int]]:
        """Roles and pids of its processes that belong to no job."""
        ...

    @property
    def dashboard_error(self) -> str:
        """Why no dashboard is served; empty: it is, or is not wanted."""
        ...

    @property
    def clients(self) -> int:
        """How many are connected."""
        ...

    def end(self) -> None:
        """Drain, then end."""


class OperatorRequests:
    """Of one daemon.

    Args:
        config: Gives the daemon's configuration, as it is now.
        table: The sessions.
        intake: Resolves jobs that are submitted.
        daemon: What is looked at beside sessions.
        observer: Has the looks of the past.
        loop_watch: Counts how often the daemon stood still.
        reloader: Reads the configuration again.
        cluster: None: the node is of none.
    """

    def __init__(
        self,
        config: Callable[[], DaemonConfig],
        table: SessionTable,
        intake: JobIntake,
        daemon: LookedOver,
        observer: Observer,
        loop_watch: LoopWatch,
        reloader: Reloader,
        cluster: ClusterNode | None,
    ) -> None:
        self._config = config
        self._table = table
        self._intake = intake
        self._daemon = daemon
        self._observer = observer
        self._loop_watch = loop_watch
        self._reloader = reloader
        self._cluster = cluster
        self._started = time.time()
        self._memory_lately = MemoryLately()

    @property
    def verbs(self) -> dict[str, Any]:
        """What is answered, by its name in a request."""
        return {
            "ping": self._ping,
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
        }

    async def _ping(self, _client: Client, _body: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid(), "uptime_s": time.time() - self._started}

    async def _status(
        self, client: Client, body: dict[str, Any], memory: MemoryOf = memory_of
    ) -> dict[str, Any]:
        name = body.get("job")
        sessions = self._table.sessions
        if name is not None:
            sessions = [self._table.find(client, name)]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        jobs = [session_status(session) | self._observer.status(session) for session in sessions]
        for job in jobs:
            job["workers"] = [process_row(w["role"], w["pid"], memory) for w in job["workers"]]
        children = [process_row(role, pid, memory) for role, pid in self._daemon.helpers]
        return {
            "daemon": {
                "pid": os.getpid(),
                "version": _version(),
                "socket": str(self._config().socket),
                "state_dir": str(self._config().state_dir),
                "uptime_s": time.time() - self._started,
                "cpu_s": usage.ru_utime + usage.ru_stime,
                "observe_cpu_s": self._observer.cpu_s,
                "memory": memory(os.getpid()),
                "memory_budget_bytes": self._config().memory_bytes,
                "stalls": self._loop_watch.stalls_total,
                "stall_longest_s": round(self._loop_watch.longest_s, 1),
                "is_draining": self._daemon.is_draining,
                "waiting_for": self._daemon.waiting_for,
                "dashboard_error": self._daemon.dashboard_error,
                "clients": self._daemon.clients,
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
            {session.identity: session for session in self._table.sessions},
            node=self._daemon.node,
            ask_cluster=None if self._cluster is None else self._cluster.ask,
            history_s=float(body.get("history_s", 0.0)),
            uid=_history_uid(client),
        )

    async def _why(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """Say who waits for whom, now or at a time (Unix seconds) of the last day."""
        name, at, uid = body.get("job"), body.get("at"), _history_uid(client)
        if at is not None:
            return await why_then(self._observer, name, float(at), self._daemon.node, uid)
        try:
            session = self._table.find(client, name)
        except NotFoundError:
            if name is None or any(name == s.job.name for s in self._table.sessions):
                raise
            return await why_then(self._observer, name, None, self._daemon.node, uid)
        about = {"job": session.job.name, "id": session.identity, "node": self._daemon.node}
        told = self._observer.status(session)
        ask = None if self._cluster is None else self._cluster.ask
        others = await waits_of_others(ask, session.job.name, self._daemon.node)
        return about | {"at": time.time(), "is_past": False, "others": others} | told

    async def _trace(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """See observe/tracing.py."""
        session = self._table.find(client, body.get("job"))
        steps, wait_s = int(body["steps"]), float(body["wait_s"])
        return await trace_steps(session, steps, wait_s, self._daemon.planner_pid)

    async def _bad(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """List bad records of a job that runs, or of one whose folder is there."""
        name, source = body.get("job"), body.get("source")
        wanted = (
            None if source is None else str(source),
            int(body.get("offset", 0)),
            int(body.get("limit", 1000)),
        )
        try:
            session = self._table.find(client, name)
        except NotFoundError:
            if any(name in (None, known.job.name) for known in self._table.sessions):
                raise  # several match: which is to be said
            page = await asyncio.to_thread(
                page_of_folder, Path(self._config().state_dir), name, client.uid, wanted
            )
            if page is None:
                raise
            return page
        page = await session.bad_page(*wanted)
        return page | {"job": session.job.name, "folder": str(session.folder.path)}

    async def _sources(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """Tell what the sources of a running job cost, and what their loaders do."""
        session = self._table.find(client, body.get("job"))
        return {"job": session.job.name, "sources": session.sources_page()}

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
            for s in self._table.sessions
        ]
        running = {row["digest"] for row in rows}
        rows += [
            {"name": name, "state": "submitted", "digest": r.job.digest(), "uid": uid, "ranks": 0}
            for name, (uid, r) in self._table.submitted.items()
            if r.job.digest() not in running
        ]
        return {"jobs": rows}

    async def _submit(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        resolution = await self._intake.resolve(client, resolve_request(body))
        self._intake.check_strategy(resolution.job)
        self._table.submitted[resolution.job.name] = (client.uid, resolution)
        return {
            "name": resolution.job.name,
            "digest": resolution.job.digest(),
            "resolved_yaml": resolution.resolved_yaml,
        }

    async def _mixture(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        session = self._table.find(client, body.get("job"))
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
        session = self._table.find(client, body.get("job"))
        first, end = step_run(body.get("steps"))
        return {"job": session.job.name} | await session.changes.skip_steps(first, end)

    async def _rewind(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """Rewind a job that runs, or one whose folder is there; or take rewinds back."""
        order = RewindOrder.of(body)
        name = body.get("job")
        try:
            session = self._table.find(client, name)
        except NotFoundError:
            found = []
            if not any(name in (None, known.job.name) for known in self._table.sessions):
                found = await asyncio.to_thread(
                    named_folders, Path(self._config().state_dir), str(name), client.uid
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
        self._table.find(client, body.get("job")).changes.report_loss(int(body["step"]), losses)
        return {}

    async def _scale(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        """Have a source read in a number of partitions, or as the scaler finds; or limit the loaders."""
        session = self._table.find(client, body.get("job"))
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

    async def _stop_job(self, client: Client, body: dict[str, Any]) -> dict[str, Any]:
        name = str(body.get("job"))
        removed = self._table.submitted.pop(name, None)
        try:
            session = self._table.find(client, name)
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
        self._daemon.end()
        return {"pid": os.getpid()}


def _history_uid(client: Client) -> int:
    """Return whose history a client may see; 0: everybody's."""
    return 0 if client.uid == os.getuid() else client.uid


@functools.cache
def _version() -> str:
    from importlib.metadata import version  # what it imports is of use to nobody else here

    return version("msd")
