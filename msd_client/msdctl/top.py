"""`msdctl top`: the jobs of this node, live: full screen on a terminal, text elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from msd_client.contract.errors import UsageError
from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import json_option, print_json
from msd_client.msdctl.status_text import daemon_text, job_text
from msd_client.msdctl.top_state import VIEWS, TopState
from msd_client.msdctl.whole_file import check_writable, write_output

FIRST_HISTORY_S = 1200.0


@click.command(name="top", short_help="Watch the jobs of this node, full screen.")
@click.argument("job", required=False)
@click.option("--every", "every_s", type=click.FloatRange(0.1, 60), default=1.0, show_default=True)
@click.option("--count", type=click.IntRange(min=1), help="End after so many looks.")
@click.option("--plain", is_flag=True, help="Text as of status, also on a terminal.")
@click.option(
    "--view",
    type=click.Choice(sorted(set(VIEWS.values()))),
    default="overview",
    help="What the full screen begins with.",
)
@click.option(
    "--svg",
    "svg_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the screen there as a picture after --count looks (default 1), and end.",
)
@socket_option
@json_option
def command(
    job: str | None,
    every_s: float,
    count: int | None,
    plain: bool,
    view: str,
    svg_path: Path | None,
    socket_path: Path | None,
    as_json: bool,
) -> None:
    """Watch JOB, or all jobs of this node; q or Ctrl-C ends it. With --json, one line a look.

    On a terminal: o overview, s sources, r ranks, n nodes of the cluster, w workers, y the verdict;
    tab goes to the next job, arrows move in tables.
    """
    asked: dict[str, Any] = {} if job is None else {"job": job}
    state = TopState(view=view)
    if svg_path is not None:
        check_writable(svg_path)
        _picture(socket_path, asked, state, every_s, count or 1, svg_path)
    elif not as_json and not plain and sys.stdout.isatty() and sys.stdin.isatty():
        _full_screen(socket_path, asked, state, every_s, count)
    else:
        _lines(socket_path, asked, every_s, count, as_json=as_json)


def _full_screen(
    socket_path: Path | None,
    asked: dict[str, Any],
    state: TopState,
    every_s: float,
    count: int | None,
) -> None:
    try:
        from rich.console import Console
        from rich.live import Live

        from msd_client.msdctl.top_keys import next_key, raw_keys
        from msd_client.msdctl.top_view import screen
    except ImportError as error:
        raise UsageError(
            f"the full screen needs rich ({error}): pip install rich, or --plain"
        ) from error
    console = Console()
    looks = 0
    with raw_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while not state.is_over and (count is None or looks < count):
            snapshot = _look(socket_path, asked, state, looks)
            looks += 1
            until_s = time.monotonic() + every_s
            while not state.is_over:
                live.update(screen(snapshot, state, console.size.height), refresh=True)
                key = next_key(until_s)
                if key is None:
                    break
                state.press(key, snapshot)


def _look(
    socket_path: Path | None, asked: dict[str, Any], state: TopState, looks: int
) -> dict[str, Any]:
    history = {"history_s": FIRST_HISTORY_S} if not looks else {}
    snapshot = call(socket_path, "snapshot", **asked, **history)
    state.look(snapshot)
    return snapshot


def _picture(
    socket_path: Path | None,
    asked: dict[str, Any],
    state: TopState,
    every_s: float,
    count: int,
    path: Path,
) -> None:
    from msd_client.msdctl.top_view import svg

    snapshot: dict[str, Any] = {}
    for number in range(count):
        if number:
            time.sleep(every_s)
        snapshot = _look(socket_path, asked, state, number)
    write_output(path, svg(snapshot, state).encode())


def _lines(
    socket_path: Path | None,
    asked: dict[str, Any],
    every_s: float,
    count: int | None,
    *,
    as_json: bool,
) -> None:
    looks = 0
    last: dict[str, tuple[float, int]] = {}
    while True:
        answer = call(socket_path, "status", **asked)
        add_rates(answer, last, time.monotonic())
        if as_json:
            print_json("top", answer)
        else:
            parts = [daemon_text(answer.get("daemon", {}))]
            for found in answer.get("jobs", []):
                rate = found.get("tokens_per_s")
                now = "" if rate is None else f"\n  now {rate:,.0f} tokens/s"
                parts.append(job_text(found) + now)
            click.echo("\n\n".join(parts))
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
