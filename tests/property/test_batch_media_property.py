"""Masks, media and M-RoPE ids of batches against the stream in one process, token by token (E11)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.model.job import BatchRule, ResolvedJob
from federation.model.recipe import SampleRecipe
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.context_parallel import CP_LAYOUTS
from msd_daemon.core.ring_plan import stage_spec
from msd_daemon.inline_media import items_of_part, items_of_records
from msd_daemon.inline_rows import InlineBatch, InlineRow, InlineSegment, Piece, batch_of, fill_row
from tests.support.media_rows import (
    FIELDS,
    RULES,
    Cut,
    Sample,
    build,
    make_sample,
    media_columns,
    place_cuts,
)
from tests.support.metadata import make_job, make_spec

ROW_TOKENS = 48
WEIGHTS = (1.0, 0.0, 0.5)

SEEDS = st.integers(0, 1 << 32)
some = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def jobs(draw: st.DrawFn) -> ResolvedJob:
    """Return a job of three sources with media and any convention."""
    ignore = draw(st.sampled_from(["label", "loss_mask"]))
    batch = BatchRule(
        3,
        ROW_TOKENS,
        3,
        labels=draw(st.sampled_from(["shifted", "aligned"])),
        ignore=ignore,
        ignore_label=7 if ignore == "loss_mask" else -100,
        documents=draw(st.sampled_from(["separate", "joined"])),
        pad_id=7,
        segment_multiple=draw(st.sampled_from([1, 1, 4])),
        boundaries=draw(st.sampled_from(["exact", "constant"])),
        is_mtp=draw(st.booleans()),
        token_dtype=draw(st.sampled_from(["int32", "int64"])),
        label_dtype=draw(st.sampled_from(["int32", "int64"])),
        positions=draw(st.sampled_from(["plain", "mrope"])),
    )
    weights = draw(st.sampled_from([(1.0, 1.0, 1.0), WEIGHTS]))
    recipe = SampleRecipe(image_field="a", video_field="b", audio_field="c")
    specs = [
        replace(make_spec(name), recipe=recipe, loss_weight=weight)
        for name, weight in zip("abc", weights, strict=True)
    ]
    return make_job(specs, batch, media=RULES)


def plain_batch(job: ResolvedJob, chunks: list[list[Sample]], cuts: list[Cut]) -> InlineBatch:
    """Return what the stream in one process makes of the same pieces."""
    rows = []
    for number in range(job.batch.microbatch_rows):
        segments, pieces = [], []
        for cut in cuts:
            if cut.row != number:
                continue
            sample = chunks[cut.chunk][cut.sample]
            (items,) = items_of_records(media_columns([sample]), 1)
            part = slice(cut.offset, cut.offset + cut.length)
            name = job.sources[cut.chunk].name
            segments.append(
                InlineSegment(
                    name, cut.chunk, 0, 0, 0, cut.sample, cut.offset, cut.length, cut.column
                )
            )
            own = items_of_part(items, cut.offset, cut.length)
            pieces.append(Piece(sample.pool_ids[part], (), own))
        arrays = fill_row(job, ROW_TOKENS, segments, pieces)
        rows.append(InlineRow(number, 0, 0, number, *arrays, tuple(segments)))
    return batch_of(rows, job.fields, job.media)


def valid_count(job: ResolvedJob, chunks: list[list[Sample]], cuts: list[Cut]) -> int:
    """Count trained labels from the samples, by what a label is."""
    trained: dict[tuple[int, int], tuple[bool, int]] = {}
    for number, cut in enumerate(cuts):
        sample = chunks[cut.chunk][cut.sample]
        for k in range(cut.length):
            is_trained = cut.offset + k not in sample.untrained
            trained[cut.row, cut.column + k] = (is_trained, number)
    count = 0
    for (row, column), (is_trained, number) in trained.items():
        before = trained.get((row, column - 1))
        if not is_trained or before is None:
            continue
        if job.batch.documents == "separate" and before[1] != number:
            continue
        owner = number if job.batch.labels == "aligned" else before[1]
        count += job.sources[cuts[owner].chunk].loss_weight > 0
    return count


def draw_case(rng: random.Random, spec: BatchSpec) -> tuple[list[list[Sample]], list[Cut]]:
    chunks = [
        [
            make_sample(rng, rng.randint(1, 30), has_media=rng.random() < 0.8)
            for _ in range(rng.randint(1, 4))
        ]
        for _ in range(3)
    ]
    return chunks, place_cuts(rng, chunks, spec)


@given(jobs(), SEEDS)
@some
def test_a_whole_batch_is_what_one_process_makes(job: ResolvedJob, seed: int) -> None:
    spec = stage_spec(job, 1, "all")
    chunks, cuts = draw_case(random.Random(seed), spec)
    (batch,) = build(spec, chunks, cuts, valid_tokens=valid_count(job, chunks, cuts))
    want = plain_batch(job, chunks, cuts)
    for name in ("tokens", "labels", "position_ids", "loss_weights", "mrope_position_ids"):
        value = getattr(want, name)
        assert (name in batch) == (value is not None), name
        if value is not None:
            assert batch[name].tolist() == value.tolist(), name
    count = len(want.segment_source)
    assert batch.cu_seqlens[: count + 1].tolist() == want.cu_seqlens.tolist()
    assert batch.segment_source[:count].tolist() == want.segment_source.tolist()
    assert batch.valid_tokens == valid_count(job, chunks, cuts)
    check_media(batch, want)


def check_media(batch: Any, want: InlineBatch) -> None:
    for rule in RULES:
        media, plain = batch.media(rule.modality), want.media[rule.modality]
        assert media.patches.dtype == np.dtype(rule.unit_dtype)
        for name in ("patches", "cu_seqlens", "places", "cu_places", "segments"):
            assert getattr(media, name).tolist() == getattr(plain, name).tolist(), name
        if rule.modality == "audio":
            assert media.grids is None
            assert media.frames is media.patches
        else:
            assert media.grids.tolist() == plain.grids.tolist()
        sizes = np.diff(plain.cu_seqlens)
        assert media.max_seqlen == (sizes.max() if len(sizes) else 0)
        ids = batch.tokens.reshape(-1)[media.places]
        assert (ids == rule.placeholder_id).all()
        assert int(np.count_nonzero(batch.tokens == rule.placeholder_id)) == len(media.places)


@given(
    jobs(),
    st.sampled_from([2, 4]),
    st.sampled_from(CP_LAYOUTS),
    st.sampled_from(["all", "first", "middle", "last"]),
    SEEDS,
)
@some
def test_ranks_and_stages_have_their_part_of_it(
    job: ResolvedJob, cp_count: int, layout: Any, stage: Any, seed: int
) -> None:
    multiple = 2 * cp_count if layout == "zigzag_document" else job.batch.segment_multiple
    job = replace(job, batch=replace(job.batch, cp_layout=layout, segment_multiple=multiple))
    spec = stage_spec(job, cp_count, stage)
    chunks, cuts = draw_case(random.Random(seed), spec)
    batches = build(spec, chunks, cuts, valid_tokens=valid_count(job, chunks, cuts))
    want = plain_batch(job, chunks, cuts)
    names = ("tokens", "labels", "position_ids", "loss_weights")
    has_media = stage in ("all", "first")
    seen: dict[str, list[tuple[int, int]]] = {rule.modality: [] for rule in RULES}
    for batch in batches:
        own = batch.cp_places
        for name in names:
            if name in batch:
                assert batch[name].tolist() == getattr(want, name).reshape(-1)[own].tolist(), name
        assert ("labels" in batch) == (stage in ("all", "last"))
        if want.mrope_position_ids is not None:
            whole = want.mrope_position_ids.reshape(3, -1)
            assert batch.mrope_position_ids.tolist() == whole[:, own].tolist()
            assert batch.flat.mrope_position_ids.shape == (3, 1, own.size)
        for rule in RULES if has_media else ():
            plain = want.media[rule.modality]
            assert batch.media(rule.modality).patches.tolist() == plain.patches.tolist()
            places, numbers = batch.local_places(rule.modality)
            assert own.reshape(-1)[places].tolist() == plain.places[numbers].tolist()
            seen[rule.modality] += zip(numbers.tolist(), places.tolist(), strict=True)
        assert has_media == ("image_patches" in batch)
    for modality, found in seen.items():
        if has_media:  # every placeholder token has one rank
            numbers = sorted(number for number, _ in found)
            assert numbers == list(range(len(want.media[modality].places)))


def test_the_fields_are_the_jobs() -> None:
    spec = stage_spec(make_job([make_spec("a")], BatchRule(3, 48, 3), media=RULES), 1, "all")
    assert spec.media == FIELDS
    assert [field.merge for field in spec.media] == [2, 1, 1]
    assert spec.has_masks
