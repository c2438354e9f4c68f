"""Records with marks: what a loader may not send, where they are cut, what is passed over."""

import dataclasses

import numpy as np
import pytest

from federation.model.chunk import FAULT_STATUSES, ChunkMeta, Marks, RecordStatus
from federation.model.job import ErrorPolicy
from federation.planning.cuts import INDEX, LENGTH, OFFSET
from federation.planning.extra_rows import ExtraRows
from federation.planning.fragments import FragmentQueue
from msd_client.contract.errors import DataError, ErrorBudgetExceededError, ProtocolError
from msd_client.contract.position import pack_block_key
from msd_client.contract.state import DROPPED_COLUMNS, DROPPED_TOKENS
from tests.support.marked import marked_spec

IMAGES = ExtraRows(True, True, ("image",), (10,))


def chunk(lengths, lines, statuses=None, first=0, is_block_end=True):
    """Return a chunk; `lines` are the marks of each record."""
    counts = np.array([len(one) for one in lines], np.int32)
    table = np.array([line for one in lines for line in one], np.int32).reshape(-1, 4)
    return ChunkMeta(
        0,
        0,
        first,
        np.array(lengths, np.int32),
        np.array(statuses or [0] * len(lengths), np.uint8),
        is_block_end,
        1,
        marks=Marks(counts, table),
    )


def queue(long="split", row_tokens=10, extras=IMAGES, cursor=(0, 0, 0), **options):
    spec = marked_spec("web", **options)
    return FragmentQueue(
        spec,
        0,
        row_tokens,
        long,
        unit="tokens",
        epochs_max=1,
        cursor=cursor,
        record_order=cursor[1],
        extras=extras,
    )


def cut(lengths, lines, **options):
    """Return (index, offset, length, begins, trained, units) of each fragment."""
    made = queue(**options)
    made.add(chunk(lengths, lines), 0)
    rows = made.columns[[INDEX, OFFSET, LENGTH, *range(-made_extras(made), 0)]]
    return [tuple(column) for column in rows.T.tolist()]


def made_extras(made):
    return made.columns.shape[0] - 7


def test_a_fragment_knows_what_is_trained_of_it() -> None:
    # Tokens 2, 3 and 9 of the first record are untrained, all but the last of the second.
    lines = [[(-1, 2, 2, 0), (-1, 9, 1, 0)], [(-1, 0, 4, 0)], []]
    assert cut([12, 5, 3], lines) == [
        (0, 0, 10, 1, 2 * 7 + 1, 0),
        (0, 10, 2, 0, 2 * 2 + 1, 0),
        (1, 0, 5, 1, 2, 0),
        (2, 0, 3, 1, 2 * 3 + 1, 0),
    ]


def test_no_cut_falls_inside_an_item() -> None:
    # An item of 4 tokens lies over the end of the first row.
    assert cut([15], [[(0, 8, 4, 3)]]) == [(0, 0, 8, 1, 17, 0), (0, 8, 7, 0, 2 * 3, 3)]
    # One that ends or begins there is no obstacle.
    assert [found[2] for found in cut([15], [[(0, 6, 4, 3)]])] == [10, 5]
    assert [found[2] for found in cut([15], [[(0, 10, 4, 3)]])] == [10, 5]
    # One of a whole row stands alone.
    assert [found[2] for found in cut([25], [[(0, 8, 10, 3)]])] == [8, 10, 7]


def test_units_cut_a_sample_before_the_item_that_is_too_much() -> None:
    items = [(0, at, 1, 4) for at in (1, 3, 5, 7, 8)]
    assert cut([9], [items]) == [
        (0, 0, 5, 1, 2 * 3 + 1, 8),
        (0, 5, 3, 0, 2 * 1, 8),
        (0, 8, 1, 0, 0, 4),
    ]
    assert cut([9], [items], long="truncate") == [(0, 0, 5, 1, 7, 8)]
    assert cut([9], [items], long="skip") == []


