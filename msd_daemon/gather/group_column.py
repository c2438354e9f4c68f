"""Which group each segment of a microbatch belongs to. Pure columns, no payload."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GROUP_BYTES = 4
"""Of a segment."""


def encode_groups(begins: npt.NDArray[np.bool_]) -> bytes:
    """Return the group of each segment as int32, little endian, counted from 0.

    Args:
        begins: Segments that begin a group, or are in none. Shape (segments,).
    """
    return (np.cumsum(begins) - 1).astype("<i4").tobytes()


def decode_groups(buffer: bytes | memoryview, count: int, offset: int) -> npt.NDArray[np.int32]:
    """Return the groups of `count` segments that lie in `buffer` from byte `offset` on.

    Raises:
        ValueError: The buffer is too short, or groups do not count from 0.
    """
    if offset + GROUP_BYTES * count > len(buffer):
        raise ValueError(
            f"groups of {count} segments need {GROUP_BYTES * count} bytes from {offset} on, the task "
            f"has {len(buffer)}"
        )
    groups = np.frombuffer(buffer, "<i4", count, offset)
    rises = np.diff(groups, prepend=-1)
    if count and (groups[0] or int(rises.min()) < 0 or int(rises.max()) > 1):
        raise ValueError(f"groups of {count} segments do not count from 0 on")
    return groups
