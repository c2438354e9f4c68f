from msd_daemon.core.allocator import PAGE_BYTES
from msd_daemon.core.pool import PoolState
from msd_daemon.core.readahead import GrantOrder, LoaderState, ReadAhead, SeekOrder

CHUNK = 4 * PAGE_BYTES


class Reader:
    """Answers grants as source loaders do: blocks of two chunks of ten records."""

    def __init__(self, pool: PoolState, readahead: ReadAhead) -> None:
        self.pool, self.readahead = pool, readahead
        self.at: dict[int, int] = {}
        self.seeks = 0

    def obey(self) -> int:
        done = 0
        self.readahead.changed()
        for order in self.readahead.next_orders():
            state = self.readahead.loaders[order.loader]
            if isinstance(order, SeekOrder):
                self.seeks += 1
                self.at[order.loader] = order.block_key * 2 + (order.first_index >= 10)
                continue
            assert isinstance(order, GrantOrder)
            place = self.at.get(order.loader, 0)
            self.at[order.loader] = place + 1
            assert self.readahead.grant_ended(order.loader, order.task)
            self.readahead.fed(state.source_index)
            self.pool.published(
                order.piece.offset_bytes, CHUNK, loader=order.loader, source_index=state.source_index,
                block_key=place // 2, first_index=place % 2 * 10, records=10,
            )  # fmt: skip
            done += 1
        return done


def make(pool_chunks: int, sources: int, target: int = CHUNK * 100):
    pool = PoolState(pool_chunks * CHUNK)
    readahead = ReadAhead(pool, CHUNK)
    for source in range(sources):
        readahead.add_source(source, target, [LoaderState(source, 0, source)])
    return pool, readahead, Reader(pool, readahead)


def test_read_ahead_stops_at_its_target():
    pool, _readahead, reader = make(20, 1, target=3 * CHUNK)
    while reader.obey():
        pass
    assert pool.undrawn_chunks(0) == 3


def test_a_source_may_have_chunks_of_its_own_size():
    pool = PoolState(20 * CHUNK)
    readahead = ReadAhead(pool, CHUNK)
    readahead.add_source(0, CHUNK, [LoaderState(0, 0, 0)])
    readahead.add_source(1, CHUNK, [LoaderState(1, 1, 1)], 3 * CHUNK)
    sizes = {order.loader: order.piece.size_bytes for order in readahead.next_orders()}
    assert sizes == {0: CHUNK, 1: 3 * CHUNK}


def test_a_loader_has_one_grant_out():
    _pool, readahead, _ = make(20, 1)
    assert len(readahead.next_orders()) == 1
    assert readahead.next_orders() == []


def test_greedy_sources_fill_the_pool_and_a_starved_one_still_moves():
    pool, readahead, reader = make(8, 3)
    readahead.loaders[2].is_dry = True
    while reader.obey():
        pass
    assert pool.room_bytes == 0
    readahead.loaders[2].is_dry = False
    readahead.changed()
    assert reader.obey() == 0
    readahead.starved([2])
    assert reader.obey() == 1
    assert reader.seeks == 1
    assert pool.undrawn_chunks(2) == 1


