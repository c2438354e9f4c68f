"""What a rank must know of a job that it joins."""

from __future__ import annotations

from typing import Any

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree, RingPlace


def join_answer(
    job: ResolvedJob,
    tree: ClientPlaceTree,
    place: RingPlace,
    rank: int,
    deadlines: dict[str, float],
) -> dict[str, Any]:
    """Return the answer to a rank that joins.

    Args:
        job: The resolved job.
        tree: The mesh.
        place: The rank's ring.
        rank: Its number.
        deadlines: That hold for it, in seconds.
    """
    return {
        "job": job.name,
        "digest": job.digest(),
        "sample_digest": job.sample_digest(),
        "stream_version": job.stream_version,
        "sources": [source.name for source in job.sources],
        "dp_group": place.group,
        "dp_count": tree.dp_count,
        "stage": place.stage,
        "cp_rank": tree.cp_rank(rank),
        "cp_count": tree.cp_count,
        "loss_weights": [source.loss_weight for source in job.sources]
        if job.has_loss_weights
        else [],
        "loaders": [loader.name for loader in job.loaders],
        "loader_sources": {
            loader.name: [s.name for s in job.sources if s.name in loader.sources]
            for loader in job.loaders
        },
        "deadlines": deadlines,
        "wants_reports": job.calibration is not None,
    }
