"""Marks: fragments of samples, masks and media equal a token-by-token oracle; states are exact."""

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.model.chunk import ChunkMeta, RecordStatus
from federation.model.job import BatchRule, ErrorPolicy, RampPoint
from federation.model.plan import StepPlan
from federation.planning.cuts import INDEX, LENGTH, OFFSET
from federation.planning.extra_rows import ExtraRows
from federation.planning.fragments import FragmentQueue
from federation.planning.packing import CARRIED_STEPS_MAX
from federation.planning.planner import Ended
from msd_client.contract.errors import DataError
from msd_client.contract.position import BLOCK_MAX, WINDOW_MAX, pack_block_key
from msd_client.contract.state import (
    DELIVERED_SAMPLES,
    DRAWN_SAMPLES,
    DROPPED_COLUMNS,
    DROPPED_TOKENS,
    StreamState,
)
from tests.support.marked import (
    TEXT,
    Fragment,
    cut_record,
    image_rule,
    length_of,
    marked_spec,
    marks_of_record,
    random_marked_corpus,
    random_record,
    tokens_of,
)
from tests.support.metadata import (
    Feed,
    initial_state,
    make_job,
    make_spec,
    marks_of,
    start,
)

seeds = st.integers(0, 2**32 - 1)
POLICY = ErrorPolicy("skip", 1.0)


# --- the cut of one source


class Case:
    """One block of records, what a queue is made of, and what the oracle says of it."""

    def __init__(self, rng):
        self.row_tokens = rng.choice([4, 16, 50])
        self.units_max = rng.choice([(), (6,), (40,), (5, 30)])
        self.long = rng.choice(["split", "split", "truncate", "skip"])
        self.is_sample_unit = rng.random() < 0.5
        self.spec = marked_spec("web", on_error=POLICY, is_many=True)
        self.statuses = [
            rng.choice(list(RecordStatus)[1:]) if rng.random() < 0.2 else 0 for _ in range(30)
        ]
        self.records = [
            []
            if status
            else random_record(rng, self.row_tokens, self.units_max, is_many=rng.random() < 0.5)
            for status in self.statuses
        ]
        self.fragments, self.lost = [], []
        for index, record in enumerate(self.records):
            made, lost = cut_record(record, self.row_tokens, self.units_max, self.long)
            self.fragments += [(index, fragment) for fragment in made]
            self.lost += [(index, one) for one in lost]
            if not record:
                reason = RecordStatus(self.statuses[index]).name.lower()
                self.lost.append((index + 1, (0, reason, 0)))

    def queue(self, cursor=(0, 0)):
        """Return a queue behind so many tokens of a record."""
        index, drawn = cursor
        modalities = ("image", "audio")[: len(self.units_max)]
        return FragmentQueue(
            self.spec,
            0,
            self.row_tokens,
            self.long,
            unit="samples" if self.is_sample_unit else "tokens",
            epochs_max=1,
            cursor=(0, index, drawn),
            record_order=index,
            extras=ExtraRows(True, True, modalities, self.units_max),
        )

    def feed(self, queue, rng, first=0):
        """Give the records from one on, in chunks of random size."""
        while first < len(self.records):
            last = min(len(self.records), first + rng.randint(1, 12))
            records = self.records[first:last]
            queue.add(
                ChunkMeta(
                    0,
                    0,
                    first,
                    np.array([length_of(record) for record in records], np.int32),
                    np.array(self.statuses[first:last], np.uint8),
                    last == len(self.records),
                    1,
                    marks=marks_of([marks_of_record(record) for record in records]),
                ),
                0,
            )
            first = last
        return queue

    def counts_at(self, index, drawn):
        """Return what was passed over once so much of a record was drawn, by column."""
        counts = np.zeros(len(DROPPED_COLUMNS), np.int64)
        for place, (behind, reason, tokens) in self.lost:
            if (place, behind) <= (index, drawn):
                counts[DROPPED_COLUMNS.index(reason)] += 1
                counts[DROPPED_TOKENS] += tokens
        return counts


