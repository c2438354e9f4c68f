"""The sums of a job's memory on this node, before anything is allocated (DESIGN.md P5). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from federation.model.job import ResolvedJob
from msd_client.contract.errors import BudgetError
from msd_daemon.shm.field_layout import value_bytes
from msd_daemon.shm.media_layout import ITEM_BYTES

POOL_BYTES_MIN = 16 << 20
CHUNK_BYTES_MIN = 64 << 10
CHUNK_BYTES_MAX = 1 << 20
MEDIA_CHUNK_BYTES_MAX = 8 << 20
"""Several decoded images: what a chunk costs the daemon and the planner is shared by them."""
MEDIA_AHEAD_BYTES = 256 << 20
MEDIA_HORIZON_STEPS_MIN = 3
"""One step being read, one kept by a loop variable, one ready."""
SHADOW_CHUNKS = 2
"""One to publish at once, and one that gives the next one time."""
TEXT_BYTES_PER_TOKEN_MIN = 1.0
"""Worst case of a record window: text of one token a byte (the bytes tokenizer; noise)."""


@dataclass(frozen=True)
class PoolSums:
    """What the pool must hold at once; bytes."""

    planned_steps: int
    steps_bytes: int
    carried_bytes: int
    windows_bytes: int
    open_sources: int
    needed_bytes: int
    pool_bytes: int
    chunk_bytes: int
    media_chunk_bytes: int
    """Of a source whose records have media."""
    shadows_bytes: int = 0
    """Of all critical sources, within `needed_bytes`."""
    source_shadow_bytes: int = 0
    """What the shadows of one critical source have ready, all its loaders together; at least a chunk
    each."""

    def lines(self) -> str:
        """Return the sums for people."""
        mib = 1 << 20
        return (
            f"{self.planned_steps} planned steps + 1: {self.steps_bytes / mib:.1f} MiB, carried: "
            f"{self.carried_bytes / mib:.1f} MiB, one chunk for each of {self.open_sources} open "
            f"sources: {self.windows_bytes / mib:.1f} MiB{self._shadow_part()}; needed "
            f"{self.needed_bytes / mib:.1f} MiB, pool {self.pool_bytes / mib:.1f} MiB"
        )

    def _shadow_part(self) -> str:
        if not self.shadows_bytes:
            return ""
        return f", shadows of critical sources: {self.shadows_bytes / (1 << 20):.1f} MiB"


def step_bytes_max(job: ResolvedJob) -> int:
    """Return the bytes of the largest step in the pool, were all of the widest source.

    Values of user fields that lie beside each token are counted with it, and in each row as many
    units of media as it may hold.
    """
    return _step_tokens_bytes(job) + max(job.batch.rows_values) * row_media_bytes(job)


def source_step_bytes(job: ResolvedJob) -> list[int]:
    """Return for each source the bytes of the largest step in the pool, were all of it of that."""
    plain, whole = _step_tokens_bytes(job), step_bytes_max(job)
    return [whole if source.has_media else plain for source in job.sources]


def row_media_bytes(job: ResolvedJob) -> int:
    """Return the most bytes that the media of a row take in the pool."""
    row_tokens = max(job.batch.row_tokens_values)
    return sum(
        rule.row_units_max * rule.unit_bytes + ITEM_BYTES * min(rule.row_units_max, row_tokens)
        for rule in job.media
    )


def _step_tokens_bytes(job: ResolvedJob) -> int:
    widest = max(source.token_bytes for source in job.sources) + value_bytes(job.fields)[0]
    return job.batch.step_tokens_max * widest


def horizon_of(job: ResolvedJob, horizon_steps: int) -> int:
    """Return how many steps are planned ahead: as configured, fewer where media make them large."""
    if not job.media:
        return horizon_steps
    fitting = max(MEDIA_AHEAD_BYTES // step_bytes_max(job), MEDIA_HORIZON_STEPS_MIN)
    return min(horizon_steps, fitting)


def pool_sums(
    job: ResolvedJob,
    horizon_steps: int,
    open_sources: int,
    pool_bytes: int | None,
    *,
    loader_workers: int = 1,
    shadow_bytes: int | None = None,
) -> PoolSums:
    """Return the pool's sums; `pool_bytes` None derives a size that fits with room for read-ahead.

    Args:
        job: The job.
        horizon_steps: Steps planned ahead.
        open_sources: Sources open at once.
        pool_bytes: Of the pool, None to derive it.
        loader_workers: How many may read one source.
        shadow_bytes: What the shadows of a critical source may have ready; None: two chunks a loader.

    Raises:
        BudgetError: A given pool can't hold them; the message has the sums.
    """
    step_bytes = step_bytes_max(job)
    steps_bytes = (horizon_steps + 1) * step_bytes
    fixed = steps_bytes + step_bytes
    wish = fixed + CHUNK_BYTES_MAX * min(open_sources, 32)
    size = pool_bytes if pool_bytes is not None else max(POOL_BYTES_MIN, wish)
    # A chunk holds a record at least, and one with media may be larger than chunks are.
    with_media = sum(source.has_media for source in job.sources)
    record_bytes = row_media_bytes(job)
    media_bytes = min(with_media, open_sources) * record_bytes
    room = max(size - fixed - media_bytes, 0)
    chunk = min(CHUNK_BYTES_MAX, room // max(3 * open_sources, 1)) // 4096 * 4096
    chunk = max(chunk, CHUNK_BYTES_MIN)
    media_chunk = max(chunk, min(MEDIA_CHUNK_BYTES_MAX, record_bytes) // 4096 * 4096)
    windows_bytes = open_sources * chunk + media_bytes
    source_shadow, shadows = _shadow_sums(job, chunk, media_chunk, loader_workers, shadow_bytes)
    needed = fixed + windows_bytes + shadows
    if pool_bytes is None:
        size = max(size + shadows, needed + windows_bytes)
    sums = PoolSums(
        horizon_steps,
        steps_bytes,
        step_bytes,
        windows_bytes,
        open_sources,
        needed,
        size,
        chunk,
        media_chunk,
        shadows,
        source_shadow,
    )
    if needed > size:
        raise BudgetError(
            f"pool of {size} bytes can't hold the job ({sums.lines()}): raise memory.pool_bytes, "
            f"or lower batch.{'step_tokens' if job.batch.is_varlen else 'rows'} or "
            "planner.horizon_steps" + (", or the patches and frames of a row" if job.media else ""),
            needed_bytes=needed,
            available_bytes=size,
        )
    return sums


def _shadow_sums(
    job: ResolvedJob, chunk: int, media_chunk: int, loader_workers: int, shadow_bytes: int | None
) -> tuple[int, int]:
    """Return what the shadows of one critical source, and of all, take of the pool at most."""
    critical = [source for source in job.sources if source.is_critical]
    if not critical:
        return 0, 0
    largest = max(media_chunk if source.has_media else chunk for source in critical)
    # A loader's shadow has room for a chunk at least, and fills one more.
    one = max(shadow_bytes or SHADOW_CHUNKS * largest * loader_workers, largest * loader_workers)
    return one, len(critical) * (one + largest)


def check_total(
    needed: Mapping[str, int], used_bytes: int, memory_bytes: int, available_bytes: int
) -> None:
    """Refuse a job whose pool and rings exceed the daemon's budget or the machine's memory.

    Args:
        needed: Bytes of shared memory by what they are for.
        used_bytes: What other jobs of the daemon take of its budget.
        memory_bytes: The daemon's budget.
        available_bytes: The machine's available memory.

    Raises:
        BudgetError: The message has both sums.
    """
    total = sum(needed.values())
    parts = ", ".join(f"{what} {size}" for what, size in needed.items() if size)
    if total + used_bytes > memory_bytes:
        used = f", of which other jobs use {used_bytes}" if used_bytes else ""
        raise BudgetError(
            f"job needs {total} bytes of shared memory ({parts}), the daemon's budget is "
            f"{memory_bytes}{used}: raise memory.memory_bytes, or lower batch.rows, "
            "batch.microbatch_rows (of packing varlen batch.step_tokens, batch.microbatch_tokens) "
            "or ring slots",
            needed_bytes=total,
            available_bytes=memory_bytes - used_bytes,
        )
    if total > available_bytes * 8 // 10:
        raise BudgetError(
            f"job needs {total} bytes of shared memory, 80 % of the available memory is "
            f"{available_bytes * 8 // 10}: free memory or make the job smaller",
            needed_bytes=total,
            available_bytes=available_bytes,
        )
