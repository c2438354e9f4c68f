"""Jobs with masks, media or several samples a record, from chunk to plan."""

from dataclasses import replace

import numpy as np
import pytest

from federation.model.job import BatchRule, RampPoint
from federation.planning.extra_rows import NO_EXTRA_ROWS, ExtraRows
from federation.planning.step_pool import cut_carried
from msd_client.contract.errors import (
    ConfigError,
    DataError,
    SourceExhaustedError,
    StateMismatchError,
)
from msd_client.contract.state import (
    CARRIED_COLUMNS,
    DELIVERED_SAMPLES,
    DRAWN_SAMPLES,
    DROPPED_COLUMNS,
    DROPPED_TOKENS,
    StreamState,
)
from tests.support.marked import TEXT, Atom, image_rule, length_of, marked_spec, marks_of_record
from tests.support.metadata import Feed, SourceCorpus, initial_state, make_job, make_spec, start

TOLD = Atom(TEXT, 4)
ASKED = Atom(TEXT, 3, is_trained=False)
IMAGE = Atom(0, 2, 5)


def one_source(records, batch, media=(), *, is_many=False, has_masks=True, **options):
    """Return a job of one source of one block of these records, and its corpus."""
    spec = marked_spec("chat", is_many=is_many, has_masks=has_masks)
    lengths = [length_of(record) for record in records]
    corpus = SourceCorpus(spec, [[(lengths, [0] * len(records))]])
    corpus.marks[0, 0] = [marks_of_record(record) for record in records]
    return make_job([spec], batch, media=media, **options), [corpus]


def segments_of(plan):
    columns = (plan.index, plan.offset, plan.length)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_the_rows_that_a_job_has() -> None:
    plain = make_job([make_spec("web")], BatchRule(2, 8))
    assert ExtraRows.of(plain) == NO_EXTRA_ROWS
    assert NO_EXTRA_ROWS.names == ()
    chat = make_job([make_spec("web"), marked_spec("chat")], BatchRule(2, 8))
    assert ExtraRows.of(chat).names == ("trained",)
    many = make_job([marked_spec("web", is_many=True, has_masks=False)], BatchRule(2, 8))
    assert ExtraRows.of(many).names == ("begins",)
    media = (image_rule(10), image_rule(20, "audio"))
    both = make_job([marked_spec("web", is_many=True)], BatchRule(2, 8), media=media)
    assert ExtraRows.of(both).names == ("begins", "trained", "units_image", "units_audio")
    assert ExtraRows.of(both).units_max == (10, 20)


def test_labels_are_counted_by_what_is_trained() -> None:
    # A question and an answer: the answer's first token is a label, the question's are none.
    job, corpora = one_source([[[ASKED, TOLD]]] * 8, BatchRule(2, 14), epochs=1)
    plan = Feed(start(job), corpora).step()
    assert plan.valid_tokens == 4 * 4
    assert plan.row_valid_tokens.tolist() == [8, 8]
    assert plan.valid_segments == 4
    # An answer first: its own first token has no token before it to predict it from.
    job, corpora = one_source([[[TOLD, ASKED]]] * 8, BatchRule(2, 14), epochs=1)
    assert Feed(start(job), corpora).step().valid_tokens == 4 * 3
    # Joined, the second segment's first token has one.
    joined = replace(job, batch=replace(job.batch, documents="joined"))
    assert Feed(start(joined), corpora).step().row_valid_tokens.tolist() == [7, 7]
    aligned = replace(joined, batch=replace(joined.batch, labels="aligned"))
    assert Feed(start(aligned), corpora).step().row_valid_tokens.tolist() == [7, 7]
    # ... unless that token is untrained.
    job, corpora = one_source([[[ASKED, TOLD]]] * 8, joined.batch, epochs=1)
    assert Feed(start(job), corpora).step().row_valid_tokens.tolist() == [8, 8]


def test_padding_between_segments_joins_nothing() -> None:
    batch = BatchRule(2, 16, documents="joined", segment_multiple=8)
    job, corpora = one_source([[[TOLD, ASKED]]] * 4, batch, epochs=1)
    assert Feed(start(job), corpora).step().row_valid_tokens.tolist() == [6, 6]


