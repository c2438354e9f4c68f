"""Sources without payload: the metadata chunks that loaders of a made-up corpus would send.

A corpus gives each source the same order whatever the number of loaders and the size of chunks, as
real loaders do, so planners can be fed in any way that must not matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from federation.model.chunk import FAULT_STATUSES, ChunkMeta, Marks, RecordStatus
from federation.model.job import (
    BatchRule,
    MixturePoint,
    MixtureSchedule,
    ResolvedJob,
    Shard,
    ShuffleRule,
    SourceSpec,
    TokenizerSpec,
)
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, Starved, StepPlanner
from msd_client.contract.position import pack_block_key, unpack_block_key
from msd_client.contract.state import StreamState

_BAD = [s for s in RecordStatus if s not in (RecordStatus.OK, RecordStatus.UNTRAINED)]
"""Of random records: a chat without a trained token has a budget of its own, which ends a stream."""

Blocks = list[tuple[list[int], list[int]]]
"""(lengths, statuses) of each block of a window or lane."""


def make_spec(name: str, shards: int = 1, order_class: str = "seekable", **options) -> SourceSpec:
    """Return a source of empty shards; `window_shards` is 2."""
    files = tuple(Shard(f"{name}-{number}", 0, f"{number:032x}") for number in range(shards))
    shuffle = ShuffleRule(window_shards=2, interleave=options.pop("interleave", 4))
    return SourceSpec(
        name, "jsonl", "none", order_class, files, "0" * 32, shuffle=shuffle, **options
    )


def make_job(
    specs: list[SourceSpec],
    batch: BatchRule,
    weights: list[float] | None = None,
    unit: str = "tokens",
    **options,
) -> ResolvedJob:
    """Return a job with one mixture point, or with `points` as given."""
    weights = weights or [1.0] * len(specs)
    names = [spec.name for spec in specs]
    point = MixturePoint(0, dict(zip(names, weights, strict=True)))
    mixture = MixtureSchedule(unit, options.pop("points", (point,)))
    return ResolvedJob("job", 17, tuple(specs), TokenizerSpec("bytes"), batch, mixture, **options)


def start(job: ResolvedJob, mesh: dict[str, int] | None = None, state=None) -> StepPlanner:
    """Return a planner at a state, or at the job's first step."""
    tree = ClientPlaceTree.from_mesh(mesh or {"dp": 1})
    return StepPlanner(job, tree, state or initial_state(job))


def initial_state(job: ResolvedJob) -> StreamState:
    """Return the state before a job's first step."""
    names = tuple(source.name for source in job.sources)
    return StreamState.initial(job.digest(), names, sample_digest=job.sample_digest())


@dataclass
class SourceCorpus:
    """Blocks of one source: per window (seekable) or lane (streaming), the same in each epoch."""

    spec: SourceSpec
    parts: list[Blocks]
    marks: dict[tuple[int, int], list[list[tuple[int, int, int, int]]]] = field(
        default_factory=dict
    )
    """Of each record of some blocks, by (part, block)."""

    def keys(self, epoch: int, loader: int, loaders: int) -> Iterator[tuple[int, int, int]]:
        """Yield (block key, part, block of the part) of a loader's blocks, in its order."""
        if self.spec.order_class == "seekable":
            for window, blocks in enumerate(self.parts):
                for block in range(loader, len(blocks), loaders):
                    yield pack_block_key(epoch, window, block), window, block
            return
        lanes = len(self.parts)
        for turn in range(max(map(len, self.parts), default=0) + 1):
            for lane in range(loader, lanes, loaders):
                if turn < len(self.parts[lane]) or (turn == 0 and not self.parts[lane]):
                    block = turn if turn < len(self.parts[lane]) else -1
                    yield pack_block_key(epoch, 0, turn * lanes + lane), lane, block


