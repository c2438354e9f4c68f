"""Who may read ahead how far: turns pool room into grants, and a starved draw into revocations.

Each source loader has at most one grant out. A source's target is its share of the steps that are
planned at once, plus one chunk; a starved source goes first and may take the room of others'
undrawn read-ahead. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from msd_client.contract.position import BLOCK_BITS, unpack_block_key
from msd_daemon.core.allocator import Piece, round_up_page
from msd_daemon.core.leases import Leases
from msd_daemon.core.pool import PoolState, Revocation
from msd_daemon.core.shadows import Reach, Ready, ShadowGrant, Shadows, ShadowSeek

SHADOW_LEAD = 2
"""A shadow has so many times ready what its source reads ahead: the first publishing empties it, and
it is to go on while its successor is being set up."""


ROOM_PARTS = 3
"""Beyond its target a source reads only while so large a part of the pool is free."""


class GrantOrder(NamedTuple):
    """Effect: lend this piece to a source loader for its next chunk."""

    loader: int
    task: int
    piece: Piece


class SeekOrder(NamedTuple):
    """Effect: a source loader must continue from here again."""

    loader: int
    task: int
    block_key: int
    first_index: int


class OpenOrder(NamedTuple):
    """Effect: a source loader that was parked is opened again where it was."""

    loader: int


Order = GrantOrder | SeekOrder | OpenOrder


@dataclass(slots=True)
class LoaderState:
    """A source loader as the daemon sees it."""

    loader: int
    worker: int
    source_index: int
    part: int = 0
    parts: int = 1
    next_block_key: int = 0
    """Where a new process would go on: behind the last chunk that was taken over."""
    next_index: int = 0
    granted_offset: int = 0
    """Piece that is out, while `is_granted`."""
    task: int = 0
    """Its lease: grows with each seek and change of hands; chunks of an older task are refused."""
    is_granted: bool = False
    is_dry: bool = False
    needed_bytes: int = 0
    """Set after TOO_SMALL: what the next record needs."""
    is_promoted: bool = False
    """Open already in the process that takes its lost worker's place."""
    must_seek: bool = False
    """That process reads elsewhere: it has to go on behind what was published."""
    has_told: bool = False
    """Something of it was taken over; what follows is about the last chunk of that."""
    is_block_end: bool = False
    window_blocks: int = 0
    until: int | None = None
    """Key of the first block that others read in its place; None: it reads on."""
    is_through: bool = False
    """It told all that it had before `until`."""
    is_parked: bool = False
    """Its process has nothing open for it: opened again once it is to read."""

    def is_beyond(self, block_key: int) -> bool:
        """True where a block is no longer its to read."""
        return self.until is not None and block_key >= self.until

    @property
    def begins_window(self) -> bool:
        """True where the next chunk may be of the first block of a window."""
        if self.part:
            return False
        block = unpack_block_key(self.next_block_key).block
        if not self.has_told:
            own = block + -block % self.parts
            return not block or 0 < self.window_blocks <= own
        return self.is_block_end and 0 < self.window_blocks <= block + self.parts


@dataclass(slots=True)
class SourceTarget:
    """How far a source's loaders read ahead together."""

    source_index: int
    target_bytes: int
    loaders: list[LoaderState]
    chunk_bytes: int
    is_starved: bool = False


