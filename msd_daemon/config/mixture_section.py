"""Resolves the mixture of a job: `*` spread, schedule in order, weights checked per source."""

from __future__ import annotations

import math

from federation.model.job import MixturePoint, MixtureSchedule, ResolvedJob
from federation.model.mixture import SHARE_RATIO_MIN, integer_shares
from federation.planning.sampling import check_drawable
from msd_client.contract.errors import ConfigError
from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import SPREAD, MixtureFile
from msd_daemon.config.mixture_groups import GroupFlattener
from msd_daemon.config.mixture_pieces import between_points
from msd_daemon.config.units import SchedulePoint, parse_schedule_key

POINTS_CHECKED_MAX = 64
"""Points whose shares are tried; of more, the planner tries each as it comes."""


def resolve_mixture(
    mixture: MixtureFile | None,
    source_names: tuple[str, ...],
    faults: list[Fault],
    *,
    apart: frozenset[str] = frozenset(),
    notes: list[str] | None = None,
) -> MixtureSchedule | None:
    """Return the schedule with a weight for every source at every point.

    Args:
        mixture: The section; None weighs all sources the same.
        source_names: All sources of the job, also those with faults of their own.
        faults: Receives what is wrong; the result is None then.
        apart: Sources that have no weight unless they are named.
        notes: Receives what was decided.
    """
    if mixture is None:
        weights = {name: 0.0 if name in apart else 1.0 for name in source_names}
        if source_names and not any(weights.values()):
            faults.append(Fault("mixture", None, "no source is left to train on", "name weights"))
            return None
        equal = MixturePoint(0, weights)
        return MixtureSchedule("tokens", (equal,))
    found: list[Fault] = []
    groups = GroupFlattener(source_names, found)
    points = []
    for key, entries in mixture.points.items():
        start, unit = parse_schedule_key(key)
        named = groups.flat(f"mixture.{key}", entries)
        weights = spread_weights(f"mixture.{key}", named, source_names, apart, found)
        points.append(MixturePoint(start, weights, "steps" if start == 0 else unit))
    found += _order_faults(points, list(mixture.points))
    ordered = tuple(sorted(points, key=lambda point: point.start))
    if not found and mixture.interpolate != "none":
        ordered = between_points(ordered, mixture.interpolate, mixture.every, found)
        if notes is not None and ordered:
            every = "a hundredth of each stretch" if mixture.every is None else mixture.every
            notes.append(
                f"mixture: {mixture.interpolate}, {len(ordered)} pieces, each of {_told(every)}"
            )
    faults += found
    if found:
        return None
    return MixtureSchedule(mixture.unit, ordered, groups.groups)


def _told(every: SchedulePoint | str) -> str:
    return every if isinstance(every, str) else f"{every.start} {every.unit}"


def spread_weights(
    path: str,
    named: dict[str, float],
    source_names: tuple[str, ...],
    apart: frozenset[str],
    faults: list[Fault],
) -> dict[str, float]:
    """Return a weight for every source: its own, its part of `*`, or 0.

    Args:
        path: Key path of the weights.
        named: As written, without groups.
        source_names: All sources of the job.
        apart: Sources that `*` leaves out.
        faults: Receives what is wrong.
    """
    known = ", ".join(source_names)
    unknown = [name for name in named if name != SPREAD and name not in source_names]
    faults += [
        Fault(f"{path}.{name}", named[name], "no source has this name", f"write one of {known}")
        for name in unknown
    ]
    rest = [name for name in source_names if name not in named and name not in apart]
    spread = named.get(SPREAD, 0.0)
    if SPREAD in named and spread > 0 and not rest:
        faults.append(
            Fault(f"{path}.{SPREAD}", spread, "every source is named already", "remove it")
        )
    weights = {
        name: named[name] if name in named else spread / len(rest) if name in rest else 0.0
        for name in source_names
    }
    total = sum(weights.values())  # not fsum, which raises where this gives inf
    if total == 0 and not unknown:
        faults.append(
            Fault(
                path,
                named,
                f"all weights are zero (sources {known}), nothing could be drawn",
                "give at least one source a weight above 0",
            )
        )
    elif math.isinf(total):
        faults.append(Fault(path, named, "the sum of the weights overflows", "write smaller ones"))
    else:
        faults += [
            Fault(
                f"{path}.{name if name in named else SPREAD}",
                weight,
                f"{name} would get a share of {weight / total:.3g}, under {SHARE_RATIO_MIN:g}",
                "write 0 for a source that is not to be drawn, or more",
            )
            for name, weight in weights.items()
            if 0 < weight < SHARE_RATIO_MIN * total
        ]
    return weights


def check_shares(job: ResolvedJob, faults: list[Fault]) -> None:
    """Check that no share of the written points is too small beside a row's fragments."""
    names = [source.name for source in job.sources]
    for point in job.mixture.points[:POINTS_CHECKED_MAX]:
        try:
            check_drawable(job, integer_shares(point.weights, names))
        except ConfigError as error:
            name = str(error.attributes["source"])
            problem = f"too small a share to be drawn beside fragments of a row's length ({error.message})"
            faults.append(
                Fault(
                    f"mixture.{point.start}.{name}", point.weights[name], problem, "write more or 0"
                )
            )


def _order_faults(points: list[MixturePoint], keys: list[str]) -> list[Fault]:
    faults = []
    if all(point.start != 0 for point in points):
        faults.append(
            Fault("mixture", keys, "no entry begins at 0", "write `0: {...}` for the first weights")
        )
    units = {point.start_unit for point in points if point.start != 0}
    if len(units) > 1:
        faults.append(
            Fault(
                "mixture",
                keys,
                "steps and tokens are mixed, their order is not known",
                "write all entries after 0 in steps, or all in tokens",
            )
        )
    seen: dict[int, str] = {}
    for point, key in zip(points, keys, strict=True):
        if point.start in seen and len(units) <= 1:
            faults.append(
                Fault(f"mixture.{key}", key, f"the same point as {seen[point.start]}", "keep one")
            )
        seen[point.start] = key
    return faults
