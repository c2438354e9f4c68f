"""Integer costs of segments and rows, so that plans agree on every machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federation.model.job import CostSpec
from federation.model.plan import StepPlan

Int64Array = npt.NDArray[np.int64]

STEP_COST_MAX = 1 << 62


@dataclass(frozen=True)
class TransformerShape:
    """What the cost of a decoder depends on."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocabulary: int
    head_tokens: int | None = None
    """Width of a head; None = hidden / heads."""


def transformer_cost(shape: TransformerShape) -> CostSpec:
    """Return forward FLOPs of a causal segment of n tokens: linear * n + quadratic * n * n.

    Each weight of projections, MLP and output layer costs 2 FLOPs a token; attention costs
    2 * 2 * n * n / 2 FLOPs a head and channel. The backward pass is twice that and changes no
    ratio. A common divisor is taken out.
    """
    width = shape.heads * (shape.head_tokens or shape.hidden // shape.heads)
    weights = shape.layers * (4 * shape.hidden * width + 2 * shape.hidden * shape.ffn)
    linear = 2 * (weights + shape.hidden * shape.vocabulary)
    quadratic = 2 * shape.layers * width
    common = math.gcd(linear, quadratic)
    return CostSpec("transformer", linear // common, quadratic // common)


def bounded_cost(spec: CostSpec, rows: int, row_tokens: int) -> CostSpec:
    """Return the factors halved until the cost of a whole step fits 62 bits.

    Both lose the same bits, so that their ratio, all that balance depends on, stays.
    """
    linear, quadratic = spec.linear, spec.quadratic
    while (linear + quadratic * row_tokens) * rows * row_tokens > STEP_COST_MAX:
        linear, quadratic = linear >> 1, quadratic >> 1
    return CostSpec(spec.kind, linear, quadratic)


def segment_costs(spec: CostSpec, lengths: Int64Array) -> Int64Array:
    """Return the cost of segments of `lengths` tokens. Shape (n,)."""
    if not spec.quadratic:
        return lengths * spec.linear
    return lengths * (spec.linear + spec.quadratic * lengths)


def row_costs(
    spec: CostSpec, lengths: Int64Array, row_starts: Int64Array, rows: Int64Array, row_count: int
) -> Int64Array:
    """Return the cost of each row; one without segments costs 0.

    Args:
        spec: Factors that `bounded_cost` passed.
        lengths: Tokens of the segments, sorted by row. Shape (n,).
        row_starts: First segment of each row that has one. Shape (r,).
        rows: Those rows. Shape (r,).
        row_count: All rows.
    """
    found = np.zeros(row_count, np.int64)
    if len(lengths):
        found[rows] = np.add.reduceat(segment_costs(spec, lengths), row_starts)
    return found


def plan_row_costs(spec: CostSpec, plan: StepPlan) -> Int64Array:
    """Return the cost of each canonical row of a plan. Shape (R,)."""
    bounded = bounded_cost(spec, plan.rows, plan.row_tokens)
    starts = np.flatnonzero(np.diff(plan.row, prepend=-1))
    lengths = plan.length.astype(np.int64)
    return row_costs(bounded, lengths, starts, plan.row[starts].astype(np.int64), plan.rows)
