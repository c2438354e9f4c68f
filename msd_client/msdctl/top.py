"""`msdctl top`: the status of this node, live."""

from __future__ import annotations

import sys
import time
from pathlib import Path

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
    while True:
        answer = call(socket_path, "status")
        if as_json:
            print_json("top", answer)
        else:
            parts = [daemon_text(answer.get("daemon", {}))]
            parts += [job_text(job) for job in answer.get("jobs", [])]
            parts.append(diagnosis(answer))
            click.echo((_CLEAR if sys.stdout.isatty() else "") + "\n\n".join(parts))
        sys.stdout.flush()
        looks += 1
        if count is not None and looks >= count:
            return
        time.sleep(every_s)


def diagnosis(answer: dict[str, object]) -> str:
    """Return one line that says who waits: full rings mean the trainer, empty ones the loader."""
    jobs = answer.get("jobs")
    lines = []
    for job in jobs if isinstance(jobs, list) else []:
        ready, slots = job.get("ring_ready"), job.get("ring_slots")
        if not isinstance(ready, int) or not isinstance(slots, int) or slots < 1:
            continue
        if ready == 0:
            verdict = "ring empty: the loader is behind"
        elif ready >= slots - 1:
            verdict = "ring full: waits for the trainer, as it should"
        else:
            verdict = "ring partly full"
        lines.append(f"{job.get('name')}: {verdict}")
    return "\n".join(lines) or "no ring yet"
