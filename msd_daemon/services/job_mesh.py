"""What follows from the mesh that a job's ranks bring: rings, and who reads them."""

from __future__ import annotations

from dataclasses import dataclass

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from msd_client.contract.batch_spec import Stage
from msd_daemon.core.ring_plan import RingPlan, plan_rings, rings_bytes


@dataclass(frozen=True)
class JobMesh:
    """A mesh with its rings. Another mesh builds another one, nothing else of the job changes."""

    axes: list[tuple[str, int]]
    tree: ClientPlaceTree
    ring_plans: dict[int, RingPlan]
    ring_of: dict[int, int]
    """Ring of each rank that reads the job."""

    @classmethod
    def plan(
        cls,
        job: ResolvedJob,
        axes: list[tuple[str, int]],
        ring_slots: int | None,
        stage: Stage | None,
    ) -> JobMesh:
        """Return the rings of a job for a mesh.

        Args:
            job: The resolved job.
            axes: Of the trainer in order, with sizes.
            ring_slots: As configured.
            stage: The only pipeline stage whose ranks read (validation), None for all.

        Raises:
            MeshMismatchError: The mesh does not fit the batch.
        """
        tree = ClientPlaceTree.from_mesh(dict(axes))
        tree.check_batch(job.batch)
        plans = {plan.place.ring: plan for plan in plan_rings(job, tree, ring_slots, stage)}
        ring_of = {rank: plan.place.ring for plan in plans.values() for rank in plan.place.ranks}
        return cls(axes, tree, plans, ring_of)

    @property
    def rings_bytes(self) -> int:
        """Bytes of all rings."""
        return rings_bytes(tuple(self.ring_plans.values()))
