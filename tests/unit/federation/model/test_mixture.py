import math

import pytest

from federation.model.job import MixturePoint, MixtureSchedule
from federation.model.mixture import SHARE_TOTAL, MixtureTimeline, check_weights, integer_shares
from msd_client.contract.errors import ConfigError

NAMES = ("a", "b")


def test_weights_are_normalised():
    shares = integer_shares({"a": 2, "b": 6}, NAMES)
    assert shares.tolist() == [SHARE_TOTAL // 4, 3 * SHARE_TOTAL // 4]
    assert shares.tolist() == integer_shares({"a": 0.25, "b": 0.75}, NAMES).tolist()


def test_only_zero_gives_zero():
    assert integer_shares({"a": 0, "b": 1}, NAMES).tolist() == [0, SHARE_TOTAL]
    assert integer_shares({"a": 1e-9, "b": 1}, NAMES)[0] > 0


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"a": 1e308, "b": 1e308}, "over 1e+15"),
        ({"a": math.nan, "b": 1}, "a: weight nan is not finite"),
        ({"a": math.inf, "b": 1}, "a: weight inf is not finite"),
        ({"a": -1, "b": 1}, "a: weight -1 is negative"),
        ({"a": 0, "b": 0.0}, "all weights are 0"),
        ({"a": 1}, "b: no weight is given"),
        ({"a": 1, "b": 1, "c": 1}, "c: no source has this name"),
        ({"a": "1", "b": 1}, "a: weight '1' is a str"),
        ({"a": True, "b": 1}, "a: weight True is a bool"),
        ({"a": 1e-12, "b": 1}, "a: weight 1e-12 is a share of"),
    ],
)
def test_impossible_weights_are_refused_by_source(weights, named):
    with pytest.raises(ConfigError) as caught:
        check_weights(weights, NAMES, "mixture change")
    assert named in caught.value.message
    assert "mixture change" in caught.value.message


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check_weights({"a": -1, "c": 2}, NAMES, "x")
    assert len(caught.value.message.splitlines()) == 4


def points(*entries):
    return MixtureSchedule("tokens", tuple(MixturePoint(*entry) for entry in entries))


def test_points_pass_by_step_and_by_tokens():
    timeline = MixtureTimeline(
        points(
            (0, {"a": 1, "b": 1}),
            (10, {"a": 1, "b": 0}),
            (5000, {"a": 0, "b": 1}, "tokens"),
        ),
        NAMES,
    )
    assert timeline.passed(0, 0, 0) == 1
    assert timeline.passed(1, 9, 400) == 1
    assert timeline.passed(1, 10, 400) == 2
    assert timeline.passed(2, 11, 4999) == 2
    assert timeline.passed(2, 11, 5000) == 3
    assert timeline.shares(3).tolist() == [0, SHARE_TOTAL]


def test_a_left_out_source_weighs_nothing_in_a_schedule():
    assert MixtureTimeline(points((0, {"b": 3})), NAMES).shares(1).tolist() == [0, SHARE_TOTAL]


def test_a_schedule_starts_at_zero():
    with pytest.raises(ConfigError, match="start at 0"):
        MixtureTimeline(points((5, {"a": 1, "b": 1})), NAMES)
    with pytest.raises(ConfigError, match="point 0"):
        MixtureTimeline(points((0, {"a": 0, "b": 0})), NAMES)
