"""One job's calibration: collects reported times, fits when it is due, knows the weights in force.

Pure: whoever owns it journals an accepted fit before a plan goes by it, and calls `accepted`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from federation.model.cost import CalibrationRule, CostSpec
from federation.model.place_tree import ClientPlaceTree
from federation.planning.calibration import WEIGHT_ONE, Fit
from federation.planning.costs import part_names
from federation.planning.step_times import Int64Array, StepTimes

EVENT_KIND = "calibration"
"""Of journalled events; states do not count them."""


class Calibrator:
    """Weights of a cost's parts, and the times that may change them."""

    def __init__(
        self, rule: CalibrationRule, cost: CostSpec, tree: ClientPlaceTree, horizon_steps: int
    ) -> None:
        """Begin with the analytical weights.

        Args:
            rule: The job's.
            cost: The job's analytical cost.
            tree: The mesh, which says what DP group a rank is of.
            horizon_steps: Steps that are planned before ranks have done with them.
        """
        self.parts = part_names(cost)
        self.weights: tuple[int, ...] = (WEIGHT_ONE,) * len(self.parts)
        """In force; all equal: the analytical cost."""
        self._since_step: int | None = None
        self._times = StepTimes(rule, tree.dp_count, horizon_steps)
        self._groups = {rank: tree.dp_group(rank) for rank in range(tree.rank_count)}
        self._fits = 0
        self._last: tuple[int, Fit] | None = None

    def planned(self, step: int, parts: Int64Array) -> None:
        """Keep what each DP group has in a step. Shape (parts, dp)."""
        self._times.planned(step, parts)

    def reported(self, reports: Iterable[Sequence[int]]) -> None:
        """Take [step, rank, nanoseconds]; what is of no known step or rank is passed over."""
        for step, rank, nanoseconds in reports:
            group = self._groups.get(rank, -1)
            self._times.report(step, group, nanoseconds / 1e9)

    def fit_if_due(self, next_step: int) -> Fit | None:
        """Fit where the rule's steps have passed; return the fit, taken or not.

        Args:
            next_step: The step that is planned next: an accepted fit holds from it on.
        """
        if not self._times.is_due:
            return None
        found = self._times.fit(self.weights)
        if found is not None:
            self._fits += 1
            self._last = (next_step, found)
        return found

    def accepted(self, weights: Sequence[int], step: int) -> None:
        """Hold weights that were journalled, in force from a step on."""
        self.weights, self._since_step = tuple(weights), step

    def status(self) -> dict[str, Any]:
        """Return plain values for people: factors relative to the linear part's analytical one."""
        status: dict[str, Any] = {
            "parts": list(self.parts),
            "weights": list(self.weights),
            "relative": _relative(self.weights),
            "since_step": self._since_step,
            "reports": self._times.reports,
            "fits": self._fits,
            "last_fit": None,
        }
        if self._last is not None:
            step, fit = self._last
            status["last_fit"] = {
                "step": step,
                "relative": _relative(fit.weights),
                "seconds": list(fit.seconds),
                "constant_s": fit.constant_s,
                "observations": fit.observations,
                "error_present_s": fit.error_present_s,
                "error_fitted_s": fit.error_fitted_s,
                "is_accepted": fit.is_accepted,
            }
        return status


def _relative(weights: Sequence[int]) -> list[float]:
    """Return weights over the linear part's; over the largest where that one is 0."""
    base = weights[0] or max(weights)
    return [weight / base for weight in weights]
