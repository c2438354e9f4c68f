"""What each data-parallel group computes for a step, part by part: what calibration fits to times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.model.cost import CostSpec
from federation.planning.costs import segment_parts
from federation.planning.extra_rows import ExtraRows
from federation.planning.graph_compile import GraphPlan
from federation.planning.step_pool import LENGTH

Int64Array = npt.NDArray[np.int64]


def parts_of_groups(
    made: GraphPlan, cost: CostSpec, extras: ExtraRows, dp_count: int
) -> Int64Array:
    """Return the parts of the cost of each group, by `costs.part_names`. Shape (parts, dp).

    Media count for the group that encodes them.

    Args:
        made: The compiled step.
        cost: The job's analytical cost.
        extras: Extra rows of the step's segments.
        dp_count: Data-parallel groups.
    """
    packed = made.packed
    units = extras.units_by_modality(packed.extras)
    parts = segment_parts(cost, packed.segments[LENGTH], units)
    home = made.placement.dp[packed.row]
    groups = [home] * (len(parts) - len(cost.encoders))
    groups += [_encoding_groups(made, extras, encoder.modality, home) for encoder in cost.encoders]
    found = np.zeros((len(parts), dp_count), np.int64)
    for total, values, group in zip(found, parts, groups, strict=True):
        np.add.at(total, group, values)
    return found


def _encoding_groups(
    made: GraphPlan, extras: ExtraRows, modality: str, home: Int64Array
) -> Int64Array:
    """Return the group that encodes the media of each segment; where it has none, its own."""
    if made.encode_dp is None or modality not in extras.modalities:
        return home
    chosen = made.encode_dp[extras.modalities.index(modality)]
    return np.where(chosen < 0, home, chosen)
