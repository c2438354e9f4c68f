"""Weights of a cost's parts from measured step times: robust, never negative, deterministic.

A rank's seconds are taken to be constant + sum of weight * part (federation.planning.costs). The
fit is Huber's M-estimator by iteratively reweighted least squares (P. J. Huber, Robust Statistics,
1981, chapter 7) with weights >= 0; what lies far out is then left out of a last solution. Floats
may differ in their last bits from machine to machine: what a plan uses are the integers of a fit
that was accepted and journalled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

WEIGHT_ONE = 1 << 16
"""The largest weight of an accepted fit; others are integers below it."""
HUBER = 1.345
"""95 % as efficient as least squares under normal errors."""
FAR_OUT = 4.0
"""Robust deviations beyond which an observation has no part in the last solution."""
ITERATIONS_MAX = 40
PRIOR_DEVIATION = 1.0
"""How far, in shares of itself, the rate of a part may be from what the weights in force and the
typical time make of it, before data have to say so: as much as one observation counts.

Packed rows are equally full: tokens then tell nothing that the constant does not, and without a
prior their weight would be anything."""
CONSTANT_RATIO = 0.5
"""How far, in shares of the typical time, the constant may be from 0 in the same sense."""
OBSERVATIONS_MIN = 24
STEPS_MIN = 4
ERROR_RATIO_MIN = 1e-3
"""Where weights explain times up to so much of them, others could not place rows better."""
KEPT_RATIO = 0.75
"""Share of the smallest errors that two sets of weights are compared by."""


@dataclass(frozen=True)
class Fit:
    """What a fit found."""

    weights: tuple[int, ...]
    """By part, relative to the analytical factors; the largest is WEIGHT_ONE."""
    seconds: tuple[float, ...]
    """Measured seconds of an analytical unit of each part."""
    constant_s: float
    """Seconds of a step that no part explains."""
    observations: int
    error_present_s: float
    """Mean error on steps that were held out, of the weights in force."""
    error_fitted_s: float
    is_accepted: bool


def fit_weights(
    steps: Int64Array,
    parts: FloatArray,
    seconds: FloatArray,
    present: Sequence[int],
    margin_ratio: float,
) -> Fit | None:
    """Return new weights and whether they explain times better than those in force.

    Both are fitted on the steps of even number and judged on those of odd number, and the other way
    round. Weights of parts that no observation has stay as they are relative to the others.

    Args:
        steps: Step of each observation. Shape (n,).
        parts: Analytical cost of each part, of what a rank had in that step. Shape (n, parts).
        seconds: What the rank took. Shape (n,).
        present: Weights in force, by part.
        margin_ratio: The new ones are accepted where their error is so much smaller.

    Returns:
        None where there are too few observations, or times that do not depend on the cost.
    """
    in_force = np.asarray(present, np.float64)
    seen = (parts > 0).any(axis=0) & (in_force >= 0)
    if len(seconds) < OBSERVATIONS_MIN or len(np.unique(steps)) < STEPS_MIN or not seen.any():
        return None
    means = np.where(seen, parts.mean(axis=0), 1.0)
    scaled = parts / means
    # Weights in force, in the units of `scaled`; their sum is 1, so that the cost is about 1.
    wanted = np.where(seen, in_force * means, 0.0)
    if not wanted.sum() > 0:
        return None
    wanted /= wanted.sum()
    is_even = steps % 2 == 0
    if is_even.all() or not is_even.any():
        is_even = np.arange(len(steps)) % 2 == 0
    present_errors, fitted_errors = [], []
    for learn, judge in ((is_even, ~is_even), (~is_even, is_even)):
        line = _present_line(scaled[learn], seconds[learn], wanted)
        found = _fit_parts(scaled[learn], seconds[learn], wanted, seen)
        present_errors.append(np.abs(seconds[judge] - _times(scaled[judge], line, wanted)))
        fitted_errors.append(np.abs(seconds[judge] - found[0] - scaled[judge] @ found[1:]))
    error_present = _trimmed_mean(np.concatenate(present_errors))
    error_fitted = _trimmed_mean(np.concatenate(fitted_errors))
    found = _fit_parts(scaled, seconds, wanted, seen)
    rates = found[1:] / means
    # A part that was not seen goes on weighing as it did beside the others.
    unit = float(found[1:].sum()) / float((in_force * means)[seen].sum())
    rates = np.where(seen, rates, in_force * unit)
    weights = _integers(rates)
    if weights is None:
        return None
    is_better = error_fitted <= (1 - margin_ratio) * error_present
    is_off = error_present > ERROR_RATIO_MIN * float(np.median(seconds))
    return Fit(
        weights,
        tuple(rates.tolist()),
        float(found[0]),
        len(seconds),
        error_present,
        error_fitted,
        is_better and is_off and weights != _integers(in_force),
    )


def _times(scaled: FloatArray, line: FloatArray, wanted: FloatArray) -> FloatArray:
    times: FloatArray = line[0] + line[1] * (scaled @ wanted)
    return times


def _present_line(scaled: FloatArray, seconds: FloatArray, wanted: FloatArray) -> FloatArray:
    """Return constant and slope of the cost in force. Shape (2,)."""
    return _robust(np.stack((np.ones(len(scaled)), scaled @ wanted), axis=1), seconds)


def _fit_parts(
    scaled: FloatArray, seconds: FloatArray, wanted: FloatArray, seen: npt.NDArray[np.bool_]
) -> FloatArray:
    """Return the constant and a rate of each part. Shape (1 + parts,)."""
    columns = np.concatenate((np.ones((len(scaled), 1)), scaled[:, seen]), axis=1)
    free = _robust(columns, seconds)
    noise = _deviation(seconds - columns @ free)
    typical = float(np.median(seconds))
    expected = np.concatenate(([0.0], typical * wanted[seen]))
    spread = np.concatenate(([CONSTANT_RATIO * typical], PRIOR_DEVIATION * expected[1:]))
    pull = np.where(spread > 0, noise / np.where(spread > 0, spread, 1.0), 0.0)
    found = np.zeros(1 + len(seen))
    found[np.concatenate(([True], seen))] = _robust(
        columns, seconds, np.diag(pull), pull * expected
    )
    return found


def _robust(
    columns: FloatArray,
    values: FloatArray,
    prior: FloatArray | None = None,
    prior_values: FloatArray | None = None,
) -> FloatArray:
    """Return Huber's non-negative fit, then one without what lies far out."""
    if prior is None or prior_values is None:
        prior, prior_values = np.zeros((0, columns.shape[1])), np.zeros(0)
    weights = np.ones(len(values))
    found = np.zeros(columns.shape[1])
    floor = 1e-12 * float(np.abs(values).max(initial=1e-30))
    for _ in range(ITERATIONS_MAX):
        before = found
        found = _weighted(columns, values, weights, prior, prior_values)
        errors = np.abs(values - columns @ found)
        limit = HUBER * max(_deviation(errors), floor)
        weights = np.minimum(1.0, limit / np.maximum(errors, floor))
        if np.abs(found - before).max() <= 1e-9 * np.abs(found).max():
            break
    near = errors <= FAR_OUT * max(_deviation(errors), floor)
    return _weighted(columns, values, near.astype(np.float64), prior, prior_values)


