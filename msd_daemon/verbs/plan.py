"""`msdctl plan resources`: the table of workers and parts for a job, and whether trainers will wait."""

from __future__ import annotations

import os
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import click

from federation.model.job import MixturePoint, ResolvedJob
from federation.model.source_profile import SourceProfile
from federation.planning.auto_partition import fastest_step_ns, make_table
from federation.planning.resource_table import Budgets, ResourceTable, WaitVerdict
from msd_client.contract.errors import BudgetError, DataError
from msd_client.msdctl.daemon_call import parsed
from msd_client.msdctl.job_argument import parse_mesh
from msd_client.msdctl.output import format_size, format_table, json_option, print_json
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.config.units import parse_bytes
from msd_daemon.verbs.run_options import chosen_state_dir, run_options

WORKERS_KEY = "workers.loader_workers"


class PlannedPoint(NamedTuple):
    """The table for one point of the mixture's schedule."""

    point: MixturePoint
    table: ResourceTable
    fastest_ns: int | None
    """Shortest step without a wait; None: there is none."""


class Planned(NamedTuple):
    """What `plan resources` found."""

    job: ResolvedJob
    mesh: dict[str, int]
    budgets: Budgets
    step_ns: int
    """0: not given, each table is for its point's shortest step."""
    profiles: list[SourceProfile | None]
    points: list[PlannedPoint]
    refused: str
    """Why a daemon would not take the job; empty where it would."""

    @property
    def worst(self) -> tuple[PlannedPoint | None, WaitVerdict]:
        """Return the point at which trainers wait the most, and its verdict."""
        if self.refused:
            return None, WaitVerdict(True, "", "memory", self.refused)
        waiting = [it for it in self.points if it.table.verdict.waits]
        if not waiting:
            return self.points[0], self.points[0].table.verdict
        worst = max(waiting, key=lambda it: it.fastest_ns or 1 << 62)
        return worst, worst.table.verdict


@click.group(name="plan", short_help="Say what a job needs, before it starts.")
def command() -> None:
    """Plan a job without starting it."""


@command.command(name="resources", short_help="Workers, parts, memory; will the trainers wait?")
@click.argument("job")
@click.option("--mesh", help="The trainer's mesh on this node, as dp=8; default: one rank.")
@click.option(
    "--step-time",
    "step_time_s",
    type=click.FloatRange(min=1e-6, max=1e5),
    help="Seconds of a step of the trainer; default: the shortest without a wait is told.",
)
@click.option(
    "--cpus",
    type=click.FloatRange(min=0.1, max=4096),
    help="CPUs for loading; default: those that this process may use.",
)
@click.option("--memory", help="Bytes for loading, as 16Gi; default: this machine's.")
@click.option(
    "--workers",
    type=click.IntRange(min=1, max=1024),
    help="Loader workers; default: as daemon.toml says, else as many as are needed.",
)
@click.option("--probe", is_flag=True, help="Measure sources anew that are known.")
@run_options
@json_option
def resources(
    job: str,
    mesh: str | None,
    step_time_s: float | None,
    cpus: float | None,
    memory: str | None,
    workers: int | None,
    probe: bool,
    state_dir: Path | None,
    socket_path: Path | None,
    as_json: bool,
) -> None:
    """Say which processes would load JOB on this node, why so many, and whether trainers will wait.

    Sources that were never measured are read for about a second each; what is found is kept in the
    state folder. One verdict for each point of the mixture's schedule. Exit code 0 either way.
    """
    axes = {} if mesh is None else parsed(parse_mesh, mesh, "--mesh")
    memory_bytes = None if memory is None else parsed(parse_bytes, memory, "--memory")
    step_ns = 0 if step_time_s is None else max(round(step_time_s * 1e9), 1)
    found = run(job, axes, step_ns, cpus, memory_bytes, workers, probe, state_dir, socket_path)
    if as_json:
        print_json("plan-resources", summary(found))
    else:
        click.echo(describe(found))


