"""Sources whose shards became more while a stream ran: which ones they are, from which pass on. Pure.

What a state knows of its sources' files is a digest, and the points of their growth. That is enough:
a guess of which shards are the old ones is right where it gives that very digest. They are the first
of the manifest where new files sort behind old ones; else the state's own job, where it is known,
lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from federation.model.job import (
    GrowthPoint,
    ResolvedJob,
    Shard,
    SourceSpec,
    manifest_digest,
    source_digest,
)
from msd_client.contract.position import BLOCK_BITS, WINDOW_BITS
from msd_client.contract.state import CURSOR_BLOCK_KEY, CURSOR_OFFSET, StreamState

SOURCE_PART = "sources."
"""What the parts of sources begin with in a sample digest."""
_EPOCH_SHIFT = WINDOW_BITS + BLOCK_BITS
_GUESSES_SHARDS_MAX = 4_000_000
"""Shards that all guesses of one source look at: two seconds."""


def grown_job(
    state: StreamState,
    job: ResolvedJob,
    new_of: Mapping[str, str],
    old_job: ResolvedJob | None,
) -> tuple[ResolvedJob, dict[str, tuple[int, int]]]:
    """Return the job with the growth of its sources written out.

    Args:
        state: The state that goes on.
        job: As it was resolved from files: without growth, or as an earlier call returned it.
        new_of: New name of each source of the state that is still there.
        old_job: The state's own, None where it is not known.

    Returns:
        The job, and by source that has more shards than the state knew: (pass from which on they
        take part, how many there are).
    """
    was = digest_parts(state.sample_digest)
    points = _points_of(state)
    sources = list(job.sources)
    appended: dict[str, tuple[int, int]] = {}
    for place, old_name in enumerate(state.source_names):
        wanted = was.get(SOURCE_PART + old_name)
        if old_name not in new_of or wanted is None:
            continue
        at = job.source_index(new_of[old_name])
        if wanted == part_of(job.sources[at], old_name):
            continue
        growth = points.get(place, ())
        for spec, old_count in _guesses(job.sources[at], old_name, growth, old_job):
            known = _with_shards(spec, spec.shards[:old_count], growth)
            if wanted != part_of(known, old_name):
                continue
            more = len(spec.shards) - old_count
            if not more:
                sources[at] = known
                break
            epoch = _next_pass(state, place)
            before = growth or (GrowthPoint(0, old_count),)
            now = (*(it for it in before if it.epoch < epoch), GrowthPoint(epoch, len(spec.shards)))
            sources[at] = _with_shards(spec, spec.shards, now if epoch else ())
            appended[sources[at].name] = (epoch, more)
            break
    return replace(job, sources=tuple(sources)), appended


def growth_columns(job: ResolvedJob) -> npt.NDArray[np.int64]:
    """Return the growth of a job's sources as a state has it. Shape (3, g)."""
    rows = [
        (place, point.epoch, point.shards)
        for place, source in enumerate(job.sources)
        for point in source.growth
    ]
    return np.array(rows, np.int64).reshape(-1, 3).T


def digest_parts(sample_digest: str) -> dict[str, str]:
    """Return the parts of a sample digest by name."""
    return dict(item.rpartition(":")[::2] for item in sample_digest.split(","))


def part_of(source: SourceSpec, name: str) -> str:
    """Return the digest of a source as it was under its former name, or the one it has."""
    if source.name != name:
        was = "" if source.was == name else source.was
        source = replace(source, name=name, was=was)
    return source_digest(source)


def _points_of(state: StreamState) -> dict[int, tuple[GrowthPoint, ...]]:
    points: dict[int, tuple[GrowthPoint, ...]] = {}
    for source, epoch, shards in state.growth.T.tolist():
        points[source] = (*points.get(source, ()), GrowthPoint(epoch, shards))
    return points


def _next_pass(state: StreamState, place: int) -> int:
    """Return the pass that a source has not begun."""
    key = int(state.progress[CURSOR_BLOCK_KEY, place])
    has_begun = key > 0 or int(state.progress[CURSOR_OFFSET, place]) > 0
    return (key >> _EPOCH_SHIFT) + has_begun


def _guesses(
    spec: SourceSpec, old_name: str, growth: tuple[GrowthPoint, ...], old_job: ResolvedJob | None
) -> Iterator[tuple[SourceSpec, int]]:
    """Yield the source with old shards first, and how many those may be; the likely ones first."""
    count = len(spec.shards)
    if old_job is not None:
        found = _behind_old(spec, old_name, old_job)
        if found is not None:
            yield found
    if growth:
        if growth[-1].shards <= count:
            yield spec, growth[-1].shards
        return
    looked_at = 0
    for old_count in range(count - 1, 0, -1):
        looked_at += old_count
        if looked_at > _GUESSES_SHARDS_MAX:
            return
        yield spec, old_count


def _behind_old(
    spec: SourceSpec, old_name: str, old_job: ResolvedJob
) -> tuple[SourceSpec, int] | None:
    """Return the source with the shards of the state's own job first, in their order, and how many."""
    old = next((source for source in old_job.sources if source.name == old_name), None)
    if old is None:
        return None
    left: dict[tuple[int, str], list[Shard]] = {}
    for shard in spec.shards:
        left.setdefault((shard.size_bytes, shard.fingerprint), []).append(shard)
    first = []
    for shard in old.shards:
        same = left.get((shard.size_bytes, shard.fingerprint))
        if not same:
            return None  # one is gone, or was changed
        first.append(same.pop(0))
    taken = {id(shard) for shard in first}
    later = [shard for shard in spec.shards if id(shard) not in taken]
    return replace(spec, shards=(*first, *later)), len(first)


def _with_shards(
    spec: SourceSpec, shards: tuple[Shard, ...], growth: tuple[GrowthPoint, ...]
) -> SourceSpec:
    return replace(spec, shards=shards, manifest_digest=manifest_digest(shards), growth=growth)
