import dataclasses

import numpy as np
import pytest

from federation.model.chunk import ChunkMeta, RecordStatus
from federation.model.cost import CostSpec
from federation.model.job import BatchRule, ErrorPolicy, MixturePoint
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, Starved
from msd_client.contract.errors import (
    ConfigError,
    CorruptRecordError,
    DataError,
    ErrorBudgetExceededError,
    MeshMismatchError,
    ProtocolError,
    SourceExhaustedError,
    StateMismatchError,
)
from msd_client.contract.plain import encode_plain
from msd_client.contract.state import DRAWN_SAMPLES, DRAWN_TOKENS, StreamState
from tests.support.metadata import Feed, SourceCorpus, initial_state, make_job, make_spec, start


def corpus(spec, lengths, statuses=None):
    """One block with these records."""
    return SourceCorpus(spec, [[(list(lengths), list(statuses or [0] * len(lengths)))]])


def run(job, corpora, steps=1000, mesh=None):
    feed = Feed(start(job, mesh), corpora)
    return feed, feed.steps(steps)


def one_source(lengths, batch, statuses=None, **options):
    source_options = {
        key: options.pop(key)
        for key in ("at_exhaustion", "max_epochs", "on_error")
        if key in options
    }
    spec = make_spec("a", **({"at_exhaustion": "drop"} | source_options))
    return make_job([spec], batch, **options), [corpus(spec, lengths, statuses)]


def held(planner):
    return sum(length for *_, length in planner.carried())


# --- H12: tokens beyond the row


@pytest.mark.parametrize(
    ("long", "delivered", "dropped_tokens", "reason"),
    [("split", 11, 0, None), ("truncate", 10, 1, "long_truncated"), ("skip", 6, 5, "long_skipped")],
)
def test_long_documents_are_split_cut_or_skipped_and_counted(
    long, delivered, dropped_tokens, reason
):
    job, corpora = one_source([5, 2, 3, 1], BatchRule(4, 4, long=long))
    feed, plans = run(job, corpora)
    statistics = feed.planner.statistics()
    assert sum(statistics.delivered_tokens) == delivered
    assert sum(statistics.dropped_tokens) == dropped_tokens
    assert max(int((plan.column + plan.length).max()) for plan in plans) <= 4
    for name, counts in statistics.dropped_records.items():
        assert sum(counts) == (1 if name == reason else 0)


@pytest.mark.parametrize(
    ("long", "wanted"),
    [
        ("split", {(0, 0, 4), (0, 4, 1), (1, 0, 2), (2, 0, 3), (3, 0, 1)}),
        ("truncate", {(0, 0, 4), (1, 0, 2), (2, 0, 3), (3, 0, 1)}),
        ("skip", {(1, 0, 2), (2, 0, 3), (3, 0, 1)}),
    ],
)
def test_long_documents_give_these_fragments(long, wanted):
    job, corpora = one_source([5, 2, 3, 1], BatchRule(1, 4, long=long, documents="joined"))
    _, plans = run(job, corpora)
    found = [
        (*segment, plan.step)
        for plan in plans
        for segment in zip(
            plan.index.tolist(), plan.offset.tolist(), plan.length.tolist(), strict=True
        )
    ]
    assert len(found) == len(wanted)
    assert {segment[:3] for segment in found} == wanted
    steps = {segment[:2]: segment[3] for segment in found}
    if long == "split":
        assert steps[0, 0] < steps[0, 4]


def test_a_million_token_document_resumes_at_the_right_fragment():
    job, corpora = one_source([1_000_000], BatchRule(8, 4096))
    _, plans = run(job, corpora)
    offsets = [offset for plan in plans for offset in plan.offset.tolist()]
    assert len(offsets) == 245
    assert sorted(offsets) == list(range(0, 1_000_000, 4096))

    feed = Feed(start(job), corpora)
    feed.steps(11)
    state = StreamState.decode(feed.planner.state().encode())
    again = Feed(start(job, state=state), corpora).steps(1000)
    assert [plan.stream_digest for plan in again] == [plan.stream_digest for plan in plans[11:]]


# --- H05, H06: weights


def test_extreme_weights_give_each_its_due():
    specs = [make_spec("a"), make_spec("b")]
    job = make_job(specs, BatchRule(4, 16, packing="padded"), [0.001, 0.999], "samples")
    feed, _ = run(job, [corpus(spec, [9] * 10) for spec in specs], 500)
    drawn = feed.planner.state().progress[DRAWN_SAMPLES].tolist()
    assert sum(drawn) == 2000
    assert abs(drawn[0] - 2) <= 1


