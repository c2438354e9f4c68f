"""The page of `msdctl report` is one file that loads nothing, whatever names hold."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_client.msdctl.report_page import page
from msd_client.msdctl.svg_chart import POINTS_MAX, band_chart, line_chart, thinned


class Shape(HTMLParser):
    """Checks that elements are closed in order, and keeps what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def shape_of(text: str) -> Shape:
    shape = Shape()
    shape.feed(text)
    assert not shape.open
    return shape


def job(name: str = "gpt", points: int = 50) -> dict[str, Any]:
    return {
        "name": name, "id": "ab", "digest": "cd", "state": "running", "mesh": [["dp", 4]],
        "verdict": {"side": "trainer", "level": "fine", "summary": name, "evidence": [name],
                    "command": name, "since": 1.0},
        "sources": [{"name": name, "wanted": 0.5, "realised": 0.5, "dropped": {name: 2}}],
        "ranks_now": [{"rank": 0, "node": name, "load": None}],
        "workers": [{"role": name, "pid": 3, "cpu_s": 1.0, "memory": {}}],
        "history": [
            {"at": 1000.0 + 10 * n, "span_s": 10.0, "cause": "none" if n < 20 else "disk_slow",
             "tokens_per_s": 5.0 * n, "wait_ratio": 0.1} for n in range(points)
        ],
    }  # fmt: skip


def test_the_page_has_charts_and_loads_nothing():
    text = page({"node": "n0", "at": 2000.0}, job())
    shape = shape_of(text)
    assert {"svg", "polyline", "table"} <= shape.seen
    assert not shape.links
    assert not shape.seen & {"script", "link", "img", "iframe"}
    assert not re.search(r"url\(|@import|https?://", text)
    assert text.count('class="slow"') == 1  # one span of the timeline


@given(st.text(max_size=40))
def test_names_are_text_and_nothing_else(name):
    shape = shape_of(page({"node": name}, job(f"<script>{name}&", 2)))
    assert "script" not in shape.seen


@pytest.mark.parametrize("found", [{}, {"history": [{}]}, {"history": None, "sources": None}])
def test_a_job_that_says_little_has_a_page(found):
    shape_of(page({}, found))


def test_a_gap_in_history_is_a_gap_in_the_line():
    times = [0.0, 10.0, 20.0, 4000.0, 4010.0]
    assert line_chart("x", times, [1.0] * 5).count("<polyline") == 2
    assert "nothing was seen" in line_chart("x", [], [])
    assert "nothing was seen" in band_chart("x", [], [])


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=6000))
def test_thinning_keeps_the_peak_and_the_end(values):
    points = [(float(at), value) for at, value in enumerate(values)]
    kept = thinned(points)
    assert len(kept) <= POINTS_MAX + 1
    assert max(value for _, value in kept) == max(values)
    assert kept[-1] == points[-1]
    assert kept == sorted(kept)
