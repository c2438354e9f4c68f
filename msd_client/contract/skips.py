"""Skips of a stream: runs of plan steps whose content is left out, first inclusive, end exclusive.

A step has two numbers: the trainer's, which is dense, and the plan's, which names its content. They
differ by the plan steps that were left out before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def no_skips() -> Int64Array:
    """Return the skips of a stream without any. Shape (0, 2)."""
    return np.zeros((0, 2), np.int64)


def merged_skips(skips: Int64Array, first: int, end: int) -> Int64Array:
    """Return skips with one more, ascending, those that touch each other joined. Shape (k, 2)."""
    merged: list[list[int]] = []
    for start, stop in sorted([*skips.tolist(), [first, end]]):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return np.array(merged, np.int64).reshape(-1, 2)


def skips_without(skips: Int64Array, first: int, end: int) -> Int64Array:
    """Return skips without one run of steps, which may lie in the middle of one. Shape (k, 2)."""
    left = [
        run
        for start, stop in skips.tolist()
        for run in ([start, min(stop, first)], [max(start, end), stop])
        if run[0] < run[1]
    ]
    return np.array(left, np.int64).reshape(-1, 2)


def skips_from(skips: Int64Array, plan_step: int) -> Int64Array:
    """Return the skips that end behind a plan step: those that are not over. Shape (k, 2)."""
    return skips[skips[:, 1] > plan_step]


def is_skipped(skips: Int64Array, plan_step: int) -> bool:
    """Return True where the content of a plan step is left out."""
    return bool(((skips[:, 0] <= plan_step) & (plan_step < skips[:, 1])).any())


def plan_step_of(skips: Int64Array, plan_step: int, ahead: int) -> int:
    """Return the plan step of the step that follows `ahead` served ones.

    Args:
        skips: Pending ones, ascending and apart.
        plan_step: The one that is planned next, left out or not.
        ahead: Steps of the trainer between the next one and the one that is asked for, >= 0.
    """
    found = plan_step + ahead
    for first, end in skips.tolist():
        if first > found:
            break
        found += max(0, end - max(first, plan_step))
    return found


def skipped_count(skips: Int64Array, plan_step: int) -> int:
    """Return how many plan steps from one on are left out."""
    ends, firsts = skips[:, 1], np.maximum(skips[:, 0], plan_step)
    return int(np.maximum(ends - firsts, 0).sum())