def test_weights_are_normalised():
    specs = [make_spec("a"), make_spec("b")]
    job = make_job(specs, BatchRule(4, 16, packing="padded"), [2, 6], "samples")
    feed, plans = run(job, [corpus(spec, [9] * 10) for spec in specs], 500)
    assert plans[0].wanted_shares.tolist() == [0.25, 0.75]
    drawn = feed.planner.state().progress[DRAWN_SAMPLES].tolist()
    assert sum(drawn) == 2000
    assert abs(drawn[0] - 500) <= 1


def test_each_document_of_a_repeated_source_comes_equally_often():
    specs = [make_spec("a"), make_spec("b")]
    job = make_job(specs, BatchRule(4, 16, packing="padded"), [0.001, 0.999], "samples")
    _, plans = run(job, [corpus(spec, [9] * 10) for spec in specs], 500)
    counts = np.zeros(10, int)
    for plan in plans:
        np.add.at(counts, plan.index[plan.source == 1], 1)
    assert set(counts.tolist()) <= {198, 199, 200, 201}


def test_a_source_of_weight_zero_is_never_asked_for():
    specs = [make_spec("a"), make_spec("b")]
    job = make_job(specs, BatchRule(4, 16), [0, 1])
    planner = start(job)
    assert planner.plan_step().sources == (1,)
    _feed, plans = run(job, [corpus(spec, [9] * 10) for spec in specs], 50)
    assert all((plan.source == 1).all() for plan in plans)
    assert plans[0].wanted_shares.tolist() == [0, 1]


def test_weights_are_shares_of_tokens_or_of_samples():
    specs = [make_spec("short"), make_spec("long")]
    corpora = [corpus(specs[0], [400] * 50), corpus(specs[1], [4000] * 50)]
    for unit, wanted in (("tokens", 0.5), ("samples", 400 / 4400)):
        _feed, plans = run(make_job(specs, BatchRule(10, 4096), unit=unit), corpora, 100)
        for first in range(0, 100, 10):
            window = sum(plan.drawn_tokens for plan in plans[first : first + 10])
            assert abs(window[0] / window.sum() - wanted) <= 0.01


def test_a_mixture_change_is_met_at_once_and_not_caught_up():
    specs = [make_spec("short"), make_spec("long")]
    corpora = [corpus(specs[0], [400] * 50), corpus(specs[1], [4000] * 50)]
    points = (
        MixturePoint(0, {"short": 1, "long": 1}),
        MixturePoint(50, {"short": 3, "long": 1}),
    )
    _feed, plans = run(make_job(specs, BatchRule(10, 4096), points=points), corpora, 100)
    before = sum(plan.drawn_tokens for plan in plans[:50])
    after = sum(plan.drawn_tokens for plan in plans[50:])
    assert abs(before[0] - before.sum() / 2) <= 2 * 4000
    assert abs(after[0] - after.sum() * 3 / 4) <= 3 * 4000
    first = plans[50].drawn_tokens
    assert abs(first[0] - first.sum() * 3 / 4) <= 3 * 4000


def test_points_by_tokens_take_effect_with_the_step_that_reaches_them():
    specs = [make_spec("a"), make_spec("b")]
    points = (MixturePoint(0, {"a": 1}), MixturePoint(320, {"b": 1}, "tokens"))
    job = make_job(specs, BatchRule(4, 16, packing="concat"), points=points)
    _, plans = run(job, [corpus(spec, [8] * 10) for spec in specs], 8)
    assert [int(plan.drawn_tokens[1]) > 0 for plan in plans] == [False] * 5 + [True] * 3


# --- events


def two_sources():
    specs = [make_spec("a"), make_spec("b")]
    job = make_job(specs, BatchRule(4, 64))
    return job, [corpus(spec, range(5, 60)) for spec in specs]


def test_an_event_changes_the_mixture_from_its_step_on():
    job, corpora = two_sources()
    feed = Feed(start(job), corpora)
    feed.steps(3)
    feed.planner.change_mixture({"a": 1, "b": 0}, 5)
    assert feed.planner.shares() == [0.5, 0.5]
    assert feed.planner.state().event_number == 1
    plans = feed.steps(4)
    assert [plan.drawn_tokens[1] > 0 for plan in plans] == [True, True, False, False]
    assert feed.planner.shares() == [1.0, 0.0]


