"""The making of a generation: rings, the planner's word, and what the pool still holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from federation.messages import JobOpened, OpenJob
from federation.model.job import ResolvedJob, encode_job
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.budget import PoolSums
from msd_daemon.core.ring_plan import RingPlan
from msd_daemon.core.warm_pool import WarmPool
from msd_daemon.services.generation import (
    ClusterPart,
    Generation,
    GenerationOwner,
    StartTimes,
)
from msd_daemon.services.job_folder import JobFolder
from msd_daemon.services.job_mesh import JobMesh
from msd_daemon.services.job_workers import JobWorkers, note_fallback
from msd_daemon.services.membership import Membership
from msd_daemon.services.planner_port import PlannerPort
from msd_daemon.services.rings import close_rings, make_rings
from msd_daemon.services.worker_set import WorkerSet


class StartingSession(GenerationOwner, Protocol):
    """What a generation is made of."""

    job: ResolvedJob
    sums: PoolSums
    membership: Membership
    former: Generation | None
    forget_after: int | None

    @property
    def folder(self) -> JobFolder:
        """The job's files."""


@dataclass(frozen=True)
class GenerationStart:
    """Makes one generation.

    Args:
        session: Whose it is.
        mesh: Of its ranks.
        config: The daemon's.
        planner: Numbered for the new generation already.
    """

    session: StartingSession
    mesh: JobMesh
    config: DaemonConfig
    planner: PlannerPort
    cluster: ClusterPart | None = None
    """This node's part, where the generation has other nodes."""

    def open_order(self, state: bytes, resume_step: int | None) -> OpenJob:
        """Return what the planner is told.

        Args:
            state: Where it begins.
            resume_step: Where a planner that takes over goes on instead.
        """
        session = self.session
        return OpenJob(
            encode_job(session.job),
            [[axis, size] for axis, size in self.mesh.axes],
            state,
            session.sums.planned_steps,
            str(session.folder.journal),
            resume_step,
            self.config.journal_steps_kept,
            session.forget_after if resume_step is None else None,
        )

    async def make(
        self, state: bytes, makers: JobWorkers, workers: WorkerSet, times: StartTimes
    ) -> Generation:
        """Return the generation, which has yet to `begin`; a failure leaves nothing of it behind.

        Args:
            state: Where it begins.
            makers: Give its rings to the constructors.
            workers: At rest.
            times: When ranks asked for it.

        Raises:
            MsdError: The planner refuses it, or memory is short.
        """
        session, number = self.session, self.planner.generation
        rings = await make_rings(
            self.mesh.ring_plans, number, self._readers(session.membership), self.config.segment
        )
        for ring in rings.values():
            note_fallback(session.job.name, ring.segment)
        try:
            for ring in rings.values():
                makers.give_ring(ring, number)
            opened = await self._open(state)
        except BaseException:
            close_rings(rings)
            raise
        warm = WarmPool(
            session.sums.pool_bytes,
            None if session.former is None else session.former.pool,
            session.job.sources,
            opened.cursors,
            opened.carried,
        )
        return Generation(
            session,
            session.job,
            number,
            workers=workers,
            warm=warm,
            sums=session.sums,
            rings=rings,
            opened=opened,
            state_bytes=state,
            times=times,
            cluster=self.cluster,
            deals=makers.deals,
        )

    async def _open(self, state: bytes) -> JobOpened:
        """Have the generation planned."""
        return await self.planner.open(self.open_order(state, None))

    @staticmethod
    def _readers(membership: Membership) -> Callable[[RingPlan], frozenset[int]]:
        begun = {member.rank for member in membership.waiting()}

        def readers_of(plan: RingPlan) -> frozenset[int]:
            return frozenset(
                rank
                for rank in plan.place.ranks
                if rank in membership.members
                and (rank in begun or not membership.is_optional(rank))
            )

        return readers_of
