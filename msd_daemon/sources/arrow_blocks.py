"""How the batches of an Arrow shard are cut into blocks: a function of their headers alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from federation.model.job import ShuffleRule

Blocks = npt.NDArray[np.int64]


def cut_batches(
    rows: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    rule: ShuffleRule,
    *,
    can_split: bool,
) -> Blocks:
    """Return the blocks: first batch, batch behind the last, first row in it, rows.

    Small batches are put together up to `block_records` rows and `block_bytes` bytes. Of a larger
    one each block is a run of rows of about that many bytes; where batches cannot be split
    (compressed ones have to be decompressed as a whole) it is a block by itself.

    Args:
        rows: Of each batch. Shape (batches,).
        sizes: Bytes of each batch as it lies. Shape (batches,).
        rule: The limits.
        can_split: True where reading some rows of a batch costs just these.

    Returns:
        Shape (blocks, 4), at least one block.
    """
    blocks: list[tuple[int, int, int, int]] = []
    begin = pending_rows = pending_bytes = 0
    for number, (count, size) in enumerate(zip(rows.tolist(), sizes.tolist(), strict=True)):
        is_over = pending_rows + count > rule.block_records
        if pending_rows and (is_over or pending_bytes + size > rule.block_bytes):
            blocks.append((begin, number, 0, pending_rows))
            begin, pending_rows, pending_bytes = number, 0, 0
        if can_split and (count > rule.block_records or (size > rule.block_bytes and count > 1)):
            step = max(1, min(rule.block_records, rule.block_bytes * count // max(size, 1)))
            blocks += [
                (number, number + 1, first, min(step, count - first))
                for first in range(0, count, step)
            ]
            begin = number + 1
            continue
        pending_rows += count
        pending_bytes += size
    if pending_rows or not blocks:
        blocks.append((begin, len(rows), 0, pending_rows))
    return np.array(blocks, dtype=np.int64)