def test_an_event_at_the_step_that_starves_takes_its_draw_back():
    job, corpora = two_sources()
    feed = Feed(start(job), corpora)
    feed.steps(3)
    planner = feed.planner
    while not isinstance(planner.plan_step(), Starved):
        pass
    step = planner.state().step
    planner.change_mixture({"a": 0, "b": 1}, step)
    assert planner.shares() == [0.0, 1.0]
    assert feed.step().drawn_tokens[0] == 0


def test_pending_events_are_in_the_state_and_travel_with_the_next_delta():
    job, corpora = two_sources()
    feed = Feed(start(job), corpora)
    feed.steps(2)
    before = feed.planner.state()
    feed.planner.change_mixture({"a": 1, "b": 9}, 6)
    feed.planner.change_mixture({"a": 9, "b": 1}, 4)
    saved = StreamState.decode(feed.planner.state().encode())
    assert saved.pending_steps.tolist() == [4, 6]
    plans = feed.steps(6)
    assert before.apply(plans[0].delta).encode() != saved.encode()
    again = Feed(start(job, state=saved), corpora).steps(6)
    assert [plan.stream_digest for plan in again] == [plan.stream_digest for plan in plans]
    state = before
    for plan in plans:
        state = state.apply(plan.delta)
    assert state.encode() == feed.planner.state().encode()
    assert state.pending_steps.tolist() == []


def test_an_event_that_comes_too_late_or_does_not_fit_is_refused():
    job, corpora = two_sources()
    feed = Feed(start(job), corpora)
    feed.steps(3)
    with pytest.raises(ConfigError, match="step 2 comes too late"):
        feed.planner.change_mixture({"a": 1, "b": 1}, 2)
    with pytest.raises(ConfigError, match="b: no weight"):
        feed.planner.change_mixture({"a": 1}, 9)
    assert feed.planner.state().event_number == 0


def test_a_share_too_small_to_be_drawn_is_refused_before_it_is_an_event():
    specs = [make_spec("a"), make_spec("b")]
    planner = start(make_job(specs, BatchRule(1, 1 << 20)))
    with pytest.raises(ConfigError, match=r"mixture: a: .* too small beside fragments"):
        planner.change_mixture({"a": 2e-9, "b": 1}, 9)
    assert planner.state().event_number == 0
    planner.change_mixture({"a": 1e-5, "b": 1}, 9)
    by_sample = start(make_job(specs, BatchRule(1, 1 << 20), unit="samples"))
    by_sample.change_mixture({"a": 2e-9, "b": 1}, 9)


# --- ends


def test_steps_end_a_stream():
    job, corpora = one_source([9] * 10, BatchRule(2, 16), at_exhaustion="repeat", steps=7)
    feed, plans = run(job, corpora)
    assert [plan.step for plan in plans] == list(range(7))
    assert feed.step() == Ended("all 7 steps are planned")


def test_tokens_end_a_stream_with_a_padded_step():
    job, corpora = one_source([9] * 10, BatchRule(4, 18), at_exhaustion="repeat", tokens=200)
    feed, plans = run(job, corpora)
    placed = [int(plan.placed_tokens.sum()) for plan in plans]
    assert placed[:-1] == [72] * (len(plans) - 1)
    assert 200 <= sum(placed) < 209
    assert plans[-1].valid_tokens == plans[-1].row_valid_tokens.sum() < plans[0].valid_tokens
    assert isinstance(feed.step(), Ended)


def test_epochs_deliver_each_sample_that_often():
    specs = [make_spec("a", 3), make_spec("b", 3, "streaming"), make_spec("c")]
    job = make_job(specs, BatchRule(4, 16), [8, 1, 1], epochs=3)
    corpora = [
        SourceCorpus(specs[0], [[([3, 5], [0, 0]), ([7], [0])], [([40], [0])]]),
        SourceCorpus(specs[1], [[([4], [0])], [], [([6, 6], [0, 0]), ([5], [0])]]),
        SourceCorpus(specs[2], [[([9, 9, 9], [0, 0, 0])]]),
    ]
    feed, _plans = run(job, corpora)
    statistics = feed.planner.statistics()
    assert statistics.drawn_tokens == (3 * 55, 3 * 21, 3 * 27)
    assert statistics.delivered_tokens == statistics.drawn_tokens
    assert statistics.delivered_samples == (12, 12, 9)
    assert feed.step() == Ended("every source of the mixture is exhausted")