def random_corpus(
    spec: SourceSpec,
    seed: int,
    lengths: Callable[[random.Random], int],
    blocks_max: int = 5,
    records_max: int = 40,
    bad_ratio: float = 0.0,
) -> SourceCorpus:
    """Return a corpus of random blocks."""
    rng = random.Random(seed)
    shuffle = spec.shuffle
    if spec.order_class == "seekable":
        count = -(-len(spec.shards) // shuffle.window_shards)
    else:
        count = min(shuffle.interleave, len(spec.shards))

    def block() -> tuple[list[int], list[int]]:
        size = rng.randint(1, records_max)
        statuses = [rng.choice(_BAD) if rng.random() < bad_ratio else 0 for _ in range(size)]
        return [0 if status else lengths(rng) for status in statuses], statuses

    parts = [[block() for _ in range(rng.randint(1, blocks_max))] for _ in range(count)]
    parts[0][0][0][0], parts[0][0][1][0] = 9, 0  # no corpus is without any short good record
    return SourceCorpus(spec, parts)


@dataclass
class FakeLoader:
    """Loader `loader` of `loaders` of a source: chunks of random size from a position on."""

    corpus: SourceCorpus
    source_index: int
    loader: int = 0
    loaders: int = 1
    chunk_records_max: int = 16
    seed: int = 0
    _stream: Iterator[ChunkMeta] | None = field(default=None, repr=False)

    def seek(self, block_key: int, index: int) -> None:
        """Continue from the first own block at or after a position."""
        self._stream = self._chunks(block_key, index)

    def next_chunk(self) -> ChunkMeta | None:
        """Return the next chunk, rolling into the next epoch; None where it has no block at all."""
        if self._stream is None:
            self.seek(0, 0)
        return next(self._stream, None)

    def _chunks(self, start_key: int, start_index: int) -> Iterator[ChunkMeta]:
        rng = random.Random(self.seed)
        epoch = unpack_block_key(start_key).epoch
        ended = self._ended_lanes(start_key)  # told at their turns: a loader sends in order
        while any(True for _ in self.corpus.keys(epoch, self.loader, self.loaders)):
            for key, part, block in self.corpus.keys(epoch, self.loader, self.loaders):
                if key >= start_key:
                    while ended and ended[0].block_key < key:
                        yield ended.pop(0)
                    first = start_index if key == start_key else 0
                    yield from self._block(key, part, block, first, rng)
            yield from ended
            ended = []
            epoch += 1

    def _ended_lanes(self, start_key: int) -> list[ChunkMeta]:
        """Return what tells which own lanes have no block from a position on, in order."""
        found: list[ChunkMeta] = []
        place = unpack_block_key(start_key)
        lanes = len(self.corpus.parts)
        if self.corpus.spec.order_class == "seekable" or place.block == 0:
            return found
        for lane in range(self.loader, lanes, self.loaders):
            turn = -(-(place.block - lane) // lanes)
            if turn >= len(self.corpus.parts[lane]) and turn > 0:
                key = pack_block_key(place.epoch, 0, turn * lanes + lane)
                found.append(self._meta(key, 0, [], [], is_block_end=True, is_lane_end=True))
        return sorted(found, key=lambda meta: meta.block_key)

    def _block(
        self, key: int, part: int, block: int, first: int, rng: random.Random
    ) -> Iterator[ChunkMeta]:
        is_seekable = self.corpus.spec.order_class == "seekable"
        blocks = self.corpus.parts[part]
        if block < 0:
            yield self._meta(key, 0, [], [], is_block_end=True, is_lane_end=not is_seekable)
            return
        lengths, statuses = blocks[block]
        is_lane_end = not is_seekable and block == len(blocks) - 1
        while True:
            last = min(len(lengths), first + rng.randint(1, self.chunk_records_max))
            is_end = last == len(lengths) and rng.random() < 0.7
            yield self._meta(
                key,
                first,
                lengths[first:last],
                statuses[first:last],
                is_block_end=is_end,
                is_lane_end=is_lane_end and is_end,
                window_blocks=len(blocks) if is_seekable else 0,
                marks=marks_of(self.corpus.marks[part, block][first:last])
                if (part, block) in self.corpus.marks
                else None,
            )
            if is_end:
                return
            first = last

    def _meta(
        self,
        key: int,
        first: int,
        lengths: list[int],
        statuses: list[int],
        *,
        is_block_end: bool,
        is_lane_end: bool,
        window_blocks: int = 0,
        marks: Marks | None = None,
    ) -> ChunkMeta:
        return ChunkMeta(
            self.source_index,
            key,
            first,
            np.array(lengths, np.int32),
            np.array(statuses, np.uint8),
            is_block_end,
            window_blocks,
            is_lane_end,
            fault="made-up fault" if FAULT_STATUSES.intersection(statuses) else "",
            marks=marks,
        )


def marks_of(records: list[list[tuple[int, int, int, int]]]) -> Marks:
    """Return the marks of records, given as the lines of each."""
    counts = np.array([len(lines) for lines in records], np.int32)
    flat = [line for lines in records for line in lines]
    return Marks(counts, np.array(flat, np.int32).reshape(-1, 4))


class Feed:
    """Loaders of all sources of a corpus, and a planner that they feed in random order."""

    def __init__(
        self,
        planner: StepPlanner,
        corpora: list[SourceCorpus],
        loaders: int = 1,
        chunk_records_max: int = 16,
        seed: int = 0,
        repeat_ratio: float = 0.0,
    ) -> None:
        self.planner = planner
        self._rng = random.Random(seed)
        self._repeat_ratio = repeat_ratio
        self._sent: list[ChunkMeta] = []
        self._loaders: list[list[FakeLoader]] = []
        cursors = planner.cursors()
        for source, corpus in enumerate(corpora):
            is_streaming = corpus.spec.order_class == "streaming"
            count = min(loaders, len(corpus.parts)) if is_streaming else loaders
            team = [
                FakeLoader(corpus, source, loader, count, chunk_records_max, seed + loader)
                for loader in range(count)
            ]
            for loader in team:
                loader.seek(*cursors[source])
            self._loaders.append(team)

    def step(self) -> StepPlan | Ended:
        """Plan the next step, feeding what is missing and some more."""
        while True:
            outcome = self.planner.plan_step()
            if not isinstance(outcome, Starved):
                return outcome
            for source in outcome.sources:
                team = self._loaders[source]
                for loader in self._rng.sample(team, self._rng.randint(1, len(team))):
                    self._give(loader.next_chunk())
            if self._rng.random() < 0.3:
                self._give(self._rng.choice(self._rng.choice(self._loaders)).next_chunk())

    def steps(self, count: int) -> list[StepPlan]:
        """Plan `count` steps, fewer where the stream ends."""
        plans = []
        for _ in range(count):
            outcome = self.step()
            if isinstance(outcome, Ended):
                break
            plans.append(outcome)
        return plans

    def _give(self, meta: ChunkMeta | None) -> None:
        if meta is None:
            return
        self.planner.add_chunk(meta)
        if self._rng.random() < self._repeat_ratio:
            self.planner.add_chunk(self._rng.choice(self._sent or [meta]))
        self._sent.append(meta)


def with_batch(job: ResolvedJob, **changes) -> ResolvedJob:
    """Return the job with another batch rule."""
    return replace(job, batch=replace(job.batch, **changes))
