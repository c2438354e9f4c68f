"""Nodes of a cluster without processes: they load made-up sources and note what they are told.

Messages lie in queues until `run` delivers them, in an order that a seed decides between nodes.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from federation.cluster_job import ClusterJob
from federation.cluster_messages import (
    BeginGeneration,
    JobClosed,
    NodeReady,
    NodeRefused,
    OwnersChanged,
    RanksStarted,
    ResumeNode,
    StartRefused,
    StopJob,
)
from federation.journal_place import LocalPlace
from federation.messages import (
    ChunksPublished,
    JobFailed,
    JobOpened,
    Message,
    PlansMade,
    SourcesStarved,
    StepReleased,
    decode_parts,
    encode_chunks,
)
from federation.model.exports import Export
from federation.model.job import ResolvedJob, encode_job
from federation.model.owners import Owners
from federation.model.plan import StepPlan
from federation.planning.kept_chunks import KeptChunks
from federation.planning.node_parts import producers_of
from msd_client.contract.codec import pack
from msd_client.contract.state import StreamState
from tests.support.metadata import FakeLoader, SourceCorpus

HORIZON = 4
JOB = "j"


@dataclass
class FakeNode:
    """What a node knows of one generation."""

    name: str
    cluster: FakeCluster
    ranks: list[int] = field(default_factory=list)
    begin: BeginGeneration | None = None
    generation: int = 0
    opened: JobOpened | None = None
    plans: dict[int, StepPlan] = field(default_factory=dict)
    exports: dict[int, tuple[Export, ...]] = field(default_factory=dict)
    released: int = -1
    told: list[Message] = field(default_factory=list)
    loaders: dict[tuple[int, int], FakeLoader] = field(default_factory=dict)
    kept: KeptChunks | None = None
    is_holding: bool = False
    """Releases nothing."""
    mesh: dict[str, int] = field(default_factory=dict)

    @property
    def place(self) -> int:
        assert self.begin is not None
        return self.begin.nodes.index(self.name)

    def owners(self) -> Owners:
        assert self.begin is not None
        lanes = [source.lane_count for source in self.cluster.job.sources]
        return Owners.decode(self.begin.owners, lanes, len(self.begin.nodes))

    def start(
        self, state: StreamState, mesh: dict[str, int], ranks: list[int] | None = None
    ) -> None:
        """Have all ranks here, or these, wait for a generation."""
        encoded = state.encode()
        self.mesh = mesh
        self.ranks = self.ranks if ranks is None else ranks
        self.tell_ranks(self.ranks, hashlib.sha256(encoded).hexdigest(), encoded)

    def tell_ranks(self, waiting: list[int], digest: str = "", state: bytes = b"") -> None:
        """Tell of the ranks here: those that do not wait read."""
        reading = [rank for rank in self.ranks if rank not in waiting]
        self.say(
            RanksStarted(
                "job", self.cluster.job.digest(), [[axis, size] for axis, size in self.mesh.items()],
                "", self.ranks, waiting, reading, [digest] * len(waiting), self.generation, HORIZON,
                1000,
            ),
            (pack(encode_job(self.cluster.job)), state) if waiting else (),
        )  # fmt: skip

    def say(self, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        self.cluster.to_planner.append((self.name, self.generation, message, frames))

    def hear(  # noqa: C901 - one case a message
        self, generation: int, message: Message, frames: tuple[bytes, ...]
    ) -> None:
        self.told.append(message)
        match message:
            case BeginGeneration():
                self.begin, self.generation = message, generation
                self.plans, self.exports, self.released = {}, {}, -1
                self.loaders = {}
                self.kept = KeptChunks(self.cluster.job.sources)
                self.say(NodeReady())
            case JobOpened():
                if self.opened is None or not self.plans:
                    self.opened = message
                    self.released = message.step - 1
                    self._open(message.cursors)
                else:  # another planner: all that plans did not pass is told again
                    assert self.kept is not None
                    told, columns = encode_chunks(list(self.kept.chunks_from(message.cursors)))
                    self.say(told, columns)
                    self.say(StepReleased(self.released))
            case SourcesStarved():
                for (source, _), loader in list(self.loaders.items()):
                    if source in message.sources:
                        self._publish(loader)
            case PlansMade():
                self._take(message, frames)
            case OwnersChanged():
                assert self.begin is not None
                former = self.owners()
                self.begin = BeginGeneration(**{**vars(self.begin), "owners": message.owners})
                now = self.owners()
                for source in now.sources_of(self.place):
                    if former.nodes[source] != now.nodes[source]:
                        self._open_source(source, message.cursors[source])
                for source in set(former.sources_of(self.place)) - set(now.sources_of(self.place)):
                    for key in [key for key in self.loaders if key[0] == source]:
                        del self.loaders[key]
            case JobFailed():
                assert self.cluster.may_fail, message.error
                if self not in self.cluster.failed:
                    self.cluster.failed.append(self)
                    self.say(NodeRefused(message.error))  # as a session does that fails
            case StartRefused() | JobClosed() | _:
                pass

    def _open(self, cursors: list[list[int]]) -> None:
        for source in self.owners().sources_of(self.place):
            self._open_source(source, cursors[source])

    def _open_source(self, source: int, cursor: list[int]) -> None:
        owners = self.owners()
        for part in owners.parts_of(self.place, source):
            loader = FakeLoader(
                self.cluster.corpora[source], source, part, len(owners.nodes[source])
            )
            loader.seek(*cursor)
            self.loaders[source, part] = loader

    def _publish(self, loader: FakeLoader) -> None:
        meta = loader.next_chunk()
        if meta is not None:
            assert self.kept is not None
            self.kept.add(meta)
            message, frames = encode_chunks([meta])
            self.say(message, frames)

    def _take(self, message: PlansMade, frames: tuple[bytes, ...]) -> None:
        for plan, exports in decode_parts(message, frames):
            known = self.plans.get(plan.step)
            assert known is None or known.stream_digest == plan.stream_digest
            self.plans[plan.step] = plan
            self.exports[plan.step] = exports
        if not self.is_holding and self.plans and max(self.plans) > self.released:
            self.released = max(self.plans)
            self.say(StepReleased(self.released))


class FakeCluster:
    """A planner's job with nodes; it is the job's host, too."""

    def __init__(
        self,
        folder: Path,
        job: ResolvedJob,
        corpora: list[SourceCorpus],
        ranks: Mapping[str, list[int]],
        seed: int = 0,
    ) -> None:
        self.folder, self.job, self.corpora = folder, job, corpora
        self.nodes = {name: FakeNode(name, self, list(own)) for name, own in ranks.items()}
        self.to_planner: deque[tuple[str, int, Message, tuple[bytes, ...]]] = deque()
        self.to_nodes: dict[str, deque[tuple[int, Message, tuple[bytes, ...]]]] = {
            name: deque() for name in ranks
        }
        self.workers = dict.fromkeys(ranks, 2)
        self.record = b""
        self.silent: set[str] = set()
        self.may_fail = False
        self.failed: list[FakeNode] = []
        """Nodes that were told so."""
        self.clock_ns = 0
        self._rng = random.Random(seed)
        self.term = 1
        self.planner = ClusterJob(JOB, self)

    # the host's side

    def now_ns(self) -> int:
        return self.clock_ns

    def capacities(self) -> Mapping[str, int]:
        return self.workers

    def send(
        self, node: str, job: str, generation: int, message: Message, frames: tuple[bytes, ...] = ()
    ) -> None:
        assert job == JOB
        if node in self.workers:
            self.to_nodes[node].append((generation, message, frames))

    def journal(self, job: str) -> LocalPlace:
        return LocalPlace(self.folder / f"{job}.db")

    def address(self, node: str) -> tuple[str, str]:
        return f"tcp://{node}", ""

    def is_silent(self, node: str) -> bool:
        return node in self.silent

    def keep(self, job: str, record: bytes) -> None:
        self.record = record

    # the test's side

    def start(self, state: StreamState, mesh: dict[str, int]) -> None:
        for node in self.nodes.values():
            if node.ranks:
                node.start(state, mesh)

    def lose(self, name: str) -> None:
        """A node is gone for good."""
        del self.nodes[name], self.workers[name]
        self.to_nodes.pop(name)
        self.to_planner = deque(it for it in self.to_planner if it[0] != name)
        self.planner.node_lost(name, "killed")

    def replace_planner(self) -> None:
        """Another planner takes over; what was on its way is lost."""
        self.planner.abandon()
        self.to_planner.clear()
        for queue in self.to_nodes.values():
            queue.clear()
        self.term += 1
        self.planner = ClusterJob(JOB, self)
        self.planner.restore(self.record, self.clock_ns)
        nodes = list(self.nodes.values())
        self._rng.shuffle(nodes)
        for node in nodes:
            node.say(ResumeNode(node.released))
            node.tell_ranks([])

    def run(self, until: Any, turns: int = 20_000, look_every: int = 1) -> None:
        """Deliver messages until a condition holds; it is looked at every so many turns."""
        for turn in range(turns):
            if turn % look_every == 0 and until():
                return
            waiting = [name for name, queue in self.to_nodes.items() if queue]
            if self.to_planner and (not waiting or self._rng.random() < 0.5):
                node, generation, message, frames = self.to_planner.popleft()
                self._to_planner(node, generation, message, frames)
            elif waiting:
                name = self._rng.choice(waiting)
                self.nodes[name].hear(*self.to_nodes[name].popleft())
            else:
                self.clock_ns += 10**9
                self.planner.advance()
        raise AssertionError(f"not after {turns} turns: {self.planner.status()}")

    def _to_planner(
        self, node: str, generation: int, message: Message, frames: tuple[bytes, ...]
    ) -> None:
        match message:
            case RanksStarted():
                self.planner.ranks_started(node, message, frames)
            case NodeReady():
                self.planner.node_ready(node, generation)
            case ResumeNode():
                self.planner.node_resumes(node, generation, message)
            case NodeRefused():
                self.planner.node_refused(node, generation, message)
            case StopJob():
                self.planner.stopped(node, message)
            case ChunksPublished() | StepReleased() | _:
                self.planner.message(node, generation, message, frames)
        self.planner.advance()

    def owners(self) -> Owners:
        """Return who loads what now, as the nodes were told."""
        return next(iter(self.nodes.values())).owners()

    def steps(self) -> int:
        """Return how many steps every node was told of."""
        return min((max(node.plans, default=-1) + 1 for node in self.nodes.values()), default=0)

    def rows(self, step: int) -> dict[tuple[int, int, int], list[tuple[int, ...]]]:
        """Return each row of a step by its place, as the nodes that read it have it."""
        found: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
        for node in self.nodes.values():
            plan = node.plans[step]
            columns = list(
                zip(
                    plan.source.tolist(), plan.block_key.tolist(), plan.index.tolist(),
                    plan.offset.tolist(), plan.length.tolist(), plan.row.tolist(), strict=True,
                )
            )  # fmt: skip
            for row in range(plan.rows):
                place = (
                    int(plan.row_dp[row]),
                    int(plan.row_microbatch[row]),
                    int(plan.row_slot[row]),
                )
                content = [it[:5] for it in columns if it[5] == row]
                assert found.setdefault(place, content) == content
        return found

    def check_exports(self, step: int) -> None:
        """See that every node is given what its rows need of others, each fragment once."""
        for node in self.nodes.values():
            plan = node.plans[step]
            for producer, places in producers_of(plan, node.owners(), node.place):
                wanted = Export.of_plan(plan, places, node.place).segments()
                assert node.begin is not None
                name = node.begin.nodes[producer]
                (given,) = [
                    it for it in self.nodes[name].exports[step] if it.consumer == node.place
                ]
                assert given.segments() == wanted
