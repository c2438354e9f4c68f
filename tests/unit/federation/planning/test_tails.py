"""How a stream ends: `pad`, `drop` and `wrap`, by epochs, by tokens and by a source's end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from federation.model.job import BatchRule
from federation.planning.passes import read_epochs_max
from federation.planning.planner import Ended, Starved
from federation.planning.sampling import WRAPPED
from msd_client.contract.errors import DataError
from msd_client.contract.state import DROPPED_COLUMNS, DROPPED_TOKENS, StreamState
from tests.support.metadata import Feed, SourceCorpus, make_job, make_spec, start

NO_LABEL = DROPPED_COLUMNS.index("no_label")


def corpus(spec, lengths):
    """One block with these records."""
    return SourceCorpus(spec, [[(list(lengths), [0] * len(lengths))]])


def one_source(lengths, batch, at_exhaustion="drop", max_epochs=None, **options):
    spec = make_spec("a", at_exhaustion=at_exhaustion, max_epochs=max_epochs)
    return make_job([spec], batch, **options), [corpus(spec, lengths)]


def contents(plan):
    """Return each row's segments as (epoch, index, offset, length)."""
    rows = [[] for _ in range(plan.rows)]
    columns = (plan.row, plan.block_key, plan.index, plan.offset, plan.length)
    for row, key, *segment in zip(*(column.tolist() for column in columns), strict=True):
        rows[row].append((key >> 48, *segment))
    return rows


def run(job, corpora, state=None):
    feed = Feed(start(job, state=state), corpora)
    plans = feed.steps(1000)
    return feed, plans, feed.step()


TEN = [4] * 10
TWO_ROWS = BatchRule(2, 8)
CONCAT = BatchRule(2, 8, packing="concat")
PADDED = BatchRule(4, 8, packing="padded")


# --- pad: what there is, in rows that may stay empty


def test_pad_leaves_rows_of_the_last_step_empty():
    job, corpora = one_source(TEN, TWO_ROWS)
    _, plans, ended = run(job, corpora)
    assert [int(plan.length.sum()) for plan in plans] == [16, 16, 8]
    assert contents(plans[-1]) == [[(0, 8, 0, 4), (0, 9, 0, 4)], []]
    assert ended == Ended("every source of the mixture is exhausted")


# --- drop: full steps alone, a beginning of the endless stream


@pytest.mark.parametrize("batch", [TWO_ROWS, CONCAT, PADDED])
def test_drop_serves_no_step_that_is_not_full_and_leaves_its_samples_undrawn(batch):
    job, corpora = one_source(TEN, batch, end="drop")
    feed, plans, ended = run(job, corpora)
    endless, _ = one_source(TEN, batch, "repeat")
    same = Feed(start(endless), corpora).steps(len(plans))
    assert [plan.membership_digest for plan in plans] == [plan.membership_digest for plan in same]
    assert len(plans) == 2
    assert ended == Ended("every source of the mixture is exhausted")
    assert feed.planner.state().step == 2
    assert feed.planner.state().encode() == plans_state(job, plans).encode()


def plans_state(job, plans):
    """Return the state that the steps' differences give."""
    state = start(job).state()
    for plan in plans:
        state = state.apply(plan.delta)
    return state


def test_drop_serves_a_last_step_that_is_exactly_full():
    job, corpora = one_source([4] * 8, CONCAT, end="drop")
    _, plans, _ = run(job, corpora)
    assert [int(plan.length.sum()) for plan in plans] == [16, 16]


def test_drop_never_places_more_tokens_than_the_job_has():
    job, corpora = one_source(TEN, TWO_ROWS, "repeat", end="drop", tokens=70)
    _, plans, ended = run(job, corpora)
    assert [int(plan.length.sum()) for plan in plans] == [16] * 4
    assert ended == Ended("no full step is left of 70 tokens")
    exact = replace(job, tokens=64)
    _, plans, ended = run(exact, corpora)
    assert len(plans) == 4
    assert ended == Ended("all 64 tokens are planned")


