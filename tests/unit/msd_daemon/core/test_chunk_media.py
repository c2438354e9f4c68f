"""What media take in the pool, told from marks; budgets, and copies of carried fragments."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.model.chunk import Marks
from federation.model.job import BatchRule
from federation.model.recipe import SampleRecipe
from msd_client.contract.codec import pack
from msd_client.contract.errors import BudgetError, CorruptRecordError, InternalError
from msd_daemon.core.budget import (
    CHUNK_BYTES_MAX,
    MEDIA_AHEAD_BYTES,
    MEDIA_CHUNK_BYTES_MAX,
    horizon_of,
    pool_sums,
    row_media_bytes,
    source_step_bytes,
    step_bytes_max,
)
from msd_daemon.core.chunk import Located
from msd_daemon.core.chunk_media import ChunkMedia
from msd_daemon.core.pool import PoolState
from msd_daemon.core.steps import CopyWish
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT, ChunkView, single_bytes
from msd_daemon.shm.media_layout import MediaSize
from msd_daemon.workers.loader_main import LoaderWorker
from msd_daemon.workers.messages import ToLoader
from tests.support.media_rows import RULES, Sample, make_draft, make_sample, marks_of
from tests.support.metadata import make_job, make_spec

MIB = 1 << 20
ROW_BYTES = 64 * 4 + 48 * 12 + 40 * 4 + 24 * (64 + 48 + 40)


def media_job(**batch: Any) -> Any:
    specs = [make_spec("text"), replace(make_spec("vlm"), recipe=SampleRecipe(image_field="a"))]
    return make_job(specs, BatchRule(16, 64, 2, **batch), media=RULES)


def test_a_step_counts_the_media_of_all_its_rows() -> None:
    job = media_job()
    assert row_media_bytes(job) == ROW_BYTES
    assert step_bytes_max(job) == 16 * (64 * 4 + ROW_BYTES)
    assert source_step_bytes(job)[0] == 16 * 64 * 4
    assert source_step_bytes(job)[1] == step_bytes_max(job)
    plain = replace(job, media=())
    assert step_bytes_max(plain) == source_step_bytes(plain)[1] == 16 * 64 * 4
    few = (replace(RULES[0], row_units_max=10),)
    assert row_media_bytes(replace(job, media=few)) == 10 * 4 + 24 * 10


@pytest.mark.parametrize(
    ("row_units", "expected"), [(64, 8), (1 << 20, 4), (1 << 21, 3), (1 << 24, 3)]
)
def test_media_limit_how_many_steps_are_planned_ahead(row_units: int, expected: int) -> None:
    """Units of 4 bytes: 16 rows of 4 MiB are a step of 64 MiB, four of which are 256 MiB."""
    job = replace(media_job(), media=(replace(RULES[0], row_units_max=row_units),))
    steps = min(8, MEDIA_AHEAD_BYTES // step_bytes_max(job))
    assert horizon_of(job, 8) == max(steps, 3) in (expected, expected - 1)
    assert horizon_of(job, 2) == 2
    assert horizon_of(replace(job, media=()), 8) == 8


def test_chunks_of_media_hold_several_records() -> None:
    job = replace(media_job(), media=(replace(RULES[0], row_units_max=1 << 22),))
    sums = pool_sums(job, 3, 2, None)
    assert sums.chunk_bytes <= CHUNK_BYTES_MAX < MEDIA_CHUNK_BYTES_MAX == sums.media_chunk_bytes
    # A chunk is never larger than the room that the sums have for a row's media.
    small = pool_sums(replace(job, media=(replace(RULES[0], row_units_max=1 << 19),)), 3, 2, None)
    assert small.media_chunk_bytes <= row_media_bytes(job)


def test_a_pool_holds_steps_carried_samples_and_a_row_of_each_source_with_media() -> None:
    job = replace(media_job(), media=(replace(RULES[0], row_units_max=1 << 20),))
    step, row = step_bytes_max(job), row_media_bytes(job)
    sums = pool_sums(job, 3, 2, None)
    assert sums.steps_bytes == 4 * step
    assert sums.carried_bytes == step
    assert sums.windows_bytes == 2 * sums.chunk_bytes + row
    assert sums.needed_bytes == 5 * step + sums.windows_bytes <= sums.pool_bytes
    with pytest.raises(BudgetError, match="or the patches and frames of a row"):
        pool_sums(job, 3, 2, 5 * step)
    plain = replace(job, media=())
    assert pool_sums(plain, 3, 2, None).windows_bytes == 2 * MIB


def test_a_mark_of_media_that_the_job_lacks_is_an_error() -> None:
    marks = Marks(np.array([1], np.int32), np.array([[3, 0, 1, 1]], np.int32))
    with pytest.raises(InternalError, match="kind 3, the job has 3"):
        ChunkMedia.of(marks, RULES)
    assert ChunkMedia.of(marks, ()) is None
    assert ChunkMedia.of(None, RULES) is None
    just_masks = marks_of([Sample([1, 2], {0})])
    assert ChunkMedia.of(just_masks, RULES) is None


def copy_part(
    samples: list[Sample], number: int, offset: int, tokens: int, target_bytes: int
) -> ChunkView:
    """Return the chunk that a loader worker makes of a part of a sample."""
    draft = make_draft(samples)
    size = draft.encoded_bytes()
    data = bytearray(size + target_bytes)
    draft.write_into(memoryview(data)[:size])
    worker: Any = LoaderWorker(SimpleNamespace(send=lambda *_: None))  # type: ignore[arg-type]
    worker._pool = memoryview(data)
    worker._job = SimpleNamespace(fields=(), media=RULES)
    copy = [0, size, number, offset, tokens, size, target_bytes]
    worker._handle(int(ToLoader.COPY), pack({"task": 1, "copies": [copy]}), [])
    return ChunkView(memoryview(data)[size:])


def lines_of(chunk: ChunkView, number: int, offset: int, tokens: int) -> list[Any]:
    return [
        (part.items.tolist(), [data.tolist() for data in part.data])
        for part in (view.part(number, offset, tokens) for view in chunk.media(RULES))
        if len(part.items)
    ]


@given(st.integers(0, 1 << 32))
def test_a_copied_fragment_fits_the_bytes_that_marks_tell_and_keeps_its_items(seed: int) -> None:
    rng = random.Random(seed)
    samples = [make_sample(rng, rng.randint(1, 30)) for _ in range(3)]
    number = rng.randrange(3)
    sample = samples[number]
    cuts = [0, *sample.cuts(), len(sample.tokens)]
    begin, end = sorted(rng.sample(cuts, 2))
    media = ChunkMedia.of(marks_of(samples), RULES)
    sizes = () if media is None else media.sizes(number, begin, end - begin)
    needed = single_bytes(end - begin, 4, (), sizes)
    copy = copy_part(samples, number, begin, end - begin, needed)
    assert copy.tokens.tolist() == sample.pool_ids[begin:end].tolist()
    draft = make_draft(samples)
    view = memoryview(bytearray(draft.encoded_bytes()))
    draft.write_into(view)
    whole = ChunkView(view)
    assert lines_of(copy, 0, 0, end - begin) == lines_of(whole, number, begin, end - begin)
    # The copy's own sizes are those of the part.
    part = None if media is None else media.part(number, begin, end - begin)
    assert (part is None) == (not any(size.items for size in sizes))
    if media is not None and part is not None:
        assert part.sizes(0, 0, end - begin) == sizes
        length = rng.randint(1, end - begin)
        inner = part.sizes(0, end - begin - length, length)
        assert inner == media.sizes(number, end - length, length)
        data_bytes = sum(size.data_bytes + 24 * size.items for size in sizes)
        assert media.part_bytes(number, begin, end - begin) == data_bytes


def large_image(count: int) -> Marks:
    """Return marks of `count` records of 10 tokens with an image of 1 MiB each."""
    line = [[0, 2, 4, MIB // 4]]
    return Marks(np.full(count, 1, np.int32), np.array(line * count, np.int32))


def test_a_fragment_is_copied_once_and_its_media_are_counted() -> None:
    pool = PoolState(64 * MIB)
    piece = pool.lend(8 * MIB)
    assert piece is not None
    chunk = pool.published(
        piece.offset_bytes,
        3 * MIB + 4096,
        loader=0,
        source_index=0,
        block_key=0,
        first_index=0,
        records=3,
        media=ChunkMedia.of(large_image(3), RULES),
    )
    chunk.is_drawn = True
    pool.pin_carried(chunk)
    wish = CopyWish((0, 0, 1, 0), Located(chunk, 1, 0), 10)
    assert wish.is_worth_it
    assert wish.media_sizes == (MediaSize(1, MIB), MediaSize(0, 0), MediaSize(0, 0))
    target = pool.lend(single_bytes(10, 4, (), wish.media_sizes))
    assert target is not None
    assert target.size_bytes == MIB + 4096
    pool.copied(target, wish.located, wish.key, 10)
    located = pool.locate(0, 0, 1, 0, 10)
    assert located is not None
    assert located.chunk is not chunk
    again = CopyWish(wish.key, located, 10)
    assert again.media_sizes == wish.media_sizes
    assert not again.is_worth_it
    rest = CopyWish((0, 0, 1, 6), located, 4)  # of shorter rows: the image was placed
    assert rest.media_sizes == (MediaSize(0, 0),) * 3
    assert rest.is_worth_it


def test_fetched_chunks_know_their_media() -> None:
    pool = PoolState(64 * MIB)
    piece = pool.lend(2 * MIB + 4096)
    assert piece is not None
    media = ChunkMedia.of(large_image(2), RULES)
    pool.published_singles(
        piece.offset_bytes, 2 * MIB, source_index=1, block_key=4, indices=[9, 2], media=media
    )
    located = pool.locate(1, 4, 2, 0, 10)
    assert located is not None
    wish = CopyWish((1, 4, 2, 0), located, 10)
    assert wish.is_worth_it
    assert wish.media_sizes[0] == MediaSize(1, MIB)


@pytest.mark.parametrize(
    ("job_masks", "own_masks", "largest", "is_refused"),
    [
        (False, False, UNTRAINED_BIT | 5, False),
        (True, False, UNTRAINED_BIT | 5, True),
        (True, True, UNTRAINED_BIT | 5, False),
    ],
)
def test_an_id_that_would_say_untrained_is_refused_in_jobs_with_masks(
    job_masks: bool, own_masks: bool, largest: int, is_refused: bool
) -> None:
    source = SimpleNamespace(name="a", is_tokenized=True, has_masks=own_masks)
    worker: Any = LoaderWorker(SimpleNamespace())  # type: ignore[arg-type]
    worker._job = SimpleNamespace(
        sources=[source],
        has_masks=job_masks,
        tokenizer=SimpleNamespace(vocabulary_count=1 << 31),
    )
    draft = make_draft([Sample([1, largest])])
    view = memoryview(bytearray(draft.encoded_bytes()))
    draft.write_into(view)
    if is_refused:
        with pytest.raises(CorruptRecordError, match=f"holds the id {largest}"):
            worker._check_ids(0, view)
    else:
        worker._check_ids(0, view)
