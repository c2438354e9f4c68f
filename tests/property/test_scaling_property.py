"""Random deals of a source while it is read, deaths and a scarce pool: nothing is left out, all ends.

Real SourceLoaders, ReadAhead and pool; loader workers, the planner and the draw are the test's. Blocks
lie in windows of different sizes and hold different numbers of records, as sources' do.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from federation.messages import JobOpened
from federation.model.chunk import ChunkMeta
from federation.model.job import BatchRule, Shard, ShuffleRule
from federation.planning.ordering import BlockWalk, ChunkMerger
from msd_client.contract.position import pack_block_key, unpack_block_key
from msd_daemon.core.allocator import PAGE_BYTES
from msd_daemon.core.budget import PoolSums
from msd_daemon.core.readahead import GrantOrder, OpenOrder, ReadAhead, SeekOrder
from msd_daemon.core.warm_pool import WarmPool
from msd_daemon.services.source_loaders import SourceLoaders
from tests.support.metadata import make_job, make_spec

CHUNK = 16 * PAGE_BYTES
WORKERS = 4


EPOCHS = 3


class Windows:
    """The blocks of a source over some epochs: by key how many records each has."""

    def __init__(self, rng: random.Random) -> None:
        self.counts = [rng.randint(1, 9) for _ in range(rng.randint(1, 5))]
        self.records = {
            pack_block_key(epoch, window, block): rng.choice((0, 1, 3, 8, 20))
            for epoch in range(EPOCHS)
            for window, count in enumerate(self.counts)
            for block in range(count)
        }
        for epoch in range(EPOCHS):  # none is empty
            self.records[pack_block_key(epoch, 0, 0)] = 3
        self.keys = sorted(self.records)

    def next_own(self, key: int, part: int, parts: int) -> int | None:
        """Return the first own block at or behind a key."""
        epoch, window, block = unpack_block_key(key)
        assert not block or block < self.counts[window], "a watermark behind a window's end"
        while epoch < EPOCHS:
            if window >= len(self.counts):
                epoch, window, block = epoch + 1, 0, 0
                continue
            own = block + (part - block) % parts
            if own < self.counts[window]:
                return pack_block_key(epoch, window, own)
            window, block = window + 1, 0
        return None

    def behind(self, key: int) -> int:
        """Return a key behind a block and all before it."""
        epoch, window, block = unpack_block_key(key)
        if block + 1 < self.counts[window]:
            return key + 1
        return pack_block_key(epoch, window + 1, 0)


class Loader:
    """A source loader in a worker's process."""

    def __init__(self, windows: Windows, order: dict[str, Any]) -> None:
        self.windows = windows
        self.part, self.parts, self.until = order["part"], order["parts"], order["until"]
        self.grants: deque[tuple[int, int]] = deque()
        self.seek(order["block_key"], order["index"])

    def seek(self, block_key: int, index: int) -> None:
        own = self.windows.next_own(block_key, self.part, self.parts)
        self.key, self.index = own, index if own == block_key else 0

    def cut(self, records: int) -> tuple[int, int, int, bool] | None:
        """Return (block, first, end, whether the block ends) of the next chunk."""
        if self.key is None or (self.key >= self.until and not self.index):
            return None
        key, first = self.key, self.index
        end = min(first + records, self.windows.records[key])
        is_end = end == self.windows.records[key]
        if is_end:
            self.seek(self.windows.behind(key), 0)
        else:
            self.index = end
        return key, min(first, end), end, is_end


