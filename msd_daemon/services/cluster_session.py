"""One job on this node of a cluster: its ranks here, and what it loads for ranks elsewhere.

The planner gathers the ranks of all nodes, and says when a generation begins, on which nodes and who
loads what. Once the ranks here left, the node goes on to load for the others; once all left, all
nodes wait for them to come back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from federation.cluster_messages import (
    AwaitedRanks,
    BeginGeneration,
    JobClosed,
    NodeReady,
    NodeRefused,
    OwnersChanged,
    RanksGone,
    RanksStarted,
    ResumeNode,
    StartRefused,
    StopJob,
)
from federation.core.gathering import RankNeeds
from federation.messages import CloseJob, Envelope, JobOpened
from federation.model.job import encode_job
from federation.model.owners import Owners
from federation.planner_link import PlannerWire
from msd_client.contract.batch_spec import Stage
from msd_client.contract.codec import pack
from msd_client.contract.errors import (
    MsdError,
    PlannerUnavailableError,
    WorkerLostError,
    decode_error,
    encode_error,
)
from msd_daemon.core.ring_plan import RingPlan
from msd_daemon.services.exchange_port import ExchangePort, ParcelKey
from msd_daemon.services.generation import ClusterPart
from msd_daemon.services.generation_start import GenerationStart
from msd_daemon.services.job_mesh import JobMesh
from msd_daemon.services.job_session import JobSession
from msd_daemon.services.membership import Membership
from msd_daemon.services.parcels import Parcels, issue_of, parcel_generation
from msd_daemon.services.starts import Starts
from msd_daemon.shm.segment import Segment

log = logging.getLogger(__name__)

FREE_WAIT_S = 20.0
"""Longer than a node that died counts as living."""
FREE_POLL_S = 0.05


class ClusterMembership(Membership):
    """The ranks here; whom else a start waits for the planner says."""

    awaited: tuple[int, ...] = ()

    def waiting_for(self) -> list[int]:
        """Return ranks of any node that the next generation waits for; of them the planner knows."""
        if self.awaited or not self.waiting():
            return list(self.awaited)
        return super().waiting_for()


class ClusterStarts(Starts):
    """Starts of the ranks here: a generation begins when the planner says so."""

    def __init__(self, owner: ClusterSession, membership: Membership) -> None:
        super().__init__(owner, membership)
        self._session = owner

    def begin_if_possible(self) -> None:
        """Tell the planner who waits."""
        self._session.tell_ranks()

    def will_not_come(self, rank: int) -> None:
        """The planner knows: it refuses the pass on all nodes."""

    def begin(self, state: bytes) -> None:
        """Begin the generation that the planner asked for."""
        self._owner.state = "beginning"
        self._begin_task = asyncio.get_running_loop().create_task(self._make(state))

    async def _make(self, state: bytes) -> None:
        session = self._session
        try:
            await session.begin_generation(state)
            return
        except MsdError as error:
            failure = error
        except (TimeoutError, OSError) as error:
            failure = WorkerLostError(f"job {session.job.name!r} could not start: {error!r}")
        session.state = "failed"
        session.send_planner(NodeRefused(encode_error(failure)))
        self._membership.refuse_start(failure)


class ClusterStart(GenerationStart):
    """Makes this node's part of a generation."""

    async def _open(self, _state: bytes) -> JobOpened:
        return await self.planner.await_opened(NodeReady())


