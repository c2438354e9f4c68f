"""Groups from chunk to plan: when they are known, what no row holds, what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from federation.model.chunk import MARK_GROUP, ChunkMeta, Marks, RecordStatus
from federation.model.job import BatchRule, RampPoint, ResolvedJob
from federation.model.plan import StepPlan
from federation.planning.cuts import CUMULATIVE, INDEX
from federation.planning.extra_rows import ExtraRows
from federation.planning.fragments import FragmentQueue
from federation.planning.groups import RowLimits
from federation.planning.run_marks import continued_records
from federation.simulation.length_statistics import SourceLengths
from federation.simulation.statistic_feed import StatisticFeed, simulated_job
from msd_client.contract.errors import ConfigError, ProtocolError, StateMismatchError
from msd_client.contract.state import CARRIED_COLUMNS, DROPPED_COLUMNS, DROPPED_TOKENS
from tests.support.grouped import (
    BY_FIELD,
    BY_RECORD,
    check_whole_groups,
    grouped_corpus,
    grouped_spec,
)
from tests.support.metadata import Feed, initial_state, make_job, make_spec, start

FIRST, LATER = [], [(MARK_GROUP, 0, 0, 0)]
GROUPS = ExtraRows(has_groups=True)
LONG = DROPPED_COLUMNS.index("long_skipped")


def chunk(
    lengths: list[int],
    lines: list[Any],
    first: int = 0,
    *,
    is_end: bool = False,
    statuses: list[int] | None = None,
    block: int = 0,
) -> ChunkMeta:
    counts = np.array([len(one) for one in lines], np.int32)
    table = np.array([line for one in lines for line in one], np.int32).reshape(-1, 4)
    return ChunkMeta(
        0,
        block,
        first,
        np.array(lengths, np.int32),
        np.array(statuses or [0] * len(lengths), np.uint8),
        is_end,
        2,
        marks=Marks(counts, table),
    )


def queue(unit: Any = "tokens", **limits: int) -> FragmentQueue:
    spec = grouped_spec("pairs", BY_FIELD, has_masks=False)
    rule = RowLimits(**{"places": 10, "segments": 3} | limits)
    return FragmentQueue(spec, 0, 10, "split", unit=unit, epochs_max=1, extras=GROUPS, limits=rule)


def known(made: FragmentQueue) -> list[tuple[int, int]]:
    """Return (index, how many of its group follow) of each fragment."""
    found: list[tuple[int, int]] = [tuple(c) for c in made.columns[[INDEX, -1]].T.tolist()]
    return found


def test_a_group_is_known_once_the_next_one_begins() -> None:
    made = queue()
    assert not made.add(chunk([3, 4], [FIRST, LATER]), 0)
    assert known(made) == []
    assert made.add(chunk([2, 1], [LATER, FIRST], 2), 0)
    assert known(made) == [(0, 2), (1, 1), (2, 0)]
    assert made.columns[CUMULATIVE].tolist() == [9, 9, 9], "a group is due as one"
    made.add(chunk([], [], 4, is_end=True), 0)
    assert known(made) == [(0, 2), (1, 1), (2, 0), (3, 0)]


def test_a_block_ends_its_last_group() -> None:
    made = queue("samples")
    made.add(chunk([3, 4], [FIRST, LATER], is_end=True), 0)
    assert known(made) == [(0, 1), (1, 0)]
    made.add(chunk([5, 5], [FIRST, LATER], is_end=True, block=1), 0)
    assert known(made)[2:] == [(0, 1), (1, 0)]
    assert made.columns[CUMULATIVE].tolist() == [2, 2, 4, 4]
    assert made.is_complete


@pytest.mark.parametrize(
    ("lengths", "limits"),
    [
        ([6, 5], {}),
        ([11, 1], {}),
        ([2, 2, 2, 2], {}),
        ([5, 5], {"multiple": 4}),
    ],
)
def test_what_no_row_holds_is_passed_over_whole(lengths: list[int], limits: dict[str, int]) -> None:
    made = queue(**limits)
    lines = [FIRST, *[LATER] * (len(lengths) - 1)]
    made.add(chunk([2, *lengths, 2], [FIRST, *lines, FIRST], is_end=True), 0)
    last = len(lengths) + 1
    assert known(made) == [(0, 0), (last, 0)]
    before, _ = made.pass_records(0, 0, 2, 0)
    assert not before.any(), "they count once the draw is behind them"
    counts, _ = made.pass_records(0, last, 2, 0)
    assert counts[LONG] == len(lengths)
    assert counts[DROPPED_TOKENS] == sum(lengths)


def test_a_bad_record_leaves_its_group_together_and_has_its_own_reason() -> None:
    made = queue()
    bad = int(RecordStatus.BAD_SYNTAX)
    lines = [FIRST, LATER, LATER, FIRST, LATER]
    made.add(chunk([3, 0, 4, 0, 5], lines, is_end=True, statuses=[0, bad, 0, bad, 0]), 0)
    assert known(made) == [(0, 1), (2, 0), (4, 0)]
    counts, _ = made.pass_records(0, 2, 4, 0)
    assert counts[DROPPED_COLUMNS.index("bad_syntax")] == 1
    counts, _ = made.pass_records(0, 4, 5, 0)
    assert counts[DROPPED_COLUMNS.index("bad_syntax")] == 1
    assert not counts[LONG]


@pytest.mark.parametrize(
    "lines",
    [
        [LATER, FIRST],
        [FIRST, [(MARK_GROUP, 1, 0, 0)]],
        [FIRST, [(MARK_GROUP, 0, 1, 0)]],
        [FIRST, [*LATER, *LATER]],
        [FIRST, [(MARK_GROUP - 1, 0, 0, 0)]],
    ],
)
def test_marks_that_no_loader_sends_are_refused(lines: list[Any]) -> None:
    with pytest.raises(ProtocolError, match=r"source pairs: marks"):
        queue().add(chunk([3, 3], lines), 0)


def test_a_source_without_groups_has_no_such_mark() -> None:
    spec = make_spec("text")
    made = FragmentQueue(spec, 0, 10, "split", unit="tokens", epochs_max=1, extras=GROUPS)
    with pytest.raises(ProtocolError, match="kind -3"):
        made.add(chunk([3, 3], [FIRST, LATER]), 0)


def test_continued_records_of_a_part_of_a_chunk() -> None:
    marks = chunk([1] * 4, [FIRST, [*LATER, (-1, 0, 1, 0)], [(-1, 0, 1, 0)], LATER]).marks
    assert continued_records(marks, 0, 4).tolist() == [False, True, False, True]
    assert continued_records(marks, 1, 2).tolist() == [True, False]
    assert continued_records(None, 1, 2).tolist() == [False, False]


def job_of(batch: BatchRule, **options: Any) -> ResolvedJob:
    return make_job([grouped_spec("pairs", BY_FIELD, has_masks=False)], batch, **options)


@pytest.mark.parametrize("packing", ["concat", "padded"])
def test_packings_that_have_no_row_for_a_group_are_refused(packing: Any) -> None:
    with pytest.raises(ConfigError, match=rf"packing {packing} does not fit sources with group"):
        start(job_of(BatchRule(2, 16, packing=packing)))


def test_rows_that_become_shorter_are_refused() -> None:
    batch = BatchRule(2, 16, row_tokens_ramp=(RampPoint(3, 8),))
    with pytest.raises(ConfigError, match="and groups, cannot be cut"):
        start(job_of(batch))


def test_a_carried_group_has_to_fit_the_rows_of_a_changed_job() -> None:
    job = job_of(BatchRule(2, 16, row_segments_max=4))
    carried = np.array([[0, 0, 0, 0, 5, 0, 2], [0, 0, 1, 0, 5, 0, 1], [0, 0, 2, 0, 5, 0, 0]]).T
    state = replace(
        initial_state(job), carried=carried, carried_columns=(*CARRIED_COLUMNS, "follow")
    )
    assert start(job, state=state).carried()
    for change, told in (
        ({"row_tokens": 14}, "group of 15 tokens, a row of the job holds 14"),
        ({"row_segments_max": 2}, "group of 3 segments, a row of the job holds 2"),
    ):
        other = replace(job, batch=replace(job.batch, **change))
        with pytest.raises(StateMismatchError, match=told):
            start(other, state=state)


def test_the_digest_tells_groups_and_jobs_without_keep_theirs() -> None:
    spec = grouped_spec("pairs", BY_FIELD)
    batch = BatchRule(2, 16)
    jobs = [
        make_job([replace(spec, group=rule)], batch)
        for rule in (None, BY_FIELD, replace(BY_FIELD, field="other"), BY_RECORD)
    ]
    assert len({job.digest() for job in jobs}) == 4
    assert len({job.sample_digest() for job in jobs}) == 4
    assert "group" not in jobs[0]._stream_map()["sources"][0]
    assert not jobs[0].has_groups
    assert jobs[1].has_groups


def test_a_plan_says_which_segments_belong_together_and_damage_is_refused() -> None:
    job = job_of(BatchRule(4, 64))
    corpus = grouped_corpus(job.sources[0], random.Random(3), 64)
    plan = Feed(start(job, {"dp": 2}), [corpus.corpus]).steps(1)[0]
    groups = check_whole_groups(plan, [corpus], job)
    assert any(len(group.samples) > 1 for _, _, group in groups)
    header, frames = plan.encode()
    again = StepPlan.decode(header, frames)
    assert np.array_equal(again.group_begins, plan.group_begins)
    assert again.encode_dp is None
    begun = bytes(frames[5])
    for bad in (begun[:-1], b"\0" + begun[1:], b"\2" * len(begun)):
        with pytest.raises(ProtocolError, match="frame of groups"):
            StepPlan.decode(header, [*frames[:5], bad])
    with pytest.raises(ProtocolError, match="5 or 6 frames"):
        StepPlan.decode(header, frames[:5])


def test_a_simulation_draws_whole_groups() -> None:
    job = simulated_job(job_of(BatchRule(4, 64)))
    lines = [FIRST, LATER, FIRST, LATER, LATER, FIRST]
    made = chunk([10, 12, 20, 5, 6, 9], lines)
    statistics = SourceLengths(made.lengths.astype(np.int64), made.status, 5000, made.marks)
    assert statistics.group_starts.tolist() == [0, 2, 5]
    meta = StatisticFeed([statistics], 1).next_block(0)
    assert len(meta.lengths) == 4096
    continued = continued_records(meta.marks, 0, 4096)
    assert not continued[0]
    pairs = list(zip(meta.lengths.tolist(), continued.tolist(), strict=True))
    assert {pair for pair in pairs if pair[1]} == {(12, True), (5, True), (6, True)}
    assert all(pairs[n + 1] == (12, True) for n, pair in enumerate(pairs[:-1]) if pair[0] == 10)
    planner = start(job)
    feed = StatisticFeed([statistics], 1)
    for _ in range(5):
        plan = feed.next_step(planner)
        assert isinstance(plan, StepPlan)
        assert plan.group_begins is not None
