"""Spans of a step trace, and the events that a trace viewer reads."""

from __future__ import annotations

from msd_daemon.core import step_trace
from msd_daemon.core.step_trace import StepTrace, chrome_events


def made(end_step: int = 3) -> tuple[StepTrace, list[int]]:
    over: list[int] = []
    return StepTrace(["web", "code"], end_step, 1000, lambda: over.append(1)), over


def test_spans_go_from_order_to_answer_and_unknown_ones_are_left_out():
    trace, _ = made()
    trace.granted(4, 1, 0, 1, 1100)
    trace.chunk_came(4, 1, 10, 64, 1300)
    trace.chunk_came(4, 2, 10, 64, 1300)  # told before the trace began
    trace.build_ordered(0, 7, 2, 1, 1400)
    trace.filled(0, 7, 128, 1500)
    trace.filled(0, 8, 128, 1500)
    spans = [(span.lane, span.name, span.begin_ns, span.end_ns) for span in trace.spans]
    assert spans == [
        ("loader 0", "code", 1100, 1300),
        ("constructor 2", "step 1, ring 0", 1400, 1500),
    ]


def test_ranks_wait_until_what_they_waited_for_is_published_and_hold_it_until_they_give_it_back():
    trace, _ = made()
    trace.build_ordered(0, 7, 0, 1, 1900)
    trace.filled(0, 7, 1, 2000)
    trace.published(0, 7, 2000)
    trace.published(0, 8, 2100)
    trace.released(5, 0, 6, 100, 1950)  # published before
    trace.released(5, 0, 7, 40, 2500)
    trace.released(5, 0, 8, 0, 2600)
    spans = [(s.name, s.begin_ns, s.end_ns) for s in trace.spans if s.lane == "rank 5"]
    assert spans == [("waits", 1960, 2000), ("step 1", 2000, 2500), ("batch", 2500, 2600)]


def test_what_draw_and_plans_lack_is_a_span_of_the_planner():
    trace, _ = made()
    trace.lacks(frozenset([0]), 1100)
    trace.lacks(frozenset([0, 1]), 1200)
    trace.lacks(frozenset(), 1300)
    assert [(s.name, s.begin_ns, s.end_ns) for s in trace.spans] == [
        ("waits for web", 1100, 1300), ("waits for code", 1200, 1300),
    ]  # fmt: skip


def test_it_is_over_with_its_last_step():
    trace, over = made(3)
    trace.steps_released(2, 1100)
    assert not over
    trace.steps_released(3, 1200)
    assert over


def test_it_is_bounded(monkeypatch):
    monkeypatch.setattr(step_trace, "EVENTS_MAX", 2)
    trace, _ = made()
    for number in range(5):
        trace.planned(number, 1, 1100)
        trace.counted("x", number, 1100)
    assert (len(trace.spans), trace.dropped, len(trace.counters)) == (2, 3, 2)


def test_events_have_lanes_in_the_order_of_a_bytes_way_and_times_in_microseconds():
    trace, _ = made()
    trace.planned(1, 1, 1500)
    trace.granted(4, 1, 0, 1, 1100)
    trace.chunk_came(4, 1, 10, 64, 3100)
    trace.counted("ready", 3, 2000)
    events = chrome_events(trace, {"loader 0": 77})
    lanes = [it["args"]["name"] for it in events if it["name"] == "process_name"]
    assert lanes == ["loader 0", "planner 0"]
    (span,) = [it for it in events if it["ph"] == "X"]
    assert (span["pid"], span["ts"], span["dur"]) == (77, 1.1, 2.0)
    (instant,) = [it for it in events if it["ph"] == "i"]
    assert instant["ts"] == 1.5
    (counter,) = [it for it in events if it["ph"] == "C"]
    assert counter["args"] == {"value": 3}
