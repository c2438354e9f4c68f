"""Groups of a microbatch's segments on their way to a constructor and into the slot."""

from __future__ import annotations

import numpy as np
import pytest

from msd_daemon.gather.group_column import decode_groups, encode_groups


def test_groups_are_counted_from_nought_and_survive_the_wire() -> None:
    begins = np.array([True, False, True, True, False, False])
    sent = encode_groups(begins)
    assert decode_groups(b"12345" + sent, 6, 5).tolist() == [0, 0, 1, 2, 2, 2]
    assert decode_groups(b"", 0, 0).tolist() == []


@pytest.mark.parametrize("groups", [[1, 1], [0, 2], [0, -1], [0, 1, 0]])
def test_groups_that_no_daemon_sends_are_refused(groups: list[int]) -> None:
    with pytest.raises(ValueError, match="do not count from 0"):
        decode_groups(np.array(groups, "<i4").tobytes(), len(groups), 0)


def test_a_short_task_is_refused() -> None:
    with pytest.raises(ValueError, match="groups of 2 segments need 8 bytes from 0 on"):
        decode_groups(b"\0" * 7, 2, 0)
