"""The full screen of `msdctl top`: keys move it, and it draws whatever a daemon says."""

from __future__ import annotations

import io
from typing import Any

import pytest

pytest.importorskip("rich")
from rich.console import Console

from msd_client.msdctl.top_state import VIEWS, TopState
from msd_client.msdctl.top_view import bar, screen, sparkline, svg


def snapshot(jobs: int = 2) -> dict[str, Any]:
    job = {
        "name": "gpt", "state": "running", "generation": 1, "step_released": 41, "step_planned": 50,
        "imbalance": 1.0, "imbalance_last": 1.02, "fill_last": 0.98,
        "ranks": [{}, {}],
        "verdict": {"side": "loader", "level": "stalled", "summary": "rank 1 waits for source web",
                    "evidence": ["seen"], "command": "do this", "since": 5.0},
        "now": {"at": 100.0, "tokens_per_s": 1234567.0, "wait_ratio": 0.25, "wait_ratio_max": 0.5,
                "workers_cpus": 1.5},
        "rings": [{"dp_group": 0, "stage": "all", "slots": 4, "free": 0, "ready": 4, "last_reader": 1}],
        "pool": {"capacity_bytes": 100, "free_bytes": 25},
        "sources": [{"name": f"s{n}", "wanted": 0.5, "realised": 0.5, "dropped": {"long": 3}}
                    for n in range(60)],
        "sources_now": [{"name": "s1", "waited_for_s": 2.0, "is_waited_for": True, "workers": [0]}],
        "ranks_now": [{"rank": 0, "dp_group": 0, "state": "T", "batches": 3, "waited_s": 1.0,
                       "released_ago_s": None, "waiting_s": 2.0, "load": 0.5}],
        "workers_now": [{"role": "loader", "number": 0, "pid": 7, "state": "S", "activity": "reading",
                         "source": "s1", "shard": "/a/b.jsonl", "activity_s": 1.0, "cpu_s": 2.0}],
    }  # fmt: skip
    return {
        "node": "n0",
        "at": 100.0,
        "daemon": {"version": "0.1.0", "uptime_s": 3700.0, "clients": 3},
        "cluster": {"nodes": [{"node": "n1", "silent_s": 4.0, "verdicts": [["gpt", "loader", "slow", "cpu_bound", "x"]]}]},
        "jobs": [job | {"id": f"j{n}", "name": f"job{n}"} for n in range(jobs)],
    }  # fmt: skip


def drawn(found: dict[str, Any], state: TopState) -> str:
    console = Console(width=140, height=40, file=io.StringIO(), force_terminal=False)
    console.print(screen(found, state, 40), height=40)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("view", "shown"),
    [
        ("overview", "1,234,567"),
        ("sources", "3 long"),
        ("ranks", "waits now"),
        ("nodes", "gpt: loader (slow), cpu_bound"),
        ("workers", "b.jsonl"),
        ("why", "next: do this"),
    ],
)
def test_every_view_shows_its_part_and_the_verdict(view, shown):
    state = TopState(view=view)
    state.look(snapshot())
    text = drawn(snapshot(), state)
    assert shown in text
    assert "loader (stalled): rank 1 waits for source web" in text
    assert "job1" in text


@pytest.mark.parametrize("view", sorted(VIEWS.values()))
@pytest.mark.parametrize(
    "found", [{}, {"jobs": []}, {"jobs": [{}]}, {"jobs": [{"id": "x", "now": {}}]}]
)
def test_what_is_not_known_breaks_nothing(view, found):
    state = TopState(view=view)
    state.look(found)
    assert drawn(found, state)


def test_keys_choose_views_rows_and_jobs():
    state, found = TopState(), snapshot()
    state.press("s", found)
    assert state.view == "sources"
    for _ in range(70):
        state.press("down", found)
    assert state.row == 59
    state.press("pageup", found)
    assert state.row == 49
    state.press("tab", found)
    assert (state.job, state.row) == ("j1", 0)
    state.press("tab", found)
    assert state.job == "j0"
    state.press("x", found)
    state.press("escape", found)
    assert state.view == "overview"
    state.press("q", found)
    assert state.is_over


def test_a_job_that_is_over_gives_its_place_to_the_first():
    state = TopState(job="gone")
    shown = state.shown(snapshot())
    assert shown is not None
    assert shown["id"] == "j0"
    assert state.shown({"jobs": []}) is None


def test_figures_are_kept_look_after_look_without_doubles():
    state, found = TopState(), snapshot(1)
    found["jobs"][0]["history"] = [{"at": 90.0, "tokens_per_s": 1.0}]
    state.look(found)
    state.look(found)
    assert [point["at"] for point in state.looks["j0"]] == [90.0, 100.0]
    state.look({"jobs": []})
    assert state.looks == {}


def test_the_picture_is_svg_with_the_screen_on_it():
    text = svg(snapshot(), TopState())
    assert text.startswith("<svg")
    assert "tokens/s" in text


def test_sparklines_and_bars_stay_within_their_bounds():
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([0, 1, 2], top=1.0) == "▁██"
    assert len(sparkline(range(500))) == 60
    assert bar(-1).count("█") == 0
    assert bar(2).count("░") == 0
