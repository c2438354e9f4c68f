"""Samples with masks and media, sent from drafts of chunks through a slot to batches."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from federation.model.chunk import MARK_UNTRAINED, ChunkMeta, Marks
from federation.model.media import AudioRule, ImageRule, MediaRule, PatchRule, VideoRule
from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.media_fields import MediaField
from msd_daemon.gather.encode_columns import EncodeColumns
from msd_daemon.gather.segment_columns import SegmentColumns
from msd_daemon.inline_media import InlineItem
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT
from msd_daemon.shm.mapping import map_read_only
from msd_daemon.shm.media_layout import MediaColumn
from msd_daemon.shm.segment import make_segment
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.workers.microbatch_builder import MicrobatchBuilder, MicrobatchTask
from tests.support.microbatches import columns_of
from tests.support.rings import GENERATION, small_ring

RULES = (
    MediaRule("image", 4, "uint8", 64, 900, image=ImageRule(patches=PatchRule(merge=2))),
    MediaRule("video", 3, "float32", 48, 901, video=VideoRule(patches=PatchRule(merge=1))),
    MediaRule("audio", 2, "float16", 40, 902, audio=AudioRule()),
)
FIELDS = tuple(
    MediaField(rule.modality, rule.unit_values, rule.unit_dtype, rule.row_units_max, rule.merge)
    for rule in RULES
)


@dataclass
class Sample:
    """One record."""

    tokens: list[int]
    untrained: set[int] = field(default_factory=set)
    """Places of tokens that are not trained, those of items included."""
    items: list[tuple[int, InlineItem]] = field(default_factory=list)
    """Kind and item, by place."""

    @property
    def pool_ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """As they lie in the pool."""
        ids = np.array(self.tokens, np.int32)
        ids[sorted(self.untrained)] |= UNTRAINED_BIT
        return ids

    def cuts(self) -> list[int]:
        """Places where the sample may be cut."""
        inside = {
            at for _, item in self.items for at in range(item.begin + 1, item.begin + item.tokens)
        }
        return [at for at in range(1, len(self.tokens)) if at not in inside]


@dataclass(frozen=True)
class Cut:
    """A piece of a sample, placed."""

    chunk: int
    sample: int
    offset: int
    length: int
    row: int
    column: int


def make_item(rng: random.Random, kind: int, begin: int, values: int) -> InlineItem:
    """Return an item of random units."""
    rule = RULES[kind]
    if rule.modality == "audio":
        grid = (rng.randint(1, 5), 1, 1)
        tokens = rng.randint(1, 4)
    else:
        t = rng.randint(1, 3) if rule.modality == "video" else 1
        h, w = rng.randint(1, 2), rng.randint(1, 3)
        grid, tokens = (t, h * rule.merge, w * rule.merge), t * h * w
    units = grid[0] * grid[1] * grid[2]
    data = np.arange(values, values + units * rule.unit_values) % 251
    return InlineItem(
        begin, tokens, grid, data.reshape(units, rule.unit_values).astype(rule.unit_dtype)
    )


def make_sample(rng: random.Random, length: int, *, has_media: bool = True) -> Sample:
    """Return a sample of about `length` tokens, text and items in turn."""
    sample = Sample([])
    while len(sample.tokens) < length:
        at = len(sample.tokens)
        if has_media and rng.random() < 0.4:
            kind = rng.randrange(len(RULES))
            item = make_item(rng, kind, at, rng.randrange(1000))
            sample.items.append((kind, item))
            sample.tokens += [RULES[kind].placeholder_id] * item.tokens
            sample.untrained |= set(range(at, at + item.tokens))
        else:
            run = rng.randint(1, 4)
            sample.tokens += [rng.randrange(1, 800) for _ in range(run)]
            if rng.random() < 0.3:
                sample.untrained |= set(range(at, at + run))
    return sample


def media_columns(samples: Sequence[Sample]) -> tuple[MediaColumn, ...]:
    """Return the media of consecutive records."""
    columns = []
    for kind in range(len(RULES)):
        own = [[item for k, item in sample.items if k == kind] for sample in samples]
        lines = [
            (item.begin, item.tokens, len(item.data), *item.grid) for items in own for item in items
        ]
        columns.append(
            MediaColumn(
                np.array([len(items) for items in own], np.int32),
                np.array(lines, np.int32).reshape(-1, 6),
                [item.data for items in own for item in items],
            )
        )
    return tuple(columns)


def marks_of(samples: Sequence[Sample]) -> Marks:
    """Return the marks of consecutive records, one a token for what is just not trained."""
    counts, table = [], []
    for sample in samples:
        held = {at for _, it in sample.items for at in range(it.begin, it.begin + it.tokens)}
        lines = [(kind, it.begin, it.tokens, len(it.data)) for kind, it in sample.items]
        lines += [(MARK_UNTRAINED, at, 1, 0) for at in sample.untrained - held]
        lines.sort(key=lambda line: line[1])
        counts.append(len(lines))
        table += lines
    return Marks(np.array(counts, np.int32), np.array(table, np.int32).reshape(-1, 4))


def make_draft(samples: Sequence[Sample], source: int = 0) -> ChunkDraft:
    """Return a chunk of samples."""
    meta = ChunkMeta(
        source,
        0,
        0,
        np.array([len(sample.tokens) for sample in samples], np.int32),
        np.zeros(len(samples), np.uint8),
        is_block_end=True,
        window_blocks=1,
        marks=marks_of(samples),
    )
    parts = [sample.pool_ids for sample in samples]
    has_media = any(sample.items for sample in samples)
    media = media_columns(samples) if has_media else ()
    return ChunkDraft(meta, np.dtype(np.int32), parts, media=media)


def make_pool(chunks: Sequence[Sequence[Sample]]) -> tuple[bytearray, list[int]]:
    """Return a pool of chunks, one a source, and where they begin."""
    data, offsets = bytearray(), []
    for source, samples in enumerate(chunks):
        draft = make_draft(samples, source)
        chunk = bytearray(draft.encoded_bytes())
        draft.write_into(memoryview(chunk))
        offsets.append(len(data))
        data += chunk
    return data, offsets


def place_cuts(
    rng: random.Random, chunks: Sequence[Sequence[Sample]], spec: BatchSpec
) -> list[Cut]:
    """Return pieces of all samples, cut and placed at random, as many as the rows hold."""
    pieces = []
    for chunk, samples in enumerate(chunks):
        for number, sample in enumerate(samples):
            allowed = sample.cuts()
            bounds = [0, *sorted(rng.sample(allowed, min(len(allowed), rng.randint(0, 2))))]
            for begin, end in zip(bounds, [*bounds[1:], len(sample.tokens)], strict=True):
                pieces.append((chunk, number, begin, end - begin))
    rng.shuffle(pieces)
    placed, row, column = [], 0, 0
    for chunk, number, begin, length in pieces:
        extent = -(-length // spec.segment_multiple) * spec.segment_multiple
        if column + extent > spec.row_tokens:
            row, column = row + 1, 0
        if row == spec.rows or extent > spec.row_tokens:
            continue
        placed.append(Cut(chunk, number, begin, length, row, column))
        column += extent
    return placed


def segments_of(chunks: Sequence[Sequence[Sample]], cuts: Sequence[Cut]) -> SegmentColumns:
    """Return the columns of placed pieces of the chunks of a pool."""
    _, offsets = make_pool(chunks)
    return columns_of(
        [(offsets[c.chunk], c.sample, c.offset, c.length, c.row, c.column, c.chunk) for c in cuts]
    )


def build(
    spec: BatchSpec,
    chunks: Sequence[Sequence[Sample]],
    cuts: Sequence[Cut],
    *,
    as_: Literal["torch", "numpy"] = "numpy",
    valid_tokens: int = -1,
    encoding: EncodeColumns | None = None,
) -> list[Batch]:
    """Return the batch of each context-parallel rank; copies, so nothing is held."""
    data, _ = make_pool(chunks)
    segments = segments_of(chunks, cuts)
    with ExitStack() as stack:
        segment = make_segment(max(len(data), 64), "auto", "pool")
        stack.callback(segment.close)
        os.pwrite(segment.fd_read_write, data, 0)
        mapping = map_read_only(segment.fd_read_only, segment.nbytes)
        stack.callback(mapping.close)
        ring = stack.enter_context(small_ring(spec.payload_bytes_max, slots=1))
        # What an earlier microbatch left must not show.
        ring.writer.payload(0)[:] = b"\xa5" * len(ring.writer.payload(0))
        builder = MicrobatchBuilder(mapping, ring.writer, spec)
        stack.callback(builder.close)
        task = MicrobatchTask(0, 1, 5, 6, 2, segments, valid_tokens, encoding=encoding)
        payload_bytes = builder.build(task)
        batches = []
        for cp_rank in range(spec.cp_count):
            lease = ring.reader.open(0, 1, GENERATION, payload_bytes)
            batches.append(Batch.from_lease(lease, spec, as_=as_, copy=True, cp_rank=cp_rank))
        return batches