def fragments_of(queue):
    """Return (index, fragment) of all that a queue knows."""
    return [
        (column[INDEX], Fragment(column[OFFSET], column[LENGTH], bool(column[7]), column[8], tuple(column[9:])))
        for column in queue.columns.T.tolist()
    ]  # fmt: skip


@given(seeds)
@settings(deadline=None, max_examples=150)
def test_fragments_are_the_oracle_s_whatever_the_chunks(seed):
    rng = random.Random(seed)
    case = Case(rng)
    queue = case.feed(case.queue(), rng)
    assert fragments_of(queue) == case.fragments
    amounts = [
        fragment.is_first if case.is_sample_unit else fragment.length
        for _, fragment in case.fragments
    ]
    assert queue.columns[6].tolist() == np.cumsum(amounts).tolist()


@given(seeds)
@settings(deadline=None, max_examples=150)
def test_a_queue_goes_on_from_any_fragment_as_if_never_left(seed):
    rng = random.Random(seed)
    case = Case(rng)
    place = rng.randrange(len(case.fragments) + 1)
    drawn = (0, 0)
    if place:
        index, fragment = case.fragments[place - 1]
        drawn = (index, fragment.offset + fragment.length)
    queue = case.feed(case.queue(drawn), rng, drawn[0])
    assert fragments_of(queue) == case.fragments[place:]
    # What is passed over is counted once, at the same place, whoever is asked.
    counts = case.counts_at(*drawn)
    for index, fragment in case.fragments[place:]:
        reached = index, fragment.offset + fragment.length
        counts += queue.pass_records(0, *reached, 0)[0]
        assert counts.tolist() == case.counts_at(*reached).tolist()
    counts += queue.pass_records(0, queue.end_order, 0, 0)[0]
    assert counts.tolist() == case.counts_at(len(case.records), 0).tolist()


@given(seeds)
@settings(deadline=None, max_examples=60)
def test_rows_of_another_length_lose_and_repeat_nothing(seed):
    rng = random.Random(seed)
    case = Case(rng)
    if not case.fragments:
        return
    place = rng.randrange(len(case.fragments))
    index, fragment = case.fragments[place]
    drawn = (index, fragment.offset + fragment.length)
    longer = Case.__new__(Case)
    longer.__dict__ |= case.__dict__ | {"row_tokens": case.row_tokens + rng.randint(1, 40)}
    queue = longer.feed(longer.queue(drawn), rng, index)
    spans: dict[int, list[tuple[int, int]]] = {}
    for number, one in [*case.fragments[: place + 1], *fragments_of(queue)]:
        spans.setdefault(number, []).append((one.offset, one.length))
    for number, parts in spans.items():
        ends = [0, *(offset + length for offset, length in parts)]
        if case.long == "split":
            assert [offset for offset, _ in parts] == ends[:-1]
            assert ends[-1] == length_of(case.records[number])
        else:
            assert all(offset >= end for (offset, _), end in zip(parts, ends, strict=False))


# --- the stream


def random_job(rng):
    """Return a job with masks, with media or without, and its corpora."""
    row_tokens = rng.choice([32, 128])
    units_max = rng.choice([(), (24,), (200,), (12, 60)])
    is_many = rng.random() < 0.4
    specs = [
        marked_spec("web", rng.randint(1, 5), on_error=POLICY, is_many=is_many),
        marked_spec("code", rng.randint(1, 6), "streaming", on_error=POLICY),
        replace(marked_spec("text", 1, rng.choice(["seekable", "streaming"])), recipe=None),
    ]
    specs[1] = replace(specs[1], loss_weight=rng.choice([1.0, 1.0, 0.0]))
    batch = BatchRule(
        8,
        row_tokens,
        packing=rng.choice(["best_fit", "best_fit_even", "padded"]),
        long=rng.choice(["split", "split", "truncate", "skip"]),
        documents=rng.choice(["separate", "joined"]),
        labels=rng.choice(["shifted", "aligned"]),
        row_segments_max=rng.choice([4, 64]),
        segment_multiple=rng.choice([1, 1, 8]),
    )
    if rng.random() < 0.3:
        batch = replace(batch, row_tokens_ramp=(RampPoint(rng.randint(1, 9), row_tokens + 16),))
    ends = rng.choice([{}, {"epochs": rng.randint(1, 2)}, {"tokens": 9_000}, {"steps": 13}])
    ends["end"] = rng.choice(["pad", "drop", "wrap"])
    modalities = ("image", "audio")[: len(units_max)]
    job = make_job(
        specs,
        batch,
        [0.5, 0.3, 0.2],
        rng.choice(["tokens", "samples"]),
        media=tuple(map(image_rule, units_max, modalities)),
        **ends,
    )
    corpora = [
        random_marked_corpus(
            spec, rng.random(), row_tokens, units, is_many=many, bad_ratio=ratio, plain_ratio=plain
        )
        for spec, units, many, ratio, plain in (
            (specs[0], units_max, is_many, 0.1, 0.1),
            (specs[1], units_max, False, 0.03, 0.5),
            (specs[2], (), False, 0.0, 1.0),
        )
    ]
    return job, corpora