class ClusterSession(JobSession):
    """A job with its ranks on this node."""

    def __init__(self, *arguments: Any, exchange: ExchangePort, node: str, **options: Any) -> None:
        self._begun: BeginGeneration | None = None
        self._part: ClusterPart | None = None
        self._exchange = exchange
        self._node = node
        self._told: RanksStarted | None = None
        """What the planner was told of the ranks here last."""
        self._pool: Segment | None = None
        super().__init__(*arguments, **options)

    @staticmethod
    def refuse(planner: PlannerWire, envelope: Envelope, error: MsdError) -> None:
        """Answer a generation that no session here can take part in."""
        planner.send(envelope.job, envelope.generation, NodeRefused(encode_error(error)))

    # -- ranks -----------------------------------------------------------------------------------

    def _make_members(self) -> tuple[Membership, Starts]:
        membership = ClusterMembership(self.job.name, RankNeeds.of(self.tree, self._stage))
        return membership, ClusterStarts(self, membership)

    def tell_ranks(self, *, is_anew: bool = False) -> None:
        """Tell the planner of the ranks here, where that changed.

        Args:
            is_anew: Another planner leads.
        """
        digests = self.membership.state_digests()
        message = RanksStarted(
            self.job.name,
            self.job.digest(),
            [[axis, size] for axis, size in self.mesh],
            self._stage or "",
            sorted(self.members),
            list(digests),
            self.membership.reading(),
            list(digests.values()),
            self._planner.generation,
            self.sums.planned_steps,
            self._config.journal_steps_kept,
            self.forget_after,
            "" if self.parent is None else self.parent.identity,
        )
        if message == self._told and not is_anew:
            return
        self._told = message
        frames: tuple[bytes, ...] = ()
        waiting = self.membership.waiting()
        if waiting:
            frames = (pack(encode_job(self.job)), waiting[0].started_with or b"")
        self.send_planner(message, frames)

    async def until_free(self) -> None:
        """Wait for the ranks of other nodes: a launcher that starts all anew knows first that they left."""
        until_s = asyncio.get_running_loop().time() + FREE_WAIT_S
        while not self.members and self.generation is not None and not self.is_over:
            if asyncio.get_running_loop().time() > until_s:
                return
            await asyncio.sleep(FREE_POLL_S)

    def _all_left(self) -> None:
        """The ranks here left; the planner knows whether others read on."""
        if self.generation is None or self.is_over:
            super()._all_left()
            return
        for member in self.membership.leaving.values():
            self.generation.reader_lost(member.rank, member.ring)
        self.membership.leaving.clear()
        for ring in self.generation.rings.values():
            for rank in list(ring.state.readers):
                self.generation.reader_lost(rank, ring.plan.place.ring)
        self.tell_ranks()

    def ranks_gone(self, stage: Stage) -> list[int]:
        """Return those of the ranks that are placed here; of others the planner knows."""
        begun, part = self._begun, self._part
        if begun is None or part is None:
            return []  # nobody knows yet which ranks come here
        return [rank for rank in super().ranks_gone(stage) if begun.rank_nodes[rank] == part.node]

    def left(self, rank: int, reason: str) -> None:
        """A rank is gone; passes of validation anywhere may need it."""
        super().left(rank, reason)
        if self.members:
            self.tell_ranks()

    def leaving(self, rank: int, held: list[tuple[int, int]]) -> bool:
        """A rank said goodbye."""
        does_wait = super().leaving(rank, held)
        if self.members:
            self.tell_ranks()
        return does_wait

    # -- generations -----------------------------------------------------------------------------

    def _number_generation(self) -> int:
        return self._planner.generation

    @property
    def _start_of(self) -> ClusterStart:
        return ClusterStart(self, self._local_mesh(), self._config, self._planner, self._part)

    def _local_mesh(self) -> JobMesh:
        """Return the mesh with the rings that ranks here read."""
        begun, part = self._begun, self._part
        assert begun is not None and part is not None
        here = {rank for rank, node in enumerate(begun.rank_nodes) if node == part.node}
        plans: dict[int, RingPlan] = {}
        for number, plan in self._mesh.ring_plans.items():
            ranks = tuple(rank for rank in plan.place.ranks if rank in here)
            if ranks:
                plans[number] = plan.of_ranks(ranks)
        return JobMesh(self._mesh.axes, self._mesh.tree, plans, self._mesh.ring_of)

    async def begin_generation(self, state: bytes) -> None:
        """See StartsOwner."""
        first = parcel_generation(self._planner.generation, 0)
        await self._exchange.drop_generation(self.identity, first - 1)
        await super().begin_generation(state)
        self.tell_ranks()

    def _pool_ready(self, pool: Segment) -> None:
        """The exchange reads and fills it."""
        if self._pool is not pool:
            self._pool = pool
            self._exchange.add_pool(self.identity, pool, self.job.fields, self.job.media)

    def _planning_ends(self, reason: str) -> None:
        """The planner knows already: it says when generations begin and end."""

    # -- planner ---------------------------------------------------------------------------------

    def planner_message(self, envelope: Envelope) -> None:
        """Take an envelope that names this job."""
        message = envelope.message
        match message:
            case BeginGeneration():
                self._begin(envelope, message)
            case StartRefused():
                error = decode_error(**message.error)
                self._planner.fail(error)
                self.membership.refuse_start(error)
                self._told = None
            case AwaitedRanks():
                if isinstance(self.membership, ClusterMembership):
                    self.membership.awaited = tuple(message.ranks)
            case RanksGone():
                if self.members or self.is_waiting or self.state == "closed":
                    return
                if self._stage is not None:  # nobody comes back to a pass of validation
                    self.close("all ranks left")
                else:
                    self._wait_for_ranks()
            case JobClosed():
                if not self.members:
                    self.close(message.reason)
            case OwnersChanged():
                if self.generation is not None and envelope.generation == self.generation.number:
                    self.generation.owners_changed(message)
            case _:
                super().planner_message(envelope)

    def _begin(self, envelope: Envelope, message: BeginGeneration) -> None:
        lanes = [source.lane_count for source in self.job.sources]
        owners = Owners.decode(message.owners, lanes, len(message.nodes))
        place = message.nodes.index(self._node)
        self._begun = message
        self._part = ClusterPart(self.identity, tuple(message.nodes), place, owners, self._exchange)
        self._planner.begin(envelope.generation)
        if isinstance(self.membership, ClusterMembership):
            self.membership.awaited = ()
        self._end_grace()
        waiting = self.membership.waiting()
        state = waiting[0].started_with if waiting else envelope.frames[1]
        assert state is not None and isinstance(self.starts, ClusterStarts)
        self.starts.begin(state)

    def planner_leads(self, planner: PlannerWire) -> None:
        """Another planner leads, or the same one anew: tell it where this node stands."""
        self._planner.replaced(planner)
        generation = self.generation
        if self.is_over:
            return
        if generation is not None and self.state == "running":
            generation.planner_away()
            self.send_planner(ResumeNode(generation.steps.released_step))
            self._planner.expect_opened(generation.planner_back, self.failed)
        self.tell_ranks(is_anew=True)

    def failed(self, error: MsdError) -> None:
        """Tell every rank, here and elsewhere, that the job can't go on."""
        is_told = isinstance(error, PlannerUnavailableError) or self.is_waiting
        if not self.is_over and not is_told:
            self.send_planner(NodeRefused(encode_error(error)))
        super().failed(error)

    def stop(self) -> None:
        """End the job on an operator's word, on all nodes."""
        if not self.is_over:
            self.send_planner(StopJob(encode_error(self._stopped_by_operator())))
        super().stop()

    def close(self, reason: str) -> None:
        """End the job on this node."""
        if self.state != "closed":
            self.send_planner(CloseJob(reason))
            if self._pool is not None:
                self._pool = None
                self._exchange.drop_pool(self.identity)
        super().close(reason)

    # -- the exchange ----------------------------------------------------------------------------

    def parcels_of(self, key: ParcelKey) -> Parcels | None:
        """Return what a parcel of the running generation concerns; None of any other's."""
        generation = self.generation
        if generation is None or generation.number != issue_of(key.generation)[0]:
            return None
        return generation.parcels
