"""Schedules between points as explicit pieces of constant weights.

A schedule that moves becomes points at submit, so that planning, digests, resume and resize know of
nothing but points. Weights are rounded to 12 digits: a job's digest must not hang on how a machine's
library rounds a cosine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from federation.model.job import MixturePoint
from federation.model.mixture import SHARE_RATIO_MIN
from msd_daemon.config.faults import Fault
from msd_daemon.config.units import SchedulePoint

PIECES_MAX = 4096
VALUES_MAX = 1 << 18
"""Most weights of all points together: pieces times sources."""
PIECES_DEFAULT = 100
"""Of a stretch between two points, or of a schedule function."""
DIGITS = 12


def pieces_max(source_count: int) -> int:
    """Return how many points a job of so many sources may have."""
    return max(1, min(PIECES_MAX, VALUES_MAX // max(1, source_count)))


def between_points(
    points: Sequence[MixturePoint],
    kind: Literal["linear", "cosine"],
    every: SchedulePoint | None,
    faults: list[Fault],
) -> tuple[MixturePoint, ...]:
    """Return points with the pieces between each two of them.

    A piece has the shares that the curve has at its middle step (or token); the curve goes from
    the normalised shares of one point to those of the next, along a line or half a cosine.

    Args:
        points: At least one, by ascending start, a weight for every source.
        kind: Of the curve.
        every: Length of a piece; None for a hundredth of each stretch.
        faults: Receives what is wrong; the result is of no use then.
    """
    unit = points[-1].start_unit
    if every is not None and len(points) > 1 and every.unit != unit:
        faults.append(
            Fault(
                "mixture.every",
                every.start,
                f"counts {every.unit}, the points are in {unit}",
                f"write the length of a piece in {unit}",
            )
        )
        return ()
    most = pieces_max(len(points[0].weights))
    widths = [
        -(-(after.start - before.start) // PIECES_DEFAULT) if every is None else every.start
        for before, after in itertools.pairwise(points)
    ]
    count = 1 + sum(
        -(-(after.start - before.start) // width)
        for before, after, width in zip(points, points[1:], widths, strict=False)
    )
    if count > most:
        faults.append(_too_many("mixture.every", every, count, most, points[-1].start))
        return ()
    found = []
    for before, after, width in zip(points, points[1:], widths, strict=False):
        length = after.start - before.start
        first, last = _normalised(before.weights), _normalised(after.weights)
        for start in range(0, length, width):
            middle = start + (min(width, length - start) - 1) / 2
            part = middle / length
            if kind == "cosine":
                part = (1 - math.cos(math.pi * part)) / 2
            weights = {name: first[name] + (last[name] - first[name]) * part for name in first}
            start_unit = "steps" if before.start + start == 0 else unit
            found.append(MixturePoint(before.start + start, _tidy(weights), start_unit))
    return merged([*found, points[-1]])


def of_function(
    weights_at: Callable[[int], dict[str, float] | None],
    until: int,
    every: int | None,
    source_count: int,
    faults: list[Fault],
) -> tuple[MixturePoint, ...]:
    """Return a function of the step as points; asks it for the first step of each piece.

    Args:
        weights_at: The weight of every source; None where it found a fault.
        until: First step that it is not asked for.
        every: Steps of a piece; None for a hundredth.
        source_count: Sources of the job.
        faults: Receives what is wrong; the result is of no use then.
    """
    width = every or -(-until // PIECES_DEFAULT)
    count, most = -(-until // width), pieces_max(source_count)
    if count > most:
        given = None if every is None else SchedulePoint(every, "steps")
        faults.append(_too_many("mixture.every", given, count, most, until))
        return ()
    points = []
    for step in range(0, until, width):
        weights = weights_at(step)
        if weights is None:
            return ()
        points.append(MixturePoint(step, {name: round(w, DIGITS) for name, w in weights.items()}))
    return merged(points)


def merged(points: Sequence[MixturePoint]) -> tuple[MixturePoint, ...]:
    """Return points without those that change nothing."""
    kept = [points[0]]
    kept += [
        point for before, point in itertools.pairwise(points) if point.weights != before.weights
    ]
    return tuple(kept)


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _tidy(weights: Mapping[str, float]) -> dict[str, float]:
    """Return shares, rounded; one that is too small to be drawn is 0."""
    return {
        name: 0.0 if share < SHARE_RATIO_MIN * 2 else round(share, DIGITS)
        for name, share in weights.items()
    }


def _too_many(path: str, every: SchedulePoint | None, count: int, most: int, end: int) -> Fault:
    least = -(-end // max(1, most - 1))
    return Fault(
        path,
        None if every is None else every.start,
        f"gives {count} pieces, at most {most} fit (sources times pieces are at most {VALUES_MAX})",
        f"write {least} or more",
    )
