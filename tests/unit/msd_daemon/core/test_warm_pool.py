"""What a generation takes over from the pool of the one before: no gap, no overlap, nothing lost."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.model.chunk import ChunkMeta
from msd_client.contract.position import pack_block_key
from msd_daemon.core.allocator import PAGE_BYTES
from msd_daemon.core.pool import PoolState
from msd_daemon.core.warm_pool import WarmPool
from tests.support.metadata import make_spec

SPEC = make_spec("a")
BLOCK_RECORDS = (3, 1, 4, 2, 5, 1, 2, 3)
ORDER = [
    (pack_block_key(0, 0, block), index)
    for block, count in enumerate(BLOCK_RECORDS)
    for index in range(count)
]
"""All records of the source in order."""


class Reading:
    """Loaders that publish a source's records into a pool, and a draw that moves through them."""

    def __init__(self, pages: int, parts: int, rng: random.Random) -> None:
        self.pool = PoolState(pages * PAGE_BYTES)
        self.rng = rng
        self.parts = parts
        self.own = [
            [
                (b, i)
                for b, count in enumerate(BLOCK_RECORDS)
                if b % parts == part
                for i in range(count)
            ]
            for part in range(parts)
        ]
        self.next = [0] * parts
        self.drawn = 0
        """Records of ORDER that were drawn."""
        self.pinned: list[Any] = []
        for part in range(parts):
            self.pool.loader_opened(part, 0, (part, parts), (0, 0))

    def publish(self, part: int) -> None:
        own, at = self.own[part], self.next[part]
        if at == len(own):
            return
        block, first = own[at]
        left = BLOCK_RECORDS[block] - first
        count = self.rng.randint(1, left)
        piece = self.pool.lend(PAGE_BYTES)
        if piece is None:
            return
        self.next[part] += count
        key = pack_block_key(0, 0, block)
        meta = ChunkMeta(
            0, key, first, np.full(count, 5, np.int32), np.zeros(count, np.uint8),
            is_block_end=count == left, window_blocks=len(BLOCK_RECORDS),
        )  # fmt: skip
        self.pool.published(
            piece.offset_bytes, 100, loader=part, source_index=0, block_key=key,
            first_index=first, records=count, meta=meta,
        )  # fmt: skip

    def draw(self) -> None:
        """Draw the next record where it is resident; some of their chunks stay pinned."""
        if self.drawn == len(ORDER):
            return
        key, index = ORDER[self.drawn]
        chunk = self.pool.find_chunk(0, key, index)
        if chunk is None:
            return
        if self.rng.random() < 0.3:
            self.pool.pin_step(chunk)
            self.pinned.append(chunk)
        self.drawn += 1
        self.pool.plan_advanced(0, key, index)
        for part in range(self.parts):
            self.pool.draw_advanced(part, key, index)

    def unpin(self) -> None:
        if self.pinned:
            self.pool.unpin_step(self.pinned.pop(self.rng.randrange(len(self.pinned))))

    def revoke(self, part: int) -> None:
        revocation = self.pool.revoke_tail(part)
        if revocation is not None:
            block = revocation.block_key & 0xFF
            self.next[part] = self.own[part].index((block, revocation.first_index))


@given(st.integers(0, 1 << 32), st.integers(1, 3), st.integers(3, 12), st.integers(0, 60))
def test_what_is_taken_over_goes_on_from_the_cursor_without_a_gap(
    seed: int, parts: int, pages: int, moves: int
) -> None:
    rng = random.Random(seed)
    old = Reading(pages, parts, rng)
    for _ in range(moves):
        move = rng.choice(("publish", "publish", "draw", "draw", "unpin", "revoke"))
        if move in ("publish", "revoke"):
            getattr(old, move)(rng.randrange(parts))
        else:
            getattr(old, move)()
    place = rng.randint(0, old.drawn)
    cursor = ORDER[place - 1] if place else (0, 0)
    warm = WarmPool(pages * PAGE_BYTES, old.pool, [SPEC], [list(cursor)], [])
    positions = warm.claim(0, range(parts))
    metas = warm.metas()

    # Nothing overlaps, and all that was not taken over is free.
    used = warm.statistics.chunks * PAGE_BYTES
    assert warm.pool.statistics().free_bytes == pages * PAGE_BYTES - used
    pieces = sorted(chunk.piece for chunk in warm.pool.undrawn())
    assert all(
        a.offset_bytes + a.size_bytes <= b.offset_bytes for a, b in itertools.pairwise(pieces)
    )
    # Each part goes on behind what it has: told records and read ones are its own from the cursor on.
    for part, position in enumerate(positions):
        told = [
            (meta.block_key & 0xFF, meta.first_index + number)
            for meta in metas
            if (meta.block_key & 0xFF) % parts == part
            for number in range(len(meta.lengths))
        ]
        key, index = position
        read = [own for own in old.own[part] if (own[0], own[1]) >= (key & 0xFF, index)]
        wanted = [own for own in old.own[part] if own >= (cursor[0] & 0xFF, cursor[1])]
        # A chunk may begin before the cursor.
        assert (told + read)[-len(wanted) :] == wanted if wanted else True
        assert len(told + read) == len(set(told + read))
        for meta in metas:
            for number in range(len(meta.lengths)):
                assert warm.pool.locate(0, meta.block_key, meta.first_index + number, 0)


