"""Statistics of sources, and the marks that stay with a record's length."""

import numpy as np
import pytest

from federation.model.chunk import Marks
from federation.simulation.length_statistics import SourceLengths, merged_marks
from msd_client.contract.errors import ConfigError


def test_lengths_alone_are_all_records_unless_a_count_is_given():
    assert SourceLengths.of([3, 5]).records == 2
    assert SourceLengths.of([3, 5], 100).epoch_tokens == 400


@pytest.mark.parametrize(
    "lengths",
    [[], [4, 0], [-1], [5.7], [5.0], [None], [float("nan")], [True], ["a"], [[1, 2], [3]], [1 << 31],
     [10**5000], "12", {"a": 1}, 5, None, np.array([1.5]), np.array([[1]]), np.array([True]),
     np.array([1, 1 << 40]), np.array([1 << 63], np.uint64), np.array(["a"])],
)  # fmt: skip
def test_no_or_empty_records_are_refused(lengths):
    with pytest.raises(ConfigError, match="at least 1 token"):
        SourceLengths.of(lengths)


def test_the_first_faulty_entry_is_named():
    with pytest.raises(ConfigError, match=r"^entry 2 of lengths is 5\.7: write integers"):
        SourceLengths.of([1, 2, 5.7, -1])
    with pytest.raises(ConfigError, match=r"^entry 1 of lengths is 0: "):
        SourceLengths.of(np.array([4, 0, -1]))


@pytest.mark.parametrize("records", [0, -1, True, 2.0, "5", [5]])
def test_a_number_of_records_is_at_least_1(records):
    with pytest.raises(ConfigError, match=r"records is .*an integer of at least 1"):
        SourceLengths.of([3], records)


@pytest.mark.parametrize(
    "given", [(3, 4), range(3, 5), np.array([3, 4], np.uint64), [np.int32(3), 4]]
)
def test_integers_of_any_kind_are_lengths(given):
    found = SourceLengths.of(given, np.int64(9))
    assert (found.lengths.tolist(), found.records) == ([3, 4], 9)
    assert found.lengths.dtype == np.int64


def test_marks_go_with_the_records_that_are_picked():
    marks = Marks(
        np.array([1, 0, 2], np.int32),
        np.array([[0, 1, 2, 3], [0, 4, 5, 6], [-1, 7, 8, 0]], np.int32),
    )
    picked = merged_marks(marks, np.array([2, 1, 0, 2]))
    assert picked.counts.tolist() == [2, 0, 1, 2]
    assert picked.table[:, 1].tolist() == [4, 7, 1, 4, 7]
    assert merged_marks(marks, np.array([1])).table.shape == (0, 4)
