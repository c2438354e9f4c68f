import itertools

from hypothesis import given
from hypothesis import strategies as st

from msd_daemon.core.allocator import PAGE_BYTES, Allocator
from msd_daemon.core.pool import PoolState


def publish(
    pool: PoolState, loader: int, block: int, first: int, records: int, used: int = PAGE_BYTES
):
    piece = pool.lend(used)
    assert piece is not None
    return pool.published(
        piece.offset_bytes, used, loader=loader, source_index=loader, block_key=block,
        first_index=first, records=records,
    )  # fmt: skip


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * PAGE_BYTES)), max_size=80))
def test_the_allocator_never_overlaps_and_gives_everything_back(moves):
    allocator = Allocator(32 * PAGE_BYTES)
    held = []
    for is_take, size in moves:
        if is_take:
            piece = allocator.take(size)
            if piece is not None:
                assert piece.size_bytes >= size
                held.append(piece)
        elif held:
            allocator.give_back(held.pop(size % len(held)))
        spans = sorted((p.offset_bytes, p.offset_bytes + p.size_bytes) for p in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert allocator.free_bytes == 32 * PAGE_BYTES - sum(p.size_bytes for p in held)
    for piece in held:
        allocator.give_back(piece)
    assert allocator.largest_free_bytes() == 32 * PAGE_BYTES


def test_the_unused_tail_of_a_piece_goes_back_at_once():
    pool = PoolState(8 * PAGE_BYTES)
    piece = pool.lend(8 * PAGE_BYTES)
    pool.published(
        piece.offset_bytes,
        PAGE_BYTES + 1,
        loader=0,
        source_index=0,
        block_key=0,
        first_index=0,
        records=1,
    )
    assert pool.room_bytes == 6 * PAGE_BYTES


def test_records_are_found_by_position_across_chunks_of_a_block():
    pool = PoolState(16 * PAGE_BYTES)
    first = publish(pool, 0, block=5, first=0, records=10)
    second = publish(pool, 0, block=5, first=10, records=3)
    assert pool.locate(0, 5, 9, 0)[:2] == (first, 9)
    assert pool.locate(0, 5, 12, 0)[:2] == (second, 2)
    assert pool.locate(0, 5, 13, 0) is None
    assert pool.locate(0, 6, 0, 0) is None
    assert pool.locate(1, 5, 0, 0) is None


def test_a_chunk_goes_when_drawn_past_and_no_step_or_fragment_needs_it():
    pool = PoolState(4 * PAGE_BYTES)
    chunk = publish(pool, 0, block=1, first=0, records=4)
    pool.pin_step(chunk)
    pool.pin_carried(chunk)
    pool.draw_advanced(0, 1, 4)
    assert pool.locate(0, 1, 0, 0) is not None
    pool.unpin_step(chunk)
    assert pool.locate(0, 1, 0, 0) is not None
    pool.unpin_carried(chunk)
    assert pool.locate(0, 1, 0, 0) is None
    assert pool.room_bytes == 4 * PAGE_BYTES


def test_a_chunk_with_the_cursors_record_stays():
    pool = PoolState(4 * PAGE_BYTES)
    publish(pool, 0, block=1, first=0, records=4)
    pool.draw_advanced(0, 1, 3)
    assert pool.locate(0, 1, 3, 0) is not None


def test_only_the_unpinned_tail_is_revoked_and_never_what_a_plan_draws():
    pool = PoolState(16 * PAGE_BYTES)
    publish(pool, 0, block=1, first=0, records=2)
    publish(pool, 0, block=1, first=2, records=2)
    pinned = publish(pool, 0, block=2, first=0, records=2)
    pool.pin_step(pinned)
    assert pool.revoke_tail(0) is None
    pool.unpin_step(pinned)
    pool.plan_advanced(0, 1, 1)
    assert pool.revoke_tail(0) == (0, 2, 0)
    assert pool.locate(0, 2, 0, 0) is None
    assert pool.revoke_tail(0) == (0, 1, 2)
    assert pool.revoke_tail(0) is None
    assert pool.statistics().revocations_total == 2


def test_a_copied_fragment_is_found_at_its_new_place_and_frees_the_old_chunk():
    pool = PoolState(16 * PAGE_BYTES)
    chunk = publish(pool, 0, block=1, first=0, records=1, used=8 * PAGE_BYTES)
    pool.pin_carried(chunk)
    pool.draw_advanced(0, 2, 0)
    old = pool.locate(0, 1, 0, 300)
    piece = pool.lend(PAGE_BYTES)
    pool.copied(piece, old, (0, 1, 0, 300), 50)
    found = pool.locate(0, 1, 0, 300)
    assert found.chunk.piece == piece
    assert found.base_tokens == 300
    assert pool.locate(0, 1, 0, 0) is None
    assert pool.locate(0, 1, 0, 300, 50) == found
    assert pool.locate(0, 1, 0, 300, 51) is None  # the rest of the record is not in the copy
    pool.unpin_carried(found.chunk)
    assert pool.room_bytes == 16 * PAGE_BYTES
