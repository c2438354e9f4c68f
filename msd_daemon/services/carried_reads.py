"""Records that the state carried, read again by position; carried fragments, copied out of large chunks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from federation.model.job import ResolvedJob
from msd_client.contract.errors import BudgetError
from msd_daemon.core.allocator import Piece
from msd_daemon.core.chunk_media import ChunkMedia
from msd_daemon.core.pool import PoolState
from msd_daemon.core.readahead import LoaderState, ReadAhead
from msd_daemon.core.shared_steps import SharedSteps
from msd_daemon.core.steps import CopyWish, StepsState
from msd_daemon.services.worker_set import WorkerSet
from msd_daemon.shm.chunk_layout import single_bytes
from msd_daemon.workers.messages import ChunkNotice

COPIES_AT_ONCE = 64
COPYING_WORKER = 0
TOKEN_BYTES_MAX = 4
FETCH_HEAD_BYTES = 256
FIRST_FETCH_TASK = 1 << 31
"""Fetches and copies count from here, grants of read-ahead from 0: an answer names the task alone."""


@dataclass(frozen=True)
class _Fetch:
    """Records that a loader was told to read again."""

    loader: int
    source_index: int
    block_key: int
    indices: list[int]
    piece: Piece
    is_sent: bool
    """False while its worker is being replaced."""


class CarriedReads:
    """Of one generation.

    Args:
        job: The job.
        generation: Its number.
        workers: Its loader workers.
        readahead: Of the generation.
        pool: Of the generation.
        steps: Of the generation.
        owners: In a cluster what this node loads.
        open_source: Opens a source's loaders, unless they are open.
        first_loader: Returns a loader of an open source.
    """

    def __init__(
        self,
        job: ResolvedJob,
        generation: int,
        *,
        workers: WorkerSet,
        readahead: ReadAhead,
        pool: PoolState,
        steps: StepsState,
        owners: SharedSteps | None,
        open_source: Callable[[int], None],
        first_loader: Callable[[int], LoaderState],
    ) -> None:
        self._job = job
        self._generation = generation
        self._workers = workers
        self._readahead = readahead
        self._pool = pool
        self._steps = steps
        self._owners = owners
        self._open_source = open_source
        self._first_loader = first_loader
        self._tasks = itertools.count(FIRST_FETCH_TASK)
        self._copies: dict[int, list[tuple[CopyWish, Piece]]] = {}
        self._copying: set[tuple[int, int, int, int]] = set()
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_wishes: deque[tuple[int, int, list[int], int]] = deque()
        """Source, block key, indices and bytes of carried records that are to be read again."""

    @property
    def is_fetching(self) -> bool:
        """True while something that the state carried is not here yet."""
        return bool(self._fetch_wishes or self._fetches)

    def working(self) -> set[int]:
        """Return the loader workers that were told to read or copy something and have not answered."""
        return self.fetching() | ({COPYING_WORKER} if self._copies else set())

    def loaders(self) -> set[int]:
        """Return the source loaders that were told to read something."""
        return {fetch.loader for fetch in self._fetches.values()}

    def fetching(self) -> set[int]:
        """Return the loader workers that were told to read something."""
        return {
            self._readahead.loaders[fetch.loader].worker
            for fetch in self._fetches.values()
            if fetch.is_sent and fetch.loader in self._readahead.loaders
        }

    def fetched(self, notice: ChunkNotice) -> None:
        """Carried records were read again."""
        self._fetches.pop(notice.task, None)
        assert notice.indices is not None
        self._pool.published_singles(
            notice.offset_bytes,
            notice.used_bytes,
            source_index=notice.source_index,
            block_key=notice.block_key,
            indices=notice.indices.tolist(),
            media=ChunkMedia.of(notice.marks, self._job.media),
        )
        self._steps.singles_arrived()

    def needs_more(self, task: int, needed_bytes: int) -> bool:
        """A piece was too small for records that are read again; return False where it was no such."""
        fetch = self._fetches.pop(task, None)
        if fetch is None:
            return False
        wish = (fetch.source_index, fetch.block_key, fetch.indices, needed_bytes)
        self._fetch_wishes.appendleft(wish)
        return True

    def wish(self, told: Sequence[Sequence[int]], issue: int = 0) -> None:
        """Wish for what is carried; `order_fetches` has it read.

        Args:
            told: [source, block_key, index, offset, length] of each fragment.
            issue: The change that made their sources this node's.
        """
        carried = list(told)
        if self._owners is not None:
            carried = [it for it in carried if self._owners.is_own(it[0], it[1])]
        if not carried:
            return
        keys = [
            (source, block_key, index, offset) for source, block_key, index, offset, _ in carried
        ]
        for source in dict.fromkeys(entry[0] for entry in carried):
            self._open_source(source)
        self._steps.restore_carried(keys, [entry[4] for entry in carried], issue)
        self._steps.singles_arrived()
        self._pool.drop_unpinned_singles()
        wanted: dict[tuple[int, int], dict[int, int]] = {}
        for source, block_key, index, offset, length in carried:
            if self._steps.is_carried((source, block_key, index, offset)):
                continue  # it lies in the pool still
            tokens = wanted.setdefault((source, block_key), {})
            tokens[index] = max(tokens.get(index, 0), offset + length)
        for (source, block_key), tokens in wanted.items():
            # At least so much; a record's end is not known before it is read.
            size_bytes = FETCH_HEAD_BYTES + 4 * sum(tokens.values()) + 16 * len(tokens)
            self._fetch_wishes.append((source, block_key, sorted(tokens), size_bytes))

    def order_fetches(self) -> None:
        """Have carried records read again, as many at once as the pool has room for.

        Those of a loader whose worker is being replaced are ordered once it is back.

        Raises:
            BudgetError: The pool is too small for one of them.
        """
        while self._fetch_wishes:
            source, block_key, indices, size_bytes = self._fetch_wishes[0]
            piece = self._pool.lend(size_bytes)
            if piece is None:
                if not self._fetches and not self._readahead.leases.condemned_count:
                    raise BudgetError(
                        f"pool has no {size_bytes} bytes for carried samples of source "
                        f"{self._job.sources[source].name!r}: raise memory.pool_bytes",
                        needed_bytes=size_bytes,
                        available_bytes=self._pool.allocator.largest_free_bytes(),
                    )
                return
            self._fetch_wishes.popleft()
            self._order_fetch(source, block_key, indices, piece)

    def _order_fetch(self, source: int, block_key: int, indices: list[int], piece: Piece) -> None:
        task = next(self._tasks)
        state = self._first_loader(source)
        order = {
            "loader": state.loader,
            "task": task,
            "generation": self._generation,
            "block_key": block_key,
            "indices": indices,
            "offset": piece.offset_bytes,
            "bytes": piece.size_bytes,
        }
        is_here = not self._readahead.is_away(state.worker)
        self._fetches[task] = _Fetch(state.loader, source, block_key, indices, piece, is_here)
        if is_here:
            self._workers.fetch(state.worker, order)

    def copied(self, task: int) -> None:
        """Carried fragments lie in chunks of their own now."""
        for wish, piece in self._copies.pop(task, []):
            self._copying.discard(wish.key)
            if self._steps.is_carried(wish.key):
                self._pool.copied(piece, wish.located, wish.key, wish.length)
                located = self._pool.locate(*wish.key)
                assert located is not None
                self._steps.copied(wish.key, located)
            else:
                self._pool.returned(piece.offset_bytes)
            self._pool.unpin_carried(wish.located.chunk)

    def order_copies(self) -> None:
        """Have carried fragments copied out of chunks that they alone keep, where room is scarce."""
        if self._pool.room_bytes > self._pool.allocator.capacity_bytes // 4:
            return  # nobody needs the room yet
        if self._readahead.is_away(COPYING_WORKER):
            return
        wishes = [w for w in self._steps.copy_wishes(COPIES_AT_ONCE) if w.key not in self._copying]
        batch: list[tuple[CopyWish, Piece]] = []
        rows = []
        for wish in wishes:
            piece = self._pool.lend(
                single_bytes(wish.length, TOKEN_BYTES_MAX, self._job.fields, wish.media_sizes)
            )
            if piece is None:
                break
            chunk = wish.located.chunk
            rows.append(
                [
                    chunk.piece.offset_bytes,
                    chunk.piece.size_bytes,
                    wish.located.sample,
                    wish.first_token,
                    wish.length,
                    piece.offset_bytes,
                    piece.size_bytes,
                ]
            )
            batch.append((wish, piece))
            self._copying.add(wish.key)
            # The source chunk must stay until the copy is done, even if the fragment is placed.
            self._pool.pin_carried(chunk)
        if batch:
            task = next(self._tasks)
            self._copies[task] = batch
            self._workers.copy(COPYING_WORKER, {"task": task, "copies": rows})

    def worker_lost(
        self, worker: int, give_back: Callable[[int], object], *, may_write: bool
    ) -> None:
        """A loader worker is gone: take back what it had of this.

        Args:
            worker: Its number.
            give_back: Takes the offset of each piece.
            may_write: It may not have ended yet: what it was to fill is given back, not kept for its
                successor.
        """
        if worker == COPYING_WORKER:
            for batch in self._copies.values():
                for wish, piece in batch:
                    self._copying.discard(wish.key)
                    give_back(piece.offset_bytes)
                    self._pool.unpin_carried(wish.located.chunk)
            self._copies.clear()
        if not may_write:
            return
        for task, fetch in self._fetches_of(worker):
            give_back(fetch.piece.offset_bytes)
            del self._fetches[task]
            self._fetch_wishes.appendleft(
                (fetch.source_index, fetch.block_key, fetch.indices, fetch.piece.size_bytes)
            )

    def worker_back(self, worker: int) -> None:
        """A loader worker was replaced: what it was told to read is told to its successor."""
        for task, fetch in self._fetches_of(worker):
            del self._fetches[task]
            self._order_fetch(fetch.source_index, fetch.block_key, fetch.indices, fetch.piece)

    def _fetches_of(self, worker: int) -> list[tuple[int, _Fetch]]:
        return [
            (task, fetch)
            for task, fetch in self._fetches.items()
            if fetch.loader in self._readahead.loaders
            and self._readahead.loaders[fetch.loader].worker == worker
        ]
