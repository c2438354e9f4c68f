"""Where the partitions of a source change hands, and when its former loaders are done. Pure.

A watermark is a block key: former loaders read their blocks before it, the new ones theirs from it
on. Order is by block, whoever reads it, so a source may be dealt anew at any block, into any number
of partitions, and nobody waits: the new loaders begin at once, the former ones finish meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msd_client.contract.position import BLOCK_BITS, pack_block_key, unpack_block_key
from msd_daemon.core.readahead import LoaderState


class NewPartition(NamedTuple):
    """A partition that a worker is to read from the watermark on."""

    part: int
    parts: int
    worker: int


class Move(NamedTuple):
    """What is to change about a source's loaders."""

    watermark: int
    """Block key."""
    leaving: tuple[LoaderState, ...]
    """They read up to it."""
    coming: tuple[NewPartition, ...]
    """They read from it on."""
    window_blocks: int = 0
    """Of the window that it lies in; 0 where that is not known, or of a stream."""


def plan_move(
    loaders: Sequence[LoaderState], wanted: Sequence[NewPartition], lanes: int
) -> Move | None:
    """Return how a source comes to be read by others.

    Args:
        loaders: Of the source on this node; those that read up to an earlier watermark are left as
            they are.
        wanted: Its partitions, all that this node reads.
        lanes: Of a streamed source; 0 of a seekable one.

    Returns:
        None where a loader that has to go has told nothing yet: it is not known how far its block
        lies from the end of its window. A move of nothing has neither who leaves nor who comes.
    """
    present = [state for state in loaders if state.until is None]
    is_new_deal = {(state.part, state.parts) for state in present} != {
        (want.part, want.parts) for want in wanted
    }
    held = {(state.part, state.parts): state.worker for state in present}
    coming = tuple(
        want for want in wanted if is_new_deal or held[want.part, want.parts] != want.worker
    )
    going = {(want.part, want.parts) for want in coming}
    leaving = tuple(state for state in present if is_new_deal or (state.part, state.parts) in going)
    if not leaving:
        return Move(0, (), ())
    told = [state for state in leaving if state.has_told]
    if not told or any(not (state.has_told or state.is_dry) for state in leaving):
        return None
    watermark = max(_behind(state, lanes) for state in told)
    same = [it for it in told if it.next_block_key >> BLOCK_BITS == watermark >> BLOCK_BITS]
    return Move(watermark, leaving, coming, same[0].window_blocks if same else 0)


def _behind(state: LoaderState, lanes: int) -> int:
    """Return a key behind all that a loader has read, or reads now."""
    epoch, window, block = unpack_block_key(state.next_block_key)
    if lanes:
        # One more of each lane: opening a compressed shard in its middle takes the new ones a while.
        return pack_block_key(epoch, window, block + 1 + lanes)
    if state.is_block_end and state.is_granted and block + state.parts < state.window_blocks:
        block += state.parts
    if block + 1 < state.window_blocks:
        return pack_block_key(epoch, window, block + 1)
    return pack_block_key(epoch, window + 1, 0)