def random_many_job(rng):
    """Return a job whose records are several samples each, every token trained; any packing."""
    spec = marked_spec(
        "web",
        rng.randint(1, 5),
        rng.choice(["seekable", "streaming"]),
        on_error=POLICY,
        is_many=True,
        has_masks=False,
    )
    batch = BatchRule(
        8,
        32,
        packing=rng.choice(["best_fit", "best_fit_even", "concat", "concat", "padded"]),
        long=rng.choice(["split", "truncate", "skip"]),
        documents=rng.choice(["separate", "joined"]),
        row_segments_max=rng.choice([4, 64]),
    )
    if rng.random() < 0.5:
        values = rng.choices([16, 24, 48, 64], k=2)
        starts = sorted(rng.sample(range(1, 12), 2))
        batch = replace(batch, row_tokens_ramp=tuple(map(RampPoint, starts, values)))
    ends = rng.choice([{}, {"epochs": rng.randint(1, 2)}, {"tokens": 3_000}])
    ends["end"] = rng.choice(["pad", "drop", "wrap"])
    plain = make_spec("text", 2)
    unit = rng.choice(["tokens", "samples"])
    job = make_job([spec, plain], batch, [0.7, 0.3], unit, **ends)
    corpora = [
        random_marked_corpus(one, rng.random(), 32, (), is_many=many, bad_ratio=0.05 * many)
        for one, many in ((spec, True), (replace(plain, recipe=None), False))
    ]
    corpora[1].corpus.marks.clear()
    return job, corpora


def any_job(rng):
    return random_job(rng) if rng.random() < 0.7 else random_many_job(rng)


def planned_to_end(feed, count):
    """Plan some steps, fewer where the stream ends or a step would hold nothing that is trained.

    Returns the steps, and the end if it came.
    """
    plans = []
    try:
        while len(plans) < count:
            outcome = feed.step()
            if isinstance(outcome, Ended):
                return plans, outcome
            plans.append(outcome)
    except DataError as error:
        assert "no valid label" in error.message
    return plans, None


def planned(feed, count):
    return planned_to_end(feed, count)[0]


class Oracle:
    """What the records of all corpora are, token by token."""

    def __init__(self, job, corpora):
        self.job = job
        self._records = {}
        self._tokens = {}
        for source, (corpus, records) in enumerate(corpora):
            for key, part, block in corpus.keys(0, 0, 1):
                for index, record in enumerate(records.get((part, block), ())):
                    self._records[source, key, index] = record
        self.is_trained = [spec.loss_weight > 0 for spec in job.sources]

    def of(self, segment):
        """Return (sample, atom) of a segment's tokens, and of the token before and behind them."""
        source, key, index, offset, length = segment
        record = source, key & pack_block_key(0, WINDOW_MAX, BLOCK_MAX), index
        if record not in self._tokens:
            self._tokens[record] = tokens_of(self._records[record])
        tokens = self._tokens[record]
        assert 0 <= offset < offset + length <= len(tokens)
        before = tokens[offset - 1] if offset else None
        behind = tokens[offset + length] if offset + length < len(tokens) else None
        return tokens[offset : offset + length], before, behind


