"""Which data-parallel group encodes media: said by the job, or followed from its strategy."""

from __future__ import annotations

from typing import Literal

from federation.planning.strategies import HYBRID_STRATEGIES
from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import JobFile


def resolve_encode(
    file: JobFile, *, has_media: bool, faults: list[Fault]
) -> Literal["home", "any"]:
    """Return `any` where batches have to carry the routes of embeddings.

    Args:
        file: The job.
        has_media: True where some source has images, videos or sounds.
        faults: Receives what is wrong.
    """
    is_hybrid = file.strategy in HYBRID_STRATEGIES
    given = file.batch.encode
    if is_hybrid and not has_media:
        faults.append(
            Fault(
                "strategy",
                file.strategy,
                "evens out encoders of media, and no source has any",
                "write balanced, or give a source its image, video or audio field",
            )
        )
    if given == "any" and not has_media:
        faults.append(Fault("batch.encode", given, "no source has media to encode", "leave it out"))
    if is_hybrid and given == "home":
        faults.append(
            Fault(
                "batch.encode",
                given,
                f"strategy {file.strategy} has media encoded anywhere",
                "leave it out, or write strategy: vlm_backbone",
            )
        )
    return given or ("any" if is_hybrid else "home")
