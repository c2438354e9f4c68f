"""Reported step times beside what each rank had in the step: the bounded window that fits look at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.model.cost import CalibrationRule
from federation.planning.calibration import Fit, fit_weights

Int64Array = npt.NDArray[np.int64]

OBSERVATIONS_MAX = 1 << 15
STEPS_KEPT_MIN = 16
"""Of meshes so large that fewer steps would fill OBSERVATIONS_MAX."""


class StepTimes:
    """Parts of the last planned steps by DP group, and the seconds reported of them."""

    def __init__(self, rule: CalibrationRule, groups: int, horizon_steps: int) -> None:
        """Keep nothing yet.

        Args:
            rule: The job's.
            groups: DP groups.
            horizon_steps: Steps that are planned before they are reported.
        """
        self._rule = rule
        self._groups = groups
        window = min(rule.window_steps, max(STEPS_KEPT_MIN, OBSERVATIONS_MAX // groups))
        self._window = window
        self._kept = window + horizon_steps
        self._parts: dict[int, Int64Array] = {}
        self._seconds: dict[int, npt.NDArray[np.float64]] = {}
        self._newest = -1
        self._fitted_at = -1
        self.reports = 0
        """Reports that were of a step in the window."""

    def planned(self, step: int, parts: Int64Array) -> None:
        """Keep what each group has in a step. Shape (parts, groups)."""
        self._parts[step] = parts
        while len(self._parts) > self._kept:
            oldest = next(iter(self._parts))
            del self._parts[oldest]
            self._seconds.pop(oldest, None)

    def report(self, step: int, group: int, seconds: float) -> bool:
        """Take a rank's time; of the ranks of a group the slowest counts.

        Returns:
            False where the step is not in the window: planned by a planner before, or too old.
        """
        if step not in self._parts or not 0 <= group < self._groups or not seconds > 0:
            return False
        times = self._seconds.setdefault(step, np.zeros(self._groups))
        times[group] = max(times[group], seconds)
        self._newest = max(self._newest, step)
        self._fitted_at = self._fitted_at if self._fitted_at >= 0 else step
        self.reports += 1
        return True

    @property
    def is_due(self) -> bool:
        """True once so many steps as the rule says were reported since the last fit."""
        return self._fitted_at >= 0 and self._newest - self._fitted_at >= self._rule.every_steps

    def fit(self, present: tuple[int, ...]) -> Fit | None:
        """Fit what is there; see `calibration.fit_weights`."""
        self._fitted_at = self._newest
        steps, parts, seconds = [], [], []
        for step, times in self._seconds.items():
            if step <= self._newest - self._window:
                continue
            groups = np.flatnonzero(times)
            steps.append(np.full(len(groups), step, np.int64))
            parts.append(self._parts[step][:, groups].T.astype(np.float64))
            seconds.append(times[groups])
        if not steps:
            return None
        return fit_weights(
            np.concatenate(steps),
            np.concatenate(parts),
            np.concatenate(seconds),
            present,
            self._rule.margin_ratio,
        )
