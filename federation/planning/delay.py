"""Holds long fragments back for a few steps, so that few steps have them and those have several.

Time is cut into windows of so many steps: a long fragment that is drawn inside a window waits in the
carried pool for the first step of the next one, where it comes before all that is younger. So it
waits fewer steps than a window has, and the steps between hold short fragments alone, which pack and
balance well. What is held is a function of the fragments in draw order and of the step, so it stays
the same on any mesh and after any restore.

Held tokens are at most a quarter of what the step's rows hold; with what packing leaves over the pool
stays below one step's tokens. Fragments beyond that are not held. Only whole documents are: of one
that is longer than a row the parts have to come in order, however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule
from federation.planning.step_pool import DRAWN_STEP, LENGTH, OFFSET, places_of, step_tokens

Int64Array = npt.NDArray[np.int64]

HELD_DIVISOR = 4
"""Held tokens are at most this part of a step's."""


@dataclass(frozen=True)
class Delay:
    """Which fragments wait, and how long."""

    over_tokens: int
    """Longer ones do, up to a row's length."""
    steps: int
    """Steps of a window."""

    def held(self, fragments: Int64Array, step: int, rule: BatchRule) -> npt.NDArray[np.bool_]:
        """Return which fragments of a step's pool wait. Shape (n,).

        Whether one does depends on itself and on those before it alone.

        Args:
            fragments: Carried ones, then drawn ones in draw order. Shape (6 + extra rows, n).
            step: The step that is packed.
            rule: Its batch.
        """
        lengths, drawn_step = fragments[LENGTH], fragments[DRAWN_STEP]
        due_step = -(-drawn_step // self.steps) * self.steps
        is_long = (
            (lengths > self.over_tokens)
            & (lengths < rule.row_tokens)
            & (fragments[OFFSET] == 0)
            & (step < due_step)
        )
        sizes = np.where(is_long, places_of(lengths, rule.segment_multiple), 0)
        held: npt.NDArray[np.bool_] = is_long & (
            np.cumsum(sizes) <= step_tokens(rule) // HELD_DIVISOR
        )
        return held
