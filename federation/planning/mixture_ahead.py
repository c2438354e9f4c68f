"""The largest share that each source has from now on within a number of steps, as far as known. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from federation.model.job import MixtureSchedule
from federation.model.mixture import SHARE_TOTAL, integer_shares

POINTS_MAX = 16
"""Points of the schedule that are looked at: of more (a ramp of many) as many, evenly."""


class MixtureAhead:
    """Looks ahead in a schedule.

    Args:
        schedule: Of the job.
        source_names: Of all its sources.
    """

    def __init__(self, schedule: MixtureSchedule, source_names: Sequence[str]) -> None:
        self._points = schedule.points
        self._names = source_names

    def shares(
        self,
        now: Sequence[float],
        *,
        step: int,
        tokens: int,
        steps: int,
        step_tokens: int,
        changes: Iterable[tuple[int, Sequence[int]]] = (),
    ) -> npt.NDArray[np.float64]:
        """Return the largest share of each source. Shape (sources,).

        Args:
            now: Shares in force, of 1.
            step: The plan step that is planned next.
            tokens: Tokens placed in rows by all steps before it.
            steps: How far to look.
            step_tokens: Tokens of a step, about.
            changes: Accepted changes of the mixture: (plan step, integer shares).
        """
        largest = np.asarray(now, np.float64)
        coming = [
            point.weights
            for point in self._points
            if (
                step < point.start <= step + steps
                if point.start_unit == "steps"
                else tokens < point.start <= tokens + steps * step_tokens
            )
        ]
        if len(coming) > POINTS_MAX:
            places = np.linspace(0, len(coming) - 1, POINTS_MAX).astype(np.int64)
            coming = [coming[place] for place in places.tolist()]
        for weights in coming:
            named = dict.fromkeys(self._names, 0.0) | dict(weights)
            largest = np.maximum(largest, integer_shares(named, self._names) / SHARE_TOTAL)
        for at, shares in changes:
            if at <= step + steps:
                largest = np.maximum(largest, np.asarray(shares) / max(sum(shares), 1))
        return largest
