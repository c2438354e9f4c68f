"""Hot shadows: second source loaders of critical sources, a few chunks ahead of the active ones.

A shadow reads the partitions of its active loader in another process. What it has ready lies in the
pool, in a budget of its own, known to nobody: not to the planner, not to the draw. Chunks that the
active loader published meanwhile are dropped. When the active loader is gone, what the shadow has
behind the last published record is published at once, and the shadow is the active one.

Each shadow holds one run of chunks without a gap, from `start` to `position`. It may take over where
the run begins no later than what was published ends; chunk boundaries of the two need not agree, as
a record that is known already is passed over. The budget is the first to go where a starved source
needs room. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from msd_daemon.core.allocator import Piece
from msd_daemon.core.leases import Leases
from msd_daemon.core.pool import PoolState

AnyNotice = TypeVar("AnyNotice")


class Reach(NamedTuple):
    """How far a loader told its source: all before it is known. Ordered as the source is."""

    block_key: int
    record: int
    """Index behind the last record of the block that it told."""
    is_block_end: bool = False
    """True where it also told that the block ends here."""
    is_lane_end: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Where a process would go on."""
        return self.block_key, self.record


class Ready(NamedTuple, Generic[AnyNotice]):
    """A chunk that a shadow has ready."""

    offset_bytes: int
    used_bytes: int
    first: tuple[int, int]
    reach: Reach
    notice: AnyNotice


class ShadowGrant(NamedTuple):
    """Effect: lend this piece to a shadow for its next chunk."""

    loader: int
    task: int
    piece: Piece


class ShadowSeek(NamedTuple):
    """Effect: a shadow goes on from here."""

    loader: int
    block_key: int
    first_index: int


class Promotion(NamedTuple, Generic[AnyNotice]):
    """What the active loader becomes."""

    ready: list[Ready[AnyNotice]]
    """To be published now, in order."""
    task: int
    """Lease under which the process works."""
    granted_offset: int | None
    """Piece that it fills now."""
    is_dry: bool
    needed_bytes: int
    is_open: bool
    """True where a process reads for it."""
    is_at_place: bool
    """False: it reads elsewhere and must be told to go on behind what was published."""


@dataclass(eq=False)
class Shadow(Generic[AnyNotice]):
    """One shadow; `loader` and `worker` are those of the active loader that it stands behind."""

    loader: int
    worker: int
    chunk_bytes: int
    budget_bytes: int
    taken: Reach
    """How far the active loader told the source."""
    start: Reach
    """What is told before its run begins: an end of a block may be all that is missing."""
    position: Reach
    task: int = 0
    ready: deque[Ready[AnyNotice]] = field(default_factory=deque)
    ready_bytes: int = 0
    is_open: bool = False
    """True while a process reads for it."""
    granted_offset: int | None = None
    is_dry: bool = False
    needed_bytes: int = 0
    must_seek: bool = False
    """True where its process reads elsewhere than at `position`."""

    @property
    def is_contiguous(self) -> bool:
        """True where its run begins no later than what was published ends."""
        return self.start <= self.taken

    @property
    def is_at_place(self) -> bool:
        """True where a process that reads on from here leaves nothing out and repeats nothing."""
        return self.is_contiguous and self.position.place >= self.taken.place


