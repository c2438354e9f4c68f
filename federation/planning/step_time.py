"""The time of a planned step under one forward, one backward, predicted from its costs alone.

Forward passes take what they cost, backward ones twice that; nothing between stages takes time, and
all ranks meet at the end of the step. Encoders run on the first stage, and the backbone's layers are
laid out so that all stages have the same work on average. Where media may be encoded on other ranks,
groups exchange embeddings in every microbatch and wait for its slowest encoder.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.model.cost import CostSpec
from federation.planning.balance import pipeline_ends
from federation.planning.costs import segment_costs
from federation.planning.extra_rows import ExtraRows
from federation.planning.graph_compile import GraphPlan
from federation.planning.hybrid import encoder_loads, media_costs, stay_home
from federation.planning.step_pool import LENGTH

Int64Array = npt.NDArray[np.int64]

_SUM_BITS = 61


def model_loads(made: GraphPlan, cost: CostSpec, extras: ExtraRows, dp_count: int) -> Int64Array:
    """Return what the encoders of each group cost in each microbatch. Shape (modalities, dp, M).

    Modalities are the job's; of one without an encoder in `cost` all are 0.

    Args:
        made: A compiled step.
        cost: Factors that `bounded_cost` passed.
        extras: Extra rows of its segments.
        dp_count: Data-parallel groups.
    """
    packed, placement = made.packed, made.placement
    units = extras.units(packed.extras)
    costs = media_costs(units, extras.modalities, cost.encoders, unit_cost=0)
    group = made.encode_dp
    if group is None:
        group = stay_home(units, placement.dp[packed.row])
    return encoder_loads(
        costs, group, placement.microbatch[packed.row], dp_count, placement.microbatches
    )


def predicted_time(
    made: GraphPlan, cost: CostSpec, extras: ExtraRows, dp_count: int, stages: int
) -> int:
    """Return the time of a step in the unit of its costs, or that unit divided by a power of two.

    Args:
        made: A compiled step.
        cost: The whole model's factors, that `bounded_cost` passed.
        extras: Extra rows of its segments.
        dp_count: Data-parallel groups.
        stages: Pipeline stages.
    """
    packed, placement = made.packed, made.placement
    backbone = np.zeros((dp_count, placement.microbatches), np.int64)
    place = (placement.dp[packed.row], placement.microbatch[packed.row])
    np.add.at(backbone, place, segment_costs(cost, packed.segments[LENGTH]))
    encoders = model_loads(made, cost, extras, dp_count)
    work = int(encoders.sum())
    if made.encode_dp is not None and encoders.size:
        encoders = np.broadcast_to(encoders.max(axis=1, keepdims=True), encoders.shape)
    costs = stage_costs(backbone, encoders.sum(axis=0), work, stages)
    # By what all placements of a step have in common, so that their times are in one unit.
    bits = (
        (max(1, int(backbone.sum())) + work) * 3 * (stages + 1) * dp_count
    ).bit_length() - _SUM_BITS
    return int(pipeline_ends(costs >> max(0, bits)).max())


def stage_costs(
    backbone: Int64Array, media: Int64Array, encoder_work: int, stages: int
) -> Int64Array:
    """Return the forward cost of each microbatch in each stage. Shape (dp, stages, M).

    Args:
        backbone: Of each group's microbatches, in order. Shape (dp, M).
        media: What the first stage spends on encoders, or waits for them. Shape (dp, M).
        encoder_work: What all encoders compute: so much less of the backbone is on the first stage.
        stages: Pipeline stages.
    """
    total = max(1, int(backbone.sum()))
    first = max(0.0, ((total + encoder_work) / stages - encoder_work) / total)
    later = (1 - first) / max(1, stages - 1)
    dp_count, microbatches = backbone.shape
    costs = np.empty((dp_count, stages, microbatches), np.int64)
    costs[:, 0] = media + (backbone if stages == 1 else (first * backbone).astype(np.int64))
    costs[:, 1:] = (later * backbone).astype(np.int64)[:, None]
    return costs
