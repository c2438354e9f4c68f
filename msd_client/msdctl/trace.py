"""`msdctl trace`: some steps of a job across all its processes, for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import click

from msd_client import control
from msd_client.msdctl.daemon_call import socket_option
from msd_client.msdctl.output import json_option, print_json, say
from msd_client.msdctl.whole_file import check_writable, write_output

SLACK_S = 20.0


@click.command(name="trace", short_help="Record some steps for Perfetto.")
@click.argument("job", required=False)
@click.option(
    "--steps", type=click.IntRange(1, 1000), default=8, show_default=True, help="So many steps."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 300),
    default=60.0,
    show_default=True,
    help="Take what there is after so long.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("msd-trace.json.gz"),
    show_default=True,
    help="Chrome's JSON trace format; .gz is compressed.",
)
@socket_option
@json_option
def command(
    job: str | None,
    steps: int,
    seconds: float,
    out: Path,
    socket_path: Path | None,
    as_json: bool,
) -> None:
    """Record the next steps of JOB: loader workers, planner, constructors, rings and ranks.

    Open the file at https://ui.perfetto.dev, beside a trace of torch's profiler: times are those of
    CLOCK_MONOTONIC in microseconds, and `otherData` has their distance from Unix time.
    """
    check_writable(out)
    asked = {"verb": "trace", "steps": steps, "wait_s": seconds}
    if job is not None:
        asked["job"] = job
    answer = control.request(socket_path, asked, timeout_s=seconds + SLACK_S)
    document = {
        "traceEvents": answer["events"],
        "displayTimeUnit": "ms",
        "otherData": {
            "job": answer.get("job"),
            "clock": "CLOCK_MONOTONIC",
            "unix_offset_us": answer.get("unix_offset_us"),
            "dropped": answer.get("dropped"),
        },
    }
    text = json.dumps(document, separators=(",", ":")).encode()
    write_output(out, gzip.compress(text) if out.suffix == ".gz" else text)
    facts = {key: answer.get(key) for key in ("job", "steps", "is_complete", "dropped")}
    if as_json:
        print_json("trace", facts | {"path": str(out), "events": len(answer["events"])})
    else:
        more = (
            "" if answer.get("is_complete") else f" (of {steps}: the time was up, or the run ended)"
        )
        say(f"{out}: {answer.get('steps')} steps{more}, {len(answer['events'])} events")