def test_the_first_exhausted_source_stops_the_stream_where_told_so():
    specs = [make_spec("a", at_exhaustion="stop"), make_spec("b")]
    job = make_job(specs, BatchRule(2, 16))
    feed, _plans = run(job, [corpus(spec, [4] * 20) for spec in specs])
    statistics = feed.planner.statistics()
    assert statistics.delivered_tokens[0] == 80
    assert abs(statistics.delivered_tokens[1] - 80) <= 8
    assert feed.step() == Ended("source a is exhausted")


def test_a_dropped_source_leaves_its_share_to_the_others():
    specs = [make_spec("a", at_exhaustion="drop"), make_spec("b")]
    job = make_job(specs, BatchRule(2, 16))
    feed, plans = run(job, [corpus(spec, [4] * 20) for spec in specs], 30)
    assert feed.planner.statistics().delivered_tokens[0] == 80
    assert plans[-1].wanted_shares.tolist() == [0, 1]
    assert feed.planner.shares() == [0.0, 1.0]
    resumed = start(job, state=feed.planner.state())
    assert resumed.plan_step().sources == (1,)


def test_a_source_that_may_not_repeat_again_is_an_error():
    job, corpora = one_source([4] * 20, BatchRule(2, 16), at_exhaustion="repeat", max_epochs=2)
    feed = Feed(start(job), corpora)
    with pytest.raises(SourceExhaustedError, match="source a has no sample left after its 2"):
        feed.steps(100)
    assert feed.planner.state().step == 4


def test_a_source_without_a_sample_is_an_error():
    job, corpora = one_source([0, 0], BatchRule(2, 16), [1, 1], at_exhaustion="repeat")
    with pytest.raises(SourceExhaustedError, match=r"source a: epoch 0 .* holds no sample"):
        run(job, corpora)


def test_a_step_without_a_valid_label_is_never_served():
    job, corpora = one_source([1] * 100, BatchRule(2, 16))
    with pytest.raises(DataError, match="no valid label"):
        run(job, corpora)
    job, corpora = one_source([1] * 8, BatchRule(2, 16))
    with pytest.raises(SourceExhaustedError, match=r"before its first step.*no_label 8"):
        Feed(start(job), corpora).step()


# --- faults


def test_bad_records_are_passed_over_and_counted_when_the_draw_gets_there():
    ok, status = RecordStatus.OK, RecordStatus
    statuses = [ok, status.BAD_SYNTAX, ok, status.EMPTY, status.FIELD_MISSING, ok, ok]
    job, corpora = one_source(
        [4 if not status else 0 for status in statuses], BatchRule(1, 4), statuses
    )
    feed, plans = run(job, corpora)
    assert [plan.index.tolist() for plan in plans] == [[0], [2], [5], [6]]
    assert [plan.dropped_records.tolist() for plan in plans] == [[0], [1], [2], [0]]
    counts = feed.planner.statistics().dropped_records
    assert {name: sum(count) for name, count in counts.items() if sum(count)} == {
        "bad_syntax": 1,
        "empty": 1,
        "field_missing": 1,
    }


def test_held_out_records_are_no_faults():
    held, ok = RecordStatus.HELD_OUT, RecordStatus.OK
    statuses = [held, ok, held, held, ok, ok]
    job, corpora = one_source(
        [0 if status else 4 for status in statuses],
        BatchRule(1, 4),
        statuses,
        on_error=ErrorPolicy("fail"),
    )
    feed, plans = run(job, corpora)
    assert [plan.index.tolist() for plan in plans] == [[1], [4], [5]]
    counts = feed.planner.statistics().dropped_records
    assert {name: sum(count) for name, count in counts.items() if sum(count)} == {"held_out": 3}
    assert feed.planner.state().faults.size == 0


def faulty(policy, count=40, every=4, **options):
    statuses = [
        RecordStatus.BAD_SYNTAX if place % every == every - 1 else RecordStatus.OK
        for place in range(count)
    ]
    lengths = [0 if status else 4 for status in statuses]
    return one_source(lengths, BatchRule(1, 4), statuses, on_error=policy, **options)


def test_fail_acts_when_the_draw_reaches_the_fault_and_not_before():
    job, corpora = faulty(ErrorPolicy("fail"))
    feed = Feed(start(job), corpora)
    with pytest.raises(CorruptRecordError) as caught:
        feed.steps(100)
    assert feed.planner.state().step == 3
    assert "source a: epoch 0, window 0, block 0, record 3 is bad_syntax" in caught.value.message
    assert "made-up fault" in caught.value.message
    with pytest.raises(CorruptRecordError):
        feed.planner.plan_step()


