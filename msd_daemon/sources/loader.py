"""A source loader: reads the blocks of one source that are its own and makes chunks of them.

Hosted by a loader worker. It knows nothing of the pool, of other sources, or of what is drawn: it
goes through the source's order from a position on, epoch after epoch, as fast as it is asked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from federation.model.chunk import ChunkMeta, RecordStatus
from federation.model.job import FieldRule, ResolvedJob, SourceSpec
from federation.model.media import MediaRule
from federation.planning.epochs import read_epochs_max
from msd_client.contract.errors import CorruptRecordError
from msd_client.contract.position import KEY_MAX
from msd_daemon.core.loader_costs import NO_COST, ReadCost
from msd_daemon.sources.block_cursor import Run
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.sources.fetch_ahead import FetchAhead
from msd_daemon.sources.formats import format_of, is_read_plain
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.order import SourceOrder
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.record_guard import NO_GUARD, SourceGuard
from msd_daemon.sources.run_delay import run_delay_ns
from msd_daemon.sources.sample_encoder import SampleEncoder, SampleTools
from msd_daemon.sources.sample_parts import composer_of
from msd_daemon.sources.sample_tools import Watch, open_tools
from msd_daemon.sources.shard_door import ShardDoor
from msd_daemon.sources.shared_calls import SharedCalls
from msd_daemon.sources.source_walk import field_walk, plain_walk
from msd_daemon.sources.walk import LaneWalk, OpenBlock, SeekableWalk
from msd_daemon.transforms.tokenizer import Tokenizer

ROW_TOKENS_UNKNOWN = 1 << 31


@dataclass(frozen=True)
class SourceLoaderStatistics:
    """What a source loader did so far."""

    records: int
    """Records handed out, faults included, fetched ones excluded."""
    tokens: int
    read_bytes: int
    """Bytes read from shards, as they lie; of parquet the decoded bytes of the columns read."""
    cpu_s: float
    """CPU time of the calling thread inside the loader."""
    faults: Mapping[str, int]
    """Records handed out by the name of their RecordStatus, OK left out."""


def open_source_loader(
    job: ResolvedJob,
    source_index: int,
    tokenizer: Tokenizer,
    part: int = 0,
    parts: int = 1,
    index_dir: Path | None = None,
    watch: Watch | None = None,
    guard: SourceGuard = NO_GUARD.source,
    *,
    is_naming: bool = False,
    is_lengths_only: bool = False,
    open_wait_s: float = 0.0,
    calls: SharedCalls | None = None,
) -> SourceLoader:
    """Return the loader of a part of a job's source, that stops behind the last pass to be drawn.

    `guard` marks what it works on and knows the records that are not to be touched; `is_naming`
    has records named, not encoded, `is_lengths_only` leaves out token ids that lie ready; a shard that
    cannot be opened is waited for `open_wait_s`.

    Raises:
        ConfigError: See SourceLoader.
    """
    return SourceLoader(
        replace(job.sources[source_index], max_epochs=read_epochs_max(job, source_index)),
        source_index,
        tokenizer,
        job.seed,
        part,
        parts,
        index_dir,
        job.fields,
        job.media,
        min(job.batch.row_tokens_values),
        watch,
        guard,
        is_naming=is_naming,
        is_lengths_only=is_lengths_only,
        open_wait_s=open_wait_s,
        calls=calls,
    )


class SourceLoader:
    """Reads one source, or one part of it, in the source's order.

    Args:
        spec: The source, resolved.
        source_index: Its index in the job.
        tokenizer: Shared by the loaders of a worker.
        seed: The job's.
        part: Which of the source's loaders this is.
        parts: How many there are; the order is the same for any number.
        index_dir: Where indexes are kept, None for none.
        fields: The job's; records of formats that have fields carry their values.
        media: The job's rules.
        row_tokens_min: Tokens of the job's shortest row.
        watch: Sees all that the user's code is given.
        guard: Marks what it works on.
        is_naming: Records are named, not encoded: chunks hold no text, and `bad` names them all.
        is_lengths_only: Chunks of formats whose token ids lie ready hold none of them.
        open_wait_s: How long a shard that cannot be opened is tried again.
        calls: Processes of the user's code that other loaders use, too.

    Raises:
        ConfigError: A recipe's list, template or code is not what the job was resolved with.
    """

    def __init__(
        self,
        spec: SourceSpec,
        source_index: int,
        tokenizer: Tokenizer,
        seed: int,
        part: int,
        parts: int,
        index_dir: Path | None,
        fields: tuple[FieldRule, ...] = (),
        media: tuple[MediaRule, ...] = (),
        row_tokens_min: int = ROW_TOKENS_UNKNOWN,
        watch: Watch | None = None,
        guard: SourceGuard = NO_GUARD.source,
        *,
        is_naming: bool = False,
        is_lengths_only: bool = False,
        open_wait_s: float = 0.0,
        calls: SharedCalls | None = None,
    ) -> None:
        assert 0 <= part < parts, f"part {part} of {parts}"
        self._spec = spec
        self._source_index = source_index
        self._is_naming = is_naming
        self._meter = ReadMeter()
        self._close_tools: Callable[[], None] = _nothing
        self._open: OpenBlock | None = None
        self._index = 0
        self._skip = 0
        self._skip_key = -1
        self._until = KEY_MAX
        self._records = 0
        self._tokens = 0
        self._cpu_ns = 0
        self._in_flight = guard.in_flight
        self._cost = NO_COST
        """Not told of yet."""
        self._metered_bytes = 0
        self._faults: Counter[int] = Counter()
        self._walk: SeekableWalk | LaneWalk
        order = SourceOrder(seed, spec.order_name, spec.shards_in(0), spec.shuffle, spec.growth)
        store = IndexStore(index_dir, spec)
        door = ShardDoor(guard, open_wait_s)
        fields = fields if fields and format_of(spec.format).has_fields else ()
        if is_read_plain(spec):
            self._walk = plain_walk(
                spec, order, store, self._meter, tokenizer, fields, (part, parts), guard,
                door, is_naming=is_naming, has_tokens=not is_lengths_only,
            )  # fmt: skip
            return
        encoder: SampleEncoder
        if is_naming:
            from msd_daemon.sources.naming_encoder import NamingSampleEncoder

            tools = SampleTools(compose=composer_of(spec))
            encoder = NamingSampleEncoder(spec, tokenizer, tools, media, fields=fields)
        else:
            tools, self._close_tools = open_tools(
                spec, media, tokenizer, self._meter, guard.in_flight, watch, calls
            )
            encoder = SampleEncoder(
                spec, tokenizer, tools, media, row_tokens_min, fields, source_guard=guard
            )
        self._walk = field_walk(spec, order, store, self._meter, encoder, (part, parts), door)

    @property
    def name(self) -> str:
        """Of the source."""
        return self._spec.name

    @property
    def lost_shards(self) -> frozenset[str]:
        """Paths of shards that could not be opened so far, or were not of the manifest's size."""
        return frozenset(self._meter.lost)

    def seek(self, block_key: int, index: int) -> None:
        """Continue from a position: the first own block at or after it, at the record `index`.

        A position behind a block's last record gives an empty chunk that ends the block.
        """
        self._close_block()
        self._walk.seek(block_key)
        self._skip, self._skip_key = index, block_key

    def stop_before(self, block_key: int) -> None:
        """Begin no block at or behind a key: other loaders read those.

        `next_chunk` returns None from there on. A block behind it that is open already is closed.
        """
        self._until = block_key
        if self._open is not None and self._open.block_key >= block_key:
            self._close_block()

    def fetch_ahead(self, blocks: int) -> None:
        """Have so many of the blocks that come next fetched while one is worked on; 0: none.

        Of a seekable source; a stream is read ahead as it lies.
        """
        if isinstance(self._walk, SeekableWalk):
            self._walk.ahead = FetchAhead(self._spec.shards, blocks) if blocks else None

    def next_chunk(self, payload_bytes_max: int) -> ChunkDraft | None:
        """Return the next run of records of one block, in order.

        Args:
            payload_bytes_max: Bytes of tokens and field values; one record is given even if it
                has more.

        Returns:
            A chunk, of no records where a block or the rest of a lane has none; None where this
            part has no block in a whole epoch, the source's last epoch is over, or it is to stop.

        Raises:
            CorruptRecordError: The place sought is behind the end of a shard, which was longer.
        """
        begun = self._clocks()
        try:
            return self._next_chunk(payload_bytes_max)
        finally:
            self._count_cost(begun)

    def fetch(self, block_key: int, indices: Sequence[int]) -> ChunkDraft:
        """Return exactly these records of a block again, in the order given.

        Does not move the position of `next_chunk`; the block may be another part's.

        Raises:
            CorruptRecordError: The source no longer has such a record.
        """
        begun = self._clocks()
        try:
            return self._fetch(block_key, indices)
        finally:
            self._count_cost(begun)

    def shard_block(self, block_key: int) -> int | None:
        """Return which block of its shard stands at a key, in formats that number records by block.

        A row of parquet or Arrow is a row of its row group or batch; all other places are the shard's.
        """
        if isinstance(self._walk, LaneWalk) or format_of(self._spec.format).place_name != "row":
            return None
        return self._walk.shard_block(block_key)

    def keys_of_shard(self, epoch: int, shard_number: int) -> list[int] | None:
        """Return the keys of a shard's blocks in an epoch, None where its lane has to be read."""
        if isinstance(self._walk, LaneWalk):
            return None
        return self._walk.keys_of_shard(epoch, shard_number)

    def lane_of_shard(self, epoch: int, shard_number: int) -> tuple[int, int]:
        """Return (lane, lanes) of a shard in an epoch: part and parts of a loader of it; else (0, 1)."""
        if not isinstance(self._walk, LaneWalk):
            return 0, 1
        return self._walk.lane_of_shard(epoch, shard_number), self._walk.lane_count

    def close(self) -> None:
        """Close all readers; the loader may be used again after a seek."""
        self._close_block()
        self._walk.close()
        self._close_tools()

    def statistics(self) -> SourceLoaderStatistics:
        """Return what was read and handed out so far."""
        return SourceLoaderStatistics(
            records=self._records,
            tokens=self._tokens,
            read_bytes=self._meter.read_bytes,
            cpu_s=self._cpu_ns / 1e9,
            faults={RecordStatus(code).name: count for code, count in sorted(self._faults.items())},
        )

    def take_cost(self) -> ReadCost:
        """Return what it took since this was called last."""
        cost, self._cost = self._cost, NO_COST
        return cost

    def _clocks(self) -> tuple[int, int, int, int]:
        """Return the wall's, the thread's CPU, the user's code's and the run queue's."""
        now_ns, user_ns = time.monotonic_ns(), self._in_flight.user_ns
        return now_ns, time.thread_time_ns(), user_ns, run_delay_ns()

    def _count_cost(self, begun: tuple[int, int, int, int]) -> None:
        wall_ns, cpu_ns, user_ns, delay_ns = (
            now - then for now, then in zip(self._clocks(), begun, strict=True)
        )
        self._cpu_ns += cpu_ns
        wait_ns = max(wall_ns - cpu_ns - user_ns - max(delay_ns, 0), 0)
        read_bytes = self._meter.read_bytes - self._metered_bytes
        self._metered_bytes = self._meter.read_bytes
        self._cost = self._cost.plus(ReadCost(cpu_ns, user_ns, wait_ns, read_bytes))

    def _next_chunk(self, payload_bytes_max: int) -> ChunkDraft | None:
        if self._open is None:
            try:
                self._open = self._walk.next_block(self._until)
            except IndexError as error:
                raise CorruptRecordError(
                    f"source {self._spec.name!r} no longer holds the place to go on from ({error}): "
                    "a shard is missing or was cut, restore it",
                    source=self._spec.name,
                ) from error
            if self._open is None:
                return None
            self._index = 0
            if self._open.block_key == self._skip_key and self._skip:
                self._index = self._open.cursor.skip(self._skip)
            self._skip, self._skip_key = 0, -1
        opened = self._open
        run = opened.cursor.take(payload_bytes_max)
        meta = self._meta(opened, self._index, run)
        draft = ChunkDraft(
            meta,
            run.dtype,
            run.payload,
            index=None,
            values=run.values,
            media=run.media,
            bad=run.bad,
        )
        self._index += len(run.lengths)
        self._count(run)
        if run.is_block_end:
            self._close_block()
            if run.is_lane_end and isinstance(self._walk, LaneWalk):
                self._walk.end_lane(opened.block_key)
        return draft

    def _fetch(self, block_key: int, indices: Sequence[int]) -> ChunkDraft:
        opened = self._walk.open(block_key)
        if opened is None:
            raise self._gone(block_key, "no such block")
        try:
            run = opened.cursor.pick(indices)
        except IndexError as error:
            raise self._gone(block_key, str(error)) from error
        finally:
            opened.close()
        return ChunkDraft(
            self._meta(opened, -1, run),
            run.dtype,
            run.payload,
            index=np.asarray(indices, dtype=np.int32),
            values=run.values,
            media=run.media,
            bad=run.bad if self._is_naming else [],
        )

    def _gone(self, block_key: int, what: str) -> CorruptRecordError:
        return CorruptRecordError(
            f"source {self._spec.name!r} no longer holds a record that was drawn "
            f"(block {block_key:#x}: {what}): a shard was changed after submit",
            source=self._spec.name,
            block_key=block_key,
        )

    def _meta(self, opened: OpenBlock, first_index: int, run: Run) -> ChunkMeta:
        return ChunkMeta(
            source_index=self._source_index,
            block_key=opened.block_key,
            first_index=first_index,
            lengths=run.lengths,
            status=run.status,
            is_block_end=run.is_block_end,
            window_blocks=opened.window_blocks,
            is_lane_end=run.is_lane_end,
            fault=run.fault,
            marks=run.marks,
        )

    def _count(self, run: Run) -> None:
        self._records += len(run.lengths)
        self._tokens += int(run.lengths.sum(dtype=np.int64))
        if run.status.any():
            counts = np.bincount(run.status)
            for code in np.flatnonzero(counts[1:]).tolist():
                self._faults[code + 1] += int(counts[code + 1])

    def _close_block(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _nothing() -> None:
    return None