class Workers:
    """Loader workers as the daemon sees them."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.loaders: list[dict[int, Loader]] = [{} for _ in range(WORKERS)]
        self.returned: list[tuple[int, int, int]] = []

    def open_loader(self, worker: int, order: dict[str, Any]) -> None:
        assert order["loader"] not in self.loaders[worker]
        self.loaders[worker][order["loader"]] = Loader(self.windows, order)

    def close_loader(self, worker: int, loader: int) -> None:
        closed = self.loaders[worker].pop(loader)
        assert not closed.grants, "closed with a piece to fill"

    def stop_loader(self, worker: int, loader: int, until: int) -> None:
        self.loaders[worker][loader].until = until

    def seek(self, worker: int, order: SeekOrder) -> None:
        loader = self.loaders[worker][order.loader]
        while loader.grants:
            self.returned.append((order.loader, *loader.grants.popleft()))
        loader.seek(order.block_key, order.first_index)

    def has_shadow(self, _worker: int) -> bool:
        return False


class Run:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.windows = Windows(rng)
        self.workers: Any = Workers(self.windows)
        shards = tuple(Shard(f"/{n}", 1, "") for n in range(len(self.windows.counts)))
        spec = replace(make_spec("a"), shards=shards, shuffle=ShuffleRule(window_shards=1))
        specs = [spec]
        self.merger = ChunkMerger(BlockWalk(spec))
        """The planner's."""
        pool_chunks = rng.randint(6, 16)
        self.warm = WarmPool(pool_chunks * CHUNK, None, specs, [[0, 0]], ())
        self.pool = self.warm.pool
        self.readahead = ReadAhead(self.pool, CHUNK)
        steps: Any = SimpleNamespace(copy_wishes=lambda _: [])
        self.loaders = SourceLoaders(
            make_job(specs, BatchRule(4, 8)), 1, workers=self.workers, warm=self.warm,
            readahead=self.readahead, steps=steps, opened=JobOpened(0, [[0, 0]], [], [0], [1.0], []),
            sums=PoolSums(2, 0, 0, 0, 1, 0, pool_chunks * CHUNK, CHUNK, CHUNK), loaders_of={},
            deals={0: (0,)},
        )  # fmt: skip
        self.loaders.open_source(0)
        self.readahead.add_source(0, rng.randint(1, 6) * CHUNK, [])
        self.told = 0
        """Place in `places` up to which the planner knows the order."""
        self.drawn = 0
        """Place in `places`."""
        self.places = [
            (key, index) for key in self.windows.keys for index in range(self.windows.records[key])
        ]
        self.deals = self.kills = 0
        self.room: dict[int, int] = {}
        """Size of each piece that is out, by offset."""

    @property
    def is_over(self) -> bool:
        return self.drawn == len(self.places)

    # -- what happens ----------------------------------------------------------------------------

    def order(self) -> None:
        self.readahead.changed()
        if not self.is_over and not self.is_known():
            self.readahead.starved([0])
        self.loaders.close_finished()
        for order in self.readahead.next_orders():
            state = self.readahead.loaders[order.loader]
            assert not self.readahead.is_away(state.worker)
            if isinstance(order, GrantOrder):
                loader = self.workers.loaders[state.worker][order.loader]
                loader.grants.append((order.task, order.piece.offset_bytes))
                self.room[order.piece.offset_bytes] = order.piece.size_bytes
            elif isinstance(order, OpenOrder):
                self.loaders.open_parked(order.loader)
            else:
                self.workers.seek(state.worker, order)
        for loader, task, offset in self.workers.returned:
            self.pool.returned(offset)
            assert not self.readahead.grant_ended(loader, task)
        self.workers.returned.clear()

    def is_known(self) -> bool:
        """True where the next record, and that none is before it, was told, and it is still there."""
        key, index = self.places[self.drawn]
        return self.drawn < self.told and self.pool.locate(0, key, index, 0) is not None

    def work(self) -> None:
        busy = [
            (number, loader)
            for worker in self.workers.loaders
            for number, loader in worker.items()
            if loader.grants
        ]
        if not busy:
            return
        number, loader = self.rng.choice(busy)
        task, offset = loader.grants.popleft()
        cut = loader.cut(self.rng.randint(1, 12))
        if cut is None:
            self.pool.returned(offset)
            if self.readahead.grant_ended(number, task):
                self.readahead.has_no_more(number)
            return
        if not self.readahead.grant_ended(number, task):
            self.pool.returned(offset)
            return
        self.publish(number, offset, *cut)

    def publish(
        self, number: int, offset: int, key: int, first: int, end: int, is_end: bool
    ) -> None:
        if self.readahead.loaders[number].is_beyond(key):
            self.pool.returned(offset)
            self.readahead.has_no_more(number)
            return
        self.readahead.fed(0)
        count = self.windows.counts[unpack_block_key(key).window]
        self.readahead.took(number, key, end, is_block_end=is_end, window_blocks=count)
        room = self.room.pop(offset)
        used = self.rng.randint(1, room) if end > first else 1
        self.pool.published(
            offset, used, loader=number, source_index=0, block_key=key, first_index=first,
            records=end - first,
        )  # fmt: skip
        lengths = np.ones(end - first, np.int32)
        meta = ChunkMeta(0, key, first, lengths, np.zeros(end - first, np.uint8), is_end, count)
        for run in self.merger.add(meta):
            begin = run.meta.first_index + run.skip
            for number in range(begin, run.meta.first_index + len(run.meta.lengths)):
                assert self.places[self.told] == (run.meta.block_key, number), "left out, or moved"
                self.told += 1

    def draw(self) -> None:
        """Draw in order what is told and there, as plans do."""
        for _ in range(self.rng.randint(1, 10)):
            if self.is_over or not self.is_known():
                break
            key, index = self.places[self.drawn]
            self.drawn += 1
            for number in list(self.readahead.loaders):
                self.pool.draw_advanced(number, key, index + 1)
        if self.is_over:
            for number in list(self.readahead.loaders):
                self.pool.draw_advanced(number, 1 << 62, 0)
        self.readahead.room_came_free()

    def deal(self) -> None:
        count = self.rng.randint(1, WORKERS)
        self.deals += self.loaders.deal(0, self.rng.sample(range(WORKERS), count))

    def park(self) -> None:
        self.loaders.park([0])

    def kill(self) -> None:
        worker = self.rng.randrange(WORKERS)
        if self.readahead.is_away(worker):
            self.loaders.worker_back(worker)
            return
        self.kills += 1
        self.workers.loaders[worker].clear()
        self.loaders.worker_lost(worker)

    def check(self) -> None:
        owned = [
            offset
            for worker in self.workers.loaders
            for loader in worker.values()
            for _, offset in loader.grants
        ]
        assert len(owned) == len(set(owned)) == self.pool.lent_count
        present = [it for it in self.readahead.loaders.values() if it.until is None]
        parts = {it.parts for it in present}
        assert parts == {len(present)}
        assert {it.part for it in present} == set(range(len(present)))


