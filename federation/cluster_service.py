"""The planner of a cluster: every job of its nodes, in one blocking loop over one ROUTER.

Which node speaks is what its key says (federation.cluster_sockets). Several steps are planned per
call, journalled in one commit and sent in one message a node.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from federation.cluster_events import Message as NodeMessage
from federation.cluster_events import (
    PeerDown,
    PeerGreeted,
    PeerHeard,
    PeerSilent,
    PeerTraffic,
    PeerUp,
)
from federation.cluster_job import ClusterJob
from federation.cluster_messages import (
    AskCluster,
    ClusterAnswer,
    DrainNode,
    NodeReady,
    NodeRefused,
    NodeReport,
    RanksStarted,
    ResumeNode,
    StartRefused,
    StopJob,
)
from federation.faults import failure_of
from federation.journal_place import JournalPlace
from federation.messages import Envelope, JobFailed, Message, decode_envelope
from federation.store.plan_store import PlanStore
from msd_client.contract.errors import (
    LeadershipLostError,
    MsdError,
    NotFoundError,
    PlanStoreError,
    ProtocolError,
    encode_error,
)

log = logging.getLogger(__name__)

RETRY_MS = 300
"""Between tries of what has to wait: a journal, nodes of a generation that is taken over."""
NODE_LOST_NS = 10 * 10**9
"""A node that is not heard for so long is lost: others load in its place."""
DRAINED = b"drained"
EVENTS_KEPT = 64


class NodeRouter(Protocol):
    """Nodes' messages, in order and each once while both ends live."""

    def send(self, node: str, frames: Sequence[bytes]) -> bool:
        """Send to a node; False, and it is dropped, without a session."""
        ...

    def drop(self, node: str, reason: str) -> None:
        """End a node's session: it begins anew if it comes back."""

    def traffic(self) -> list[PeerTraffic]:
        """Return what went to and came from every node."""
        ...

    def hellos(self) -> dict[str, dict[str, Any]]:
        """Return what each node that has a session said of itself."""
        ...


