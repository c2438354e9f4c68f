"""`msdctl report`: a job's last day as one HTML file that loads nothing else."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.mixture import only_job
from msd_client.msdctl.output import say
from msd_client.msdctl.report_page import page
from msd_client.msdctl.whole_file import check_writable, write_output

DAY_S = 24 * 3600.0


@click.command(name="report", short_help="Write a job's last day as an HTML page.")
@click.argument("job")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file; default: JOB.html here.",
)
@click.option(
    "--hours",
    type=click.FloatRange(0.01, 24),
    default=24.0,
    show_default=True,
    help="How far back.",
)
@socket_option
def command(job: str, out: Path | None, hours: float, socket_path: Path | None) -> None:
    """Write a report of JOB: its verdict, charts of its last day, mixture, ranks and processes.

    The page is one file, with no script and nothing that it loads: it may be mailed.
    """
    if out is not None:
        check_writable(out)
    snapshot = call(socket_path, "snapshot", job=job, history_s=3600.0 * hours)
    found = only_job(snapshot, job)
    path = out or Path(f"{str(found['name']).replace('/', '_')}.html")
    write_output(path, page(snapshot, found).encode())
    say(f"{path}: {len(found.get('history', []))} points of history")
