"""Figures of a job between two looks: what charts, metrics and history keep. Pure."""

from __future__ import annotations

from typing import Any

from msd_daemon.core.looks import JobLook

SOURCES_KEPT = 8
"""Sources of a history record: those that were waited for most, then the largest shares."""


def point_of(
    old: JobLook, new: JobLook, tokens: tuple[int, int], steps: tuple[int, int], unix: float
) -> dict[str, Any]:
    """Return the figures of a job between two looks of one generation.

    Args:
        old: The earlier look.
        new: The later one.
        tokens: Placed so far, then and now.
        steps: Released so far, then and now.
        unix: When the later one was, Unix seconds.

    Returns:
        at (Unix s), span_s, step (released), tokens_per_s, steps_per_s, wait_ratio (mean over ranks
        of the part of their time that they waited, 0-1), wait_ratio_max, ready_ratio (slots ready or
        held, of all), pool_used_bytes, pool_bytes, workers_cpus (CPUs that loader workers and
        constructors used), ranks (on this node).
    """
    span_ns = max(new.at_ns - old.at_ns, 1)
    span_s = span_ns / 1e9
    was = {rank.rank: rank.waited_ns for rank in old.ranks}
    waits = []
    for rank in new.ranks:
        waited_ns = rank.waited_ns - was.get(rank.rank, rank.waited_ns)
        if rank.waiting_since_ns:
            waited_ns += new.at_ns - max(rank.waiting_since_ns, old.at_ns)
        waits.append(min(max(waited_ns, 0) / span_ns, 1.0))
    before = {worker.process.pid: worker.process.cpu_ns for worker in old.workers}
    cpu_ns = sum(
        worker.process.cpu_ns - before[worker.process.pid]
        for worker in new.workers
        if worker.process.pid in before
    )
    slots = sum(ring.slots for ring in new.rings)
    return {
        "at": round(unix, 1),
        "span_s": round(span_s, 2),
        "step": steps[1],
        "tokens_per_s": round((tokens[1] - tokens[0]) / span_s, 1),
        "steps_per_s": round((steps[1] - steps[0]) / span_s, 4),
        "wait_ratio": round(sum(waits) / len(waits), 4) if waits else 0.0,
        "wait_ratio_max": round(max(waits, default=0.0), 4),
        "ready_ratio": round(sum(ring.published for ring in new.rings) / slots, 3) if slots else 0,
        "pool_used_bytes": new.pool_bytes - new.pool_free_bytes,
        "pool_bytes": new.pool_bytes,
        "workers_cpus": round(max(cpu_ns, 0) / span_ns, 3),
        "ranks": len(new.ranks),
    }


def waited_sources(old: JobLook, new: JobLook) -> list[dict[str, Any]]:
    """Return the sources of a history record: name, share, and part of the time it was waited for."""
    span_ns = max(new.at_ns - old.at_ns, 1)
    was = {source.name: source.starved_ns for source in old.sources}
    rows: list[dict[str, Any]] = [
        {
            "name": source.name,
            "share": round(source.wanted, 4),
            "waited_for": round(
                (source.starved_ns - was.get(source.name, source.starved_ns)) / span_ns, 3
            ),
        }
        for source in new.sources
    ]
    rows.sort(key=lambda row: (-row["waited_for"], -row["share"]))
    return rows[:SOURCES_KEPT]
