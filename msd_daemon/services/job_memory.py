"""Shared memory of a job on this node under the daemon's configuration: asked before it starts."""

from __future__ import annotations

from dataclasses import replace

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from federation.model.validation import validation_job
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.core.budget import PoolSums, check_total, horizon_of, pool_sums
from msd_daemon.core.ring_plan import plan_rings, rings_bytes

VALIDATION_HORIZON_STEPS = 2
"""A pass of validation plans no further ahead: its pool stays small beside training's."""


def validation_config(config: DaemonConfig) -> DaemonConfig:
    """Return the configuration of a validation stream's session."""
    horizon_steps = min(config.horizon_steps, VALIDATION_HORIZON_STEPS)
    return replace(
        config,
        loader_workers=1,
        loader_workers_min=1,
        loader_workers_max=1,
        spares=0,
        horizon_steps=horizon_steps,
        pool_bytes=None,
    )


def job_pool_sums(job: ResolvedJob, config: DaemonConfig) -> PoolSums:
    """Return the sums of a job's pool.

    Raises:
        BudgetError: A configured pool can't hold the job.
    """
    weighted = {name for point in job.mixture.points for name, w in point.weights.items() if w > 0}
    horizon_steps = horizon_of(job, config.horizon_steps)
    return pool_sums(
        job,
        horizon_steps,
        max(len(weighted), 1),
        config.pool_bytes,
        loader_workers=config.loader_workers_max,
        shadow_bytes=config.shadow_bytes,
    )


def validation_bytes(job: ResolvedJob, mesh: list[tuple[str, int]], config: DaemonConfig) -> int:
    """Return what the largest of a job's validation streams takes while a pass runs.

    Raises:
        MeshMismatchError: The mesh does not fit the rows of a stream.
    """
    tree = ClientPlaceTree.from_mesh(dict(mesh))
    small = validation_config(config)
    largest = 0
    for loader in job.loaders:
        derived = validation_job(job, loader.name)
        tree.check_batch(derived.batch)
        plans = plan_rings(derived, tree, config.ring_slots)
        # Each kind of pipeline stage goes through a pass of its own, with a pool of its own.
        passes = len({plan.place.stage for plan in plans})
        pools_bytes = passes * job_pool_sums(derived, small).pool_bytes
        largest = max(largest, pools_bytes + rings_bytes(plans))
    return largest


def check_job_memory(
    job: ResolvedJob, mesh: list[tuple[str, int]], config: DaemonConfig, available_bytes: int
) -> tuple[dict[str, int], int]:
    """Return the bytes of shared memory that a job needs, by what for, and how many rings it has.

    Raises:
        MeshMismatchError: The mesh does not fit the job.
        BudgetError: They exceed the daemon's budget or the machine; the sums are in the message.
    """
    tree = ClientPlaceTree.from_mesh(dict(mesh))
    tree.check_batch(job.batch)
    plans = plan_rings(job, tree, config.ring_slots)
    needed = {
        "pool": job_pool_sums(job, config).pool_bytes,
        "rings": rings_bytes(plans),
        "validation": validation_bytes(job, mesh, config),
    }
    check_total(needed, 0, config.memory_bytes, available_bytes)
    return needed, len(plans)
