"""Shadows of one loader: what they hold, what they drop, what they hand over."""

from __future__ import annotations

from typing import Any

import pytest

from msd_daemon.core.allocator import PAGE_BYTES
from msd_daemon.core.leases import Leases
from msd_daemon.core.pool import PoolState
from msd_daemon.core.shadows import Reach, ShadowGrant, Shadows, ShadowSeek

CHUNK = 4 * PAGE_BYTES
LOADER, WORKER = 7, 2


class Made:
    """One shadow; blocks of ten records, chunks of `step` records."""

    def __init__(self, budget_chunks: int = 2, pool_chunks: int = 8) -> None:
        self.pool = PoolState(pool_chunks * CHUNK)
        self.shadows: Shadows[str] = Shadows(self.pool, Leases())
        self.shadows.add(
            LOADER, WORKER, (0, 0), chunk_bytes=CHUNK, budget_bytes=budget_chunks * CHUNK
        )
        self.at = (0, 0)

    @property
    def shadow(self) -> Any:
        return self.shadows.of(LOADER)

    def come(self) -> None:
        (shadow,) = self.shadows.process_came(WORKER)
        self.at = shadow.position.place

    def grant(self, *, is_roomy: bool = True) -> ShadowGrant | None:
        granted = None
        for order in self.shadows.next_orders(is_roomy=is_roomy):
            if isinstance(order, ShadowSeek):
                self.at = (order.block_key, order.first_index)
            else:
                granted = order
        return granted

    def fill(self, grant: ShadowGrant, records: int = 5, used: int = CHUNK) -> bool:
        block, first = self.at
        end = first + records
        self.at = (block + 1, 0) if end == 10 else (block, end)
        return self.shadows.came(
            LOADER, grant.task, grant.piece.offset_bytes, used, (block, first),
            Reach(block, end, end == 10), f"{block}:{first}-{end}",
        )  # fmt: skip

    def read(self, chunks: int) -> None:
        for _ in range(chunks):
            grant = self.grant()
            assert grant is not None
            assert self.fill(grant)


@pytest.fixture
def made() -> Made:
    it = Made()
    it.come()
    return it


def test_nothing_is_read_before_a_process_is_there():
    assert Made().grant() is None


def test_it_holds_as_much_as_its_budget_and_never_waits_with_a_piece(made):
    made.read(2)
    assert made.grant() is None
    assert made.shadows.ready_bytes == 2 * CHUNK
    assert made.pool.allocator.free_bytes == 6 * CHUNK


def test_it_reads_nothing_while_an_active_loader_waits_for_room(made):
    assert made.grant(is_roomy=False) is None


def test_what_the_active_loader_published_is_dropped_and_makes_room(made):
    made.read(2)
    made.shadows.taken(LOADER, Reach(0, 5))
    assert made.shadows.ready_bytes == CHUNK
    made.read(1)


def test_an_end_of_a_block_that_is_news_is_kept(made):
    made.read(2)
    made.shadows.taken(LOADER, Reach(0, 10))  # the active one has yet to tell that it ends there
    assert made.shadows.ready_bytes == CHUNK
    made.shadows.taken(LOADER, Reach(0, 10, is_block_end=True))
    assert made.shadows.ready_bytes == 0


def test_a_shadow_that_fell_behind_goes_on_behind_what_was_published(made):
    grant = made.grant()
    made.shadows.taken(LOADER, Reach(3, 5))
    assert made.fill(grant)  # the late chunk itself is of no use
    assert made.shadows.ready_bytes == 0
    assert made.grant() is not None
    assert made.at == (3, 5)


def test_a_chunk_under_an_older_lease_is_refused_and_its_piece_free(made):
    grant = made.grant()
    made.shadows.process_gone(WORKER, made.pool.returned)
    made.come()
    other = made.grant()
    assert other.task > grant.task
    assert other.piece.offset_bytes == grant.piece.offset_bytes
    made.shadows.process_gone(WORKER, lambda _: None)  # fenced: its piece is not free
    made.come()
    third = made.grant()
    assert third.piece.offset_bytes != other.piece.offset_bytes


def test_what_a_dead_process_had_ready_stays(made):
    made.read(2)
    made.shadows.process_gone(WORKER, made.pool.returned)
    assert [c.notice for c in made.shadows.promote(LOADER, WORKER).ready] == ["0:0-5", "0:5-10"]


def test_promotion_hands_over_ready_chunks_lease_and_the_piece_in_work(made):
    made.shadows.taken(LOADER, Reach(0, 3))
    made.read(1)
    grant = made.grant()
    promotion = made.shadows.promote(LOADER, WORKER)
    assert [chunk.notice for chunk in promotion.ready] == ["0:3-8"]
    assert promotion.task == grant.task
    assert promotion.granted_offset == grant.piece.offset_bytes
    assert promotion.is_open
    assert promotion.is_at_place
    assert made.shadows.ready_bytes == 0
    assert made.grant() is None  # a process has yet to stand behind the new one
    made.come()
    assert made.grant().task > promotion.task


def test_the_next_shadow_begins_behind_what_was_handed_over(made):
    made.read(2)
    made.shadows.promote(LOADER, WORKER)
    made.come()
    assert made.at == (0, 10)


def test_revoked_records_are_read_again_by_the_shadow(made):
    made.shadows.taken(LOADER, Reach(4, 5))
    made.read(2)
    assert made.shadows.of(LOADER).start == Reach(4, 5)
    in_work = made.shadows.of(LOADER).task
    made.shadows.set_back(LOADER, 2, 0)
    assert made.shadows.ready_bytes == 0
    grant = made.grant()
    assert grant.task > in_work
    assert made.at == (2, 0)


def test_a_shadow_gives_its_last_chunk_up_and_reads_it_again(made):
    made.read(1)
    in_work = made.grant()
    assert made.shadows.give_up_one()
    assert not made.shadows.give_up_one()
    assert not made.fill(in_work)  # it would leave a gap
    assert made.pool.allocator.free_bytes == made.pool.allocator.capacity_bytes
    made.read(1)
    assert made.shadow.ready[0].first == (0, 0)


def test_a_promoted_shadow_that_reads_elsewhere_is_told_so(made):
    made.shadows.taken(LOADER, Reach(3, 0))
    promotion = made.shadows.promote(LOADER, WORKER)
    assert promotion.ready == []
    assert not promotion.is_at_place


def test_a_record_larger_than_the_budget_waits_for_the_active_loader(made):
    grant = made.grant()
    made.shadows.came_back(
        LOADER, grant.task, grant.piece.offset_bytes, needed_bytes=9 * CHUNK, is_dry=False
    )
    assert made.grant() is None
    made.shadows.taken(LOADER, Reach(0, 1))
    assert made.grant() is not None
    assert made.at == (0, 1)