def test_a_state_of_a_dropped_end_ends_at_once():
    job, corpora = one_source(TEN, TWO_ROWS, end="drop")
    feed, _, ended = run(job, corpora)
    saved = StreamState.decode(feed.planner.state().encode())
    _, plans, again = run(job, corpora, saved)
    assert (plans, again) == ([], ended)


# --- wrap: the last step is filled from the next epoch


def test_wrap_fills_the_last_step_from_the_next_epoch():
    job, corpora = one_source(TEN, CONCAT, end="wrap")
    feed, plans, ended = run(job, corpora)
    assert [int(plan.length.sum()) for plan in plans] == [16] * 3
    last = contents(plans[-1])
    assert [epoch for row in last for epoch, *_ in row] == [0, 0, 1, 1]
    assert sorted(index for row in last for epoch, index, *_ in row if not epoch) == [8, 9]
    assert ended == Ended("every source of the mixture is exhausted" + WRAPPED)
    assert feed.planner.state().ending == ended.reason


def test_wrap_places_everything_before_the_end_first():
    # Fillers as long as a row would push short samples out, were they packed together.
    job, corpora = one_source([8] * 6 + [3, 3], TWO_ROWS, end="wrap")
    _, plans, _ = run(job, corpora)
    placed = [segment for plan in plans for row in contents(plan) for segment in row]
    assert sorted(index for epoch, index, *_ in placed if not epoch) == list(range(8))
    assert len({(epoch, index) for epoch, index, *_ in placed}) == len(placed)
    assert all(row for row in contents(plans[-1]))


def test_wrap_goes_on_by_the_same_mixture_and_through_several_epochs():
    specs = [make_spec("a", at_exhaustion="drop"), make_spec("b", at_exhaustion="drop")]
    corpora = [corpus(specs[0], [4] * 3), corpus(specs[1], [4] * 9)]
    job = make_job(specs, BatchRule(8, 16, packing="concat"), [3, 1], epochs=1, end="wrap")
    _, plans, _ = run(job, corpora)
    assert len(plans) == 1
    assert int(plans[0].length.sum()) == 128
    fillers = (plans[0].block_key >> 48) > 0
    tokens = [
        int(plans[0].length[fillers & (plans[0].source == source)].sum()) for source in (0, 1)
    ]
    assert sum(tokens) == 128 - 48
    assert abs(tokens[0] - 60) <= 8
    assert int(plans[0].block_key[plans[0].source == 0].max() >> 48) >= 4


def test_wrap_adds_no_step_where_the_end_comes_with_a_full_one():
    job, corpora = one_source([4] * 8, CONCAT, end="wrap")
    _, plans, ended = run(job, corpora)
    assert [int(plan.length.sum()) for plan in plans] == [16, 16]
    assert not any((plan.block_key >> 48).any() for plan in plans)
    assert ended == Ended("every source of the mixture is exhausted")


def test_wrap_goes_behind_max_epochs_and_the_end_that_stops_a_stream():
    job, corpora = one_source(TEN, CONCAT, "stop", 2, end="wrap")
    _, plans, ended = run(job, corpora)
    assert [int(plan.length.sum()) for plan in plans] == [16] * 5
    assert ended == Ended("source a is exhausted")
    job, corpora = one_source(TEN, BatchRule(3, 8, packing="concat"), "stop", 2, end="wrap")
    _, plans, ended = run(job, corpora)
    assert [int(plan.length.sum()) for plan in plans] == [24] * 4
    assert [epoch for row in contents(plans[-1]) for epoch, *_ in row] == [1, 1, 2, 2, 2, 2]
    assert ended == Ended("source a is exhausted" + WRAPPED)
    assert read_epochs_max(job, 0) is None
    assert read_epochs_max(replace(job, end="pad"), 0) == 2


def test_wrap_serves_the_step_that_reaches_the_tokens_as_any_other():
    job, corpora = one_source(TEN, TWO_ROWS, "repeat", end="wrap", tokens=70)
    _, plans, ended = run(job, corpora)
    assert [int(plan.length.sum()) for plan in plans] == [16] * 5
    assert ended == Ended("all 70 tokens are planned")