def run(
    path: str,
    mesh: dict[str, int],
    step_ns: int,
    cpus: float | None,
    memory_bytes: int | None,
    workers: int | None,
    is_anew: bool = False,
    state_dir: Path | None = None,
    socket_path: Path | None = None,
) -> Planned:
    """Plan a job file's resources; see `resources`.

    Raises:
        ConfigError: The job or the daemon's configuration is faulty.
        MeshMismatchError: The mesh does not fit the job.
        DataError: No source could be measured.
    """
    from msd_daemon.core.resource_needs import weighted_sources
    from msd_daemon.verbs.local_job import resolve_local_job
    from msd_daemon.verbs.profiling import measured_profiles

    job, config = resolve_local_job(path)
    config = replace(config, state_dir=chosen_state_dir(state_dir, socket_path, config))
    if workers is not None:
        config = replace(
            config, loader_workers=workers, origins={**config.origins, WORKERS_KEY: "flag"}
        )
    budgets, refused = node_budgets(job, mesh, config, cpus, memory_bytes)
    profiles = measured_profiles(job, config, weighted_sources(job), is_anew=is_anew)
    if not any(profile is not None and profile.is_measured for profile in profiles):
        raise DataError(
            f"job {job.name!r}: no source could be measured: see msdctl check {path}, mend them first"
        )
    return Planned(
        job, mesh, budgets, step_ns, profiles, plan_points(job, profiles, budgets, step_ns), refused
    )


def plan_points(
    job: ResolvedJob, profiles: list[SourceProfile | None], budgets: Budgets, step_ns: int
) -> list[PlannedPoint]:
    """Return the table of every point of the schedule."""
    from msd_daemon.core.resource_needs import pace_of, point_shares, source_needs

    found = []
    for point in job.mixture.points:
        needs = source_needs(job, point_shares(job, point), profiles)
        pace = pace_of(job, needs, step_ns)
        fastest = fastest_step_ns(needs, pace, budgets, job.mixture.unit)
        pace = pace._replace(step_ns=step_ns or fastest or 1_000_000_000)
        table = make_table(needs, pace, budgets, job.mixture.unit)
        found.append(PlannedPoint(point, table, fastest))
    return found


def node_budgets(
    job: ResolvedJob,
    mesh: dict[str, int],
    config: DaemonConfig,
    cpus: float | None,
    memory_bytes: int | None,
) -> tuple[Budgets, str]:
    """Return this node's budgets, and why a daemon would refuse the job.

    Raises:
        MeshMismatchError: The mesh does not fit the job.
    """
    from msd_client.machine_memory import usable_memory_bytes
    from msd_daemon.services.job_memory import check_job_memory

    usable = usable_memory_bytes()
    total = memory_bytes or usable
    refused = ""
    try:
        capped = replace(config, memory_bytes=min(config.memory_bytes, total))
        needed, _ = check_job_memory(job, list(mesh.items()), capped, usable)
        shared = sum(needed.values())
    except BudgetError as error:
        refused, shared = error.message, int(error.attributes.get("needed_bytes") or 0)
    fixed = config.loader_workers if config.origins[WORKERS_KEY] != "default" else 0
    return Budgets(
        cpus_milli=round((cpus or len(os.sched_getaffinity(0))) * 1000),
        memory_bytes=total,
        shared_bytes=shared,
        workers_max=fixed or max(config.loader_workers_max, ceil(cpus or 0)),
        workers_fixed=fixed,
    ), refused


def summary(found: Planned) -> dict[str, Any]:
    """Return the plan for JSON."""
    point, verdict = found.worst
    return {
        "job": found.job.name,
        "digest": found.job.digest(),
        "mesh": found.mesh,
        "budgets": found.budgets._asdict(),
        "step_s": found.step_ns / 1e9 if found.step_ns else None,
        "verdict": _verdict_map(verdict)
        | {"from": None if point is None else _start_text(point.point)},
        "points": [_point_map(it) for it in found.points],
        "profiles": {
            spec.name: None if profile is None else profile.figures()
            for spec, profile in zip(found.job.sources, found.profiles, strict=True)
        },
    }