def test_an_error_budget_is_spent_by_more_faults_than_it_allows():
    job, corpora = faulty(ErrorPolicy("skip", 0.05, 100), every=8)
    feed, _plans = run(job, corpora)
    assert sum(feed.planner.statistics().dropped_records["bad_syntax"]) == 5
    job, corpora = faulty(ErrorPolicy("skip", 0.02, 100), every=8)
    feed = Feed(start(job), corpora)
    with pytest.raises(ErrorBudgetExceededError, match=r"3 faults in its last 100.*budget is 2"):
        feed.steps(100)
    assert feed.planner.state().step == 21


def test_an_error_budget_looks_at_the_last_records_only():
    job, corpora = faulty(ErrorPolicy("skip", 0.25, 8), every=4)
    run(job, corpora)
    job, corpora = faulty(ErrorPolicy("skip", 0.25, 8), every=3)
    with pytest.raises(ErrorBudgetExceededError):
        run(job, corpora)


def test_a_budget_of_one_reads_on_whatever_is_broken():
    job, corpora = faulty(ErrorPolicy("skip", 1.0, 10), every=2)
    feed, _ = run(job, corpora)
    assert sum(feed.planner.statistics().dropped_records["bad_syntax"]) == 20


def test_an_error_window_survives_a_restore():
    job, corpora = faulty(ErrorPolicy("skip", 0.02, 100), every=8)
    feed = Feed(start(job), corpora)
    feed.steps(20)
    saved = StreamState.decode(feed.planner.state().encode())
    assert saved.faults.tolist() == [[0, 0], [7, 15]]
    again = Feed(start(job, state=saved), corpora)
    with pytest.raises(ErrorBudgetExceededError):
        again.steps(100)
    assert again.planner.state().step == 21


# --- what is known and what is missing


def test_starved_names_sources_and_positions():
    job, _corpora = two_sources()
    planner = start(job)
    assert planner.plan_step() == Starved((0, 1), ((0, 0), (0, 0)))
    meta = ChunkMeta(0, 0, 0, np.full(5, 9, np.int32), np.zeros(5, np.uint8), False, 1)
    planner.add_chunk(meta)
    assert planner.plan_step() == Starved((1,), ((0, 0),))
    assert planner.state().step == 0


def test_a_source_of_which_something_came_is_starved_no_longer():
    planner = start(two_sources()[0])
    assert planner.plan_step() == Starved((0, 1), ((0, 0), (0, 0)))
    meta = ChunkMeta(1, 0, 0, np.full(5, 9, np.int32), np.zeros(5, np.uint8), False, 1)
    planner.add_chunk(meta)
    assert planner.plan_step() == Starved((0,), ((0, 0),))


def test_chunks_of_no_source_are_refused():
    planner = start(two_sources()[0])
    meta = ChunkMeta(2, 0, 0, np.ones(1, np.int32), np.zeros(1, np.uint8), True, 1)
    with pytest.raises(ProtocolError, match="source 2 of 2"):
        planner.add_chunk(meta)
    odd = ChunkMeta(1, 0, 0, np.ones(1, np.int32), np.full(1, 99, np.uint8), True, 1)
    with pytest.raises(ProtocolError, match="status 99"):
        planner.add_chunk(odd)


def test_a_changed_record_at_the_cursor_is_noticed():
    job, corpora = one_source([4] * 9, BatchRule(1, 4))
    feed = Feed(start(job), corpora)
    feed.steps(3)
    again = start(job, state=feed.planner.state())
    assert again.cursors() == [[0, 2]]
    broken = ChunkMeta(
        0, 0, 2, np.zeros(1, np.int32), np.full(1, RecordStatus.UNREADABLE, np.uint8), False, 1
    )
    with pytest.raises(DataError, match="record at the state's cursor"):
        again.add_chunk(broken)


def test_states_and_meshes_that_do_not_fit_are_refused():
    job, _ = two_sources()
    other = dataclasses.replace(job, seed=18)
    with pytest.raises(StateMismatchError):
        start(job, state=initial_state(other))
    with pytest.raises(MeshMismatchError, match="dp 3"):
        start(job, {"dp": 3})
    with pytest.raises(ConfigError, match="strategy 'clever' is unknown; there are balanced"):
        start(dataclasses.replace(job, strategy="clever"))
    odd = dataclasses.replace(job, batch=BatchRule(4, 64, packing="concat", segment_multiple=8))
    with pytest.raises(ConfigError, match="segment_multiple 8"):
        start(odd)


