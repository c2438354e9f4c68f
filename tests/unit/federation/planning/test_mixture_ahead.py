"""The largest share of each source within a number of steps."""

import pytest

from federation.model.job import MixturePoint, MixtureSchedule
from federation.planning.mixture_ahead import POINTS_MAX, MixtureAhead

NAMES = ["a", "b", "c"]


def ahead(points, unit="tokens"):
    return MixtureAhead(MixtureSchedule(unit, tuple(points)), NAMES)


def look(made, *, step=0, tokens=0, steps=10, changes=()):
    found = made.shares(
        [0.5, 0.5, 0.0], step=step, tokens=tokens, steps=steps, step_tokens=100, changes=changes
    )
    return pytest.approx([0.5, 0.5, 0.0]) == found.tolist(), [round(x, 6) for x in found.tolist()]


POINTS = [
    MixturePoint(0, {"a": 1, "b": 1, "c": 0}),
    MixturePoint(20, {"a": 1, "b": 0, "c": 3}),
    MixturePoint(30, {"a": 1, "b": 3, "c": 0}),
]


def test_a_point_is_seen_once_it_is_near_enough():
    made = ahead(POINTS)
    assert look(made, step=9)[0]
    assert look(made, step=10)[1] == [0.5, 0.5, 0.75]
    assert look(made, step=10, steps=20)[1] == [0.5, 0.75, 0.75]
    assert look(made, step=30)[0]  # it is in force, no longer ahead


def test_points_by_tokens_are_as_far_as_their_tokens():
    made = ahead([POINTS[0], MixturePoint(2000, {"a": 0, "b": 0, "c": 1}, "tokens")])
    assert look(made, tokens=900)[0]
    assert look(made, tokens=1000)[1] == [0.5, 0.5, 1.0]


def test_accepted_changes_count_as_points_do():
    made = ahead(POINTS[:1])
    assert look(made, changes=[(11, [0, 0, 7])])[0]
    assert look(made, changes=[(10, [0, 0, 7])])[1] == [0.5, 0.5, 1.0]


def test_of_a_long_ramp_both_ends_are_seen():
    ramp = [MixturePoint(n, {"a": 1, "b": n / 1000, "c": 1 - n / 1000}) for n in range(1000)]
    found = ahead(ramp).shares([0.5, 0.5, 0.0], step=0, tokens=0, steps=999, step_tokens=1)
    assert found[1] == pytest.approx(max(0.5, 0.999 / 2))
    assert found[2] == pytest.approx(0.999 / 2, rel=1e-3)
    assert len(ramp) > POINTS_MAX