def test_a_fragment_without_a_trained_token_is_fine_beside_others() -> None:
    # Cut at the image's begin: its fragment is nothing but the image.
    sample = [Atom(TEXT, 9), Atom(0, 8, 5)]
    job, corpora = one_source([[sample], [[TOLD]]] * 4, BatchRule(4, 10), (image_rule(10),))
    plan = Feed(start(job), corpora).step()
    assert {(offset, length) for _, offset, length in segments_of(plan)} == {(0, 9), (9, 8)}
    images = [place for place, one in enumerate(segments_of(plan)) if one[1] == 9]
    assert images and plan.valid_segments == len(plan.length) - len(images)


def test_a_step_without_a_trained_token_is_refused() -> None:
    job, corpora = one_source([[[ASKED]]] * 8, BatchRule(2, 3))
    with pytest.raises(DataError, match=r"no valid label.*without a trained token"):
        Feed(start(job), corpora).step()
    # At the end of a stream such fragments are dropped and counted.
    ended, corpora = one_source([[[ASKED]]] * 4, BatchRule(8, 3), epochs=1)
    with pytest.raises(SourceExhaustedError, match="no_label 4"):
        Feed(start(ended), corpora).step()
    records = [*[[[TOLD]]] * 2, *[[[ASKED]]] * 2]
    ended, corpora = one_source(records, BatchRule(2, 4), epochs=1)
    feed = Feed(start(ended), corpora)
    assert [plan.valid_tokens for plan in feed.steps(9)] == [6]
    state = feed.planner.state()
    assert state.dropped[DROPPED_COLUMNS.index("no_label"), 0] == 2
    assert state.dropped[DROPPED_TOKENS, 0] == 6


def test_rows_hold_no_more_units_than_they_may() -> None:
    records = [[[TOLD, IMAGE]]] * 20
    job, corpora = one_source(records, BatchRule(4, 60), (image_rule(12),), epochs=1)
    plan = Feed(start(job), corpora).step()
    assert np.bincount(plan.row).tolist() == [2, 2, 2, 2]  # 5 units each; by tokens 10 would fit
    # The draw stops once units are enough: four rows of 12, a 32nd more, and the last one over it.
    assert int(plan.drawn_samples.sum()) == 10
    assert plan.carried_tokens == 2 * 6


def test_samples_of_a_record_are_drawn_and_counted_one_by_one() -> None:
    records = [[[Atom(TEXT, n)] for n in (3, 9, 2, 4)]] * 6
    batch = BatchRule(2, 8, long="skip")
    job, corpora = one_source(records, batch, is_many=True, has_masks=False, epochs=1)
    feed = Feed(start(job), corpora)
    plans = feed.steps(20)
    served = sorted(segment for plan in plans for segment in segments_of(plan))
    assert served == [(n, at, size) for n in range(6) for at, size in ((0, 3), (12, 2), (14, 4))]
    progress = feed.planner.state().progress
    assert progress[[DRAWN_SAMPLES, DELIVERED_SAMPLES], 0].tolist() == [18, 18]
    counts = feed.planner.state().dropped[:, 0]
    assert counts[DROPPED_COLUMNS.index("long_skipped")] == 6
    assert counts[DROPPED_TOKENS] == 6 * 9


def test_shares_of_samples_count_samples_of_records() -> None:
    many = marked_spec("many", is_many=True, has_masks=False)
    plain = make_spec("plain")
    record = [[Atom(TEXT, 2)]] * 4
    corpora = [
        SourceCorpus(many, [[([8] * 50, [0] * 50)]]),
        SourceCorpus(plain, [[([2] * 200, [0] * 200)]]),
    ]
    corpora[0].marks[0, 0] = [marks_of_record(record)] * 50
    job = make_job([many, plain], BatchRule(4, 32), [0.5, 0.5], "samples")
    plan = Feed(start(job), corpora).step()
    drawn = plan.drawn_samples.tolist()
    assert abs(drawn[0] - drawn[1]) <= 1 and sum(drawn) == 66


def test_concat_keeps_samples_of_a_record_apart() -> None:
    records = [[[Atom(TEXT, 3)], [Atom(TEXT, 4)], [Atom(TEXT, 11)]]] * 3
    batch = BatchRule(2, 8, packing="concat")
    job, corpora = one_source(records, batch, is_many=True, has_masks=False, epochs=1)
    feed = Feed(start(job), corpora)
    plan = feed.step()
    assert segments_of(plan) == [(0, 0, 3), (0, 3, 4), (0, 7, 1), (0, 8, 8)]
    assert feed.planner.state().carried.tolist() == [[0], [0], [0], [16], [2], [0], [0]]
    assert plan.valid_tokens == 2 + 3 + 0 + 7
    plan = feed.step()
    assert segments_of(plan)[:3] == [(0, 16, 2), (1, 0, 3), (1, 3, 3)]
    assert feed.planner.state().progress[DELIVERED_SAMPLES, 0] == 3 + 3