def test_each_modality_has_a_cap_of_its_own() -> None:
    extras = ExtraRows(False, True, ("image", "audio"), (10, 4))
    lines = [[(0, 0, 1, 6), (1, 1, 1, 2), (0, 2, 1, 4), (1, 3, 1, 2), (1, 4, 1, 1)]]
    assert cut([5], lines, extras=extras) == [(0, 0, 4, 0, 10, 4), (0, 4, 1, 0, 0, 1)]


def test_a_sample_ends_where_the_next_begins() -> None:
    lines = [[(-2, 3, 0, 0), (-1, 3, 2, 0), (-2, 15, 0, 0)], [], [(-2, 1, 0, 0)]]
    assert cut([17, 4, 2], lines) == [
        (0, 0, 3, 1, 7, 0),
        (0, 3, 10, 1, 2 * 8, 0),
        (0, 13, 2, 0, 5, 0),
        (0, 15, 2, 1, 5, 0),
        (1, 0, 4, 1, 9, 0),
        (2, 0, 1, 1, 3, 0),
        (2, 1, 1, 1, 3, 0),
    ]
    assert [found[1:3] for found in cut([17, 4, 2], lines, long="skip")] == [
        (0, 3), (15, 2), (0, 4), (0, 1), (1, 1)
    ]  # fmt: skip


def test_chunks_without_marks_are_trained_whole() -> None:
    made = queue()
    made.add(ChunkMeta(0, 0, 0, np.array([12, 3]), np.zeros(2, np.uint8), True, 1), 0)
    assert made.columns[7:].tolist() == [[1, 0, 1], [21, 5, 7], [0, 0, 0]]


BAD = {
    "a kind below those there are": [[(-3, 0, 1, 0)]],
    "a modality that the job has not": [[(1, 0, 1, 1)]],
    "before its record": [[(-1, -1, 2, 0)]],
    "behind its record": [[(-1, 5, 2, 0)]],
    "a sample at its record's begin": [[(-2, 0, 0, 0)]],
    "a sample at its record's end": [[(-2, 6, 0, 0)]],
    "a sample with tokens": [[(-2, 3, 1, 0)]],
    "two samples at one place": [[(-2, 3, 0, 0), (-2, 3, 0, 0)]],
    "an item without tokens": [[(0, 3, 0, 1)]],
    "an item without units": [[(0, 3, 1, 0)]],
    "an item of too many units": [[(0, 3, 1, 11)]],
    "negative tokens": [[(-1, 3, -1, 0)]],
    "items that overlap": [[(0, 0, 3, 1), (0, 2, 1, 1)]],
    "marks out of order": [[(-1, 4, 1, 0), (-1, 0, 1, 0)]],
    "a sample inside an item": [[(0, 1, 3, 1), (-2, 2, 0, 0)]],
    "numbers beyond all": [[(-1, (1 << 31) - 1, (1 << 31) - 1, 0)]],
    "kinds beyond all": [[(-(1 << 31), 0, 1, 1)]],
}


@pytest.mark.parametrize("lines", BAD.values(), ids=BAD.keys())
def test_marks_that_do_not_fit_are_refused(lines) -> None:
    with pytest.raises(ProtocolError, match="source web: marks of the chunk at block 0, 0: mark"):
        queue().add(chunk([6], lines), 0)


def test_an_item_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ProtocolError, match="of 11 tokens and 1 units, fits neither"):
        queue().add(chunk([20], [[(0, 3, 11, 1)]]), 0)


def test_marks_of_a_record_that_is_passed_over_are_refused() -> None:
    with pytest.raises(ProtocolError, match="record of 0 tokens"):
        queue().add(chunk([6], [[(-1, 0, 1, 0)]], [RecordStatus.UNDECODABLE]), 0)


def test_marks_that_the_job_has_no_row_for_are_refused() -> None:
    for extras, line in (
        (ExtraRows(), (-1, 0, 1, 0)),
        (ExtraRows(), (-2, 1, 0, 0)),
        (ExtraRows(has_begins=True), (-1, 0, 1, 0)),
        (ExtraRows(has_begins=True), (0, 0, 1, 1)),
        (ExtraRows(has_trained=True), (-2, 1, 0, 0)),
        (ExtraRows(has_trained=True), (0, 0, 1, 1)),
    ):
        with pytest.raises(ProtocolError, match="mark 0 of kind"):
            queue(extras=extras).add(chunk([6], [[line]]), 0)