def test_a_revoked_loader_reads_the_dropped_records_again():
    pool, readahead, reader = make(4, 2)
    readahead.loaders[1].is_dry = True
    while reader.obey():
        pass
    readahead.loaders[1].is_dry = False
    readahead.starved([1])
    reader.obey()
    last = pool.undrawn_chunks(0)
    pool.draw_advanced(0, 1, 0)
    while reader.obey():
        pass
    for index in range(10):
        assert pool.locate(0, last // 2, last % 2 * 10 + index, 0) is not None


def test_a_chunk_of_an_older_task_is_refused():
    _pool, readahead, reader = make(4, 2)
    readahead.loaders[1].is_dry = True
    while reader.obey():
        pass
    task = readahead.loaders[0].task
    readahead.loaders[1].is_dry = False
    readahead.starved([1])
    reader.obey()
    assert readahead.loaders[0].task == task + 1
    assert not readahead.grant_ended(0, task)


def test_a_record_larger_than_a_chunk_gets_the_piece_it_needs():
    pool, readahead, _ = make(8, 1)
    (order,) = readahead.next_orders()
    pool.returned(order.piece.offset_bytes)
    readahead.grant_ended(order.loader, order.task, needed_bytes=3 * CHUNK)
    (again,) = readahead.next_orders()
    assert again.piece.size_bytes == 3 * CHUNK


def test_flipping_demand_never_deadlocks_a_small_pool():
    """Twelve sources in a pool of thirteen chunks, each starved in turn for 200 rounds."""
    pool, readahead, reader = make(13, 12)
    drawn = dict.fromkeys(range(12), 0)
    for turn in range(200):
        source = turn * 7 % 12
        readahead.starved([source])
        for _ in range(3):
            reader.obey()
        assert pool.undrawn_chunks(source) >= 1, turn
        place = drawn[source]
        assert pool.locate(source, place // 2, place % 2 * 10, 0) is not None
        drawn[source] = place + 1
        pool.draw_advanced(source, (place + 1) // 2, (place + 1) % 2 * 10)


def split(pool_chunks: int, target: int):
    """One source that two loaders share, and another one."""
    pool = PoolState(pool_chunks * CHUNK)
    readahead = ReadAhead(pool, CHUNK)
    readahead.add_source(0, target, [LoaderState(0, 0, 0, 0, 2), LoaderState(1, 1, 0, 1, 2)])
    readahead.add_source(1, target, [LoaderState(2, 0, 1)])
    return pool, readahead


def give(
    pool: PoolState,
    readahead: ReadAhead,
    loader: int,
    block_key: int,
    *,
    first: int = 0,
    is_block_end: bool = True,
) -> None:
    """Answer a loader's grant with a chunk of ten records."""
    state = readahead.loaders[loader]
    offset = state.granted_offset
    assert readahead.grant_ended(loader, state.task)
    readahead.fed(state.source_index)
    readahead.took(loader, block_key, first + 10, is_block_end=is_block_end)
    pool.published(
        offset, CHUNK, loader=loader, source_index=state.source_index, block_key=block_key,
        first_index=first, records=10,
    )  # fmt: skip


def test_each_of_several_loaders_may_make_a_block_ahead_of_the_draw_where_there_is_room():
    pool, readahead = split(40, CHUNK)
    readahead.loaders[2].is_dry = True
    readahead.next_orders()
    give(pool, readahead, 0, 0, is_block_end=False)
    give(pool, readahead, 1, 1, is_block_end=False)
    assert {order.loader for order in readahead.next_orders()} == {0, 1}
    give(pool, readahead, 1, 1, first=10)
    assert readahead.next_orders() == []  # its block is whole, the other has a grant
    give(pool, readahead, 0, 0, first=10)
    assert readahead.next_orders() == []
    pool.draw_advanced(0, 1, 0)  # block 0 is drawn
    readahead.changed()
    assert [order.loader for order in readahead.next_orders()] == [0]


def test_loaders_make_no_block_ahead_in_the_last_third_of_the_pool():
    pool, readahead = split(5, CHUNK)
    readahead.loaders[2].is_dry = True
    readahead.next_orders()
    give(pool, readahead, 0, 0, is_block_end=False)
    give(pool, readahead, 1, 1, is_block_end=False)
    assert {order.loader for order in readahead.next_orders()} == {0, 1}
    give(pool, readahead, 0, 0, first=10, is_block_end=False)
    give(pool, readahead, 1, 1, first=10, is_block_end=False)
    assert readahead.next_orders() == []


def test_a_starved_source_reads_on_where_it_is_furthest_behind_and_fills_no_pool():
    pool, readahead = split(40, CHUNK)
    readahead.loaders[2].is_dry = True
    assert {order.loader for order in readahead.next_orders()} == {0, 1}
    give(pool, readahead, 0, 0)
    give(pool, readahead, 1, 1)
    for block in (2, 4, 6):  # loader 1 lags: only it can end the hunger, loader 0 runs nowhere
        readahead.starved([0])
        granted = [order.loader for order in readahead.next_orders()]
        assert granted == ([0] if block == 2 else [])
        if granted:
            give(pool, readahead, 0, block)
            readahead.starved([0])
            assert [order.loader for order in readahead.next_orders()] == [1]
    give(pool, readahead, 1, 3)
    assert pool.undrawn_chunks(0) == 2


def test_two_starved_sources_of_one_plan_do_not_take_each_others_chunks():
    pool, readahead = split(2, 10 * CHUNK)
    readahead.loaders[1].is_dry = True
    readahead.next_orders()
    give(pool, readahead, 0, 0)
    give(pool, readahead, 2, 0)
    pool.plan_advanced(0, 0, 9)
    readahead.starved([1])
    assert readahead.next_orders() == []  # its room is the other's planned chunk
    pool.draw_advanced(0, 1, 0)
    readahead.room_came_free()
    assert [order.loader for order in readahead.next_orders()] == [2]


def test_a_loader_that_had_ended_reads_again_what_was_revoked():
    pool, readahead = split(2, 10 * CHUNK)
    readahead.loaders[1].is_dry = True
    readahead.next_orders()
    give(pool, readahead, 0, 0)
    readahead.loaders[0].is_dry = True
    give(pool, readahead, 2, 0)
    readahead.starved([1])
    seek, grant = readahead.next_orders()
    assert seek == SeekOrder(0, 1, 0, 0)
    assert grant.loader == 2
    assert not readahead.loaders[0].is_dry


def test_a_worker_that_is_replaced_gets_nothing_whatever_opens_meanwhile():
    pool, readahead, reader = make(8, 1)
    readahead.worker_lost(0)
    readahead.worker_lost(1)
    readahead.add_source(1, 100 * CHUNK, [LoaderState(1, 0, 1)])
    readahead.add_source(2, 100 * CHUNK, [LoaderState(2, 1, 2)])
    readahead.starved([0, 1, 2])
    assert reader.obey() == 0
    assert readahead.is_away(0)
    readahead.worker_back(0)
    assert not readahead.is_away(0)
    assert reader.obey() == 2
    readahead.worker_back(1)
    readahead.starved([2])
    assert reader.obey() == 3
    assert pool.undrawn_chunks(2) == 1


def test_a_replaced_workers_chunks_are_not_revoked_while_it_cannot_seek():
    pool, readahead, reader = make(8, 2)
    readahead.loaders[1].worker = 1
    readahead.loaders[1].is_dry = True
    while reader.obey():
        pass
    readahead.worker_lost(0)
    readahead.loaders[1].is_dry = False
    readahead.starved([1])
    assert reader.obey() == 0
    assert pool.undrawn_chunks(0) == 8
    readahead.worker_back(0)
    assert reader.obey() == 1
    assert reader.seeks == 1
