"""Groups of sources: where the share of one that is dropped goes, by hand."""

import numpy as np
import pytest

from federation.model.job import MixturePoint, MixtureSchedule
from federation.model.mixture import (
    SHARE_TOTAL,
    MixtureTimeline,
    group_paths,
    integer_shares,
    remaining_shares,
)
from msd_client.contract.errors import ConfigError

NAMES = ("books", "code", "images", "web")
WEIGHTS = {"web": 2 / 4, "code": 1 / 8, "books": 1 / 8, "images": 1 / 4}
GROUPS = {"web": "text", "code": "text/rare", "books": "text/rare"}
"""text 3/4: web 2/3 of it, rare 1/3 of it (code and books the same); images 1/4."""


def left(*dropped, groups=GROUPS):
    schedule = MixtureSchedule("tokens", (MixturePoint(0, WEIGHTS),), groups)
    exhausted = np.array([name in dropped for name in NAMES])
    shares = remaining_shares(
        integer_shares(WEIGHTS, NAMES), exhausted, group_paths(schedule, NAMES)
    )
    return dict(zip(NAMES, (shares / shares.sum()).round(9).tolist(), strict=True))


def test_all_weigh_what_they_weigh_while_none_is_dropped():
    assert left() == {"books": 0.125, "code": 0.125, "images": 0.25, "web": 0.5}


def test_a_weight_goes_to_the_others_of_the_innermost_group():
    assert left("code") == {"books": 0.25, "code": 0, "images": 0.25, "web": 0.5}


def test_where_none_of_it_is_left_it_goes_up_the_tree():
    assert left("code", "books") == {"books": 0, "code": 0, "images": 0.25, "web": 0.75}
    assert left("code", "books", "web")["images"] == 1
    assert left("images") == {
        "books": round(1 / 6, 9),
        "code": round(1 / 6, 9),
        "images": 0,
        "web": round(2 / 3, 9),
    }
    assert left("web") == {"books": 0.375, "code": 0.375, "images": 0.25, "web": 0}


def test_without_groups_the_rest_is_normalised():
    assert left("code", groups={}) == {
        "books": round(1 / 7, 9),
        "code": 0,
        "images": round(2 / 7, 9),
        "web": round(4 / 7, 9),
    }


def test_a_source_of_weight_0_gets_nothing_of_what_becomes_free():
    shares = np.array([0, SHARE_TOTAL // 2, SHARE_TOTAL // 2])
    exhausted = np.array([False, True, False])
    paths = [("text",), ("text",), ()]
    assert remaining_shares(shares, exhausted, paths).tolist() == [0, 0, SHARE_TOTAL]


def test_a_group_of_an_unknown_source_is_refused():
    schedule = MixtureSchedule("tokens", (MixturePoint(0, WEIGHTS),), {"wbe": "text"})
    with pytest.raises(ConfigError, match="group of 'wbe': no source has this name"):
        MixtureTimeline(schedule, NAMES)