@pytest.mark.parametrize("change", ["counts", "negative", "sum", "columns", "flat", "status"])
def test_columns_of_other_lengths_are_refused(change) -> None:
    meta = chunk([6, 6], [[(-1, 0, 1, 0)], [(-1, 0, 1, 0)]])
    counts, table = meta.marks.counts, meta.marks.table
    marks = {
        "counts": Marks(counts[:1], table[:1]),
        "negative": Marks(np.array([3, -1], np.int32), table),
        "sum": Marks(counts, table[:1]),
        "columns": Marks(counts, table[:, :3]),
        "flat": Marks(counts, table.reshape(-1)),
        "status": meta.marks,
    }[change]
    status = meta.status[:1] if change == "status" else meta.status
    with pytest.raises(ProtocolError, match="do not belong to 2 records"):
        queue().add(dataclasses.replace(meta, marks=marks, status=status), 0)


def test_a_record_cut_inside_an_item_when_the_state_was_saved_is_noticed() -> None:
    made = queue(cursor=(0, 0, 5))
    with pytest.raises(DataError, match=r"5 tokens of the record .* ends inside an item"):
        made.add(chunk([9], [[(0, 4, 3, 1)]]), 0)
    made = queue(cursor=(0, 0, 12))
    with pytest.raises(DataError, match="had at least 12 tokens"):
        made.add(chunk([9], [[]]), 0)


def test_every_status_has_a_column_and_the_faults_are_faults() -> None:
    statuses = [status for status in RecordStatus if status]
    made = queue(on_error=ErrorPolicy("skip", 0.5, 100))
    made.add(chunk([0] * len(statuses) + [4], [[]] * (len(statuses) + 1), [*statuses, 0]), 0)
    counts, _ = made.pass_records(0, len(statuses), 4, 0)
    names = [status.name.lower() for status in statuses]
    assert [DROPPED_COLUMNS[place] for place in np.flatnonzero(counts)] == sorted(
        names, key=DROPPED_COLUMNS.index
    )
    assert counts.max() == 1 and counts[DROPPED_TOKENS] == 0
    faults = [place for place, status in enumerate(statuses) if status in FAULT_STATUSES]
    untrained = statuses.index(RecordStatus.UNTRAINED)  # of chats these are watched too
    assert made.faults_in_window(len(statuses)) == [*faults, ~untrained]


@pytest.mark.parametrize("status", list(RecordStatus)[1:])
def test_an_error_budget_counts_faults_alone(status) -> None:
    made = queue(on_error=ErrorPolicy("skip", 0.02, 100))
    made.add(chunk([0] * 3 + [4], [[]] * 4, [status] * 3 + [0]), 0)
    # Of a source of chats, 3 in a window of 100 without a trained token are over 1 % (E12).
    is_counted = status in FAULT_STATUSES or status == RecordStatus.UNTRAINED
    assert isinstance(made.failure, ErrorBudgetExceededError) == is_counted
    assert made.columns.shape[1] == (not is_counted)


@pytest.mark.parametrize("is_marked", [True, False])
def test_the_end_of_a_pass_counts_nothing_that_lies_behind_it(is_marked) -> None:
    made = FragmentQueue(
        marked_spec("web"),
        0,
        10,
        "truncate",
        unit="tokens",
        epochs_max=1,
        is_wrapped=True,
        extras=IMAGES,
    )
    first = chunk([4, 3], [[], []])
    behind = dataclasses.replace(chunk([15, 3], [[], []]), block_key=pack_block_key(1, 0, 0))
    for meta in (first, behind):
        made.add(meta if is_marked else dataclasses.replace(meta, marks=None), 0)
    assert (made.end_order, made.is_complete) == (2, True)
    counts, _ = made.pass_records(0, made.end_order, 0, 0)
    assert not counts.any()
    made.is_open = True
    assert made.columns[LENGTH].tolist() == [4, 3, 10, 3]
    counts, _ = made.pass_records(behind.block_key, 2, 10, 0)
    assert counts[DROPPED_COLUMNS.index("long_truncated")] == 1
    assert counts[DROPPED_TOKENS] == 5