class Shadows(Generic[AnyNotice]):
    """All shadows of one generation.

    Args:
        pool: Lends what they fill.
        leases: Of the loaders.
    """

    def __init__(self, pool: PoolState, leases: Leases) -> None:
        self._pool = pool
        self._leases = leases
        self._shadows: dict[int, Shadow[AnyNotice]] = {}
        self.promotions_total = 0

    def __bool__(self) -> bool:
        """True where a source is critical."""
        return bool(self._shadows)

    def __iter__(self) -> Iterator[Shadow[AnyNotice]]:
        """All of them."""
        return iter(self._shadows.values())

    @property
    def ready_bytes(self) -> int:
        """Bytes of the pool that hold chunks for the worst case."""
        return sum(shadow.ready_bytes for shadow in self._shadows.values())

    @property
    def budget_bytes(self) -> int:
        """Most that they may hold."""
        return sum(shadow.budget_bytes for shadow in self._shadows.values())

    @property
    def granted_workers(self) -> set[int]:
        """Loader workers behind which a process has a piece to fill."""
        return {it.worker for it in self._shadows.values() if it.granted_offset is not None}

    @property
    def workers(self) -> set[int]:
        """Loader workers that need a second process behind them."""
        return {shadow.worker for shadow in self._shadows.values()}

    def of(self, loader: int) -> Shadow[AnyNotice] | None:
        """Return the shadow of a loader, None where its source is not critical."""
        return self._shadows.get(loader)

    def add(
        self,
        loader: int,
        worker: int,
        place: tuple[int, int],
        *,
        chunk_bytes: int,
        budget_bytes: int,
    ) -> None:
        """Have a loader shadowed; nothing is read before a process is there."""
        reach = Reach(*place)
        self._shadows[loader] = Shadow(
            loader, worker, chunk_bytes, max(budget_bytes, chunk_bytes), reach, reach, reach
        )

    def process_came(self, worker: int) -> list[Shadow[AnyNotice]]:
        """A process is there to read behind a worker; return its shadows, to be opened in it."""
        loaders = [
            it.loader for it in self._shadows.values() if it.worker == worker and not it.is_open
        ]
        return [self.opened(loader) for loader in loaders]

    def opened(self, loader: int) -> Shadow[AnyNotice]:
        """A shadow's process is told to open it at its position, returned with it."""
        shadow = self._shadows[loader]
        if not shadow.is_at_place:
            self._restart(shadow)
        shadow.is_open = True
        shadow.must_seek = False
        shadow.is_dry = False
        shadow.needed_bytes = 0
        shadow.task = self._leases.renew(loader)
        return shadow

    def remove(self, loader: int) -> None:
        """A loader's source is another node's now: what its shadow has ready goes.

        A piece that it fills comes back as one of an older lease.
        """
        shadow = self._shadows.pop(loader, None)
        for ready in () if shadow is None else shadow.ready:
            self._pool.returned(ready.offset_bytes)

    def process_gone(self, worker: int, give_back: Callable[[int], object]) -> None:
        """That process ended, or is not to be trusted; chunks that it had ready stay.

        Args:
            worker: It read behind this one.
            give_back: Takes the offset of each piece that it was filling.
        """
        for shadow in self._shadows.values():
            if shadow.worker != worker:
                continue
            shadow.is_open = False
            shadow.task = self._leases.renew(shadow.loader)
            if shadow.granted_offset is not None:
                give_back(shadow.granted_offset)
                shadow.granted_offset = None

    def taken(self, loader: int, reach: Reach) -> None:
        """The active loader told its source up to here: chunks before it are of no use."""
        shadow = self._shadows.get(loader)
        if shadow is None:
            return
        shadow.taken = max(shadow.taken, reach)
        while shadow.ready and shadow.ready[0].reach <= shadow.taken:
            self._drop(shadow, shadow.ready.popleft())

    def set_back(self, loader: int, block_key: int, index: int) -> None:
        """Published chunks from here on were revoked."""
        shadow = self._shadows.get(loader)
        if shadow is None:
            return
        shadow.taken = Reach(block_key, index)
        if not shadow.is_contiguous:
            self._restart(shadow)

    def came(
        self,
        loader: int,
        task: int,
        offset_bytes: int,
        used_bytes: int,
        first: tuple[int, int],
        reach: Reach,
        notice: AnyNotice,
    ) -> bool:
        """A shadow filled a piece; return False where it was refused, as of an older lease."""
        shadow = self._ended(loader, task, offset_bytes)
        if shadow is None:
            return False
        shadow.needed_bytes = 0
        shadow.position = reach
        if reach <= shadow.taken:
            shadow.start = reach
            self._pool.returned(offset_bytes)
            return True
        held = self._pool.shrink(offset_bytes, used_bytes)
        shadow.ready.append(Ready(offset_bytes, used_bytes, first, reach, notice))
        shadow.ready_bytes += held.size_bytes
        return True

    def came_back(
        self, loader: int, task: int, offset_bytes: int, *, needed_bytes: int, is_dry: bool
    ) -> None:
        """A piece came back unused: too small for the next record, or there is none."""
        shadow = self._ended(loader, task, offset_bytes)
        if shadow is not None:
            self._pool.returned(offset_bytes)
            shadow.needed_bytes = needed_bytes
            shadow.is_dry = is_dry

    def next_orders(
        self, *, is_roomy: bool, wanted_bytes: Callable[[int], int] | None = None
    ) -> list[ShadowGrant | ShadowSeek]:
        """Return what to order now.

        Args:
            is_roomy: False where an active loader waits for room.
            wanted_bytes: How far a loader's shadow reads ahead, within its budget; what lies further
                would be made twice for nothing. None: as far as the budget goes.
        """
        orders: list[ShadowGrant | ShadowSeek] = []
        for shadow in self._shadows.values():
            if not shadow.is_open or shadow.granted_offset is not None:
                continue
            if not shadow.is_at_place:
                self._restart(shadow)
            if shadow.must_seek:
                shadow.must_seek = False
                orders.append(ShadowSeek(shadow.loader, *shadow.position.place))
            size = max(shadow.chunk_bytes, shadow.needed_bytes)
            wanted = shadow.budget_bytes
            if wanted_bytes is not None:
                wanted = min(wanted, wanted_bytes(shadow.loader))
            has_budget = not shadow.ready or (
                shadow.ready_bytes < wanted and shadow.ready_bytes + size <= shadow.budget_bytes
            )
            if shadow.is_dry or not is_roomy or not has_budget or size > 2 * shadow.budget_bytes:
                continue
            piece = self._pool.lend(size)
            if piece is not None:
                shadow.granted_offset = piece.offset_bytes
                orders.append(ShadowGrant(shadow.loader, shadow.task, piece))
        return orders

    def give_up_one(self) -> bool:
        """Drop the last chunk of the shadow that has most ready; False where none has any."""
        holders = [shadow for shadow in self._shadows.values() if shadow.ready]
        if not holders:
            return False
        shadow = max(holders, key=lambda it: (it.ready_bytes, -it.loader))
        last = shadow.ready.pop()
        self._drop(shadow, last, is_passed=False)
        shadow.position = Reach(*last.first)
        self._break_off(shadow)
        return True

    def promote(self, loader: int, worker: int) -> Promotion[AnyNotice] | None:
        """The active loader is gone: hand over what its shadow has; None where it has no process.

        The shadow is empty and without a process afterwards. Chunks that it had ready are handed
        over even where its own process is gone too.
        """
        shadow = self._shadows.get(loader)
        if shadow is None or shadow.worker != worker:
            return None
        ready = list(shadow.ready) if shadow.is_contiguous else []
        if not ready:
            for chunk in shadow.ready:
                self._drop(shadow, chunk)
        made = Promotion(
            ready, shadow.task, shadow.granted_offset, shadow.is_dry, shadow.needed_bytes,
            shadow.is_open, shadow.is_at_place and not shadow.must_seek,
        )  # fmt: skip
        if ready:
            shadow.taken = max(shadow.taken, ready[-1].reach)
        shadow.ready.clear()
        shadow.ready_bytes = 0
        shadow.is_open = False
        shadow.granted_offset = None
        self._restart(shadow)
        self.promotions_total += 1
        return made

    def _ended(self, loader: int, task: int, offset_bytes: int) -> Shadow[AnyNotice] | None:
        """A piece is no longer with its shadow; None, and it is given back, where that was fenced."""
        shadow = self._shadows.get(loader)
        if shadow is not None and shadow.granted_offset == offset_bytes:
            shadow.granted_offset = None
            if shadow.task == task:
                return shadow
        self._pool.returned(offset_bytes)
        return None

    def _restart(self, shadow: Shadow[AnyNotice]) -> None:
        """Have it begin anew behind what was published."""
        for chunk in shadow.ready:
            self._drop(shadow, chunk)
        shadow.ready.clear()
        shadow.ready_bytes = 0
        shadow.position = shadow.start = Reach(*shadow.taken.place)
        self._break_off(shadow)

    def _break_off(self, shadow: Shadow[AnyNotice]) -> None:
        """Refuse what its process reads now: it would leave a gap."""
        shadow.must_seek = True
        shadow.is_dry = False
        shadow.needed_bytes = 0
        shadow.task = self._leases.renew(shadow.loader)

    def _drop(
        self, shadow: Shadow[AnyNotice], chunk: Ready[AnyNotice], *, is_passed: bool = True
    ) -> None:
        shadow.ready_bytes -= self._pool.returned(chunk.offset_bytes).size_bytes
        if is_passed:
            shadow.start = chunk.reach