@pytest.mark.parametrize("end", ["pad", "drop", "wrap"])
def test_every_state_of_a_wrapped_or_cut_run_goes_on_to_the_same_end(end):
    lengths = [3, 9, 1, 14, 2, 8, 8, 5, 21, 4, 1, 7] * 3
    job, corpora = one_source(lengths, BatchRule(3, 8), epochs=2, end=end)
    whole = Feed(start(job), corpora)
    states, plans = [whole.planner.state()], []
    while not isinstance(outcome := whole.step(), Ended):
        plans.append(outcome)
        states.append(whole.planner.state())
    states[-1] = whole.planner.state()
    for number, state in enumerate(states):
        feed = Feed(start(job, state=StreamState.decode(state.encode())), corpora)
        again = feed.steps(1000)
        wanted = [plan.stream_digest for plan in plans[number:]]
        assert [plan.stream_digest for plan in again] == wanted
        assert feed.step() == outcome
        assert feed.planner.state().encode() == states[-1].encode()


def starve_in_the_wrap(feed):
    """Plan and feed up to the step that is filled, until it waits for what lies behind the end."""
    plans = feed.steps(2)
    assert isinstance(feed.planner.plan_step(), Starved)
    while feed.planner._sampler._wrapped_ending == "":
        source = feed.planner.plan_step().sources[0]
        feed.planner.add_chunk(feed._loaders[source][0].next_chunk())
        assert isinstance(feed.planner.plan_step(), Starved)
    return plans


def test_a_mixture_change_takes_a_half_drawn_wrap_back():
    job, corpora = one_source(TEN, CONCAT, end="wrap")
    feed = Feed(start(job), corpora, chunk_records_max=1)
    starve_in_the_wrap(feed)
    feed.planner.change_mixture({"a": 2}, 2)
    last = feed.step()
    plain = Feed(start(job), corpora)
    plain.planner.change_mixture({"a": 2}, 2)
    assert plain.steps(3)[-1].stream_digest == last.stream_digest
    assert isinstance(feed.step(), Ended)
    assert feed.planner.state().encode() == plain.planner.state().encode()


# --- what has no label to train


def test_tokens_without_a_label_at_the_end_are_dropped_not_held():
    job, corpora = one_source([8, 8, 1, 1], TWO_ROWS)
    feed, plans, ended = run(job, corpora)
    assert [int(plan.length.sum()) for plan in plans] == [16]
    assert ended == Ended("every source of the mixture is exhausted")
    state = feed.planner.state()
    assert state.step == 1
    assert state.carried.shape[1] == 0
    assert state.dropped[[NO_LABEL, DROPPED_TOKENS], 0].tolist() == [2, 2]
    statistics = feed.planner.statistics()
    assert (statistics.drawn_tokens, statistics.delivered_tokens) == ((16,), (16,))
    assert (statistics.drawn_samples, statistics.delivered_samples) == ((2,), (2,))
    _, again, ended_again = run(job, corpora, StreamState.decode(state.encode()))
    assert (again, ended_again) == ([], ended)


def test_joined_documents_leave_nothing_without_a_label():
    job, corpora = one_source([8, 8, 1, 1], BatchRule(2, 8, documents="joined"))
    feed, plans, _ = run(job, corpora)
    assert [int(plan.length.sum()) for plan in plans] == [16, 2]
    assert not feed.planner.state().dropped.any()


def test_labels_of_sources_that_weigh_nothing_are_not_counted():
    specs = [make_spec("a", at_exhaustion="drop"), make_spec("b", at_exhaustion="drop")]
    specs[1] = replace(specs[1], loss_weight=0.0)
    corpora = [corpus(spec, [4] * 4) for spec in specs]
    _, plans, _ = run(make_job(specs, TWO_ROWS), corpora)
    assert [plan.source_valid_tokens.tolist() for plan in plans] == [[6, 0], [6, 0]]
    assert [plan.valid_segments for plan in plans] == [2, 2]
    specs[0] = replace(specs[0], loss_weight=0.0)
    endless = make_job([replace(spec, at_exhaustion="repeat") for spec in specs], TWO_ROWS)
    with pytest.raises(DataError, match="of sources of loss_weight 0"):
        run(endless, corpora)