def test_masks_do_not_fit_concat_nor_rows_that_become_shorter() -> None:
    job, _ = one_source([[[TOLD]]], BatchRule(2, 8, packing="concat"))
    with pytest.raises(ConfigError, match="concat cuts samples anywhere"):
        start(job)
    ramp = (RampPoint(3, 16), RampPoint(5, 12))
    job, _ = one_source([[[TOLD]]], BatchRule(2, 8, row_tokens_ramp=ramp))
    with pytest.raises(ConfigError, match=r"becomes smaller \(8, 16, 12\)"):
        start(job)
    plain = make_job([make_spec("web")], BatchRule(2, 8, packing="concat", row_tokens_ramp=ramp))
    start(plain)
    start(one_source([[[TOLD]]], BatchRule(2, 8, row_tokens_ramp=ramp[:1]))[0])


def carrying_state(job, fragments):
    """Return a state of a job that carries (length, trained, units) fragments."""
    extras = ExtraRows.of(job)
    carried = np.zeros((len(CARRIED_COLUMNS) + extras.count, len(fragments)), np.int64)
    carried[2] = np.arange(len(fragments))
    carried[[4, 6, 7]] = np.array(fragments).T
    columns = (*CARRIED_COLUMNS, *extras.names)
    return replace(initial_state(job), carried=carried, carried_columns=columns)


def test_a_state_whose_fragments_fit_no_row_is_refused() -> None:
    job, _ = one_source([[[TOLD, IMAGE]]], BatchRule(2, 10), (image_rule(10),))
    start(job, state=carrying_state(job, [(10, 4, 10), (3, 0, 0)]))
    with pytest.raises(StateMismatchError, match=r"a fragment of 11 tokens, a row .* holds 10"):
        start(job, state=carrying_state(job, [(4, 4, 1), (11, 4, 10)]))
    with pytest.raises(StateMismatchError, match=r"of 12 image units, a row .* holds 10"):
        start(job, state=carrying_state(job, [(4, 4, 12)]))
    # Rows that grow by then are those that count.
    ramp = (RampPoint(7, 20),)
    grown = replace(job, batch=replace(job.batch, row_tokens_ramp=ramp))
    state = replace(carrying_state(grown, [(11, 4, 10)]), step=7)
    start(grown, state=state)


def test_a_state_of_other_rows_is_refused() -> None:
    job, _ = one_source([[[TOLD, IMAGE]]], BatchRule(2, 10), (image_rule(10),))
    state = carrying_state(job, [(4, 4, 1)])
    other = replace(state, carried=state.carried[:6], carried_columns=CARRIED_COLUMNS)
    with pytest.raises(StateMismatchError, match=r"the job needs source, .*units_image"):
        start(job, state=other)


def test_a_state_is_small_and_says_what_is_carried() -> None:
    records = [[[TOLD, IMAGE]]] * 20
    job, corpora = one_source(records, BatchRule(4, 60), (image_rule(12),))
    feed = Feed(start(job), corpora)
    feed.step()
    state = StreamState.decode(feed.planner.state().encode())
    assert state.carried_columns[6:] == ("trained", "units_image")
    assert state.carried[4:].tolist() == [[6, 6], [0, 0], [9, 9], [5, 5]]


def test_of_a_carried_sample_cut_for_shorter_rows_the_first_piece_begins_it() -> None:
    carried = np.array([[0, 0], [0, 0], [0, 1], [0, 4], [20, 9], [1, 1], [1, 0]])
    pieces, origins = cut_carried(carried, BatchRule(2, 8))
    assert pieces[[2, 3, 4, 6]].T.tolist() == [
        [0, 0, 8, 1], [0, 8, 8, 0], [0, 16, 4, 0], [1, 4, 8, 0], [1, 12, 1, 0]
    ]  # fmt: skip
    assert origins.tolist() == [0, 0, 0, 1, 1]
