"""Samples that cross nodes, of one generation: joins what is owed and wanted to the exchange.

The daemon touches no payload: it says which fragments go where, lends room for what comes, the
parcel of the lowest step first, and learns what lies there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from federation.model.plan import StepPlan
from msd_client.contract.errors import InternalError, MsdError
from msd_daemon.core.chunk import Chunk
from msd_daemon.core.drawn_line import Places, Segment, segments_of
from msd_daemon.core.pool import ParcelChunk, PoolState
from msd_daemon.core.readahead import GrantOrder, ReadAhead, SeekOrder
from msd_daemon.core.shared_steps import Offer, SharedSteps
from msd_daemon.core.steps import StepsState
from msd_daemon.services.exchange_port import (
    ExchangePort,
    FragmentColumns,
    ParcelKey,
    ParcelPart,
)


class ParcelOwner(Protocol):
    """What parcels ask of their generation."""

    def parcels_moved(self) -> None:
        """Something came, or was taken: let everything move that can."""

    def parcel_failed(self, error: MsdError) -> None:
        """A parcel can't be had: the generation can't go on."""

    def carry_out(self, orders: Sequence[GrantOrder | SeekOrder]) -> None:
        """Tell loader workers."""


class Parcels:
    """Of one generation.

    Args:
        exchange: The node's.
        owner: The generation.
        job: Its identity, and the generation's number.
        nodes: Names of the generation's nodes.
        shared: What is owed and wanted.
    """

    def __init__(
        self,
        exchange: ExchangePort,
        owner: ParcelOwner,
        job: tuple[str, int],
        nodes: Sequence[str],
        shared: SharedSteps,
        *,
        pool: PoolState,
        steps: StepsState,
        readahead: ReadAhead,
        plan_of: Callable[[int], StepPlan | None],
    ) -> None:
        self._exchange = exchange
        self._owner = owner
        self._job, self._generation = job
        self._nodes = list(nodes)
        self._shared = shared
        self._pool = pool
        self._steps = steps
        self._readahead = readahead
        self._plan_of = plan_of
        self._sizes: list[tuple[int, int, int]] = []
        """Heap of (step, producer, bytes): parcels that have no room yet."""
        self._rooms: dict[ParcelKey, int] = {}
        """Offset of the piece that a parcel was lent."""
        self.came_total = 0
        self.came_bytes = 0

    @property
    def wanted_steps(self) -> list[int]:
        """Steps of which a parcel has room or waits for it, ascending."""
        return sorted({step for step, _, _ in self._sizes} | {key.step for key in self._rooms})

    def settle(self) -> None:
        """Tell the exchange what is owed and wanted; lend room."""
        shared = self._shared
        while shared.offers:
            offer = shared.offers.popleft()
            self._exchange.offer(
                self._key(offer.step, shared.node, offer.consumer), _columns(offer)
            )
        while shared.wants:
            want = shared.wants.popleft()
            self._exchange.want(self._key(want.step, want.producer, shared.node))
        while self._sizes:
            step, producer, size_bytes = self._sizes[0]
            # Lower steps first: what a later one took could be what an earlier one waits for.
            piece, orders = self._readahead.lend_at_once(size_bytes)
            self._owner.carry_out(orders)
            if piece is None:
                return
            heapq.heappop(self._sizes)
            key = self._key(step, producer, shared.node)
            self._rooms[key] = piece.offset_bytes
            self._exchange.room(key, piece.offset_bytes, piece.size_bytes)

    def _key(self, step: int, producer: int, consumer: int) -> ParcelKey:
        nodes = self._nodes
        return ParcelKey(self._job, self._generation, step, nodes[producer], nodes[consumer])

    # -- what the exchange says ----------------------------------------------------------------------

    def size(self, key: ParcelKey, size_bytes: int) -> None:
        """A wanted parcel is there."""
        former = self._rooms.pop(key, None)
        if former is not None:
            self._pool.returned(former)
        heapq.heappush(self._sizes, (key.step, self._nodes.index(key.producer), size_bytes))
        self._owner.parcels_moved()

    def came(self, key: ParcelKey, parts: Sequence[ParcelPart]) -> None:
        """All of a parcel lies in its room."""
        offset_bytes = self._rooms.pop(key)
        plan = self._plan_of(key.step)
        producer = self._nodes.index(key.producer)
        if plan is None:
            self._pool.returned(offset_bytes)
            return
        end = max((part.offset_bytes + part.used_bytes for part in parts), default=offset_bytes)
        chunks = self._pool.published_parcel(
            offset_bytes,
            end - offset_bytes,
            [
                ParcelChunk(part.source, part.offset_bytes, part.used_bytes, len(part.index))
                for part in parts
            ],
        )
        places = _places(
            segments_of(plan, self._shared.segments_from(plan, producer)), parts, chunks
        )
        if places is None:
            self._owner.parcel_failed(
                InternalError(
                    f"node {key.producer} gave other samples for step {key.step} than were planned"
                )
            )
            return
        self.came_total += 1
        self.came_bytes += end - offset_bytes
        self._steps.parcel_came(key.step, producer, chunks, places)
        self._owner.parcels_moved()

    def acked(self, key: ParcelKey) -> None:
        """A consumer has what it was offered."""
        if self._shared.acked(key.step, self._nodes.index(key.consumer)):
            self._owner.parcels_moved()

    def failed(self, key: ParcelKey, error: MsdError) -> None:
        """A parcel can't be given, or had."""
        former = self._rooms.pop(key, None)
        if former is not None:
            self._pool.returned(former)
        self._owner.parcel_failed(error)


def _columns(offer: Offer) -> FragmentColumns:
    export, places = offer.export
    bases = np.array(places.bases, np.int64)
    return FragmentColumns(
        source=export.source,
        block_key=export.block_key,
        index=export.index,
        offset=export.offset,
        length=export.length,
        chunk_offset=np.array([chunk.piece.offset_bytes for chunk in places.chunks], np.int64),
        chunk_bytes=np.array([chunk.piece.size_bytes for chunk in places.chunks], np.int64),
        sample=np.array(places.samples, np.int32),
        first_token=(export.offset - bases).astype(np.int32),
    )


def _places(
    wanted: Sequence[Segment], parts: Sequence[ParcelPart], chunks: Sequence[Chunk]
) -> Places | None:
    """Return where wanted fragments lie in a parcel; None where one is not in it."""
    found: dict[Segment, tuple[Chunk, int, int]] = {}
    for part, chunk in zip(parts, chunks, strict=True):
        columns = (
            part.block_key.tolist(),
            part.index.tolist(),
            part.offset.tolist(),
            part.length.tolist(),
        )
        for number, (block_key, index, offset, length) in enumerate(zip(*columns, strict=True)):
            found[part.source, block_key, index, offset, length] = (chunk, number, offset)
    places = Places([], [], [])
    for segment in wanted:
        at = found.get(segment)
        if at is None:
            return None
        places.chunks.append(at[0])
        places.samples.append(at[1])
        places.bases.append(at[2])
    return places