class ReadAhead:
    """Grants for all source loaders of one generation."""

    def __init__(self, pool: PoolState, chunk_bytes: int) -> None:
        self._pool = pool
        self.chunk_bytes = chunk_bytes
        self.leases = Leases()
        self.shadows: Shadows[Any] = Shadows(pool, self.leases)
        """Of critical sources."""
        self._sources: dict[int, SourceTarget] = {}
        self._loaders: dict[int, LoaderState] = {}
        self._away: set[int] = set()
        """Workers that are being replaced: what they are ordered now would be lost."""
        self._is_dirty = True
        self._was_refused = False

    @property
    def loaders(self) -> dict[int, LoaderState]:
        """Source loaders by id."""
        return self._loaders

    def add_source(
        self,
        source_index: int,
        target_bytes: int,
        loaders: list[LoaderState],
        chunk_bytes: int | None = None,
    ) -> None:
        """Take on a source with its loaders, or change its target.

        Args:
            source_index: The source.
            target_bytes: How far its loaders read ahead together.
            loaders: Of a new source; of a known one those that come beside its others.
            chunk_bytes: Of a new source, where it is not `chunk_bytes` of all.
        """
        self._is_dirty = True
        known = self._sources.get(source_index)
        if known is not None:
            known.target_bytes = target_bytes
            known.loaders += loaders
            self._loaders |= {loader.loader: loader for loader in loaders}
            return
        self._sources[source_index] = SourceTarget(
            source_index, target_bytes, loaders, chunk_bytes or self.chunk_bytes
        )
        for loader in loaders:
            self._loaders[loader.loader] = loader

    @property
    def was_refused(self) -> bool:
        """True where a source got no room for its next chunk at the last look."""
        return self._was_refused

    def loaders_of(self, source_index: int) -> list[LoaderState]:
        """Return the loaders of a source; none where it is not read here."""
        source = self._sources.get(source_index)
        return [] if source is None else list(source.loaders)

    def target_bytes(self, source_index: int) -> int:
        """Return how far the loaders of a known source read ahead together."""
        return self._sources[source_index].target_bytes

    def remove_loader(self, loader: int) -> LoaderState:
        """Forget a source loader: another node's go on; what it was lent comes back by itself."""
        self._is_dirty = True
        state = self._loaders.pop(loader)
        source = self._sources[state.source_index]
        source.loaders.remove(state)
        if not source.loaders:
            del self._sources[state.source_index]
        self.shadows.remove(loader)
        return state

    def retire(self, loader: int, until: int) -> LoaderState:
        """Have a loader begin no block at or behind a key: others read those from now on."""
        self._is_dirty = True
        state = self._loaders[loader]
        state.until, state.is_through = until, state.is_dry
        return state

    def has_no_more(self, loader: int) -> None:
        """A loader came to where it was to stop, or to its source's end."""
        self._is_dirty = True
        state = self._loaders[loader]
        state.is_dry, state.is_through = True, state.until is not None

    def changed(self) -> None:
        """Demand or room changed: the next call looks at all sources again."""
        self._is_dirty = True

    def room_came_free(self) -> None:
        """Chunks went; matters only where a grant was refused for want of room."""
        self._is_dirty = self._is_dirty or self._was_refused

    def starved(self, sources: Iterable[int]) -> None:
        """The draw or a waiting plan needs these sources' next chunk, whatever their targets."""
        for number in sources:
            source = self._sources.get(number)
            if source is not None and not source.is_starved:
                source.is_starved = True
                self._is_dirty = True

    def fed(self, source_index: int) -> None:
        """A chunk of a source arrived: it goes on by its target until starved again."""
        self._sources[source_index].is_starved = False

    def grant_ended(self, loader: int, task: int, needed_bytes: int = 0) -> bool:
        """A piece came back, used or not; return whether it belongs to the loader's present task."""
        self._is_dirty = True
        state = self._loaders.get(loader)
        if state is None:
            return False
        state.is_granted = False
        state.needed_bytes = needed_bytes if task == state.task else 0
        return task == state.task

    def took(
        self,
        loader: int,
        block_key: int,
        next_index: int,
        *,
        is_block_end: bool = False,
        is_lane_end: bool = False,
        window_blocks: int = 0,
    ) -> None:
        """A chunk of a loader was taken over; it ends before this position, maybe with its block.

        `window_blocks` is how many blocks the window has that the block lies in; 0 of a stream.
        """
        state = self._loaders[loader]
        state.next_block_key, state.next_index = block_key, next_index
        state.has_told, state.is_block_end = True, is_block_end
        state.window_blocks = window_blocks
        self.shadows.taken(loader, Reach(block_key, next_index, is_block_end, is_lane_end))

    def worker_lost(
        self, worker: int, give_back: Callable[[int], object] | None = None
    ) -> list[LoaderState]:
        """A worker is gone or fenced off. Return its loaders, to be opened anew.

        Args:
            worker: Its number.
            give_back: Takes the offset of each piece it had; by default they are free at once, which
                only the end of its process allows.
        """
        give_back = give_back or self._pool.returned
        self._away.add(worker)
        lost = [state for state in self._loaders.values() if state.worker == worker]
        for state in lost:
            if state.is_granted:
                give_back(state.granted_offset)
            state.is_granted = False
            state.task = self.leases.renew(state.loader)
            state.needed_bytes = 0
            state.is_promoted = state.must_seek = False
        return lost

    def promote(self, loader: int) -> list[Ready[Any]]:
        """Have a lost loader's shadow take its place, if it has one; return the chunks it had ready.

        They are to be published in order, under the loader's name, before anything else is done.
        """
        state = self._loaders[loader]
        made = self.shadows.promote(loader, state.worker)
        if made is None:
            return []
        state.is_promoted = made.is_open
        if made.is_open:
            state.task = made.task
            state.is_granted = made.granted_offset is not None
            state.granted_offset = made.granted_offset or 0
            state.is_dry, state.needed_bytes = made.is_dry, made.needed_bytes
        state.must_seek = made.is_open and not made.is_at_place
        self._is_dirty = True
        return made.ready

    def worker_back(self, worker: int) -> None:
        """A worker was replaced and its loaders were opened again."""
        self._away.discard(worker)
        self._is_dirty = True

    def sought(self, loader: int) -> SeekOrder:
        """Return the order that has a promoted loader go on behind what was published."""
        state = self._loaders[loader]
        state.must_seek = False
        state.is_dry = False
        state.needed_bytes = 0
        state.task = self.leases.renew(loader)
        return SeekOrder(loader, state.task, state.next_block_key, state.next_index)

    def is_away(self, worker: int) -> bool:
        """Return True while a worker is being replaced."""
        return worker in self._away

    def granted_workers(self, *, starved_only: bool = False) -> set[int]:
        """Return the workers that have a piece to fill, for starved sources alone if asked so."""
        return {
            loader.worker
            for source in self._sources.values()
            if source.is_starved or not starved_only
            for loader in source.loaders
            if loader.is_granted
        }

    def park(self, source_index: int, busy: AbstractSet[int] = frozenset()) -> list[LoaderState]:
        """Have a source's loaders that have nothing to read keep nothing open; return them.

        Args:
            source_index: The source.
            busy: Loaders that have something else to do.
        """
        source = self._sources.get(source_index)
        if source is None or source.is_starved:
            return []
        parked = [
            state
            for state in source.loaders
            if not (state.is_granted or state.is_parked or state.worker in self._away)
            and state.loader not in busy
        ]
        for state in parked:
            state.is_parked = True
        return parked

    def drain(self, worker: int) -> None:
        """Order nothing more of a worker: it is to be replaced once what it has came back."""
        self._away.add(worker)

    def next_shadow_orders(self) -> list[ShadowGrant | ShadowSeek]:
        """Return what to order of shadows; ask behind `next_orders`, they get what is left."""
        if not self.shadows:
            return []

        def wanted_bytes(loader: int) -> int:
            source = self._sources[self._loaders[loader].source_index]
            return SHADOW_LEAD * source.target_bytes // len(source.loaders)

        return self.shadows.next_orders(is_roomy=not self._was_refused, wanted_bytes=wanted_bytes)

    def next_orders(self) -> list[Order]:
        """Return what to order now; starved sources first, then those furthest below target."""
        if not self._is_dirty:
            return []
        self._is_dirty = self._was_refused = False
        orders: list[Order] = []
        wanting = []
        for source in self._sources.values():
            undrawn = sum(self._pool.undrawn_bytes(loader.loader) for loader in source.loaders)
            loaders = self._by_need(source, undrawn)
            if loaders:
                ratio = undrawn / max(source.target_bytes, 1)
                wanting.append((not source.is_starved, ratio, source.source_index, source, loaders))
        wanting.sort(key=lambda entry: entry[:3])
        for _, _, _, source, loaders in wanting:
            for loader in loaders:
                if loader.is_granted or loader.worker in self._away or _must_wait(loader, source):
                    continue
                # Only for what is needed first others give up what they have: it is drawn later.
                is_urgent = source.is_starved and loader is loaders[0]
                if not self._grant(loader, source, orders, is_urgent=is_urgent):
                    self._was_refused = True
                    if source.is_starved:
                        return orders  # what comes free must go to the starved source first
                    break
        return orders

    def _by_need(self, source: SourceTarget, undrawn_bytes: int) -> list[LoaderState]:
        """Return the loaders to grant to, those furthest behind in the order first.

        A source beyond its target is starved of what its furthest loader has yet to read: others
        would only fill the pool. Blocks are drawn one after the other, so several loaders of a source
        work at the same time only where each may make a block that is not drawn yet.
        """
        is_short = undrawn_bytes < source.target_bytes
        if not is_short and not source.is_starved and len(source.loaders) < 2:
            return []
        loaders = [loader for loader in source.loaders if not loader.is_dry]
        if is_short and len(loaders) < 2:
            return loaders
        loaders.sort(key=lambda it: (it.next_block_key, it.next_index, it.loader))
        if is_short:
            return loaders
        found = loaders[:1] if source.is_starved else []
        if source.target_bytes and self._has_room:
            found += [it for it in loaders if it not in found and self._is_in_first_block(it)]
        return found

    @property
    def _has_room(self) -> bool:
        return ROOM_PARTS * self._pool.room_bytes > self._pool.allocator.capacity_bytes

    def _is_in_first_block(self, loader: LoaderState) -> bool:
        """True where a loader has undrawn chunks of no block but the one that it reads."""
        first = self._pool.first_undrawn_block(loader.loader)
        return first is None or (first == loader.next_block_key and not loader.is_block_end)

    def _grant(
        self,
        loader: LoaderState,
        source: SourceTarget,
        orders: list[Order],
        *,
        is_urgent: bool,
    ) -> bool:
        size = max(source.chunk_bytes, loader.needed_bytes)
        piece = self._pool.lend(size)
        if piece is None and is_urgent and loader.needed_bytes == 0:
            # A smaller piece still moves a starved source on, and costs nobody a chunk.
            largest = self._pool.allocator.largest_free_bytes()
            if largest >= 4 * round_up_page(1):
                piece = self._pool.lend(min(largest, size))
        while piece is None and is_urgent and self._make_room(loader, orders):
            piece = self._pool.lend(size)
        if piece is None:
            return False
        loader.is_granted = True
        loader.granted_offset = piece.offset_bytes
        if loader.is_parked:
            loader.is_parked = False
            orders.append(OpenOrder(loader.loader))
        orders.append(GrantOrder(loader.loader, loader.task, piece))
        return True

    def lend_at_once(self, size_bytes: int) -> tuple[Piece | None, list[Order]]:
        """Return a piece that a planned step waits for, made room for by undrawn read-ahead.

        None where even that is not enough now. The orders are to be carried out in any case.
        """
        orders: list[Order] = []
        piece = self._pool.lend(size_bytes)
        while piece is None and self._make_room(None, orders):
            piece = self._pool.lend(size_bytes)
        if piece is None:
            self._was_refused = True
        return piece, orders

    def _make_room(self, needing: LoaderState | None, orders: list[Order]) -> bool:
        """Drop a chunk that nobody needs now: a shadow's first, no draw counts on those."""
        return self.shadows.give_up_one() or self._revoke_one(needing, orders)

    def _revoke_one(self, needing: LoaderState | None, orders: list[Order]) -> bool:
        """Drop the tail of the loader that read furthest ahead of its target, starved ones last."""
        candidates = [
            (
                not source.is_starved,
                self._pool.undrawn_bytes(loader.loader) / max(source.target_bytes, 1),
                loader.loader,
            )
            for source in self._sources.values()
            for loader in source.loaders
            if loader is not needing
            and loader.worker not in self._away
            and not self._comes_before(loader, needing)
        ]
        for _, _, number in sorted(candidates, reverse=True):
            revocation = self._pool.revoke_tail(number)
            if revocation is not None:
                order = self._seek(revocation)
                if not self._loaders[number].is_parked:
                    orders.append(order)
                return True
        return False

    def _comes_before(self, loader: LoaderState, needing: LoaderState | None) -> bool:
        """True where what a loader read last is drawn before what another of its source is to read."""
        if needing is None or loader.source_index != needing.source_index:
            return False
        last = self._pool.last_place(loader.loader)
        return last is not None and last < (needing.next_block_key, needing.next_index)

    def _seek(self, revocation: Revocation) -> SeekOrder:
        state = self._loaders[revocation.loader]
        self.shadows.set_back(state.loader, revocation.block_key, revocation.first_index)
        state.task = self.leases.renew(state.loader)
        state.needed_bytes = 0
        state.is_dry = False
        if revocation.block_key >> BLOCK_BITS != state.next_block_key >> BLOCK_BITS:
            state.has_told = False  # how many blocks that window has is not known any more
        state.next_block_key, state.next_index = revocation.block_key, revocation.first_index
        state.is_block_end = False
        return SeekOrder(state.loader, state.task, revocation.block_key, revocation.first_index)


def _must_wait(loader: LoaderState, source: SourceTarget) -> bool:
    """True where a loader would begin a window before others told all that comes before.

    That a window has no block is told by the first block of a later one: the planner would pass over
    what those have yet to tell.
    """
    if len(source.loaders) < 2 or not loader.begins_window:
        return False
    return any(
        other.until is not None and not other.is_through and other.until <= loader.next_block_key
        for other in source.loaders
    )
