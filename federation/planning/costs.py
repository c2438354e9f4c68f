"""Integer costs of segments, media and rows, so that plans agree on every machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from federation.model.cost import CostSpec, EncoderCost, SpanTerm, WindowTerm
from federation.model.plan import StepPlan

Int64Array = npt.NDArray[np.int64]

STEP_COST_MAX = 1 << 62


def factors_of(spec: CostSpec) -> list[int]:
    """Return all factors: linear, quadratic, of windows, then of each encoder."""
    found = [spec.linear, spec.quadratic, *(term.quadratic for term in spec.windowed)]
    for encoder in spec.encoders:
        found += [encoder.linear, *(term.quadratic for term in encoder.spans)]
    return found


def with_factors(spec: CostSpec, factors: Sequence[int]) -> CostSpec:
    """Return a spec with other factors, in the order of `factors_of`."""
    rest = iter(factors)
    return replace(
        spec,
        linear=next(rest),
        quadratic=next(rest),
        windowed=tuple(WindowTerm(term.window_tokens, next(rest)) for term in spec.windowed),
        encoders=tuple(
            EncoderCost(
                encoder.modality,
                next(rest),
                tuple(SpanTerm(term.span_units, next(rest)) for term in encoder.spans),
            )
            for encoder in spec.encoders
        ),
    )


def reduced_cost(spec: CostSpec) -> CostSpec:
    """Return a spec without the common divisor of its factors."""
    factors = factors_of(spec)
    common = math.gcd(*factors) or 1
    return with_factors(spec, [factor // common for factor in factors])


def bounded_cost(
    spec: CostSpec,
    rows: int,
    row_tokens: int,
    row_units: Mapping[str, int] | None = None,
    limit: int = STEP_COST_MAX,
) -> CostSpec:
    """Return the factors halved until the cost of a whole step is at most `limit`.

    All lose the same bits, so that their ratios, all that balance depends on, stay; none that is
    above 0 becomes 0.

    Args:
        spec: The factors.
        rows: Most rows of a step.
        row_tokens: Most tokens of a row.
        row_units: Most units of a row by modality; an encoder whose modality is not there costs 0.
        limit: Most cost of a step.
    """
    units = row_units or {}
    factors = factors_of(spec)
    while _row_cost_max(with_factors(spec, factors), row_tokens, units) * rows > limit:
        if max(factors) <= 1:
            break
        factors = [max(1, factor >> 1) if factor else 0 for factor in factors]
    return with_factors(spec, factors)


def _row_cost_max(spec: CostSpec, row_tokens: int, row_units: Mapping[str, int]) -> int:
    total = (spec.linear + spec.quadratic * row_tokens) * row_tokens
    for window in spec.windowed:
        total += window.quadratic * min(row_tokens, 2 * window.window_tokens) * row_tokens
    for encoder in spec.encoders:
        units = row_units.get(encoder.modality, 0)
        total += encoder.linear * units
        total += sum(span.quadratic * min(units, span.span_units) * units for span in encoder.spans)
    return total


def attention_costs(spec: CostSpec, lengths: Int64Array) -> Int64Array:
    """Return what grows faster than the tokens of segments of `lengths` tokens. Shape (n,)."""
    found: Int64Array = lengths * lengths * spec.quadratic
    for term in spec.windowed:
        seen = np.minimum(lengths, term.window_tokens)
        found += term.quadratic * seen * (2 * lengths - seen)
    return found


def segment_costs(spec: CostSpec, lengths: Int64Array) -> Int64Array:
    """Return the cost of segments of `lengths` tokens, media left out. Shape (n,)."""
    if not spec.windowed:
        if not spec.quadratic:
            return lengths * spec.linear
        return lengths * (spec.linear + spec.quadratic * lengths)
    return lengths * spec.linear + attention_costs(spec, lengths)


def encoder_costs(encoder: EncoderCost, units: Int64Array) -> Int64Array:
    """Return the cost of media of so many units each. Shape of `units`.

    Known is how many units a segment holds, not how many items they are of: units attend to
    `span_units` units, the typical size of an item, and to no more than there are. So an item up to
    the typical size costs exactly what it does, and several items as much as typical ones.

    Args:
        encoder: Factors that `bounded_cost` passed.
        units: Patches or frames of a segment, or of one item.
    """
    found: Int64Array = units * encoder.linear
    for term in encoder.spans:
        found += term.quadratic * units * np.minimum(units, term.span_units)
    return found


def whole_costs(
    spec: CostSpec, lengths: Int64Array, units: Mapping[str, Int64Array] | None = None
) -> Int64Array:
    """Return the cost of segments of `lengths` tokens, backbone and encoders. Shape (n,).

    Args:
        spec: Factors that `bounded_cost` passed.
        lengths: Tokens of the segments. Shape (n,).
        units: Units of their media by modality, (n,) each; modalities that `spec` has no encoder
            for cost nothing.
    """
    found = segment_costs(spec, lengths)
    for encoder in spec.encoders:
        if units is not None and encoder.modality in units:
            found = found + encoder_costs(encoder, units[encoder.modality])
    return found


def row_costs(
    spec: CostSpec,
    lengths: Int64Array,
    row_starts: Int64Array,
    rows: Int64Array,
    row_count: int,
    units: Mapping[str, Int64Array] | None = None,
) -> Int64Array:
    """Return the cost of each row, backbone and encoders; one without segments costs 0.

    Args:
        spec: Factors that `bounded_cost` passed.
        lengths: Tokens of the segments, sorted by row. Shape (n,).
        row_starts: First segment of each row that has one. Shape (r,).
        rows: Those rows. Shape (r,).
        row_count: All rows.
        units: As in `whole_costs`.

    Returns:
        Shape (row_count,).
    """
    found = np.zeros(row_count, np.int64)
    if not len(lengths):
        return found
    found[rows] = np.add.reduceat(whole_costs(spec, lengths, units), row_starts)
    return found


def part_names(spec: CostSpec) -> tuple[str, ...]:
    """Return the names of the parts of a cost, each with a measured factor of its own."""
    return ("linear", "attention", *(encoder.modality for encoder in spec.encoders))


def segment_parts(
    spec: CostSpec, lengths: Int64Array, units: Mapping[str, Int64Array] | None = None
) -> Int64Array:
    """Return the parts of each segment's cost, by `part_names`; their sum is its cost in a row.

    Args:
        spec: Factors that `bounded_cost` passed.
        lengths: Tokens of the segments. Shape (n,).
        units: Units of their media by modality, (n,) each.

    Returns:
        Shape (parts, n).
    """
    parts = [lengths * spec.linear, attention_costs(spec, lengths)]
    for encoder in spec.encoders:
        held = None if units is None else units.get(encoder.modality)
        parts.append(np.zeros_like(lengths) if held is None else encoder_costs(encoder, held))
    return np.stack(parts)


def weighted_cost(spec: CostSpec, weights: Sequence[int]) -> CostSpec:
    """Return a spec whose parts, by `part_names`, weigh so many times as much (integers).

    Args:
        spec: Analytical factors.
        weights: One a part.
    """
    linear, attention, *media = weights
    factors = [spec.linear * linear, spec.quadratic * attention]
    factors += [term.quadratic * attention for term in spec.windowed]
    for encoder, weight in zip(spec.encoders, media, strict=True):
        factors += [encoder.linear * weight, *(span.quadratic * weight for span in encoder.spans)]
    return with_factors(spec, factors)


def plan_row_costs(spec: CostSpec, plan: StepPlan) -> Int64Array:
    """Return the cost of each canonical row of a plan. Shape (R,)."""
    bounded = bounded_cost(spec, plan.rows, plan.row_tokens)
    starts = np.flatnonzero(np.diff(plan.row, prepend=-1))
    lengths = plan.length.astype(np.int64)
    return row_costs(bounded, lengths, starts, plan.row[starts].astype(np.int64), plan.rows)


def activation_bytes(
    spec: CostSpec, tokens: Int64Array, units: Mapping[str, Int64Array] | None = None
) -> Int64Array:
    """Return the bytes that rows or microbatches keep for the backward pass. Shape of `tokens`.

    Of the whole model on one rank. Tensor and context parallelism divide it; under 1F1B the first
    pipeline stage keeps as many microbatches as there are stages, of its share of the layers each,
    so that pipelines do not (Korthikanti et al., arXiv 2205.05198, section 4.2.3).

    Args:
        spec: The job's cost.
        tokens: Tokens of each, padding included.
        units: Units of media of each by modality.
    """
    found: Int64Array = tokens * spec.activations.token
    for encoder in spec.encoders:
        if units is not None and encoder.modality in units:
            found = found + units[encoder.modality] * spec.activations.of_unit(encoder.modality)
    return found
