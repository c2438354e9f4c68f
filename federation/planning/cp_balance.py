"""How even the attention of context-parallel ranks is under a layout. Pure arithmetic on integers.

A rank computes the attention of its own queries, whose keys lie on all ranks: query p of a document
(from 0) has p + 1 keys. `zigzag_document` is even by construction: of a segment cut into 2 * cp equal
chunks, rank r has chunks r and 2 * cp - 1 - r, whose keys add up to the same for every r; only padding
at the end of a segment, of which the last chunks have more, takes some away. `zigzag_row` is as even
only where a row is one document.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from msd_client.contract.context_parallel import CpLayout

Int64Array = npt.NDArray[np.int64]


def attention_pairs(
    layout: CpLayout,
    cp_count: int,
    row: Int64Array,
    column: Int64Array,
    length: Int64Array,
    shape: tuple[int, int],
    segment_multiple: int = 1,
) -> Int64Array:
    """Return the pairs of query and key that each rank computes of each row. Shape (rows, cp).

    Args:
        layout: How rows are dealt; `check_layout` of the contract holds.
        cp_count: Context-parallel ranks.
        row: Of each segment. Shape (n,).
        column: First place of each segment. Shape (n,).
        length: Tokens of each segment, padding left out. Shape (n,).
        shape: (rows, row_tokens).
        segment_multiple: Segments take a multiple of so many places.
    """
    chunks = chunk_pairs(layout, cp_count, row, column, length, shape, segment_multiple)
    if layout == "contiguous":
        return chunks[:, 0::2] + chunks[:, 1::2]
    return chunks[:, :cp_count] + chunks[:, : cp_count - 1 : -1]


def chunk_pairs(
    layout: CpLayout,
    cp_count: int,
    row: Int64Array,
    column: Int64Array,
    length: Int64Array,
    shape: tuple[int, int],
    segment_multiple: int = 1,
) -> Int64Array:
    """Return the pairs of each of the 2 * cp chunks: of a row, or of all its segments. Shape (rows, 2 * cp).

    Args:
        layout: As in `attention_pairs`.
        cp_count: As in `attention_pairs`.
        row: As in `attention_pairs`.
        column: As in `attention_pairs`.
        length: As in `attention_pairs`.
        shape: As in `attention_pairs`.
        segment_multiple: As in `attention_pairs`.
    """
    rows, row_tokens = shape
    parts = np.arange(2 * cp_count + 1)
    if layout == "zigzag_document":
        extent = -(-length // segment_multiple) * segment_multiple
        edges = extent[:, None] // (2 * cp_count) * parts
    else:
        edges = row_tokens // (2 * cp_count) * parts - column[:, None]
    queries = np.clip(edges, 0, length[:, None])
    pairs = np.diff(queries * (queries + 1) // 2, axis=1)
    found = np.zeros((rows, 2 * cp_count), np.int64)
    np.add.at(found, row, pairs)
    return found
