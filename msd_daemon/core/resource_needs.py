"""A job, its profiles and this node's budgets, as auto-partitioning takes them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from federation.model.job import MixturePoint, ResolvedJob, SourceSpec
from federation.model.mixture import integer_shares
from federation.model.source_profile import SourceProfile
from federation.planning.resource_costs import SourceNeed, source_loads
from federation.planning.resource_table import Pace
from msd_client.contract.state import StreamState


def source_needs(
    job: ResolvedJob,
    shares: Sequence[int],
    profiles: Sequence[SourceProfile | None],
) -> list[SourceNeed]:
    """Return what is known of each source.

    Args:
        job: The resolved job.
        shares: Integer shares of the mixture in force. Of each source.
        profiles: Of each source, None where it was never measured.
    """
    return [
        SourceNeed(
            name=spec.name,
            share=int(share),
            profile=profile,
            lanes=spec.lane_count,
            is_streaming=spec.order_class == "streaming",
            is_critical=spec.is_critical,
            block_ns=_block_ns(spec, profile),
        )
        for spec, share, profile in zip(job.sources, shares, profiles, strict=True)
    ]


def _block_ns(spec: SourceSpec, profile: SourceProfile | None) -> int:
    """Return what one loader takes for a block of a format whose blocks are ranges of bytes; else 0."""
    if profile is None or not profile.read_bytes or spec.format not in ("jsonl", "text"):
        return 0
    if spec.order_class != "seekable":
        return 0
    largest = max((shard.size_bytes for shard in spec.shards), default=0)
    return profile.busy_ns * min(spec.shuffle.block_bytes, largest) // profile.read_bytes


def point_shares(job: ResolvedJob, point: MixturePoint) -> list[int]:
    """Return the integer shares of all sources at a point of the schedule."""
    names = [source.name for source in job.sources]
    weights = dict.fromkeys(names, 0.0) | point.weights
    shares: list[int] = integer_shares(weights, names).tolist()
    return shares


def shares_of_state(job: ResolvedJob, state: StreamState) -> list[int]:
    """Return the integer shares in force where a stream goes on; before its first step the schedule's."""
    names = tuple(source.name for source in job.sources)
    if state.source_names == names and state.shares.any():
        shares: list[int] = state.shares.tolist()
        return shares
    return point_shares(job, job.mixture.points[0])


def weighted_sources(job: ResolvedJob) -> list[int]:
    """Return the sources that have a weight at some point of the schedule: no other is opened."""
    named = {name for point in job.mixture.points for name, w in point.weights.items() if w > 0}
    return [number for number, spec in enumerate(job.sources) if spec.name in named]


def pace_of(job: ResolvedJob, needs: Sequence[SourceNeed], step_ns: int) -> Pace:
    """Return what ranks consume that take `step_ns` for a step of the job's largest size.

    Media and field values of a step are told by the profiles: what samples take in the pool beside
    their tokens.
    """
    step_tokens = job.batch.step_tokens_max
    payload_bytes = 0
    loads = source_loads(needs, step_tokens, max(step_ns, 1), job.mixture.unit)
    for spec, need, load in zip(job.sources, needs, loads, strict=True):
        profile = need.profile
        if profile is not None and profile.is_measured:
            beside = max(profile.chunk_bytes - profile.tokens * spec.token_bytes, 0)
            payload_bytes += load.tokens * beside // profile.tokens
    return Pace(step_tokens, step_ns, payload_bytes)


def named_shares(job: ResolvedJob, shares: Sequence[int]) -> Mapping[str, float]:
    """Return shares of 1 by name, those of 0 left out."""
    total = max(sum(shares), 1)
    return {
        spec.name: share / total for spec, share in zip(job.sources, shares, strict=True) if share
    }