@pytest.mark.parametrize("seed", range(150))
def test_no_record_is_left_out_wherever_partitions_move(seed: int) -> None:
    rng = random.Random(seed)
    run = Run(rng)
    acts: list[tuple[int, Callable[[], None]]] = [
        (8, run.order),
        (10, run.work),
        (6, run.draw),
        (2, run.deal),
        (1, run.park),
        (1, run.kill),
    ]
    weights = [weight for weight, _ in acts]
    for _ in range(rng.randint(50, 1500)):
        rng.choices(acts, weights)[0][1]()
        run.check()
        if run.is_over:
            break
    for worker in range(WORKERS):
        if run.readahead.is_away(worker):
            run.loaders.worker_back(worker)
    for _ in range(4000):  # nobody interferes any more: it comes to its end
        run.order()
        run.work()
        run.draw()
        run.check()
        if run.is_over:
            break
    assert run.is_over, f"it stands at {run.drawn} of {len(run.places)}"


def test_loaders_that_read_up_to_a_watermark_go_and_give_all_back() -> None:
    rng = random.Random(7)
    run = Run(rng)
    for turn in range(3000):
        run.order()
        run.work()
        run.draw()
        if turn % 4 == 3 and not run.is_over:
            run.deal()
    assert run.is_over
    assert run.deals > 1
    for _ in range(200):
        run.order()
        run.work()
    assert all(state.until is None for state in run.readahead.loaders.values())
    assert run.pool.lent_count == 0
