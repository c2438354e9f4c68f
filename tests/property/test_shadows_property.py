"""Random deaths and promotions of a shadowed loader: nothing is skipped, no byte of the pool leaks.

A source of blocks with ten records; loaders that cut it as they like; a daemon that publishes what
the active one sends, and what its shadow has ready once it is gone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from msd_daemon.core.allocator import PAGE_BYTES
from msd_daemon.core.pool import PoolState
from msd_daemon.core.readahead import GrantOrder, LoaderState, ReadAhead, SeekOrder
from msd_daemon.core.shadows import Reach, ShadowGrant

CHUNK = 4 * PAGE_BYTES
BLOCK = 10
WORKER = 0


class Cut(NamedTuple):
    block: int
    first: int
    end: int


class Process:
    """A loader process: a place, and the grants that it was given."""

    def __init__(self, place: tuple[int, int]) -> None:
        self.block, self.index = place
        self.grants: list[tuple[int, int]] = []
        """(task, offset)."""

    def seek(self, block: int, index: int) -> None:
        self.block, self.index = block, index

    def cut(self, records: int) -> Cut:
        end = min(self.index + records, BLOCK)
        made = Cut(self.block, min(self.index, BLOCK), end)
        self.block, self.index = (self.block + 1, 0) if end == BLOCK else (self.block, end)
        return made


class ShadowedLoader:
    def __init__(self, pool: int, budget: int, ahead: int) -> None:
        self.pool = PoolState(pool * CHUNK)
        self.readahead = ReadAhead(self.pool, CHUNK)
        self.readahead.add_source(0, ahead * CHUNK, [LoaderState(0, WORKER, 0)])
        self.readahead.shadows.add(
            0, WORKER, (0, 0), chunk_bytes=CHUNK, budget_bytes=budget * CHUNK
        )
        # Another source that takes room, and has what was read ahead revoked.
        self.readahead.add_source(1, CHUNK, [LoaderState(1, WORKER + 1, 1)])
        self.rival: list[tuple[int, int]] = []
        self.rival_block = 0
        self.active: Process | None = Process((0, 0))
        self.shadow: Process | None = None
        self.fenced: list[tuple[int, Process]] = []
        """Processes that were replaced and have not ended, by pid."""
        self.next_pid = 1
        self.told = Reach(0, 0)
        """How far the planner knows the source."""
        self.drawn = (0, 0)

    @property
    def state(self) -> LoaderState:
        return self.readahead.loaders[0]

    def publish(self, offset: int, cut: Cut, used: int) -> None:
        reach = Reach(cut.block, cut.end, cut.end == BLOCK)
        known = self.told.place if not self.told.is_block_end else (self.told.block_key + 1, 0)
        assert (cut.block, cut.first) <= known, f"records between {known} and {cut} are left out"
        self.told = max(self.told, reach)
        self.readahead.fed(0)
        self.readahead.took(0, cut.block, cut.end, is_block_end=reach.is_block_end)
        self.pool.published(
            offset, used, loader=0, source_index=0, block_key=cut.block, first_index=cut.first,
            records=cut.end - cut.first,
        )  # fmt: skip

    def send_back(self, process: Process, order: SeekOrder) -> None:
        """A worker gives back what was lent to it before the order, then goes there."""
        for task, offset in process.grants:
            assert not self.readahead.grant_ended(0, task)
            self.pool.returned(offset)
        process.grants.clear()
        process.seek(order.block_key, order.first_index)

    def order(self, starved: set[int]) -> None:
        self.readahead.starved(starved)
        self.readahead.changed()
        for order in self.readahead.next_orders():
            if order.loader == 1:
                if isinstance(order, GrantOrder):
                    self.rival.append((order.task, order.piece.offset_bytes))
                continue
            assert self.active is not None, "a worker that is away was given an order"
            if isinstance(order, SeekOrder):
                self.told = Reach(order.block_key, order.first_index)
                self.send_back(self.active, order)
            else:
                assert isinstance(order, GrantOrder)
                self.active.grants.append((order.task, order.piece.offset_bytes))
        for shadow_order in self.readahead.next_shadow_orders():
            assert self.shadow is not None
            if isinstance(shadow_order, ShadowGrant):
                self.shadow.grants.append((shadow_order.task, shadow_order.piece.offset_bytes))
            else:
                self.shadow.seek(shadow_order.block_key, shadow_order.first_index)

    def active_fills(self, records: int, used: int) -> None:
        if self.active is None or not self.active.grants:
            return
        task, offset = self.active.grants.pop(0)
        cut = self.active.cut(records)
        if self.readahead.grant_ended(0, task):
            self.publish(offset, cut, used)
        else:
            self.pool.returned(offset)

    def rival_fills(self) -> None:
        if not self.rival:
            return
        task, offset = self.rival.pop(0)
        if not self.readahead.grant_ended(1, task):
            self.pool.returned(offset)
            return
        self.readahead.fed(1)
        self.readahead.took(1, self.rival_block, BLOCK)
        self.pool.published(
            offset, CHUNK, loader=1, source_index=1, block_key=self.rival_block, first_index=0,
            records=BLOCK,
        )  # fmt: skip
        self.rival_block += 1

    def rival_is_drawn(self) -> None:
        self.pool.draw_advanced(1, self.rival_block, 0)

    def shadow_fills(self, records: int, used: int) -> None:
        if self.shadow is None or not self.shadow.grants:
            return
        task, offset = self.shadow.grants.pop(0)
        cut = self.shadow.cut(records)
        reach = Reach(cut.block, cut.end, cut.end == BLOCK)
        self.readahead.shadows.came(
            0, task, offset, used, (cut.block, cut.first), reach, (cut, used)
        )

    def shadow_comes(self) -> None:
        if self.shadow is None:
            for shadow in self.readahead.shadows.process_came(WORKER):
                self.shadow = Process(shadow.position.place)

    def shadow_dies(self) -> None:
        if self.shadow is not None:
            self.shadow = None
            self.readahead.shadows.process_gone(WORKER, self.pool.returned)

    def active_goes(self, is_fenced: bool) -> None:
        if self.active is None:
            return
        if is_fenced:
            pid = self.next_pid = self.next_pid + 1
            self.fenced.append((pid, self.active))
            self.readahead.worker_lost(
                WORKER, lambda offset: self.readahead.leases.condemn(pid, offset)
            )
        else:
            self.readahead.worker_lost(WORKER)
        self.active = None
        had_shadow = self.shadow
        for chunk in self.readahead.promote(0):
            cut, used = chunk.notice
            self.publish(chunk.offset_bytes, cut, used)
        if had_shadow is not None:
            assert self.state.is_promoted
            self.active, self.shadow = had_shadow, None

    def successor_serves(self) -> None:
        if not self.readahead.is_away(WORKER):
            return
        self.readahead.worker_back(WORKER)
        if not self.state.is_promoted:
            self.active = Process((self.state.next_block_key, self.state.next_index))
        elif self.state.must_seek:
            order = self.readahead.sought(0)
            assert self.active is not None
            self.send_back(self.active, order)
        self.state.is_promoted = False

    def fenced_one_ends(self) -> None:
        if self.fenced:
            pid, _ = self.fenced.pop(0)
            for offset in self.readahead.leases.ended(pid):
                self.pool.returned(offset)

    def draw(self, records: int) -> None:
        block, index = self.drawn
        place = min(block * BLOCK + index + records, self.told.block_key * BLOCK + self.told.record)
        self.drawn = max(self.drawn, (place // BLOCK, place % BLOCK))
        self.pool.draw_advanced(0, *self.drawn)

    def what_was_told_is_there(self) -> None:
        end = self.told.block_key * BLOCK + self.told.record
        for place in range(self.drawn[0] * BLOCK + self.drawn[1], end):
            assert self.pool.locate(0, place // BLOCK, place % BLOCK, 0) is not None

    def no_piece_has_two_owners_and_none_is_lost(self) -> None:
        shadow = self.readahead.shadows.of(0)
        assert shadow is not None
        assert shadow.ready_bytes <= max(shadow.budget_bytes, CHUNK)
        owned = [offset for _, offset in self.active.grants] if self.active else []
        owned += [offset for _, offset in self.shadow.grants] if self.shadow else []
        owned += [offset for _, offset in self.rival]
        owned += [offset for _, process in self.fenced for _, offset in process.grants]
        owned += [chunk.offset_bytes for chunk in shadow.ready]
        assert len(owned) == len(set(owned)) == self.pool.lent_count


@pytest.mark.parametrize("seed", range(60))
def test_a_shadowed_loader_skips_nothing_whatever_dies(seed: int) -> None:
    rng = random.Random(seed)
    run = ShadowedLoader(rng.randint(3, 12), rng.randint(1, 3), rng.randint(1, 6))

    def fill(one: Callable[[int, int], None]) -> Callable[[], None]:
        return lambda: one(rng.randint(1, 12), rng.randint(1, CHUNK))

    acts: list[tuple[int, Callable[[], None]]] = [
        (8, lambda: run.order({n for n in (0, 1) if rng.random() < 0.4})),
        (5, fill(run.active_fills)),
        (6, fill(run.shadow_fills)),
        (5, run.rival_fills),
        (2, run.rival_is_drawn),
        (4, lambda: run.draw(rng.randint(1, 15))),
        (3, run.shadow_comes),
        (1, run.shadow_dies),
        (1, lambda: run.active_goes(rng.random() < 0.5)),
        (3, run.successor_serves),
        (1, run.fenced_one_ends),
    ]
    weights = [weight for weight, _ in acts]
    for _ in range(600):
        rng.choices(acts, weights)[0][1]()
        run.what_was_told_is_there()
        run.no_piece_has_two_owners_and_none_is_lost()
    assert run.readahead.shadows.promotions_total > 3
    assert run.told > Reach(3, 0)
