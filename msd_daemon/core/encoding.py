"""Which segments' media each microbatch of a step encodes, by the plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federation.model.plan import StepPlan
from msd_daemon.gather.encode_columns import EncodeColumns
from msd_daemon.gather.segment_columns import SegmentColumns


@dataclass(frozen=True, slots=True)
class StepEncoding:
    """Of one step whose media may be encoded anywhere; cells are groups * microbatches."""

    encode_dp: npt.NDArray[np.int32]
    """Of all segments, sorted as the step's columns. Shape (modalities, segments)."""
    columns: tuple[SegmentColumns, ...]
    """Of each modality: segments with media, sorted by (cell that encodes them, group, row, column
    of their text)."""
    bounds: tuple[list[int], ...]
    """Of each modality: first segment that each cell encodes, and the end."""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        columns: SegmentColumns,
        order: npt.NDArray[np.int64],
        microbatch_rows: int,
    ) -> StepEncoding | None:
        """Return the encoding of a plan, None where its media are encoded with their text.

        Args:
            plan: The step.
            columns: All its segments, sorted by (group, microbatch, row in microbatch, column).
            order: Number in the plan of each.
            microbatch_rows: Rows of a microbatch.
        """
        if plan.encode_dp is None:
            return None
        row = plan.row[order]
        microbatch = plan.row_microbatch[row].astype(np.int64)
        far_row = (plan.row_dp[row] * np.int32(microbatch_rows) + columns.row).astype(np.int32)
        cells = np.arange(plan.dp_count * plan.microbatch_count + 1)
        encode_dp = plan.encode_dp[:, order]
        parts, bounds = [], []
        for groups in encode_dp:
            own = np.flatnonzero(groups >= 0)
            cell = groups[own] * np.int64(plan.microbatch_count) + microbatch[own]
            # Sorted by (group, ...) already, and all of a cell are of one microbatch index.
            by_cell = np.argsort(cell, kind="stable")
            picked = own[by_cell]
            parts.append(
                SegmentColumns(
                    chunk_offset=columns.chunk_offset[picked],
                    sample=columns.sample[picked],
                    sample_offset=columns.sample_offset[picked],
                    length=columns.length[picked],
                    row=far_row[picked],
                    column=columns.column[picked],
                    source=columns.source[picked],
                )
            )
            bounds.append(np.searchsorted(cell[by_cell], cells).tolist())
        return cls(encode_dp, tuple(parts), tuple(bounds))

    def encode_cell(self, cell: int, start: int, end: int) -> bytes:
        """Return a cell's `EncodeColumns` as they travel.

        Args:
            cell: group * microbatches + microbatch.
            start: Its first segment.
            end: Behind its last segment.
        """
        encoded = tuple(
            part.part(bounds[cell], bounds[cell + 1])
            for part, bounds in zip(self.columns, self.bounds, strict=True)
        )
        return EncodeColumns(self.encode_dp[:, start:end], encoded).encode()
