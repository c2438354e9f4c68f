"""What is told of a step's frozen rows: their digest, the labels that count, that they keep the caps."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule
from federation.planning.extra_rows import ExtraRows
from federation.planning.step_pool import BLOCK_KEY, INDEX, LENGTH, OFFSET, SOURCE, Packed

Int64Array = npt.NDArray[np.int64]


def check_rows(
    packed: Packed, rule: BatchRule, extras: ExtraRows, row_count: int, *, is_last: bool
) -> None:
    """Assert that rows are full in number and within their caps, and segments do not overlap."""
    is_whole = len(packed.row_starts) == row_count or rule.is_varlen
    assert is_whole or is_last, "only the last step may have empty rows"
    if not len(packed.row):
        return
    assert int(packed.row_sizes.max()) <= rule.row_segments_max, "a row has too many segments"
    # A row's segments follow each other, so its last end bounds all of them.
    ends = packed.column + packed.segments[LENGTH]
    assert int(ends.max()) <= rule.row_tokens, "a row overflows"
    gaps = packed.column[1:] - ends[:-1]
    gaps[packed.row_starts[1:] - 1] = 0
    assert not len(gaps) or int(gaps.min()) >= 0, "segments overlap"
    for most, held in zip(extras.units_max, extras.units(packed.extras), strict=True):
        row_units = np.add.reduceat(held, packed.row_starts)
        assert int(row_units.max()) <= most, "a row has too many units of media"


def valid_labels(
    packed: Packed,
    rule: BatchRule,
    extras: ExtraRows,
    is_trained: npt.NDArray[np.bool_] | None,
) -> Int64Array:
    """Return the labels of each segment that count. Shape (n,).

    A label is counted for each trained token but a segment's first. Joined documents have one
    more where they touch, of the later one's first token if it is trained: at the earlier one's
    last token if labels are shifted, else at that token.

    Args:
        packed: The rows.
        rule: Of the step.
        extras: Of the segments.
        is_trained: False for sources whose labels weigh nothing; None = all do. Shape (S,).
    """
    lengths, column = packed.segments[LENGTH], packed.column
    valid: Int64Array = lengths - 1
    first: Int64Array | None = None
    if extras.has_trained:
        trained = extras.trained(packed.extras)
        first = trained % 2
        valid = trained // 2 - first
    if rule.documents == "joined" and len(valid):
        touches = column[1:] == column[:-1] + lengths[:-1]
        if first is not None:
            touches &= first[1:] > 0
        if rule.labels == "shifted":
            valid[:-1] += touches
        else:
            valid[1:] += touches
    if is_trained is not None:
        valid *= is_trained[packed.segments[SOURCE]]
    return valid


def membership(packed: Packed, source_ids: Int64Array) -> bytes:
    """Return sha256 over columns: sources by name, so that renumbering them changes nothing.

    Args:
        packed: The rows.
        source_ids: 64 bits of each source's name. Shape (S,).
    """
    wide = np.stack((source_ids[packed.segments[SOURCE]], packed.segments[BLOCK_KEY]))
    narrow = np.concatenate(
        (
            packed.segments[[INDEX, OFFSET, LENGTH]],
            packed.row[None],
            packed.column[None],
        )
    )
    digest = hashlib.sha256(wide.astype("<i8", copy=False).tobytes())
    digest.update(narrow.astype("<i4").tobytes())
    return digest.digest()
