"""Resolves `strategy`: one by name, or the user's own function from a copy by content."""

from __future__ import annotations

from pathlib import Path

from federation.model.job import ResolvedJob
from federation.model.recipe import UserCall
from federation.planning.extra_rows import ExtraRows
from federation.planning.strategies import DELAYING_STRATEGIES, STRATEGIES
from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import JobFile
from msd_daemon.config.transform_file import FunctionFile
from msd_daemon.config.user_code import resolve_user_call


def resolve_strategy(
    file: JobFile, base_dir: Path, store_dir: Path, faults: list[Fault]
) -> tuple[str, UserCall | None]:
    """Return a strategy's name, and the call of one of the user's own."""
    strategy = file.strategy
    if isinstance(strategy, FunctionFile):
        call = resolve_user_call("strategy", strategy.as_transform(), base_dir, store_dir, faults)
        return strategy.call, call
    if strategy not in STRATEGIES:
        faults.append(
            Fault(
                "strategy",
                strategy,
                f"no strategy has this name, there are {', '.join(sorted(STRATEGIES))}",
                "write one of them, or module:function for one of your own",
            )
        )
    return strategy, None


def check_delay(job: ResolvedJob, faults: list[Fault]) -> None:
    """Refuse a strategy that lets documents wait where they cannot."""
    if job.strategy not in DELAYING_STRATEGIES:
        return
    if job.batch.packing != "best_fit" or ExtraRows.of(job).count:
        problem = (
            f"lets long documents wait, which packing {job.batch.packing} with these sources cannot: "
            "it takes best_fit, without masks, media, groups or transforms that make several samples"
        )
        faults.append(Fault("strategy", job.strategy, problem, "write balanced"))
