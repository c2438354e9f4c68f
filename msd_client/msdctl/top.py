"""`msdctl top`: the status of this node, live."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import json_option, print_json
from msd_client.msdctl.status_text import daemon_text, job_text

_CLEAR = "\x1b[H\x1b[2J"


@click.command(name="top", short_help="Watch the daemon and its jobs.")
@click.option("--every", "every_s", type=click.FloatRange(0.1, 60), default=1.0, show_default=True)
@click.option("--count", type=click.IntRange(min=1), help="End after so many looks.")
@socket_option
@json_option
def command(every_s: float, count: int | None, socket_path: Path | None, as_json: bool) -> None:
    """Watch the daemon and its jobs; Ctrl-C ends it. With --json, one line a look."""
    looks = 0
    last: dict[str, tuple[float, int]] = {}
    while True:
        answer = call(socket_path, "status")
        add_rates(answer, last, time.monotonic())
        if as_json:
            print_json("top", answer)
        else:
            parts = [daemon_text(answer.get("daemon", {}))]
            for job in answer.get("jobs", []):
                rate = job.get("tokens_per_s")
                now = "" if rate is None else f"\n  now {rate:,.0f} tokens/s"
                parts.append(job_text(job) + now)
            click.echo((_CLEAR if sys.stdout.isatty() else "") + "\n\n".join(parts))
        sys.stdout.flush()
        looks += 1
        if count is not None and looks >= count:
            return
        time.sleep(every_s)


def add_rates(answer: dict[str, Any], last: dict[str, tuple[float, int]], now_s: float) -> None:
    """Add `tokens_per_s` to each job that was looked at before.

    Args:
        answer: The daemon's status; jobs are changed in place.
        last: Time and tokens of each job at the last look; brought up to date.
        now_s: Monotonic seconds.
    """
    for job in answer.get("jobs", []):
        key, tokens = f"{job.get('id')}/{job.get('generation')}", job.get("tokens")
        if not isinstance(tokens, int):
            continue
        if key in last and now_s > last[key][0]:
            job["tokens_per_s"] = (tokens - last[key][1]) / (now_s - last[key][0])
        last[key] = (now_s, tokens)
