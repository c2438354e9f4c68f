"""Varlen steps: a draw of tokens, dealt segment by segment; its contents know of no mesh (E9)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.cost import ActivationBytes, EncoderCost
from federation.model.job import BatchRule, CostSpec, RampPoint, varlen_rows
from federation.model.place_tree import ClientPlaceTree
from federation.planning.balance import BalanceRule, objective_of_loads
from federation.planning.costs import activation_bytes
from federation.planning.extra_rows import ExtraRows
from federation.planning.planner import Ended
from federation.planning.sampling import WRAPPED
from federation.planning.step_pool import Pool
from federation.planning.varlen import place_segments, whole_step
from federation.planning.varlen_measures import segment_measures
from msd_client.contract.errors import ConfigError, MeshMismatchError
from msd_client.contract.state import StreamState
from tests.support.marked import TEXT, Atom, image_rule, length_of, marked_spec, marks_of_record
from tests.support.metadata import (
    Feed,
    SourceCorpus,
    make_job,
    make_spec,
    random_corpus,
    start,
    with_batch,
)

TOKENS = CostSpec()
MESHES = [1, 2, 3, 8, 64]
TOLD, ASKED = Atom(TEXT, 4), Atom(TEXT, 3, is_trained=False)


def rule_of(step_tokens, microbatch_tokens, **options):
    options = {"row_segments_max": 16} | options
    return BatchRule(
        varlen_rows(step_tokens, microbatch_tokens),
        microbatch_tokens,
        packing="varlen",
        step_tokens=step_tokens,
        **options,
    )


def pool_of(lengths, extras=()):
    fragments = np.zeros((6 + len(extras), len(lengths)), np.int64)
    fragments[2] = np.arange(len(lengths))
    fragments[4] = lengths
    for row, values in enumerate(extras):
        fragments[6 + row] = values
    return Pool(fragments, 0)


def measures_of(packed, rule, units_max=(), cost=TOKENS):
    modalities = ("image", "audio")[: len(units_max)]
    return segment_measures(packed, rule, ExtraRows(False, False, modalities, units_max), cost)


def placed(
    lengths,
    rule,
    dp,
    costs=None,
    is_balanced=True,
    extras=(),
    units_max=(),
    balance=None,
    shuffle_key=None,
    cost=TOKENS,
):
    packed = whole_step(pool_of(lengths, extras), rule)
    costs = np.array(lengths if costs is None else costs, np.int64)
    balance = balance or (BalanceRule() if is_balanced else None)
    measures = measures_of(packed, rule, units_max, cost)
    return packed, place_segments(packed, costs, rule, dp, measures, balance, shuffle_key)


def segments_of(plan):
    """Return what a plan holds, in no order."""
    columns = (plan.source, plan.block_key, plan.index, plan.offset, plan.length)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def check_cells(plan, rule):
    """Check that every microbatch obeys its caps and its segments follow each other."""
    assert plan.rows == plan.dp_count * plan.microbatch_count
    cells = sorted(zip(plan.row_dp.tolist(), plan.row_microbatch.tolist(), strict=True))
    assert cells == [(d, m) for d in range(plan.dp_count) for m in range(plan.microbatch_count)]
    assert not plan.row_slot.any()
    multiple = rule.segment_multiple
    for row in range(plan.rows):
        mine = plan.row == row
        sizes = -(-plan.length[mine] // multiple) * multiple
        assert plan.column[mine].tolist() == (np.cumsum(sizes) - sizes).tolist()
        assert sizes.sum() <= rule.row_tokens
        assert mine.sum() <= rule.row_segments_max
        assert plan.row_valid_tokens[row] == (plan.length[mine] - 1).sum()


# ---- placement ----


@st.composite
def steps(draw):
    cap = draw(st.integers(2, 64))
    multiple = draw(st.sampled_from([m for m in (1, 2, 4, 8) if cap % m == 0]))
    lengths = draw(st.lists(st.integers(1, cap), min_size=1, max_size=60))
    costs = draw(st.lists(st.integers(0, 1000), min_size=len(lengths), max_size=len(lengths)))
    segments_max = draw(st.integers(1, 8))
    rule = rule_of(sum(lengths), cap, segment_multiple=multiple, row_segments_max=segments_max)
    return lengths, costs, rule, draw(st.integers(1, 9)), draw(st.booleans())


@given(steps())
@settings(max_examples=300, deadline=None)
def test_a_placement_keeps_all_segments_and_every_cap(case):
    lengths, costs, rule, dp, is_balanced = case
    packed, (rows, placement) = placed(lengths, rule, dp, costs, is_balanced)
    microbatches = len(placement.dp) // dp
    assert len(placement.dp) == dp * microbatches
    assert sorted(rows.segments[2].tolist()) == list(range(len(lengths)))
    sizes = measures_of(packed, rule).taken[0]
    cell = rows.row
    assert np.bincount(cell, weights=sizes[rows.segments[2]]).max() <= rule.row_tokens
    assert np.bincount(cell).max() <= rule.row_segments_max
    # Never more than filling one microbatch after the other, never fewer than the sums need.
    enough = 2 * sizes.sum() // rule.row_tokens + len(lengths) // rule.row_segments_max + 1
    least = max(sizes.sum() / rule.row_tokens, len(lengths) / rule.row_segments_max)
    assert least <= dp * microbatches
    assert microbatches <= -(-enough // dp)
    # Inside a microbatch segments stand in draw order, without a gap.
    same = np.diff(cell) == 0
    assert (np.diff(rows.segments[2])[same] > 0).all()
    ends = rows.column + sizes[rows.segments[2]]
    assert (rows.column[1:][same] == ends[:-1][same]).all()
    assert (rows.column[np.append(True, ~same)] == 0).all()


@given(steps())
@settings(max_examples=100, deadline=None)
def test_microbatches_of_a_rank_go_in_falling_cost(case):
    lengths, costs, rule, dp, _ = case
    _, (rows, placement) = placed(lengths, rule, dp, costs)
    loads = np.zeros(len(placement.dp), np.int64)
    np.add.at(loads, rows.row, np.array(costs)[rows.segments[2]])
    grid = loads.reshape(-1, dp)
    in_turn = placed(lengths, rule, dp, costs, is_balanced=False)[1].packed
    if not np.array_equal(rows.row, in_turn.row):  # no deal found room
        assert (np.diff(grid, axis=0) <= 0).all()


def test_the_plan_adds_a_microbatch_equally_on_all_ranks_where_one_is_too_small():
    rule = rule_of(40, 10)
    _, (rows, placement) = placed([6, 6, 6, 6, 6, 6], rule, 3)  # 36 of 60 places; 2 never share
    assert len(placement.dp) == 6
    assert np.bincount(rows.row, minlength=6).tolist() == [1] * 6
    _, (_, placement) = placed([6, 6, 6, 6, 6, 6, 6], rule, 3)
    assert len(placement.dp) == 9


def test_cost_is_evened_over_ranks_and_their_microbatches():
    generator = np.random.default_rng(7)
    lengths = np.minimum(np.exp(generator.normal(5, 0.7, 4000)).astype(int) + 1, 4096)
    rule = rule_of(int(lengths.sum()), 4096, row_segments_max=512)
    costs = lengths * (2048 + lengths)

    def spread(is_balanced):
        _, (rows, placement) = placed(lengths, rule, 8, costs, is_balanced=is_balanced)
        loads = np.zeros(len(placement.dp), np.int64)
        np.add.at(loads, rows.row, costs[rows.segments[2]])
        ranks = loads.reshape(-1, 8)
        return ranks.sum(axis=0).max() / ranks.sum(axis=0).mean(), ranks.max() / ranks.mean()

    assert spread(True)[0] < 1.002
    assert spread(True)[1] < 1.1
    assert spread(False)[0] > 1.01


def test_media_are_measures_of_their_own():
    rule = rule_of(40, 10)
    packed = whole_step(pool_of([1, 5, 3], [[60, 10, 0]]), rule)
    measures = measures_of(packed, rule, (100,))
    assert measures.taken.tolist() == [[1, 5, 3], [60, 10, 0]]
    assert measures.parts().tolist() == [6, 5, 3]
    # As the larger of the parts they take they would need two microbatches: 6 + 5 + 3 of 10 places.
    _, (_, placement) = placed([1, 5, 3], rule, 1, extras=[[60, 10, 0]], units_max=(100,))
    assert len(placement.dp) == 1
    _, (rows, placement) = placed([1, 5, 3], rule, 1, extras=[[60, 50, 0]], units_max=(100,))
    assert len(placement.dp) == 2
    assert rows.row[rows.segments[2] == 0] != rows.row[rows.segments[2] == 1]


def test_activation_bytes_are_a_cap_that_adds_microbatches():
    cost = CostSpec(
        encoders=(EncoderCost("image", 1),), activations=ActivationBytes(token=10, image=100)
    )
    media = {"extras": [[4, 4, 0, 0]], "units_max": (8,), "cost": cost}
    rule = rule_of(40, 16)
    lengths = [4, 4, 4, 4]  # 440 bytes each with media, 40 without
    assert len(placed(lengths, rule, 1, **media)[1].placement.dp) == 1
    capped = replace(rule, microbatch_activation_bytes=500)
    _, (rows, placement) = placed(lengths, capped, 1, **media)
    assert len(placement.dp) == 2
    assert rows.row[rows.segments[2] == 0] != rows.row[rows.segments[2] == 1]
    # One that keeps more than a microbatch may stands alone, whatever room is left.
    tight = replace(rule, microbatch_activation_bytes=400)
    _, (rows, placement) = placed(lengths, tight, 1, **media)
    held = [rows.segments[2][rows.row == row].tolist() for row in range(len(placement.dp))]
    assert sorted(held) == [[0], [1], [2, 3]]


@st.composite
def media_steps(draw):
    lengths, costs, rule, dp, is_balanced = draw(steps())
    units_max = (draw(st.integers(1, 40)), draw(st.integers(1, 3000)))
    extras = [
        draw(st.lists(st.integers(0, most), min_size=len(lengths), max_size=len(lengths)))
        for most in units_max
    ]
    held = ActivationBytes(draw(st.integers(1, 1 << 20)), image=draw(st.integers(0, 1 << 12)))
    cap = draw(st.sampled_from([0, 1, 1 << 8, 1 << 16, 1 << 26, 1 << 40]))
    return lengths, costs, replace(rule, microbatch_activation_bytes=cap), dp, (
        is_balanced, extras, units_max, CostSpec(encoders=(EncoderCost("image", 1),), activations=held),
    )  # fmt: skip


RULES = st.builds(
    BalanceRule,
    objective=st.sampled_from(["step", "microbatch", "pipeline"]),
    stages=st.integers(1, 4),
    min_gain_ppm=st.sampled_from([0, 20_000, 10**6]),
)


@given(media_steps(), RULES, st.data())
@settings(max_examples=300, deadline=None)
def test_every_measure_is_a_cap_of_microbatches(case, balance, data):
    lengths, costs, rule, dp, (is_balanced, extras, units_max, cost) = case
    divisors = [size for size in range(1, dp + 1) if dp % size == 0]
    balance = replace(balance, group_size=data.draw(st.sampled_from([0, *divisors])))
    key = data.draw(st.none() | st.integers(0, 99))
    packed, (rows, placement) = placed(
        lengths,
        rule,
        dp,
        costs,
        is_balanced,
        extras,
        units_max,
        balance if is_balanced else None,
        key,
        cost,
    )
    assert sorted(rows.segments[2].tolist()) == list(range(len(lengths)))
    assert np.array_equal(rows.extras, np.array(extras)[:, rows.segments[2]])
    measures = measures_of(packed, rule, units_max, cost)
    for taken, most in zip(measures.taken, measures.caps, strict=True):
        assert np.bincount(rows.row, weights=taken[rows.segments[2]]).max() <= most
    counts = np.bincount(rows.row)
    assert counts.max() <= rule.row_segments_max
    if rule.microbatch_activation_bytes:
        places = measures.taken[0][rows.segments[2]]
        held = activation_bytes(cost, places, {"image": rows.extras[0]})
        sums = np.bincount(rows.row, weights=held)
        assert ((sums <= rule.microbatch_activation_bytes) | (counts <= 1)).all()
    microbatches = len(placement.dp) // dp
    assert measures.least(dp) <= microbatches <= -(-measures.enough() // dp)
    assert (np.diff(rows.segments[2])[np.diff(rows.row) == 0] > 0).all()


# ---- planning ----

SPECS = [make_spec("a", 4), make_spec("b", 3, at_exhaustion="drop")]


def corpora_of(specs, longest=70):
    return [
        random_corpus(spec, number, lambda rng: rng.randint(1, longest))
        for number, spec in enumerate(specs)
    ]


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("long", ["split", "truncate", "skip"])
def test_a_step_is_the_draw_that_reaches_its_tokens_on_any_mesh(long, multiple):
    rule = rule_of(500, 60, segment_multiple=multiple, long=long)
    job = make_job(SPECS, rule, [2, 1])
    corpora = corpora_of(SPECS)
    streams = {}
    for dp in MESHES:
        feed = Feed(start(job, {"dp": dp}), corpora, loaders=1 + dp % 3, seed=dp)
        plans = feed.steps(12)
        assert len(plans) == 12
        for plan in plans:
            check_cells(plan, rule)
            tokens = int(plan.length.sum())
            assert 500 <= tokens < 500 + 60
            assert plan.carried_tokens == 0
            assert plan.valid_tokens == int((plan.length - 1).sum())
            assert plan.fill_ratio == pytest.approx(tokens / (plan.rows * 60))
        streams[dp] = [(p.membership_digest, p.stream_digest, segments_of(p)) for p in plans]
        counts = {plan.microbatch_count for plan in plans}
        assert min(counts) >= -(-500 // (60 * dp))
    assert all(stream == streams[1] for stream in streams.values())


def test_a_state_goes_on_on_another_mesh():
    rule = rule_of(300, 50)
    job = make_job(SPECS, rule)
    corpora = corpora_of(SPECS)
    whole = Feed(start(job, {"dp": 4}), corpora)
    plans = whole.steps(15)
    for cut in (1, 4, 9):
        planner = start(job, {"dp": 2})
        feed = Feed(planner, corpora, loaders=2)
        feed.steps(cut)
        state = StreamState.decode(planner.state().encode())
        assert state.carried.shape[1] == 0
        later = Feed(start(job, {"dp": 16}, state), corpora, loaders=3, seed=5).steps(15 - cut)
        assert [p.stream_digest for p in later] == [p.stream_digest for p in plans[cut:]]


def test_schedules_of_both_sizes_hold_from_their_step_on():
    rule = replace(
        rule_of(200, 40),
        step_tokens_ramp=(RampPoint(3, 400),),
        row_tokens_ramp=(RampPoint(5, 80),),
    )
    assert rule.rows_values == (6, 4, 11, 6)
    assert rule.step_tokens_max == 480
    later = rule.at(6, 0)
    assert (later.step_tokens, later.row_tokens, later.rows) == (400, 80, 6)
    job = make_job(SPECS, rule, end="pad")
    plans = {dp: Feed(start(job, {"dp": dp}), corpora_of(SPECS)).steps(8) for dp in (1, 4)}
    for step, plan in enumerate(plans[1]):
        wanted = 200 if step < 3 else 400
        assert wanted <= int(plan.length.sum()) < wanted + plan.row_tokens
        assert plan.row_tokens == (40 if step < 5 else 80)
        assert int(plan.length.max()) <= plan.row_tokens
    assert [p.stream_digest for p in plans[1]] == [p.stream_digest for p in plans[4]]


# ---- ends ----

TEN = [4] * 10


def one_source(lengths, batch, at_exhaustion="drop", **options):
    spec = make_spec("a", at_exhaustion=at_exhaustion)
    corpora = [SourceCorpus(spec, [[(list(lengths), [0] * len(lengths))]])]
    return make_job([spec], batch, **options), corpora


def tokens_until_end(job, corpora, dp=4):
    feed = Feed(start(job, {"dp": dp}), corpora)
    plans = feed.steps(100)
    for plan in plans:
        check_cells(plan, job.batch)
    return [int(plan.length.sum()) for plan in plans], feed.step(), plans


def test_pad_serves_a_last_step_with_what_there_is_and_empty_microbatches():
    job, corpora = one_source(TEN, rule_of(16, 8))
    tokens, ended, plans = tokens_until_end(job, corpora)
    assert tokens == [16, 16, 8]
    assert ended == Ended("every source of the mixture is exhausted")
    assert plans[-1].rows == 4
    assert sorted(plans[-1].row_valid_tokens.tolist()) == [0, 0, 3, 3]


def test_drop_serves_full_steps_alone():
    job, corpora = one_source(TEN, rule_of(16, 8), end="drop")
    assert tokens_until_end(job, corpora)[0] == [16, 16]


def test_wrap_fills_the_last_step_from_the_next_epoch():
    job, corpora = one_source(TEN, rule_of(16, 8), end="wrap")
    tokens, ended, plans = tokens_until_end(job, corpora)
    assert tokens == [16, 16, 16]
    assert ended.reason.endswith(WRAPPED)
    assert sorted((plans[-1].block_key >> 48).tolist()) == [0, 0, 1, 1]


@pytest.mark.parametrize(("end", "wanted"), [("pad", [16, 8]), ("drop", [16])])
def test_tokens_end_a_stream_where_they_are_reached(end, wanted):
    job, corpora = one_source(TEN, rule_of(16, 8), "repeat", tokens=23, end=end)
    tokens, ended, _ = tokens_until_end(job, corpora)
    assert tokens == wanted
    assert "23 tokens" in ended.reason


def test_steps_and_epochs_end_a_stream():
    job, corpora = one_source(TEN, rule_of(16, 8), "repeat", steps=2)
    assert tokens_until_end(job, corpora)[0] == [16, 16]
    job, corpora = one_source(TEN, rule_of(16, 8), "repeat", epochs=2)
    assert tokens_until_end(job, corpora)[0] == [16] * 5


# ---- refusals and bounds ----


def test_joined_documents_are_refused():
    job, _ = one_source(TEN, rule_of(16, 8, documents="joined"))
    with pytest.raises(ConfigError, match="varlen deals documents one by one"):
        start(job)


def test_any_dp_fits_but_a_context_parallel_degree_has_to():
    job, _ = one_source(TEN, rule_of(96, 12))
    assert ClientPlaceTree.from_mesh({"dp": 7}).microbatch_count(job.batch) == 2
    start(job, {"dp": 7, "cp": 2})
    with pytest.raises(MeshMismatchError, match=r"batch\.microbatch_tokens a multiple of 16"):
        start(job, {"dp": 1, "cp": 8})


def test_keys_that_say_nothing_change_no_digest():
    rows = make_job(SPECS, BatchRule(4, 16))
    assert rows.digest() == with_batch(rows, step_tokens=0, step_tokens_ramp=()).digest()
    varlen = make_job(SPECS, rule_of(500, 50))
    assert varlen.digest() != with_batch(varlen, step_tokens=501).digest()
    assert varlen.sample_digest() == with_batch(varlen, step_tokens=501).sample_digest()
    assert varlen.sample_digest() != rows.sample_digest()


def test_costs_of_a_step_stay_below_63_bits():
    huge = CostSpec("transformer", 1 << 40, 1 << 30)
    job, corpora = one_source([60] * 40, rule_of(600, 64), cost=huge)
    _, _, plans = tokens_until_end(job, corpora, dp=2)
    assert all(0 < plan.cost_max < 1 << 62 for plan in plans)


# ---- masks and media ----


def test_masks_and_media_are_the_steps_on_any_mesh_and_caps_of_microbatches_hold():
    image = Atom(0, 2, 5)
    records = [[[ASKED, TOLD]], [[TOLD, image, TOLD]], [[image, image, TOLD]]] * 9
    spec = marked_spec("chat")
    corpus = SourceCorpus(spec, [[([length_of(r) for r in records], [0] * len(records))]])
    corpus.marks[0, 0] = [marks_of_record(record) for record in records]
    rule = rule_of(60, 16)
    job = make_job([spec], rule, media=(image_rule(12),))
    digests = set()
    for dp in MESHES:
        plans = Feed(start(job, {"dp": dp}), [corpus]).steps(6)
        for plan in plans:
            assert plan.valid_tokens == int(plan.row_valid_tokens.sum())
            units = np.array([0, 5, 10])[plan.index % 3]
            held = np.bincount(plan.row, weights=units, minlength=plan.rows)
            assert held.max() <= 12
            assert np.bincount(plan.row, weights=plan.length).max() <= 16
        digests.add(tuple(plan.stream_digest for plan in plans))
    assert len(digests) == 1


def test_a_step_ends_where_its_microbatches_hold_no_more_media():
    """Memory of a step is bounded by its media too: small placeholders of large pictures."""
    picture = [[Atom(0, 1, 10), Atom(TEXT, 1)]]
    spec = marked_spec("chat")
    corpus = SourceCorpus(spec, [[([2] * 40, [0] * 40)]])
    corpus.marks[0, 0] = [marks_of_record(picture)] * 40
    job = make_job([spec], rule_of(40, 20), media=(image_rule(30),))
    for plan in Feed(start(job, {"dp": 2}), [corpus]).steps(3):
        assert len(plan.length) == 6  # two microbatches' worth of 30 patches, not of 20 tokens


# ---- objectives, groups, gain, orders ----


def heavy(count=3000, seed=3):
    """Return lengths with a tail of segments as long as a microbatch, and their quadratic costs."""
    generator = np.random.default_rng(seed)
    lengths = np.minimum(np.exp(generator.normal(5.5, 1.2, count)).astype(int) + 1, 4096)
    return lengths, lengths * (1024 + lengths)


def loads_of(found, costs, dp):
    rows, placement = found
    loads = np.zeros(len(placement.dp), np.int64)
    np.add.at(loads, rows.row, costs[rows.segments[2]])
    return loads.reshape(-1, dp).T


@pytest.mark.parametrize("objective", ["microbatch", "pipeline"])
def test_each_objective_is_better_by_itself_than_the_step_is(objective):
    lengths, costs = heavy()
    rule = rule_of(int(lengths.sum()), 4096, row_segments_max=512)
    values = {}
    for name in ("step", objective):
        balance = BalanceRule(objective=name, stages=4)
        _, found = placed(lengths, rule, 16, costs, balance=balance)
        values[name] = objective_of_loads(loads_of(found, costs, 16), objective, 4)
    _, turn = placed(lengths, rule, 16, costs, is_balanced=False)
    in_turn = objective_of_loads(loads_of(turn, costs, 16), objective, 4)
    assert values[objective] < values["step"] < in_turn


def test_ranks_are_dealt_in_groups_at_a_small_loss():
    lengths, costs = heavy(6000)
    rule = rule_of(int(lengths.sum()), 8192, row_segments_max=512)
    most = []
    for size in (0, 8):
        _, found = placed(lengths, rule, 32, costs, balance=BalanceRule(group_size=size))
        ranks = loads_of(found, costs, 32).sum(axis=1)
        most.append(ranks.max() / ranks.mean())
    flat, grouped = most
    assert flat <= grouped < 1.01


def test_what_gains_too_little_stays_in_draw_order():
    lengths, costs = heavy(300)
    rule = rule_of(int(lengths.sum()), 4096, row_segments_max=512)
    _, turn = placed(lengths, rule, 4, costs, is_balanced=False)
    before = objective_of_loads(loads_of(turn, costs, 4), "step")
    _, even = placed(lengths, rule, 4, costs)
    after = objective_of_loads(loads_of(even, costs, 4), "step")
    gain = (before - after) * 10**6 // before
    _, kept = placed(lengths, rule, 4, costs, balance=BalanceRule(min_gain_ppm=gain + 1))
    assert np.array_equal(kept.packed.row, turn.packed.row)
    _, dealt = placed(lengths, rule, 4, costs, balance=BalanceRule(min_gain_ppm=gain))
    assert np.array_equal(dealt.packed.row, even.packed.row)


def test_native_is_the_draw_order_and_random_another_one_each_step():
    job, corpora = one_source(TEN, rule_of(60, 20), "repeat", strategy="native", steps=2)
    native = tokens_until_end(job, corpora, dp=2)[2]
    for plan in native:  # cell after cell in draw order
        order = np.lexsort((plan.column, plan.row))
        drawn = list(zip(plan.block_key[order], plan.index[order], strict=True))
        assert drawn == sorted(drawn)
    job = replace(job, strategy="random")
    shuffled = tokens_until_end(job, corpora, dp=2)[2]
    assert [segments_of(plan) for plan in shuffled] == [segments_of(plan) for plan in native]
    assert any(not np.array_equal(a.index, b.index) for a, b in zip(shuffled, native, strict=True))
    again = tokens_until_end(job, corpora, dp=2)[2]
    assert all(np.array_equal(a.index, b.index) for a, b in zip(shuffled, again, strict=True))