# --- the plan


def test_valid_tokens_count_labels():
    # H08: two documents of 3 and 2 tokens in a row of 6
    for documents, valid in (("separate", 3), ("joined", 4)):
        for labels in ("shifted", "aligned"):
            batch = BatchRule(1, 6, documents=documents, labels=labels)
            job, corpora = one_source([3, 2], batch)
            _, plans = run(job, corpora)
            assert plans[0].valid_tokens == valid
            assert plans[0].source_valid_tokens.tolist() == [valid]


def test_a_plan_survives_the_wire():
    job, corpora = two_sources()
    _, plans = run(job, corpora, 6, {"dp": 2})
    for plan in plans:
        header, frames = plan.encode()
        again = StepPlan.decode(header, frames)
        for field in dataclasses.fields(StepPlan):
            sent, come = getattr(plan, field.name), getattr(again, field.name)
            if field.name == "delta":
                assert sent.encode() == come.encode() == again.delta_bytes
            elif field.name == "delta_bytes":
                continue
            elif isinstance(sent, np.ndarray):
                assert np.array_equal(sent, come)
                assert sent.dtype == come.dtype
            else:
                assert sent == come
        assert again.imbalance == plan.imbalance >= 1
        assert again.carried_in() == plan.carried_in()


def test_a_damaged_plan_is_refused():
    job, corpora = two_sources()
    header, frames = run(job, corpora, 1)[1][0].encode()
    for bad in ({"segments": 1}, {"rows": -1}, {"step": "1"}, {"unit": 3}):
        with pytest.raises(ProtocolError):
            StepPlan.decode(header | bad, frames)
    with pytest.raises(ProtocolError, match="lacks"):
        StepPlan.decode({key: header[key] for key in header if key != "step"}, frames)
    with pytest.raises(ProtocolError, match="5 or 6 frames"):
        StepPlan.decode(header, frames[:4])
    with pytest.raises(ProtocolError, match="carried frame"):
        StepPlan.decode(header, [*frames[:3], b"123", frames[4]])


def test_carried_fragments_come_and_go_by_the_plan():
    job, corpora = two_sources()
    feed = Feed(start(job), corpora)
    carried = set()
    for _ in range(40):
        plan = feed.step()
        carried -= {(*key,) for key in plan.carried_out()}
        carried |= {fragment[:4] for fragment in plan.carried_in()}
        assert carried == {tuple(fragment[:4]) for fragment in feed.planner.carried()}
        assert plan.carried_tokens == held(feed.planner)
        cursors = {entry[0]: list(entry[1:3]) for entry in plan.cursors_after()}
        assert all(feed.planner.cursors()[source] == at for source, at in cursors.items())


def test_valid_tokens_are_summed_by_cell():
    job, corpora = two_sources()
    plan = run(job, corpora, 1, {"dp": 2})[1][0]
    cells = plan.row_dp * plan.microbatch_count + plan.row_microbatch
    assert plan.row_valid_tokens_by_cell(cells, 4).sum() == plan.valid_tokens


def test_statistics_are_plain_and_add_up():
    job, corpora = two_sources()
    feed, _ = run(job, corpora, 20)
    plain = encode_plain(feed.planner.statistics())
    drawn = sum(plain["drawn_tokens"])
    assert drawn == sum(plain["delivered_tokens"]) + plain["carried_tokens"]
    assert drawn == int(feed.planner.state().progress[DRAWN_TOKENS].sum())
    assert plain["step"] == 20


def test_balance_changes_no_membership():
    specs = [make_spec("a")]
    lengths = np.random.default_rng(0).integers(1, 200, 400).tolist()
    digests = set()
    imbalance = {}
    for strategy in ("balanced", "unbalanced"):
        job = make_job(
            specs, BatchRule(16, 128), cost=CostSpec("transformer", 1, 5), strategy=strategy
        )
        _, plans = run(job, [corpus(specs[0], lengths)], 20, {"dp": 4})
        digests.add(tuple(plan.membership_digest for plan in plans))
        imbalance[strategy] = np.mean([plan.imbalance for plan in plans])
    assert len(digests) == 1
    assert imbalance["balanced"] < imbalance["unbalanced"]
