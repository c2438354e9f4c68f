"""A pace is the ranks' own only where they did not wait."""

from __future__ import annotations

import pytest

from msd_daemon.core.pace_watch import PaceWatch


@pytest.mark.parametrize(
    ("looks", "hungry", "step_ns"),
    [(9, 0, 0), (10, 0, 250_000_000), (20, 2, 250_000_000), (20, 3, 0)],
)
def test_it_is_told_where_enough_was_seen_and_ranks_hardly_waited(
    looks: int, hungry: int, step_ns: int
):
    watch = PaceWatch()
    watch.look(0.0, True)
    for number in range(looks):
        watch.look(4.0, number < hungry)
    assert watch.step_ns == step_ns
