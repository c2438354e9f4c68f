"""Statistics of sources, and the marks that stay with a record's length."""

import numpy as np
import pytest

from federation.model.chunk import Marks
from federation.simulation.length_statistics import SourceLengths, merged_marks
from msd_client.contract.errors import ConfigError


def test_lengths_alone_are_all_records_unless_a_count_is_given():
    assert SourceLengths.of([3, 5]).records == 2
    assert SourceLengths.of([3, 5], 100).epoch_tokens == 400


@pytest.mark.parametrize("lengths", [[], [4, 0], [-1]])
def test_no_or_empty_records_are_refused(lengths):
    with pytest.raises(ConfigError, match="at least 1 token"):
        SourceLengths.of(lengths)


def test_marks_go_with_the_records_that_are_picked():
    marks = Marks(
        np.array([1, 0, 2], np.int32),
        np.array([[0, 1, 2, 3], [0, 4, 5, 6], [-1, 7, 8, 0]], np.int32),
    )
    picked = merged_marks(marks, np.array([2, 1, 0, 2]))
    assert picked.counts.tolist() == [2, 0, 1, 2]
    assert picked.table[:, 1].tolist() == [4, 7, 1, 4, 7]
    assert merged_marks(marks, np.array([1])).table.shape == (0, 4)
