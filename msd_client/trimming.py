"""A microbatch without the padding at its end, so that a varlen trainer computes none of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msd_client.contract.batch_spec import MROPE_NAME, BatchSpec
from msd_client.contract.errors import UsageError
from msd_client.token_places import Deal

_TOKEN_FIELDS = ("tokens", "labels", "loss_weights", "position_ids", MROPE_NAME)
_SEGMENT_FIELDS = ("segment_source", "segment_group")
_BOUNDARIES = ("cu_seqlens", "cu_seqlens_padded")
_MADE_AGAIN = ("segment_ids", "cp_places")


def trimmed_fields(fields: Mapping[str, Any], deal: Deal, spec: BatchSpec | None) -> dict[str, Any]:
    """Return the fields of a batch of one row up to the end of its last segment; views.

    Args:
        fields: Of the batch.
        deal: How it was dealt to context-parallel ranks.
        spec: Its conventions; without it the job's own fields stay as they are.

    Raises:
        UsageError: The batch has several rows, each with padding of its own; or it is a
            context-parallel slice of a layout that cuts the row and not its segments.
    """
    rows, row_tokens = fields["rows"], fields["row_tokens"]
    if rows != 1:
        raise UsageError(
            f"trimmed() of a batch of {rows} rows: each has padding of its own; use packing "
            "varlen, or batch.microbatch_rows 1",
            rows=rows,
        )
    if deal.cp_count > 1 and deal.layout != "zigzag_document":
        raise UsageError(
            f"trimmed() of a slice of cp_layout {deal.layout}: ranks hold parts of the whole row, "
            "its padding too; set batch.cp_layout: zigzag_document and a segment_multiple of "
            f"{2 * deal.cp_count}",
            cp=deal.cp_count,
        )
    used, longest, segments = (
        fields[name] for name in ("used_tokens", "used_max_seqlen", "segments")
    )
    is_empty = not used
    if is_empty:  # a forward pass of nothing fails in most kernels: the least a segment takes stays
        used = longest = min(row_tokens, 1 if spec is None else spec.segment_multiple)
    elif used < row_tokens:
        segments -= 1
    users = () if spec is None else spec.user_fields
    per_token = {*_TOKEN_FIELDS, *(user.name for user in users if user.per == "token")}
    per_segment = {*_SEGMENT_FIELDS, *(user.name for user in users if user.per == "segment")}
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in per_token:
            found[name] = value[..., : used // deal.cp_count]
        elif name in per_segment:
            found[name] = value[:segments]
        elif name in _BOUNDARIES:
            bounds = value[: segments + 1]
            found[name] = bounds.clip(max=used) if is_empty else bounds
        elif name not in _MADE_AGAIN:
            found[name] = value
    return found | {"row_tokens": used, "segments": segments, "max_seqlen": longest}
