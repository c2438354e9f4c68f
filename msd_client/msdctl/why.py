"""`msdctl why`: who waits for whom, for which source, at which stage, since when."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click

from msd_client.msdctl.daemon_call import call, parsed, socket_option
from msd_client.msdctl.output import json_option, print_json
from msd_client.msdctl.verdict_text import why_text

_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


@click.command(name="why", short_help="Say who waits for whom, and what to do about it.")
@click.argument("job", required=False)
@click.option(
    "--at",
    metavar="TIME",
    help="What held then: 03:12, 03:12:30 (the last one of that clock time), 10m (ago), or Unix seconds.",
)
@socket_option
@json_option
def command(job: str | None, at: str | None, socket_path: Path | None, as_json: bool) -> None:
    """Say in at most ten lines whether JOB waits for its loader or for its trainer.

    Named are the source, the stage, the rank and the node, since when, what that rests on, and the
    command to type next. The daemon keeps 24 hours of it.
    """
    asked: dict[str, Any] = {} if job is None else {"job": job}
    if at is not None:
        asked["at"] = parsed(lambda text: parse_time(text, time.time()), at, "--at")
    answer = call(socket_path, "why", **asked)
    if as_json:
        print_json("why", answer)
    else:
        click.echo(why_text(answer, time.time()))


def parse_time(text: str, now: float) -> float:
    """Return Unix seconds of a time that a person wrote.

    Args:
        text: `HH:MM` or `HH:MM:SS` of the local clock, the last time that it showed that; a number with
            s, m or h: so long ago; or Unix seconds.
        now: Unix seconds.

    Raises:
        ValueError: It is none of these, or lies ahead.
    """
    text = text.strip()
    if found := _CLOCK.fullmatch(text):
        hour, minute, second = (int(part or 0) for part in found.groups())
        if hour > 23 or minute > 59 or second > 59:
            raise ValueError(f"{text!r} is no time of a day: write it as 03:12 or 03:12:30")
        then = list(time.localtime(now))
        then[3:6] = hour, minute, second
        then[8] = -1  # summer time or not: as it was then
        at = time.mktime(tuple(then))  # type: ignore[arg-type]
        if at > now:
            then[2] -= 1
            at = time.mktime(tuple(then))  # type: ignore[arg-type]
        return at
    if found := _AGO.fullmatch(text):
        return now - float(found[1]) * _UNITS_S[found[2]]
    try:
        at = float(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is no time: write 03:12, 03:12:30, 10m (ago) or Unix seconds"
        ) from None
    if not 0 <= at <= now:
        raise ValueError(f"{text!r} lies ahead: history is what was")
    return at