def segments_of(plan):
    columns = (plan.source, plan.block_key, plan.index, plan.offset, plan.length)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def check_plan(oracle, plan, rule, *, may_be_short):
    """Check caps, cuts and label counts of a step against single tokens."""
    job = oracle.job
    units = np.zeros((rule.rows, len(job.media)), np.int64)
    valid = np.zeros(rule.rows, np.int64)
    of_source = np.zeros(len(job.sources), np.int64)
    labelled, end, row_before, source_before = 0, -1, -1, -1
    counts = []
    places = zip(segments_of(plan), plan.row.tolist(), plan.column.tolist(), strict=True)
    for segment, row, column in places:
        tokens, before, behind = oracle.of(segment)
        samples = {sample for sample, _ in tokens}
        assert len(samples) == 1
        for edge, inside in ((before, tokens[0]), (behind, tokens[-1])):
            is_item = inside[1].kind != TEXT
            assert not is_item or edge is None or edge[0] != inside[0] or edge[1] is not inside[1]
        items = {id(atom): atom for _, atom in tokens if atom.kind != TEXT}
        for atom in items.values():
            units[row, atom.kind] += atom.units
        is_trained = [atom.kind == TEXT and atom.is_trained for _, atom in tokens]
        count = sum(is_trained[1:])
        touches = row == row_before and column == end
        owner = len(counts)
        counts.append(count)
        if rule.documents == "joined" and touches and is_trained[0]:
            owner -= rule.labels == "shifted"
            counts[owner] += 1
        end, row_before, source_before = column + len(tokens), row, segment[0]
    assert source_before >= 0
    for segment, row, count in zip(segments_of(plan), plan.row.tolist(), counts, strict=True):
        if oracle.is_trained[segment[0]]:
            valid[row] += count
            of_source[segment[0]] += count
            labelled += count > 0
    assert plan.row_valid_tokens.tolist() == valid.tolist()
    assert plan.source_valid_tokens.tolist() == of_source.tolist()
    assert plan.valid_tokens == valid.sum() > 0
    assert plan.valid_segments == labelled == plan.source_valid_segments.sum()
    assert (units <= [media.row_units_max for media in job.media]).all()
    assert int((plan.column + plan.length).max()) <= rule.row_tokens
    assert int(np.bincount(plan.row).max()) <= rule.row_segments_max
    assert may_be_short or set(plan.row.tolist()) == set(range(rule.rows))


@given(seeds)
@settings(deadline=None, max_examples=60)
def test_every_step_is_what_its_tokens_say(seed):
    rng = random.Random(seed)
    job, corpora = any_job(rng)
    oracle = Oracle(job, corpora)
    feed = Feed(start(job), [one.corpus for one in corpora], loaders=2, seed=rng.random())
    plans = planned(feed, 20)
    rules = [job.batch.at(plan.step, 0) for plan in plans]
    for plan, rule in zip(plans, rules, strict=True):
        is_late = plan.step >= len(plans) - 2 and len(plans) < 20
        check_plan(oracle, plan, rule, may_be_short=is_late)
    carried = [tuple(fragment) for fragment in feed.planner.carried()]
    check_once([segment for plan in plans for segment in segments_of(plan)], carried, job, oracle)
    check_samples(feed, plans, carried, oracle)


def check_once(served, carried, job, oracle):
    """Refuse tokens that come twice, and gaps where nothing is dropped."""
    spans: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for *record, offset, size in [*served, *carried]:
        spans.setdefault(tuple(record), []).append((offset, size))
    for parts in spans.values():
        ends = [0, *(offset + size for offset, size in sorted(parts))]
        starts = [offset for offset, _ in sorted(parts)]
        if job.batch.long == "split":
            assert starts == ends[:-1]
        assert all(offset >= end for offset, end in zip(starts, ends, strict=False))


