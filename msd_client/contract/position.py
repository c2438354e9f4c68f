"""Positions in a source's order, packed so that sorting keys sorts positions.

A source's order is: epoch, then window (16 shards), then block of the window, then record of the
block (DESIGN.md section 4). The first three are packed into one signed 64-bit `block_key`:

    bits 62..48 epoch (15) | bits 47..25 window (23) | bits 24..0 block (25)

Streaming sources have a single window 0 and block = lane block number * lanes + lane.
"""

from __future__ import annotations

from typing import NamedTuple

EPOCH_BITS = 15
WINDOW_BITS = 23
BLOCK_BITS = 25
EPOCH_MAX = (1 << EPOCH_BITS) - 1
WINDOW_MAX = (1 << WINDOW_BITS) - 1
BLOCK_MAX = (1 << BLOCK_BITS) - 1
KEY_MAX = 1 << (EPOCH_BITS + WINDOW_BITS + BLOCK_BITS)
"""Behind all block keys."""


class BlockPlace(NamedTuple):
    """A block key taken apart; all three count from 0."""

    epoch: int
    window: int
    block: int


def pack_block_key(epoch: int, window: int, block: int) -> int:
    """Return the 64-bit key of a block; keys compare as (epoch, window, block) do.

    Raises:
        OverflowError: A part is outside its bit range.
    """
    if not (0 <= epoch <= EPOCH_MAX and 0 <= window <= WINDOW_MAX and 0 <= block <= BLOCK_MAX):
        raise OverflowError(
            f"block place (epoch {epoch}, window {window}, block {block}) exceeds "
            f"({EPOCH_MAX}, {WINDOW_MAX}, {BLOCK_MAX})"
        )
    return (epoch << (WINDOW_BITS + BLOCK_BITS)) | (window << BLOCK_BITS) | block


def unpack_block_key(block_key: int) -> BlockPlace:
    """Return epoch, window and block of a key."""
    return BlockPlace(
        block_key >> (WINDOW_BITS + BLOCK_BITS),
        (block_key >> BLOCK_BITS) & WINDOW_MAX,
        block_key & BLOCK_MAX,
    )
