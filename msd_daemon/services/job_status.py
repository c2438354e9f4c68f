"""What msdctl is told of a running job."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from federation.model.job import ResolvedJob
from msd_client.contract.state import DROPPED_COLUMNS
from msd_daemon.services.generation import Generation
from msd_daemon.services.job_session import JobSession
from msd_daemon.services.rings import Ring


def session_status(session: JobSession) -> dict[str, Any]:
    """Return a job for msdctl."""
    status: dict[str, Any] = {
        "name": session.job.name,
        "id": session.identity,
        "digest": session.job.digest(),
        "uid": session.uid,
        "state": session.state,
        "mesh": [[axis, size] for axis, size in session.mesh],
        "created": session.created,
        "waiting_for_ranks": session.membership.waiting_for(),
        "ranks": [
            {
                "rank": m.rank,
                "pid": m.pid,
                "dp_group": session.tree.dp_group(m.rank),
                "stage": session.tree.stage(m.rank),
            }
            for m in session.members.values()
        ],
        "pool_bytes": session.sums.pool_bytes,
        "workers": [{"role": role, "pid": pid} for role, pid in session.pids()],
        "standby": session.standby_status(),
        "scaling": session.scaling_status(),
    }
    if session.generation is not None:
        status |= generation_status(session.generation, session.job)
        for source, cost in zip(status["sources"], session.costs.all(), strict=True):
            source["cost"] = asdict(cost)
    return status | session.changes.status()


def generation_status(generation: Generation, job: ResolvedJob) -> dict[str, Any]:
    """Return the running generation's part of a job's status."""
    totals = generation.totals
    steps = max(totals.steps, 1)
    realised = {"samples": "drawn_samples", "trained": "valid_tokens"}.get(
        job.mixture.unit, "drawn_tokens"
    )
    total = max(sum(getattr(source, realised) for source in totals.sources), 1)
    pool = generation.pool.statistics()
    sources = []
    for index, (source, spec) in enumerate(zip(totals.sources, job.sources, strict=True)):
        sources.append(
            {
                "name": spec.name,
                "wanted": totals.wanted[index] if totals.wanted else 0.0,
                "realised": getattr(source, realised) / total,
                "drawn_tokens": source.drawn_tokens,
                "drawn_samples": source.drawn_samples,
                "placed_tokens": source.placed_tokens,
                "valid_tokens": source.valid_tokens,
                "dropped_records": source.dropped_records,
                "dropped": {
                    reason: counts[index]
                    for reason, counts in zip(DROPPED_COLUMNS, totals.dropped, strict=True)
                    if counts[index]
                },
            }
        )
    calibration = {}
    if generation.calibration is not None:
        counts = {"reports_received": generation.reports_total}
        calibration = {"calibration": generation.calibration | counts}
    encoders = {}
    if totals.encoder_imbalance_last is not None:
        encoders = {
            "encoder_imbalance": totals.encoder_imbalance_sum / steps,
            "encoder_imbalance_last": totals.encoder_imbalance_last,
        }
    step_planned = generation.opened.step + totals.steps
    changes, skips = generation.waiting_events(step_planned + totals.skipped_steps)
    joined_ms, asked_ms = generation.times.until_first_batch_ms()
    return calibration | {
        "generation": generation.number,
        "step_planned": step_planned,
        "step_released": generation.steps.released_step,
        "skipped_steps": totals.skipped_steps,
        "waiting_mixtures": [
            {"plan_step": step, "shares": _named_shares(job, shares)} for step, shares in changes
        ],
        "waiting_skips": skips,
        "journal_stalled": generation.journal_stalled,
        "tokens": totals.tokens,
        "fill": totals.fill_sum / steps,
        "fill_last": totals.fill_last,
        "imbalance": totals.imbalance_sum / steps,
        "imbalance_last": totals.imbalance_last,
        **encoders,
        "mixture_unit": job.mixture.unit,
        "sources": sources,
        "pool": {
            "capacity_bytes": pool.capacity_bytes,
            "free_bytes": pool.free_bytes,
            "idle_bytes": pool.idle_bytes,
            "undrawn_bytes": pool.undrawn_bytes,
            "chunks": pool.chunks_count,
            "revocations": pool.revocations_total,
        },
        "join_to_first_batch_ms": joined_ms,
        "start_to_first_batch_ms": asked_ms,
        "reads": asdict(generation.reads),
        "taken_over": asdict(generation.warm.statistics),
        "rings": [ring_status(ring) for ring in generation.rings.values()],
    }


def _named_shares(job: ResolvedJob, shares: list[int]) -> dict[str, float]:
    """Return integer shares as shares of 1 by source, those of 0 left out."""
    total = max(sum(shares), 1)
    return {
        source.name: share / total
        for source, share in zip(job.sources, shares, strict=True)
        if share
    }


def ring_status(ring: Ring) -> dict[str, Any]:
    """Return one ring."""
    statistics = ring.state.statistics()
    debt = ring.state.oldest_debt()
    return {
        "dp_group": ring.plan.place.group,
        "stage": ring.plan.place.stage,
        "slots": statistics.slots_count,
        "free": statistics.free_count,
        "ready": statistics.ready_count,
        "held": statistics.held_count,
        "bytes": ring.layout.ring_bytes,
        "published": statistics.published_total,
        "last_reader": None if debt is None else debt.reader,
        "segment": ring.segment.kind,
    }
