"""Rows that change their number and length: numbers of the plan, and what is cut anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from federation.model.chunk import ChunkMeta
from federation.model.cost import CostSpec
from federation.model.job import BatchRule, RampPoint
from federation.planning.kept_chunks import KeptChunks
from federation.planning.packing import pack
from federation.planning.step_pool import LENGTH, OFFSET, Pool, cut_carried
from msd_client.contract.errors import ConfigError, DataError, MeshMismatchError, StateMismatchError
from msd_client.contract.state import StreamState
from tests.support.metadata import Feed, SourceCorpus, make_job, make_spec, start


def one_source(lengths, batch, **options):
    spec = make_spec("a", at_exhaustion="drop")
    return make_job([spec], batch, **options), [
        SourceCorpus(spec, [[(list(lengths), [0] * len(lengths))]])
    ]


def pieces(plan):
    columns = (plan.index, plan.offset, plan.length)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_rows_change_by_steps_and_by_tokens():
    steps = (RampPoint(2, 4), RampPoint(3, 8))
    job, corpora = one_source([8] * 90, BatchRule(2, 8, rows_ramp=steps))
    plans = Feed(start(job, {"dp": 2}), corpora).steps(5)
    assert [(plan.rows, plan.microbatch_count) for plan in plans] == [
        (2, 1), (2, 1), (4, 2), (8, 4), (8, 4),
    ]  # fmt: skip
    tokens = (RampPoint(40, 4, "tokens"),)
    job, corpora = one_source([8] * 90, BatchRule(2, 8, rows_ramp=tokens))
    plans = Feed(start(job), corpora).steps(5)
    assert [plan.rows for plan in plans] == [2, 2, 2, 4, 4]  # 48 tokens before step 3


def test_every_value_of_a_ramp_has_to_fit_the_mesh_at_the_start():
    job, _ = one_source([8], BatchRule(8, 8, rows_ramp=(RampPoint(1000, 12),)))
    start(job, {"dp": 4})
    with pytest.raises(MeshMismatchError, match=r"batch.rows 12 is not a multiple of dp 8"):
        start(job, {"dp": 8})


def test_a_document_goes_on_in_rows_of_the_new_length():
    ramp = (RampPoint(1, 16), RampPoint(2, 4))
    job, corpora = one_source([60], BatchRule(1, 8, packing="padded", row_tokens_ramp=ramp))
    plans = Feed(start(job), corpora).steps(100)
    assert [plan.row_tokens for plan in plans[:4]] == [8, 16, 4, 4]
    wanted = [(0, 8), (8, 16), *((offset, 4) for offset in range(24, 60, 4))]
    assert [piece[1:] for plan in plans for piece in pieces(plan)] == wanted


@pytest.mark.parametrize(
    ("long", "lengths", "wanted"),
    [("truncate", [20, 12, 4, 20], [8, 12, 4, 16]), ("skip", [4, 12, 20], [4, 12])],
)
def test_the_new_length_decides_over_documents_that_were_not_begun(long, lengths, wanted):
    ramp = (RampPoint(1, 16),)
    batch = BatchRule(1, 8, packing="padded", long=long, row_tokens_ramp=ramp)
    job, corpora = one_source(lengths, batch)
    feed = Feed(start(job), corpora)
    plans = feed.steps(100)
    got = [size for plan in plans for *_, size in pieces(plan)]
    assert got == wanted
    dropped = sum(feed.planner.statistics().dropped_tokens)
    assert dropped == sum(lengths) - sum(got)


def test_a_document_that_was_begun_is_finished_under_truncate_and_skip():
    for long in ("truncate", "skip"):
        batch = BatchRule(1, 8, packing="padded", long=long, row_tokens_ramp=(RampPoint(1, 4),))
        job, corpora = one_source([8, 3, 3], batch)
        feed = Feed(start(job), corpora)
        plans = feed.steps(100)
        assert [pieces(plan) for plan in plans] == [[(0, 0, 8)], [(1, 0, 3)], [(2, 0, 3)]]
        assert sum(feed.planner.statistics().dropped_tokens) == 0


def test_another_shape_loads_a_state_and_other_samples_do_not():
    job, corpora = one_source([5, 30, 7, 9] * 9, BatchRule(8, 64))
    feed = Feed(start(job), corpora)
    feed.steps(1)
    state = StreamState.decode(feed.planner.state().encode())
    other = replace(job, batch=BatchRule(4, 128))
    planner = start(other, state=state)
    assert planner.state().job_digest == other.digest()
    assert planner.state().sample_digest == job.sample_digest()
    with pytest.raises(StateMismatchError, match="another job"):
        start(replace(job, batch=replace(job.batch, long="skip")), state=state)


def test_a_record_that_became_shorter_than_what_was_drawn_of_it_is_noticed():
    job, corpora = one_source([20], BatchRule(1, 8, packing="padded"))
    feed = Feed(start(job), corpora)
    feed.steps(2)
    again = start(job, state=feed.planner.state())
    short = ChunkMeta(0, 0, 0, np.full(1, 12, np.int32), np.zeros(1, np.uint8), True, 1)
    with pytest.raises(DataError, match=r"at least 16 tokens when the state was saved, 12 can"):
        again.add_chunk(short)


def test_shares_too_small_for_the_longest_rows_are_refused_by_the_first_step():
    specs = [make_spec("a"), make_spec("b")]
    ramp = (RampPoint(10**6, 1 << 26),)
    weights = [1.0, 2e-9]
    start(make_job(specs, BatchRule(8, 64), weights)).plan_step()
    with pytest.raises(ConfigError, match="too small beside fragments"):
        start(make_job(specs, BatchRule(8, 64, row_tokens_ramp=ramp), weights)).plan_step()


def test_costs_are_bounded_by_the_largest_shape():
    cost = CostSpec("transformer", 1 << 22, 1 << 22)
    ramp = (RampPoint(10**6, 1 << 20),)
    job, corpora = one_source([8, 3] * 50, BatchRule(2, 8, row_tokens_ramp=ramp), cost=cost)
    one = Feed(start(job), corpora).steps(1)[0]
    small, _ = one_source([8, 3] * 50, BatchRule(2, 8), cost=cost)
    full = Feed(start(small), corpora).steps(1)[0]
    assert 0 < one.cost_max < full.cost_max
    assert one.membership_digest == full.membership_digest


# --- carried fragments of longer rows


def carried_of(lengths, offsets=None, documents=None, steps=None):
    carried = np.zeros((6, len(lengths)), np.int64)
    carried[2] = range(len(lengths)) if documents is None else documents
    carried[3] = 0 if offsets is None else offsets
    carried[4] = lengths
    carried[5] = 3 if steps is None else steps
    return carried


def test_carried_fragments_are_cut_for_shorter_rows():
    carried = carried_of([20, 5, 16])
    found, origins = cut_carried(carried, BatchRule(2, 8))
    assert found[[2, OFFSET, LENGTH]].tolist() == [
        [0, 0, 0, 1, 2, 2],
        [0, 8, 16, 0, 0, 8],
        [8, 8, 4, 5, 8, 8],
    ]
    assert origins.tolist() == [0, 0, 0, 1, 2, 2]
    assert cut_carried(carried, BatchRule(2, 20))[1] is None
    assert cut_carried(carried, BatchRule(2, 8, packing="concat"))[1] is None


def after(carried, packed):
    keep = np.ones(carried.shape[1], bool)
    keep[packed.carried_out] = False
    return np.concatenate((carried[:, keep], packed.carried_in), axis=1)[[2, OFFSET, LENGTH]]


def test_what_was_placed_in_part_joins_anew_with_all_behind_it():
    carried = carried_of([8, 20, 16], steps=[1, 2, 3])
    found, origins = cut_carried(carried, BatchRule(2, 8))
    packed = pack(Pool(found, found.shape[1], origins=origins, is_last=True), BatchRule(2, 8))
    assert packed.segments[[2, OFFSET, LENGTH]].tolist() == [[0, 1], [0, 0], [8, 8]]
    assert packed.carried_out.tolist() == [0, 1, 2]
    assert after(carried, packed).tolist() == [[1, 1, 2, 2], [8, 16, 0, 8], [8, 4, 8, 8]]


def test_what_was_not_placed_at_all_stays_whole():
    carried = carried_of([8, 20], steps=[1, 2])
    found, origins = cut_carried(carried, BatchRule(1, 8))
    packed = pack(Pool(found, found.shape[1], origins=origins, is_last=True), BatchRule(1, 8))
    assert packed.carried_out.tolist() == [0]
    assert after(carried, packed).tolist() == [[1], [0], [20]]


def test_a_short_part_is_placed_before_a_longer_later_one_of_its_document():
    carried = carried_of([28, 80], offsets=[100, 128], documents=[0, 0])
    packed = pack(Pool(carried, 2, is_last=True), BatchRule(1, 100))
    assert packed.segments[[OFFSET, LENGTH]].tolist() == [[100], [28]]


# --- chunks that are kept to be cut anew


def chunk(block, first, count, *, source=0, is_end=False, is_lane_end=False, epoch=0):
    return ChunkMeta(
        source,
        epoch << 48 | block,
        first,
        np.full(count, 9, np.int32),
        np.zeros(count, np.uint8),
        is_end,
        0,
        is_lane_end,
    )


def kept_of(kept):
    return [
        (meta.block_key, meta.first_index, len(meta.lengths), meta.is_lane_end)
        for meta in kept.chunks()
    ]


@pytest.fixture
def kept():
    return KeptChunks([make_spec("a", 2, "streaming")])


def test_chunks_are_kept_until_the_cursor_passed_them(kept):
    for meta in (chunk(1, 0, 4), chunk(0, 0, 3), chunk(0, 3, 3, is_end=True), chunk(0, 0, 3)):
        kept.add(meta, (0, 0))
    assert kept.count == 3
    kept.forget([(0, 0, 0, 0)])
    assert kept.count == 3
    kept.forget([(0, 0, 2, 9)])
    assert kept_of(kept) == [(0, 0, 3, False), (0, 3, 3, False), (1, 0, 4, False)]
    kept.forget([(0, 0, 3, 9)])
    assert kept_of(kept) == [(0, 3, 3, False), (1, 0, 4, False)]
    kept.add(chunk(0, 0, 3), (1, 4))
    assert kept.count == 2
    kept.forget([(0, 1, 0, 9)])
    assert kept_of(kept) == [(1, 0, 4, False)]


def test_a_longer_chunk_takes_the_place_of_a_shorter_one(kept):
    kept.add(chunk(0, 0, 3), (0, 0))
    kept.add(chunk(0, 0, 5, is_end=True), (0, 3))
    kept.add(chunk(0, 0, 2), (0, 2))
    assert kept_of(kept) == [(0, 0, 5, False)]


def test_the_end_of_a_lane_is_told_at_its_next_turn(kept):
    kept.add(chunk(0, 0, 3, is_end=True, is_lane_end=True), (0, 0))
    kept.add(chunk(1, 0, 3, is_end=True), (1, 0))
    kept.forget([(0, 1, 0, 9)])
    assert kept_of(kept) == [(1, 0, 3, False), (2, 0, 0, True)]
    kept.forget([(0, 3, 0, 9)])
    assert kept_of(kept) == []
