"""Positions of time, height and width for rows with images and videos (M-RoPE, Qwen2-VL's rule)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ITEM_COLUMNS = 6


def mrope_positions(length: int, items: npt.NDArray[np.int32], merge: int) -> npt.NDArray[np.int32]:
    """Return the three position ids of each token of a sample.

    Text counts up alike in all three. The tokens of an item get their place on its merged grid plus
    the position that a text token would have there; the text behind begins at the largest of them
    plus 1. Begin and end ids of an item are text.

    Args:
        length: Tokens of the sample.
        items: Rows (token_offset, tokens, units, t, h, w), ascending by offset; h and w in patches.
            Shape (items, 6).
        merge: Patches per side of a token.

    Returns:
        Time, height, width. Shape (3, length).

    Raises:
        ValueError: An item's tokens are not those of its grid, overlap, or end behind the sample.
    """
    table = np.asarray(items, np.int64).reshape(-1, ITEM_COLUMNS)
    offset, tokens = table[:, 0], table[:, 1]
    t, h, w = table[:, 3], table[:, 4] // merge, table[:, 5] // merge
    ends = offset + tokens
    if (t * h * w != tokens).any() or (table[:, 4:] % merge).any():
        raise ValueError(f"tokens of items are not their grids over {merge} x {merge} patches")
    starts_after = np.concatenate([[0], ends[:-1]])[: len(table)]
    if (tokens < 0).any() or (offset < starts_after).any() or (ends > length).any():
        raise ValueError(f"items overlap, are not sorted or end behind the {length} tokens")
    # What an item takes of the positions, less than what it takes of the tokens.
    span = np.where(tokens > 0, np.maximum(np.maximum(t, h), w), 0)
    saved = np.cumsum(tokens - span)
    at = np.arange(length, dtype=np.int64)
    positions = at - np.concatenate([[0], saved])[np.searchsorted(ends, at, side="right")]
    found = np.repeat(positions[None], 3, axis=0)
    inside = np.repeat(np.arange(len(table)), tokens)
    within = np.arange(len(inside)) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    place = offset[inside] + within
    start = (offset - (saved - (tokens - span)))[inside]
    plane = (h * w)[inside]
    width = w[inside]
    found[0, place] = start + within // plane
    found[1, place] = start + within % plane // width
    found[2, place] = start + within % width
    return found.astype(np.int32)
