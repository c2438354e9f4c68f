"""Samples that cross nodes, of one generation: joins what is owed and wanted to the exchange.

The daemon touches no payload: it says which fragments go where, lends room for what comes, the
parcel of the lowest step first, and learns what lies there.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from msd_client.contract.errors import MsdError
from msd_daemon.core.chunk import Chunk
from msd_daemon.core.drawn_line import Segment
from msd_daemon.core.pool import ParcelChunk, PoolState
from msd_daemon.core.readahead import Order, ReadAhead
from msd_daemon.core.shared_steps import Offer, SharedSteps
from msd_daemon.core.steps import StepsState
from msd_daemon.services.exchange_port import (
    ExchangePort,
    FragmentColumns,
    ParcelKey,
    ParcelPart,
)

ISSUES_MAX = 1 << 20
"""Changes of owners in one generation."""


class ParcelOwner(Protocol):
    """What parcels ask of their generation."""

    def parcels_moved(self) -> None:
        """Something came, or was taken: let everything move that can."""

    def parcel_failed(self, error: MsdError) -> None:
        """A parcel can't be had: the generation can't go on."""

    def carry_out(self, orders: Sequence[Order]) -> None:
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
    ) -> None:
        self._exchange = exchange
        self._owner = owner
        self._job, self._generation = job
        self.nodes = self._nodes = list(nodes)
        """Names of the generation's nodes."""
        self._shared = shared
        self._pool = pool
        self._steps = steps
        self._readahead = readahead
        self._sizes: list[tuple[int, ParcelKey, int]] = []
        """Heap of (step, key, bytes): parcels that have no room yet."""
        self._wanted: dict[ParcelKey, int] = {}
        """Since when each is, on the monotonic clock."""
        self._rooms: dict[ParcelKey, int] = {}
        """Offset of the piece that a parcel was lent."""
        self.came_total = 0
        self.came_bytes = 0

    def settle(self) -> None:
        """Tell the exchange what is owed and wanted; lend room."""
        shared = self._shared
        while shared.offers:
            offer = shared.offers.popleft()
            key = self._key(offer.step, shared.node, offer.consumer, offer.issue)
            has_units = offer.export.export.has_units
            self._exchange.offer(key, _columns(offer), has_units=has_units)
        while shared.wants:
            want = shared.wants.popleft()
            key = self._key(want.step, want.producer, shared.node, want.issue)
            if key not in self._wanted:
                self._wanted[key] = time.monotonic_ns()
                self._exchange.want(key)
        while shared.needless:
            needless = shared.needless.popleft()
            self._exchange.decline(
                self._key(needless.step, needless.producer, shared.node, needless.issue)
            )
        while self._sizes:
            _, key, size_bytes = self._sizes[0]
            # Lower steps first: what a later one took could be what an earlier one waits for.
            piece, orders = self._readahead.lend_at_once(size_bytes)
            self._owner.carry_out(orders)
            if piece is None:
                return
            heapq.heappop(self._sizes)
            self._rooms[key] = piece.offset_bytes
            self._exchange.room(key, piece.offset_bytes, piece.size_bytes)

    def _key(self, step: int, producer: int, consumer: int, issue: int) -> ParcelKey:
        nodes = self._nodes
        number = parcel_generation(self._generation, issue)
        return ParcelKey(self._job, number, step, nodes[producer], nodes[consumer])

    def nodes_gone(self, nodes: Sequence[int]) -> None:
        """Nodes take part no more: what was wanted of them comes from others, or not at all."""
        names = {self._nodes[node] for node in nodes}
        self._sizes = [entry for entry in self._sizes if entry[1].producer not in names]
        heapq.heapify(self._sizes)
        for key in [key for key in self._wanted if key.producer in names]:
            del self._wanted[key]
            done = self._exchange.withdraw(key)
            offset_bytes = self._rooms.pop(key, None)
            if offset_bytes is not None:
                done.add_done_callback(partial(self._take_back, offset_bytes))

    def _take_back(self, offset_bytes: int, _done: object) -> None:
        self._pool.returned(offset_bytes)
        self._owner.parcels_moved()

    def awaited(self) -> dict[str, tuple[int, int]]:
        """Return by node how many parcels are wanted of it, and since when the oldest is."""
        found: dict[str, tuple[int, int]] = {}
        for key, since_ns in self._wanted.items():
            count, oldest_ns = found.get(key.producer, (0, since_ns))
            found[key.producer] = (count + 1, min(oldest_ns, since_ns))
        return found

    # -- what the exchange says ----------------------------------------------------------------------

    def size(self, key: ParcelKey, size_bytes: int) -> None:
        """A wanted parcel is there."""
        former = self._rooms.pop(key, None)
        if former is not None:
            self._pool.returned(former)
        heapq.heappush(self._sizes, (key.step, key, size_bytes))
        self._owner.parcels_moved()

    def came(self, key: ParcelKey, parts: Sequence[ParcelPart]) -> None:
        """All of a parcel lies in its room."""
        self._wanted.pop(key, None)
        offset_bytes = self._rooms.pop(key)
        end = max((part.offset_bytes + part.used_bytes for part in parts), default=offset_bytes)
        chunks = self._pool.published_parcel(
            offset_bytes,
            end - offset_bytes,
            [
                ParcelChunk(part.source, part.offset_bytes, part.used_bytes, len(part.index))
                for part in parts
            ],
        )
        self.came_total += 1
        self.came_bytes += end - offset_bytes
        self._steps.parcel_came(key.step, chunks, _found(parts, chunks))
        self._owner.parcels_moved()

    def acked(self, key: ParcelKey) -> None:
        """A consumer has what it was offered."""
        _, issue = issue_of(key.generation)
        if self._shared.acked(key.step, self._nodes.index(key.consumer), issue):
            self._owner.parcels_moved()

    def declined(self, key: ParcelKey) -> None:
        """A consumer has all that it would be offered."""
        _, issue = issue_of(key.generation)
        self._shared.declined(key.step, self._nodes.index(key.consumer), issue)

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


def _found(
    parts: Sequence[ParcelPart], chunks: Sequence[Chunk]
) -> dict[Segment, tuple[Chunk, int, int]]:
    """Return chunk, record number and first token there of every fragment of a parcel."""
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
    return found


def parcel_generation(generation: int, issue: int) -> int:
    """Return what stands as generation in a parcel's key: those of later issues are other parcels."""
    return generation * ISSUES_MAX + issue


def issue_of(number: int) -> tuple[int, int]:
    """Return generation and issue of a key."""
    return divmod(number, ISSUES_MAX)