class ClusterService:
    """Plans the jobs of a cluster for one term.

    Args:
        router: To the nodes.
        store: Keeps jobs and journals for a successor.
        term: Of this planner; nodes obey no older one.
    """

    def __init__(self, router: NodeRouter, store: PlanStore, term: int) -> None:
        self._router = router
        self._store = store
        self._term = term
        self._jobs: dict[str, ClusterJob] = {}
        self._nodes: dict[str, dict[str, Any]] = dict(router.hellos())
        """What each node said of itself when it came, by name."""
        self._silent: dict[str, int] = {}
        """Since when nodes are not heard, of the monotonic clock."""
        self._drained: set[str] = set()
        self._reports: dict[str, NodeReport] = {}
        self._events: deque[list[Any]] = deque(maxlen=EVENTS_KEPT)
        """[seconds since the epoch, what happened], for people."""
        for name, body in store.records("nodes").items():
            if body == DRAINED:
                self._drained.add(name)
        self._happened(f"this planner leads with term {term}")
        for job, record in store.records("jobs").items():
            self._restore(job, record)

    def _restore(self, identity: str, record: bytes) -> None:
        job = ClusterJob(identity, self)
        try:
            job.restore(record, self.now_ns())
        except (MsdError, KeyError, TypeError) as error:
            log.error("job %s can't be taken over: %s", identity, error)
            return
        self._jobs[identity] = job
        log.info("job %s: waiting for the nodes of generation %d", identity, job.generation)

    # -- ClusterHost ---------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        """See ClusterHost."""
        return self._term

    def now_ns(self) -> int:
        """See ClusterHost."""
        return time.monotonic_ns()

    def capacities(self) -> Mapping[str, int]:
        """See ClusterHost."""
        return {
            name: 0 if name in self._drained else int(hello.get("loader_workers", 1))
            for name, hello in self._nodes.items()
            if hello.get("loader_workers", 1)
        }

    def send(
        self, node: str, job: str, generation: int, message: Message, frames: tuple[bytes, ...] = ()
    ) -> None:
        """See ClusterHost."""
        if node in self._nodes:
            envelope = Envelope(job, generation, self._term, 0, message, frames)
            self._router.send(node, envelope.encode())

    def journal(self, job: str) -> JournalPlace:
        """See ClusterHost."""
        return self._store.journal(job)

    def address(self, node: str) -> tuple[str, str]:
        """See ClusterHost."""
        hello = self._nodes.get(node, {})
        return str(hello.get("exchange", "")), str(hello.get("exchange_key", ""))

    def is_silent(self, node: str) -> bool:
        """See ClusterHost."""
        return node in self._silent

    def keep(self, job: str, record: bytes) -> None:
        """See ClusterHost."""
        if record:
            self._store.put("jobs", job, record)
        else:
            self._store.drop("jobs", job)

    # -- the loop ------------------------------------------------------------------------------------

    def handle(self, events: list[Any]) -> int | None:
        """Take what nodes sent, plan on, try again what has to wait.

        Returns:
            Milliseconds until it wants to be called again; None: once something comes.
        """
        touched: dict[str, None] = {}
        for event in events:
            named = self._take(event)
            if named is not None:
                touched[named] = None
        for node, since_ns in list(self._silent.items()):
            if self.now_ns() - since_ns > NODE_LOST_NS:
                self._router.drop(node, "it was silent for too long")
                self._node_lost(node, f"not heard for {NODE_LOST_NS / 1e9:g} s")
        for identity, job in list(self._jobs.items()):
            training = self._jobs.get(job.awaits_ranks_of())
            if training is not None:
                self._guarded(identity, "", 0, partial(job.will_not_come, training.ranks_gone()))
            if identity in touched or job.is_waiting:
                self._guarded(identity, "", 0, job.advance)
            if job.is_empty:
                del self._jobs[identity]
        is_waiting = self._silent or any(job.is_waiting for job in self._jobs.values())
        return RETRY_MS if is_waiting else None

    def _take(self, event: Any) -> str | None:
        """Take one event; return the job that it is about, if it is about one."""
        match event:
            case NodeMessage(node, frames):
                return self._receive(node, frames)
            case PeerUp(node, _, hello):
                self._node_came(node, hello)
            case PeerGreeted(node, hello):
                self._nodes[node] = hello
            case PeerDown(node, reason):
                self._node_lost(node, reason)
            case PeerSilent(node, for_s):
                self._happened(f"node {node} is not heard")
                self._silent.setdefault(node, self.now_ns() - int(for_s * 1e9))
            case PeerHeard(node):
                self._happened(f"node {node} is heard again")
                self._silent.pop(node, None)
        return None

    def close(self) -> None:
        """Keep nothing open: another planner may go on."""
        for job in self._jobs.values():
            job.abandon()

    def _node_came(self, node: str, hello: dict[str, Any]) -> None:
        log.info("node %s joins", node)
        self._happened(f"node {node} joined")
        if node in self._nodes:  # it was restarted: what it had is gone
            self._node_lost(node, "it was restarted")
        self._nodes[node] = hello
        for job in list(self._jobs.values()):
            self._guarded(job.identity, node, 0, partial(job.reassign, f"node {node} joined"))

    def _node_lost(self, node: str, reason: str) -> None:
        self._silent.pop(node, None)
        if self._nodes.pop(node, None) is None:
            return
        log.warning("node %s is lost: %s", node, reason)
        self._happened(f"node {node} was lost: {reason}")
        for job in list(self._jobs.values()):
            self._guarded(job.identity, node, 0, partial(job.node_lost, node, reason))

    def _receive(self, node: str, frames: list[bytes]) -> str | None:
        try:
            envelope = decode_envelope(frames)
        except ProtocolError as error:
            log.error("node %s sends what is no message: %s", node, error.message)
            self.send(node, "", 0, JobFailed(encode_error(error)))
            return None
        self._guarded(envelope.job, node, envelope.generation, lambda: self._handle(node, envelope))
        return envelope.job

    def _handle(self, node: str, envelope: Envelope) -> None:
        message, generation = envelope.message, envelope.generation
        if isinstance(message, (NodeReport, AskCluster, DrainNode)):
            self._handle_node(node, message)
            return
        job = self._jobs.get(envelope.job)
        if job is None:
            if not isinstance(message, (RanksStarted, ResumeNode)):
                return  # of a job that ended meanwhile
            job = self._jobs[envelope.job] = ClusterJob(envelope.job, self)
        match message:
            case RanksStarted():
                try:
                    job.ranks_started(node, message, envelope.frames)
                except MsdError as error:
                    self.send(node, envelope.job, 0, StartRefused(encode_error(error)))
            case NodeReady():
                job.node_ready(node, generation)
            case NodeRefused():
                job.node_refused(node, generation, message)
            case StopJob():
                job.stopped(node, message)
            case ResumeNode():
                job.node_resumes(node, generation, message)
            case _:
                job.message(node, generation, message, envelope.frames)

    def _handle_node(self, node: str, message: NodeReport | AskCluster | DrainNode) -> None:
        """Take what is about no job."""
        if isinstance(message, NodeReport):
            self._reports[node] = message
            return
        error = None
        if isinstance(message, DrainNode):
            if message.node in self._nodes or message.node in self._drained:
                self.drain(message.node, is_drained=message.is_drained)
            else:
                names = ", ".join(sorted(self._nodes))
                error = encode_error(
                    NotFoundError(f"the cluster has no node {message.node!r}: it has {names}")
                )
        self.send(node, "", 0, ClusterAnswer(message.request, self.status(), error))

    def _guarded(self, job: str, node: str, generation: int, action: Callable[[], None]) -> None:
        failure = failure_of(action)
        if failure is None:
            return
        if isinstance(failure, LeadershipLostError | PlanStoreError):
            raise failure  # whoever leads next goes on
        log.error("job %s: %s", job, failure.message)
        found = self._jobs.get(job)
        if found is not None and found.fail(failure):
            return
        self.send(node, job, generation, JobFailed(encode_error(failure)))

    # -- operators -----------------------------------------------------------------------------------

    def drain(self, node: str, *, is_drained: bool = True) -> None:
        """Have a node load nothing any more, or load again; its ranks read on."""
        if is_drained:
            self._store.put("nodes", node, DRAINED)
            self._drained.add(node)
        else:
            self._store.drop("nodes", node)
            self._drained.discard(node)
        what = "is drained" if is_drained else "loads again"
        self._happened(f"node {node} {what}")
        for job in list(self._jobs.values()):
            self._guarded(job.identity, node, 0, partial(job.reassign, f"node {node} {what}"))

    def status(self) -> dict[str, Any]:
        """Return what `msdctl cluster` shows."""
        traffic = {peer.node: peer for peer in self._router.traffic()}
        nodes = []
        for name, hello in sorted(self._nodes.items()):
            report, wire = self._reports.get(name), traffic.get(name)
            since_ns = self._silent.get(name)
            row: dict[str, Any] = {
                "node": name,
                "loader_workers": hello.get("loader_workers", 0),
                "exchange": hello.get("exchange", ""),
                "is_drained": name in self._drained,
                "silent_s": 0.0 if since_ns is None else (self.now_ns() - since_ns) / 1e9,
            }
            if report is not None:
                row |= {
                    "received_bytes": report.received_bytes,
                    "sent_bytes": report.sent_bytes,
                    "silent_peers": report.silent_peers,
                    "verdicts": report.verdicts,
                }
            if wire is not None:
                row |= {
                    "control_bytes_in": wire.bytes_in,
                    "control_bytes_out": wire.bytes_out,
                    "resends": wire.resends,
                }
            nodes.append(row)
        return {
            "term": self._term,
            "nodes": nodes,
            "jobs": [job.status() for job in self._jobs.values()],
            "events": list(self._events),
        }

    def _happened(self, what: str) -> None:
        self._events.append([time.time(), what])
