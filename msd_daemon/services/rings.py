"""Rings of a generation and the segments that the daemon makes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msd_client.contract.ring_layout import RingLayout
from msd_daemon.core.ring_plan import RingPlan
from msd_daemon.core.slots import RingState
from msd_daemon.shm.mapping import Mapping, map_read_write
from msd_daemon.shm.ring_writer import write_superblock
from msd_daemon.shm.segment import Segment, make_segment


@dataclass
class Ring:
    """A ring with its segment."""

    plan: RingPlan
    state: RingState
    layout: RingLayout
    segment: Segment


def close_rings(rings: MappingOf[int, Ring]) -> None:
    """Close the segments of rings; mappings of readers live on."""
    for ring in rings.values():
        ring.segment.close()


async def make_rings(
    plans: MappingOf[int, RingPlan],
    generation: int,
    readers_of: Callable[[RingPlan], frozenset[int]],
    kind: Any,
) -> dict[int, Ring]:
    """Make the rings of a generation; a failure or a cancelled wait leaves none behind.

    Args:
        plans: By ring number.
        generation: Its number.
        readers_of: Gives the ranks that read a ring, once its segment is there.
        kind: Of the segments, as the daemon's configuration has it.
    """
    rings: dict[int, Ring] = {}
    try:
        for number, plan in plans.items():
            layout = plan.layout(generation)
            purpose = f"ring {plan.place.ring}"
            segment = await make_in_thread(make_ring_segment, layout, kind, purpose)
            state = RingState(plan.slots, readers_of(plan), is_retaining=plan.is_retaining)
            rings[number] = Ring(plan, state, layout, segment)
    except BaseException:
        close_rings(rings)
        raise
    return rings


async def make_in_thread(make: Callable[..., Segment], *arguments: Any) -> Segment:
    """Make a segment in a thread; a wait that is cancelled leaves none behind."""
    making = asyncio.ensure_future(asyncio.to_thread(make, *arguments))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_made)
        raise


def _close_made(making: asyncio.Future[Segment]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()


def make_pool_segment(nbytes: int, kind: Any, purpose: str) -> Segment:
    """Return a segment with all pages present. Blocks; for a thread."""
    return _make_and_map(nbytes, kind, purpose, lambda _: None)


def make_ring_segment(layout: RingLayout, kind: Any, purpose: str) -> Segment:
    """Return a ring's segment with its superblock and all pages present. Blocks; for a thread."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

    def write(mapping: Mapping) -> None:
        write_superblock(
            mapping,
            layout,
            created_ns=time.time_ns(),
            daemon_pid=os.getpid(),
            boot_id=bytes.fromhex(boot_id.replace("-", "")),
        )

    return _make_and_map(layout.ring_bytes, kind, purpose, write)


def _make_and_map(
    nbytes: int, kind: Any, purpose: str, write: Callable[[Mapping], None]
) -> Segment:
    """Make a segment with all pages present; the daemon keeps descriptors, no mapping."""
    segment = make_segment(nbytes, kind, purpose)
    try:
        mapping = map_read_write(segment.fd_read_write, segment.nbytes)
        write(mapping)
        mapping.close()
    except BaseException:
        segment.close()
        raise
    return segment
