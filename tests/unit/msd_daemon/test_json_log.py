"""Log lines as JSON, and causes that run through tasks."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from msd_daemon.observe.json_log import JsonFormatter, caused_by, present_cause


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("x.y").makeRecord(
        "x.y", logging.WARNING, __file__, 1, message, arguments, None, extra=extra or None
    )


def line(made: logging.LogRecord) -> dict[str, object]:
    text = JsonFormatter().format(made)
    assert "\n" not in text
    found: dict[str, object] = json.loads(text)
    return found


def test_a_line_is_one_object_with_what_it_was_given():
    found = line(record("rank %d\nis gone", 3, event="verdict", source=None, level="odd"))
    assert found["message"] == "rank 3\nis gone"
    assert (found["level"], found["level_"], found["logger"]) == ("warning", "odd", "x.y")
    assert found["event"] == "verdict"
    assert "source" not in found and "cause_id" not in found


def test_an_exception_is_part_of_its_line():
    try:
        raise ValueError("seen")
    except ValueError:
        made = logging.getLogger().makeRecord(
            "x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info()
        )
    assert "ValueError: seen" in str(line(made)["exception"])


def test_a_cause_lasts_in_the_tasks_that_it_began_and_nowhere_else():
    seen: dict[str, tuple[str, str]] = {}

    async def later(name: str) -> None:
        await asyncio.sleep(0)
        seen[name] = present_cause()

    async def run() -> None:
        with caused_by("child_ended") as first:
            one = asyncio.create_task(later("one"))
            found = line(record("x"))
        with caused_by("skip"):
            two = asyncio.create_task(later("two"))
        await asyncio.gather(one, two, later("none"))
        assert found["cause_id"] == first
        assert seen["one"] == (first, "child_ended")

    asyncio.run(run())
    assert seen["two"][1] == "skip"
    assert seen["two"][0] != seen["one"][0]
    assert seen["none"] == ("", "")
