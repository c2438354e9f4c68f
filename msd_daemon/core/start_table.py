"""How a job's workers begin on this node: by profiles, where all that it draws from has one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from federation.model.job import ResolvedJob
from federation.model.source_profile import SourceProfile
from federation.planning.auto_partition import fastest_step_ns, make_table
from federation.planning.resource_table import Budgets, ResourceTable
from msd_daemon.core.resource_needs import pace_of, source_needs

PACE_PRECISION = 8
"""Where the ranks' pace is not known, the fastest that the budgets allow is found to so much."""


@dataclass(frozen=True)
class StartTable:
    """What to start, and who reads what."""

    workers: int
    constructors: int
    deals: dict[int, tuple[int, ...]]
    """By source that is drawn: the worker of each part."""
    table: ResourceTable


def start_table(
    job: ResolvedJob,
    shares: Sequence[int],
    profiles: Sequence[SourceProfile | None],
    budgets: Budgets,
    step_ns: int = 0,
) -> StartTable | None:
    """Return how a job begins; None where a source that it draws from was never measured.

    Args:
        job: The resolved job.
        shares: Integer shares of the mixture in force. Of each source.
        profiles: Of each source.
        budgets: Of this node; without a known pace `workers_max` bounds what is started for the
            fastest pace that they allow.
        step_ns: Of the ranks, 0 where it is not known.
    """
    needs = source_needs(job, shares, profiles)
    if not all(need.is_known for need in needs if need.share):
        return None
    pace = pace_of(job, needs, step_ns)
    if not step_ns:
        fastest = fastest_step_ns(needs, pace, budgets, job.mixture.unit, PACE_PRECISION)
        if fastest is None:
            return None  # memory is checked where the job is taken, and no other step is too short
        pace = pace._replace(step_ns=fastest)
    table = make_table(needs, pace, budgets, job.mixture.unit)
    deals = {row.source: row.workers for row in table.sources if row.parts}
    return StartTable(len(table.workers), table.constructors, deals, table)