@given(st.integers(0, 1 << 32), st.integers(3, 8), st.integers(0, 60))
def test_a_pool_lends_as_much_as_if_nothing_lay_idle(seed: int, pages: int, moves: int) -> None:
    rng = random.Random(seed)
    old = Reading(pages, 1, rng)
    for _ in range(moves):
        rng.choice((lambda: old.publish(0), old.draw, old.unpin))()
        held = len(old.pool.undrawn()) + len({c for c in old.pinned if c.is_drawn})
        assert old.pool.room_bytes == (pages - held) * PAGE_BYTES
        assert old.pool.allocator.free_bytes <= old.pool.room_bytes


def test_nothing_is_taken_over_by_another_number_of_loaders() -> None:
    old = Reading(8, 2, random.Random(1))
    for part in (0, 1, 0, 1):
        old.publish(part)
    warm = WarmPool(8 * PAGE_BYTES, old.pool, [SPEC], [[0, 0]], [])
    assert warm.claim(0, [0, 1, 2]) == [(0, 0)] * 3
    warm.release_unclaimed()
    assert warm.pool.statistics().free_bytes == 8 * PAGE_BYTES
    assert not warm.metas()


def test_nothing_is_taken_over_behind_a_gap() -> None:
    old = Reading(3, 1, random.Random(1))
    for _ in range(40):  # the pool turns over: its first chunks are gone
        old.publish(0)
        old.draw()
        old.unpin()
    assert old.drawn > 6
    warm = WarmPool(3 * PAGE_BYTES, old.pool, [SPEC], [[0, 0]], [])
    assert warm.claim(0, [0]) == [(0, 0)]
    assert not warm.statistics.chunks


@pytest.mark.parametrize("is_planned", [False, True])
def test_carried_fragments_stay_where_they_lie(is_planned: bool) -> None:
    old = Reading(8, 1, random.Random(2))
    while old.next[0] < 8:
        old.publish(0)
    chunk = old.pool.find_chunk(0, 0, 1)
    assert chunk is not None
    if is_planned:
        old.pool.pin_carried(chunk)
    while old.drawn < 7:
        old.draw()
    cursor = ORDER[6]
    warm = WarmPool(8 * PAGE_BYTES, old.pool, [SPEC], [list(cursor)], [[0, 0, 1, 2, 3]])
    warm.claim(0, [0])
    located = warm.pool.locate(0, 0, 1, 2, 3)
    assert located is not None
    assert located.chunk.piece == chunk.piece
    assert located.sample == 1 - chunk.first_index
    assert warm.statistics.carried == 1
    warm.pool.pin_carried(located.chunk)
    warm.pool.drop_unpinned_singles()
    warm.pool.unpin_carried(located.chunk)
    assert warm.pool.statistics().pinned_bytes == 0


def test_copies_of_fragments_are_found_again() -> None:
    old = Reading(8, 1, random.Random(2))
    old.publish(0)
    chunk = old.pool.find_chunk(0, 0, 0)
    assert chunk is not None
    old.pool.pin_carried(chunk)
    located = old.pool.locate(0, 0, 0, 1)
    piece = old.pool.lend(PAGE_BYTES)
    assert located is not None and piece is not None
    old.pool.copied(piece, located, (0, 0, 0, 1), 3)
    while old.next[0] < len(old.own[0]):
        at = old.next[0]
        old.publish(0)
        while old.drawn < old.next[0] - 1:
            old.draw()
            old.unpin()
        if at == old.next[0]:
            break
    cursor = ORDER[old.drawn - 1]
    old.pool._forget(next(iter(old.pool._idle)))  # the chunk that the fragment was copied from
    warm = WarmPool(
        8 * PAGE_BYTES, old.pool, [SPEC], [list(cursor)], [[0, 0, 0, 1, 3], [0, 0, 0, 1, 9]]
    )
    warm.claim(0, [0])
    found = warm.pool.locate(0, 0, 0, 1, 3)
    assert found is not None and found.chunk.piece == piece and found.base_tokens == 1
    assert warm.pool.locate(0, 0, 0, 1, 9) is None  # the copy is shorter
