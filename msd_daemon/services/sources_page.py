"""What msdctl is told of a running job's sources: profiles and live counters."""

from __future__ import annotations

from typing import Any

from federation.model.job import ResolvedJob
from msd_daemon.core.loader_costs import LoaderCosts
from msd_daemon.services.generation import Generation
from msd_daemon.services.profile_keeper import ProfileKeeper


def sources_page(
    job: ResolvedJob,
    generation: Generation | None,
    profiles: ProfileKeeper,
    costs: LoaderCosts,
) -> list[dict[str, Any]]:
    """Return one entry for each source of the job.

    Args:
        job: The resolved job.
        generation: The one that runs, None for none.
        profiles: Of the job.
        costs: Of the job.
    """
    wanted: list[float] = []
    workers: dict[int, list[int]] = {}
    awaited: frozenset[int] = frozenset()
    if generation is not None:
        wanted = generation.totals.wanted or list(generation.opened.shares)
        awaited = generation.awaited_sources
        for state in generation.readahead.loaders.values():
            workers.setdefault(state.source_index, []).append(state.worker)
    return [
        {
            "name": spec.name,
            "share": wanted[number] if wanted else 0.0,
            "profile": figures,
            "live": _live(workers.get(number, []), costs, number)
            | {"is_awaited": number in awaited},
        }
        for number, (spec, figures) in enumerate(zip(job.sources, profiles.figures(), strict=True))
    ]


def _live(workers: list[int], costs: LoaderCosts, source: int) -> dict[str, Any]:
    records, tokens, cost = costs.counted(source)
    return {
        "loaders": len(workers),
        "workers": sorted(workers),
        "records": records,
        "tokens": tokens,
        "read_bytes": cost.read_bytes,
        "cpu_s": cost.cpu_ns / 1e9,
        "user_s": cost.user_ns / 1e9,
        "read_wait_s": cost.wait_ns / 1e9,
    }
