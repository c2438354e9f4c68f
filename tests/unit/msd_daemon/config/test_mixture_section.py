"""Weights: the spread over the rest, the order of points, and refusals that name the source."""

import pytest

from federation.model.job import MixturePoint
from msd_daemon.config.job_file import MixtureFile
from msd_daemon.config.mixture_section import resolve_mixture

NAMES = ("code", "math", "web")


def resolve(points, names=NAMES, unit="tokens"):
    faults = []
    mixture = MixtureFile.model_validate({"unit": unit, "points": points})
    return resolve_mixture(mixture, names, faults), [fault.line() for fault in faults]


def test_star_spreads_its_weight_evenly_over_the_sources_not_named():
    schedule, faults = resolve({"0": {"web": 6, "*": 2}})
    assert not faults
    assert schedule.points == (MixturePoint(0, {"code": 1.0, "math": 1.0, "web": 6.0}),)


def test_sources_not_named_weigh_nothing():
    schedule, _ = resolve({"0": {"web": 1}})
    assert schedule.points[0].weights == {"code": 0.0, "math": 0.0, "web": 1.0}


def test_without_a_mixture_all_weigh_the_same():
    faults = []
    schedule = resolve_mixture(None, NAMES, faults)
    assert schedule.unit == "tokens"
    assert set(schedule.points[0].weights.values()) == {1.0}


def test_points_are_sorted_and_keep_their_unit():
    schedule, faults = resolve({"1.8T": {"math": 1}, "0": {"web": 1}, "250B": {"code": 1}})
    assert not faults
    assert [(p.start, p.start_unit) for p in schedule.points] == [
        (0, "steps"),
        (250_000_000_000, "tokens"),
        (1_800_000_000_000, "tokens"),
    ]


@pytest.mark.parametrize(
    ("points", "line"),
    [
        (
            {"0": {"wbe": 1}},
            "mixture.0.wbe: 1.0: no source has this name; write one of code, math, web",
        ),
        ({"0": {"web": 0}}, "all weights are zero (sources code, math, web)"),
        ({"0": {"*": 0}}, "all weights are zero"),
        ({"0": {}}, "all weights are zero"),
        ({"5": {"web": 1}}, "no entry begins at 0; write `0: {...}`"),
        ({"0": {"web": 1}, "5": {"web": 2}, "1T": {"web": 1}}, "steps and tokens are mixed"),
        (
            {"0": {"web": 1}, "1T": {"web": 1}, "1000B": {"web": 2}},
            "the same point as 1T; keep one",
        ),
        ({"0": {"web": 1, "code": 1, "math": 1, "*": 1}}, "every source is named already"),
        ({"0": {"web": 1e30, "code": 1}}, "code would get a share of 1e-30, under 1e-09"),
        ({"0": {"web": 1e308, "code": 1e308, "math": 1e308}}, "the sum of the weights overflows"),
    ],
)
def test_refusals(points, line):
    schedule, (found,) = resolve(points)
    assert schedule is None
    assert line in found


def test_all_points_are_checked_at_once():
    _, faults = resolve({"0": {"x": 1, "web": 1}, "9": {"web": 0}})
    assert len(faults) == 2
