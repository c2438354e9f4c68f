"""Curves between points as pieces, and groups in the file: by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.model.job import MixturePoint
from msd_daemon.config.job_file import MixtureFile
from msd_daemon.config.mixture_pieces import PIECES_DEFAULT, PIECES_MAX, VALUES_MAX, pieces_max
from msd_daemon.config.mixture_section import resolve_mixture

NAMES = ("code", "math", "web")


def resolve(points, names=NAMES, **keys):
    faults, notes = [], []
    mixture = MixtureFile.model_validate({"points": points} | keys)
    found = resolve_mixture(mixture, names, faults, notes=notes)
    return found, [fault.line() for fault in faults], notes


def test_a_line_goes_through_the_middle_of_each_piece():
    found, faults, notes = resolve(
        {"0": {"web": 8}, "100": {"web": 1, "code": 1}}, interpolate="linear", every=25
    )
    assert not faults
    # Middles at 12, 37, 62 and 87: shares go from 1 and 0 to a half each.
    parts = [0.06, 0.185, 0.31, 0.435]
    assert [(p.start, p.weights["code"], p.start_unit) for p in found.points[:-1]] == [
        (start, part, "steps") for start, part in zip((0, 25, 50, 75), parts, strict=True)
    ]
    assert [p.weights["web"] for p in found.points[:-1]] == [1 - part for part in parts]
    assert found.points[-1] == MixturePoint(100, {"code": 1, "math": 0, "web": 1})
    assert notes == ["mixture: linear, 5 pieces, each of 25 steps"]


def test_half_a_cosine_starts_and_ends_flat():
    found, _, _ = resolve({"0": {"web": 1}, "400": {"code": 1}}, interpolate="cosine", every=1)
    code = [point.weights["code"] for point in found.points]
    assert len(code) == 401
    assert code[200] == pytest.approx(0.5)
    assert code[100] == pytest.approx((1 - math.cos(math.pi / 4)) / 2)
    assert code == sorted(code)
    assert code[1] < 1e-4 < code[20]


def test_pieces_count_tokens_where_points_do():
    found, _, notes = resolve({"0": {"web": 1}, "1B": {"code": 1}}, interpolate="linear")
    assert len(found.points) == PIECES_DEFAULT + 1
    assert [p.start for p in found.points[:3]] == [0, 10_000_000, 20_000_000]
    assert {p.start_unit for p in found.points[1:]} == {"tokens"}
    assert found.points[0].start_unit == "steps"
    assert notes == ["mixture: linear, 101 pieces, each of a hundredth of each stretch"]


@given(
    st.integers(1, 5000),
    st.integers(1, 400),
    st.integers(1, 200),
    st.sampled_from(["linear", "cosine"]),
)
def test_pieces_are_shares_that_cover_every_step_in_order(first, second, every, kind):
    points = {"0": {"web": 1}, str(first): {"code": 3, "web": 1}, str(first + second): {"math": 1}}
    found, faults, _ = resolve(points, interpolate=kind, every=every)
    if faults:
        assert "pieces, at most 4096 fit" in faults[0]
        return
    starts = [point.start for point in found.points]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert starts[-1] == first + second
    assert len(starts) <= pieces_max(3)
    for point in found.points[:-1]:
        assert math.fsum(point.weights.values()) == pytest.approx(1)
    # No step's share of code is above the largest of the points, and web only falls.
    assert max(point.weights["code"] for point in found.points) <= 0.75


def test_too_many_pieces_are_refused_with_a_width_that_fits():
    _, (line,), _ = resolve({"0": {"web": 1}, "5000": {"code": 1}}, interpolate="linear", every=1)
    assert line == (
        f"mixture.every: 1: gives 5001 pieces, at most {PIECES_MAX} fit (sources times pieces are at "
        f"most {VALUES_MAX}); write 2 or more"
    )
    found, _, _ = resolve({"0": {"web": 1}, "5000": {"code": 1}}, interpolate="linear", every=2)
    assert len(found.points) == 2501
    assert pieces_max(306) == VALUES_MAX // 306


def test_a_width_in_the_other_unit_is_refused():
    _, (line,), _ = resolve(
        {"0": {"web": 1}, "5000": {"code": 1}}, interpolate="linear", every="1B"
    )
    assert "counts tokens, the points are in steps; write the length of a piece in steps" in line


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"every": 5}, "nothing is interpolated"),
        ({"every": 0, "interpolate": "linear"}, "is no width"),
        ({"schedule": "mine:fn"}, "gives a schedule and points or interpolate"),
    ],
)
def test_keys_that_do_not_fit_together(keys, said):
    with pytest.raises(ValueError, match=said):
        MixtureFile.model_validate({"points": {"0": {"web": 1}}} | keys)


def test_a_group_is_weighed_as_one():
    found, faults, _ = resolve(
        {
            "0": {
                "text": {
                    "weight": 3,
                    "of": {"web": 2, "rare": {"weight": 1, "of": {"code": 5, "math": 5}}},
                },
                "images": 1,
            }
        },
        ("code", "images", "math", "web"),
    )
    assert not faults
    assert found.points[0].weights == {"code": 0.5, "images": 1.0, "math": 0.5, "web": 2.0}
    assert found.groups == {"code": "text/rare", "math": "text/rare", "web": "text"}


@pytest.mark.parametrize(
    ("points", "line"),
    [
        (
            {"0": {"web": {"weight": 1, "of": {"code": 1}}}},
            'mixture.0.web: "web": is no name for a group: a source has it; write another',
        ),
        (
            {"0": {"t": {"weight": 1, "of": {"code": 0}}, "web": 1}},
            "mixture.0.t.of: 0.0: nothing inside has a weight that could be a part of it",
        ),
        (
            {"0": {"t": {"weight": 1, "of": {"code": 1}}, "code": 1}},
            "mixture.0.code: 1.0: the source stands twice at this point; keep one",
        ),
        (
            {"0": {"t": {"weight": 1, "of": {"code": 1}}}, "9": {"code": 1}},
            "mixture.9.code: 1.0: in no group, mixture.0.t.of.code puts it in group t; keep",
        ),
        (
            {"0": {"t": {"weight": 1, "of": {"wbe": 1}}}},
            "mixture.0.wbe: 1.0: no source has this name",
        ),
    ],
)
def test_groups_that_cannot_be(points, line):
    found, faults, _ = resolve(points)
    assert found is None
    assert line in faults[0]