def _verdict_map(verdict: WaitVerdict) -> dict[str, Any]:
    return {
        "waits": verdict.waits,
        "source": verdict.source or None,
        "stage": verdict.stage or None,
        "reason": verdict.reason,
    }


def _point_map(point: PlannedPoint) -> dict[str, Any]:
    table = point.table
    return {
        "from": _start_text(point.point),
        "verdict": _verdict_map(table.verdict),
        "shortest_step_s": None if point.fastest_ns is None else point.fastest_ns / 1e9,
        "step_s": table.pace.step_ns / 1e9,
        "step_tokens": table.pace.step_tokens,
        "cpus": table.cpu_ppm / 1e6,
        "memory_bytes": table.memory_bytes,
        "memory_reason": table.memory_reason,
        "workers": [
            {"worker": it.worker, "load": it.load_ppm / 1e6, "reason": it.reason}
            for it in table.workers
        ],
        "workers_reason": table.workers_reason,
        "constructors": table.constructors,
        "constructors_reason": table.constructors_reason,
        "sources": [
            {
                "name": row.name,
                "parts": row.parts,
                "workers": list(row.workers),
                "reads": row.reads,
                "shadow": row.has_shadow,
                "load": row.load.busy_ppm / 1e6,
                "reason": row.reason,
            }
            for row in table.sources
        ],
    }


def describe(found: Planned) -> str:
    """Return the plan for people."""
    point, _ = found.worst
    mesh = ",".join(f"{axis}={size}" for axis, size in found.mesh.items()) or "one rank"
    head = f"{found.job.name} on {mesh}, {found.budgets.cpus_milli / 1000:g} CPUs, "
    lines = [head + format_size(found.budgets.memory_bytes)]
    if found.refused:
        return "\n".join([*lines, f"verdict     refused, stage memory: {found.refused}"])
    assert point is not None
    table = point.table
    size = f"{table.pace.step_tokens:,} tokens in {_seconds(table.pace.step_ns)}"
    lines += [
        f"the table for the mixture from {_start_text(point.point)}, steps of {size}:",
        format_table(
            ("source", "parts", "workers", "reads", "shadow", "why"),
            [
                (
                    row.name,
                    row.parts,
                    _numbers(row.workers),
                    row.reads,
                    "yes" if row.has_shadow else "-",
                    row.reason,
                )
                for row in table.sources
            ],
        ),
        f"workers     {len(table.workers)}: {table.workers_reason}",
        *(
            f"  worker {it.worker:<4}{100 * it.load_ppm / 1e6:.3g} %: {it.reason}"
            for it in table.workers
        ),
        f"constructors {table.constructors}: {table.constructors_reason}",
        f"CPUs        {table.cpu_ppm / 1e6:.2f} of {found.budgets.cpus_milli / 1000:g}",
        f"memory      {format_size(table.memory_bytes)}: {table.memory_reason}",
    ]
    lines += [_verdict_line(found, it) for it in found.points]
    return "\n".join(lines)


def _verdict_line(found: Planned, point: PlannedPoint) -> str:
    verdict, head = point.table.verdict, f"verdict     from {_start_text(point.point)}: "
    shortest = (
        "no step is long enough"
        if point.fastest_ns is None
        else f"shortest step without a wait {_seconds(point.fastest_ns)}"
    )
    if not found.step_ns and point.fastest_ns is not None:
        return f"{head}{shortest}, {verdict.reason}"
    if not verdict.waits:
        return f"{head}trainers do not wait: {verdict.reason}; {shortest}"
    what = f"for {verdict.source} " if verdict.source else ""
    return f"{head}trainers wait {what}at stage {verdict.stage}: {verdict.reason}; {shortest}"


def _numbers(workers: tuple[int, ...]) -> str:
    if len(workers) > 4:
        return f"{len(set(workers))} of them"
    return ",".join(map(str, workers)) or "-"


def _start_text(point: MixturePoint) -> str:
    return f"{'step' if point.start_unit == 'steps' else 'token'} {point.start}"


def _seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.3g} s"