def _deviation(errors: FloatArray) -> float:
    """Return the standard deviation of normal errors by their median size."""
    return 1.4826 * float(np.median(np.abs(errors)))


def _weighted(
    columns: FloatArray,
    values: FloatArray,
    weights: FloatArray,
    prior: FloatArray,
    prior_values: FloatArray,
) -> FloatArray:
    heavy = columns * weights[:, None]
    gram = heavy.T @ columns + prior.T @ prior
    return _non_negative(gram, heavy.T @ values + prior.T @ prior_values)


def _non_negative(gram: FloatArray, right: FloatArray) -> FloatArray:
    """Return the x >= 0 that makes x' gram x - 2 right' x smallest; exact for a few unknowns.

    Where the free solution has a negative entry, every set of entries that may be above 0 is tried:
    at most 2 ** 6.
    """
    count = len(right)
    free = np.linalg.lstsq(gram, right, rcond=None)[0].astype(np.float64)
    if free.min() >= 0:
        return free
    best: FloatArray = np.zeros(count)
    lowest = 0.0
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            places = np.array(chosen)
            part: FloatArray = np.linalg.lstsq(
                gram[np.ix_(places, places)], right[places], rcond=None
            )[0]
            if part.min() < 0:
                continue
            found: FloatArray = np.zeros(count)
            found[places] = part
            value = float(found @ gram @ found - 2 * right @ found)
            if value < lowest:
                best, lowest = found, value
    return best


def _trimmed_mean(errors: FloatArray) -> float:
    kept = np.sort(errors)[: max(1, int(len(errors) * KEPT_RATIO))]
    return float(kept.mean())


def _integers(rates: FloatArray) -> tuple[int, ...] | None:
    largest = float(rates.max(initial=0.0))
    if not largest > 0 or not np.isfinite(rates).all():
        return None
    return tuple(round(rate / largest * WEIGHT_ONE) for rate in rates.tolist())
