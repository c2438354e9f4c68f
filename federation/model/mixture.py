"""Weights of a mixture: checks, the schedule's points in force, and their integer form.

A weight becomes an integer share out of `SHARE_TOTAL`; all later arithmetic is on integers, so
plans agree on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from federation.model.job import MixtureSchedule
from msd_client.contract.errors import ConfigError

SHARE_TOTAL = 1 << 40
SHARE_RATIO_MIN = 1e-9
"""Smallest share that can be told from never: below it a source would not be drawn in a run."""


WEIGHT_MAX = 1e15
"""Sums of weights stay exact enough; nobody means such numbers."""


def check_weights(weights: Mapping[str, float], source_names: Sequence[str], where: str) -> None:
    """Refuse weights that are not one finite number >= 0 per source, one of them above 0.

    Args:
        weights: Weight by source name.
        source_names: All sources of the job.
        where: What the weights are of, for the message.

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


class MixtureTimeline:
    """A schedule in order, looked up by how many of its points were passed already."""

    def __init__(self, schedule: MixtureSchedule, source_names: Sequence[str]) -> None:
        """Check every point.

        Raises:
            ConfigError: A point's weights do not fit, or no point starts at 0.
        """
        self._points = schedule.points
        self._shares: list[npt.NDArray[np.int64]] = []
        for number, point in enumerate(schedule.points):
            weights = dict.fromkeys(source_names, 0.0) | point.weights
            check_weights(weights, source_names, f"mixture point {number} (from {point.start})")
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
