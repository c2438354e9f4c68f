"""M-RoPE ids of a microbatch: plain positions on three axes, moved where images and videos lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from msd_daemon.gather.media_items import FoundItems

Array = npt.NDArray[Any]


def write_mrope(
    ids: Array, bounds: npt.NDArray[np.int32], items: list[tuple[FoundItems, int]]
) -> None:
    """Turn plain positions into those of time, height and width.

    Text counts on all three axes alike. The placeholder tokens of an item with a grid of t, h and w
    patches are t * (h / merge) * (w / merge); each has the place of its patches, counted from where
    the text before it ended, and the text behind it goes on after the largest of them. So does the
    padding inside a segment.

    Args:
        ids: int32, shape (3, rows * row_tokens), C-contiguous; ids[0] holds the positions inside
            segments, the others are wholly written.
        bounds: Segment boundaries in places. Shape (segments + 1,).
        items: Images and videos of the microbatch, and each modality's merge.

    Raises:
        ValueError: An item has another number of placeholder tokens than its grid says.
    """
    ids[1:] = ids[0]
    parts = [_columns(found, merge) for found, merge in items if len(found.places)]
    if not parts:
        return
    columns = np.concatenate(parts, axis=1)
    columns = columns[:, np.argsort(columns[0], kind="stable")]
    place, _, _, _, _, segment = columns
    # An item moves on what follows, up to the next item or to its segment's end.
    stops = bounds[segment + 1].astype(np.int64)
    is_followed = segment[1:] == segment[:-1]
    stops[:-1][is_followed] = place[1:][is_followed]
    before, shift = -1, 0
    for at, tokens, t, h, w, own, stop in np.vstack([columns, stops]).T.tolist():
        shift = shift if own == before else 0
        before = own
        first = int(ids[0, at]) - shift
        block = ids[:, at : at + tokens].reshape(3, t, h, w)
        block[0] = np.arange(first, first + t).reshape(t, 1, 1)
        block[1] = np.arange(first, first + h).reshape(1, h, 1)
        block[2] = np.arange(first, first + w)
        shift += tokens - max(t, h, w)
        ids[:, at + tokens : stop] -= shift


def _columns(found: FoundItems, merge: int) -> npt.NDArray[np.int64]:
    """Return place, tokens, merged grid and segment of each item. Shape (6, items)."""
    grids = found.grids.T // np.array([[1], [merge], [merge]])
    is_wrong = (grids.prod(axis=0) != found.tokens) | (found.grids[:, 1:] % merge).any(axis=1)
    if is_wrong.any():
        number = int(np.flatnonzero(is_wrong)[0])
        raise ValueError(
            f"item {number} has {found.tokens[number]} placeholder tokens and a grid of "
            f"{found.grids[number].tolist()} patches, of which {merge} x {merge} make a token"
        )
    return np.vstack([found.places, found.tokens, grids, found.segments])