def check_samples(feed, plans, carried, oracle):
    """Samples are counted where they begin: drawn, and delivered or still carried."""
    progress = feed.planner.state().progress
    begins = [0] * len(oracle.job.sources)
    held = [0] * len(begins)
    for counts, segments in (
        (begins, [segment for plan in plans for segment in segments_of(plan)]),
        (held, carried),
    ):
        for segment in segments:
            tokens, before, _ = oracle.of(segment)
            counts[segment[0]] += before is None or before[0] != tokens[0][0]
    assert progress[DELIVERED_SAMPLES].tolist() == begins
    drawn = [sum(pair) for pair in zip(begins, held, strict=True)]
    assert progress[DRAWN_SAMPLES].tolist() == drawn


@given(seeds)
@settings(deadline=None, max_examples=60)
def test_restores_at_any_step_continue_the_stream(seed):
    rng = random.Random(seed)
    job, marked = any_job(rng)
    corpora = [one.corpus for one in marked]
    whole = Feed(start(job), corpora)
    expected, end = planned_to_end(whole, 20)
    state, got = initial_state(job), []
    while len(got) < len(expected):
        feed = Feed(
            start(job, {"dp": rng.choice([1, 2, 4, 8])}, state),
            corpora,
            rng.choice([1, 2, 3]),
            chunk_records_max=rng.randint(1, 50),
            seed=rng.random(),
            repeat_ratio=0.1,
        )
        plans = feed.steps(min(rng.randint(1, 6), len(expected) - len(got)))
        for plan in plans:
            header, frames = plan.encode()
            state = state.apply(StepPlan.decode(header, frames).delta)
        assert state.encode() == feed.planner.state().encode()
        state = StreamState.decode(state.encode())
        got += plans
    assert [plan.stream_digest for plan in got] == [plan.stream_digest for plan in expected]
    assert [plan.valid_tokens for plan in got] == [plan.valid_tokens for plan in expected]
    if end is not None and expected:
        again = Feed(start(job, state=state), corpora, seed=rng.random()).step()
        assert isinstance(again, Ended) and again.reason == end.reason
        assert (again.state is None) == (end.state is None)
        if end.state is not None:
            assert again.state.encode() == end.state.encode()


@given(seeds)
@settings(deadline=None, max_examples=40)
def test_nothing_is_carried_for_ever_and_what_is_stays_bounded(seed):
    rng = random.Random(seed)
    job, corpora = random_job(rng)
    job = replace(job, end="pad", epochs=None, tokens=None, steps=None)
    packing = rng.choice(["best_fit", "best_fit_even"])
    batch = replace(job.batch, packing=packing, row_segments_max=64)
    job = replace(job, batch=batch)
    feed = Feed(start(job), [one.corpus for one in corpora], seed=rng.random())
    kinds = len(job.media)
    for plan in planned(feed, 25):
        state = feed.planner.state()
        carried = state.carried
        if carried.shape[1]:
            age = state.step - int(carried[5].min())
            assert age <= CARRIED_STEPS_MAX * (1 + kinds)
        rows = plan.rows
        assert int(carried[4].sum()) <= rows * plan.row_tokens * 33 // 32 + plan.row_tokens
        for rule, units in zip(job.media, carried[len(carried) - kinds :], strict=True):
            assert int(units.sum()) <= rows * rule.row_units_max * 33 // 32 + rule.row_units_max


@given(seeds)
@settings(deadline=None, max_examples=30)
def test_no_part_of_a_sample_is_served_before_an_earlier_part(seed):
    rng = random.Random(seed)
    job, corpora = any_job(rng)
    job = replace(job, batch=replace(job.batch, long="split"))
    oracle = Oracle(job, corpora)
    served: dict[tuple[int, int, int, int], int] = {}
    for plan in planned(Feed(start(job), [one.corpus for one in corpora]), 20):
        for segment in sorted(segments_of(plan)):
            tokens, before, _ = oracle.of(segment)
            sample = tokens[0][0]
            key = (*segment[:3], sample)
            is_first = before is None or before[0] != sample
            assert is_first or served[key] == segment[3]
            served[key] = segment[3] + segment[4]
