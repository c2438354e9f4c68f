"""How `msdctl why` writes a verdict, and reads a time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from msd_client.msdctl.verdict_text import LINES_MAX, clock, verdict_line, why_text
from msd_client.msdctl.why import parse_time

NOW = time.mktime((2026, 11, 30, 14, 30, 0, 0, 0, -1))


def answer(**changes: Any) -> dict[str, Any]:
    verdict = {
        "side": "loader", "level": "slow", "cause": "disk_slow", "stage": "read", "summary": "rank 3 waits",
        "source": "web", "rank": 3, "node": "n1", "since": NOW - 90, "evidence": ["a", "b"],
        "command": "iostat",
    }  # fmt: skip
    return {"job": "gpt", "node": "n0", "at": NOW, "is_past": False, "verdict": verdict} | changes


def test_a_verdict_is_written_with_all_that_it_names():
    lines = why_text(answer(), NOW).splitlines()
    assert lines[0] == "job gpt on node n0"
    assert lines[1] == "loader (slow): rank 3 waits"
    assert lines[2] == "  source web, stage read, rank 3, node n1"
    assert "90 s" in lines[3]
    assert lines[-1] == "next: iostat"


def test_it_is_ten_lines_at_most_however_much_is_known():
    others = [
        {"node": f"n{n}", "side": "loader", "level": "slow", "summary": "waits"} for n in range(9)
    ]
    full = answer(others=others)
    full["verdict"]["evidence"] = [f"line {n}" for n in range(20)]
    lines = why_text(full, NOW).splitlines()
    assert len(lines) == LINES_MAX
    assert lines[-2] == "and 7 nodes more"
    assert lines[-1] == "next: iostat"


def test_a_daemon_that_has_not_looked_yet_says_so():
    assert "nothing is known yet" in why_text({"job": "gpt"}, NOW)


def test_a_past_verdict_says_when_it_was():
    text = why_text(answer(is_past=True, at=NOW - 60), NOW)
    assert f"as it was at {clock(NOW - 60)}" in text
    assert "(30 s)" in text


def test_one_line_leaves_since_out_where_nothing_is_wrong():
    fine = answer()["verdict"] | {"level": "fine", "side": "neither", "summary": "ok"}
    assert verdict_line(fine) == "neither: ok"


@pytest.mark.parametrize(
    ("text", "seconds_ago"),
    [("14:29", 60), ("14:29:30", 30), ("10m", 600), ("1.5h", 5400), ("30s", 30), (f"{NOW - 7}", 7)],
)
def test_times_are_read(text, seconds_ago):
    assert parse_time(text, NOW) == NOW - seconds_ago


def test_a_clock_time_ahead_is_yesterdays():
    then = parse_time("14:31", NOW)
    assert then < NOW
    assert time.localtime(then)[:5] == (2026, 11, 29, 14, 31)


@pytest.mark.parametrize("text", ["25:00", "12:61", "x", "", f"{NOW + 9}", "-3", "nan"])
def test_no_times_are_refused(text):
    with pytest.raises(ValueError, match=r"time|ahead"):
        parse_time(text, NOW)
