"""Weights of a mixture: checks, the schedule's points in force, and their integer form.

A weight becomes an integer share out of `SHARE_TOTAL`; all later arithmetic is on integers, so
plans agree on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from federation.model.job import MixtureSchedule, ResolvedJob
from msd_client.contract.errors import ConfigError

SHARE_TOTAL = 1 << 40
SHARE_RATIO_MIN = 1e-9
"""Smallest share that can be told from never: below it a source would not be drawn in a run."""


WEIGHT_MAX = 1e15
"""Sums of weights stay exact enough; nobody means such numbers."""


def untrained_sources(job: ResolvedJob) -> frozenset[str]:
    """Return the sources that have no share where shares are of trained tokens: loss weight 0."""
    if job.mixture.unit != "trained":
        return frozenset()
    return frozenset(source.name for source in job.sources if source.loss_weight <= 0)


def check_weights(
    weights: Mapping[str, float],
    source_names: Sequence[str],
    where: str,
    untrained: frozenset[str] = frozenset(),
) -> None:
    """Refuse weights that are not one finite number >= 0 per source, one of them above 0.

    Args:
        weights: Weight by source name.
        source_names: All sources of the job.
        where: What the weights are of, for the message.
        untrained: Sources that no token is trained of, which the mixture's unit counts.

    Raises:
        ConfigError: All faults at once, each with source and value.
    """
    faults = [
        f"{name}: no source has this name" for name in weights if name not in set(source_names)
    ]
    for name in source_names:
        if name not in weights:
            faults.append(f"{name}: no weight is given; write 0 to leave the source out")
            continue
        fault = _weight_fault(weights[name])
        if fault:
            faults.append(f"{name}: weight {weights[name]!r} {fault}")
        elif weights[name] > 0 and name in untrained:
            faults.append(
                f"{name}: weight {weights[name]!r} is a share of trained tokens, with loss_weight 0 it "
                "has none; write weight 0, or unit: tokens"
            )
    if not faults and math.fsum(weights.values()) <= 0:
        faults.append("all weights are 0: nothing could be drawn")
    if not faults:
        total = math.fsum(weights.values())
        faults = [
            f"{name}: weight {weights[name]!r} is a share of {weights[name] / total:.3g}, "
            f"less than {SHARE_RATIO_MIN:g}; write 0 or more"
            for name in source_names
            if 0 < weights[name] < SHARE_RATIO_MIN * total
        ]
    if faults:
        raise ConfigError(f"{where}: the weights do not fit:\n  " + "\n  ".join(faults))


def _weight_fault(weight: object) -> str:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        return f"is a {type(weight).__name__}, not a number"
    if not math.isfinite(weight):
        return "is not finite"
    if weight > WEIGHT_MAX:
        return f"is over {WEIGHT_MAX:g}; weights are relative, write smaller ones"
    return "is negative" if weight < 0 else ""


def integer_shares(
    weights: Mapping[str, float], source_names: Sequence[str]
) -> npt.NDArray[np.int64]:
    """Return checked weights as integers that sum to about `SHARE_TOTAL`. Shape (sources,).

    Only a weight of exactly 0 gives 0.
    """
    total = math.fsum(weights.values())
    shares = [
        max(1, round(weights[name] / total * SHARE_TOTAL)) if weights[name] > 0 else 0
        for name in source_names
    ]
    return np.array(shares, np.int64)


def group_paths(
    schedule: MixtureSchedule, source_names: Sequence[str]
) -> list[tuple[str, ...]] | None:
    """Return the groups of each source, the outermost first; None where no source is in one.

    Raises:
        ConfigError: A group has a source that the job has not.
    """
    unknown = sorted(set(schedule.groups) - set(source_names))
    if unknown:
        raise ConfigError(f"mixture: group of {unknown[0]!r}: no source has this name")
    if not schedule.groups:
        return None
    return [
        tuple(schedule.groups[name].split("/")) if name in schedule.groups else ()
        for name in source_names
    ]


def remaining_shares(
    shares: npt.NDArray[np.int64],
    is_exhausted: npt.NDArray[np.bool_],
    groups: Sequence[tuple[str, ...]] | None,
) -> npt.NDArray[np.int64]:
    """Return the shares of the sources that are left, 0 for exhausted ones.

    A share that becomes free goes to the other members of the innermost group that has some left,
    in proportion to what those weigh. A group weighs what its sources weigh together, exhausted ones
    included, as long as one of them is left.

    Args:
        shares: Integer shares, exhausted sources included. Shape (S,).
        is_exhausted: Shape (S,).
        groups: Of each source the groups it is in, the outermost first; None where there are none.

    Returns:
        Shape (S,). Without groups the shares that are left as they are: shares are relative.
    """
    left = np.where(is_exhausted, 0, shares)
    if groups is None or not left.any() or np.array_equal(left, shares):
        return left
    weights = shares.tolist()
    found = np.zeros_like(shares)
    members = [source for source in range(len(weights)) if weights[source] > 0]
    parts = [(members, 0, Fraction(SHARE_TOTAL))]
    while parts:
        inside, depth, part = parts.pop()
        branches = [
            branch
            for branch in _branches(inside, groups, depth)
            if any(left[source] > 0 for source in branch)
        ]
        total = sum(weights[source] for branch in branches for source in branch)
        for branch in branches:
            branch_part = part * sum(weights[source] for source in branch) / total
            if len(groups[branch[0]]) > depth:
                parts.append((branch, depth + 1, branch_part))
            else:
                found[branch[0]] = max(1, round(branch_part))
    return found


def _branches(sources: list[int], groups: Sequence[tuple[str, ...]], depth: int) -> list[list[int]]:
    """Return what a group consists of: the sources of each inner group, and single sources."""
    inner: dict[str, list[int]] = {}
    branches = []
    for source in sources:
        if len(groups[source]) <= depth:
            branches.append([source])
            continue
        name = groups[source][depth]
        if name not in inner:
            inner[name] = []
            branches.append(inner[name])
        inner[name].append(source)
    return branches


class MixtureTimeline:
    """A schedule in order, looked up by how many of its points were passed already."""

    def __init__(
        self,
        schedule: MixtureSchedule,
        source_names: Sequence[str],
        untrained: frozenset[str] = frozenset(),
    ) -> None:
        """Check every point.

        Raises:
            ConfigError: A point's weights do not fit, no point starts at 0, or a group has a source
                that the job has not.
        """
        self.groups = group_paths(schedule, source_names)
        """Groups of each source, the outermost first; None where no source is in one."""
        self._points = schedule.points
        self._shares: list[npt.NDArray[np.int64]] = []
        for number, point in enumerate(schedule.points):
            weights = dict.fromkeys(source_names, 0.0) | point.weights
            where = f"mixture point {number} (from {point.start})"
            check_weights(weights, source_names, where, untrained)
            self._shares.append(integer_shares(weights, source_names))
        if not schedule.points or schedule.points[0].start != 0:
            raise ConfigError("mixture: the first point must start at 0")

    def passed(self, index: int, step: int, tokens: int) -> int:
        """Return how many points took effect, going on from `index` passed ones.

        Args:
            index: Points passed before this step.
            step: The step that is about to be planned.
            tokens: Tokens placed in rows by all steps before it.
        """
        while index < len(self._points):
            point = self._points[index]
            if point.start > (step if point.start_unit == "steps" else tokens):
                break
            index += 1
        return index

    def shares(self, index: int) -> npt.NDArray[np.int64]:
        """Return the integer shares of the last of `index` (>= 1) passed points. Shape (S,)."""
        return self._shares[index - 1]
