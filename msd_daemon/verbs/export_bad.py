"""`msdctl export-bad`: a job's bad records as they lie in their shards, written into a folder."""

from __future__ import annotations

from pathlib import Path

import click

from msd_client.msdctl.bad import bad_records
from msd_client.msdctl.daemon_call import parsed, socket_option
from msd_client.msdctl.output import format_size, json_option, print_json, say


def _bytes(text: str) -> int:
    from msd_daemon.config.units import parse_bytes

    value = parse_bytes(text)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{text!r} is no number of bytes; write 1Gi")
    return value


@click.command(name="export-bad", short_help="Write a job's bad records into a folder.")
@click.argument("job")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="A folder that is new or empty.",
)
@click.option("--source", help="Of this source alone.")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=1000, show_default=True)
@click.option("--bytes", "size", default="1Gi", show_default=True, help="Most bytes written.")
@socket_option
@json_option
def command(
    job: str,
    out: Path,
    source: str | None,
    limit: int,
    size: str,
    socket_path: Path | None,
    as_json: bool,
) -> None:
    """Write the bad records of JOB into a folder, a file each, media beside them.

    Shards are read again from their beginning in this process. `manifest.jsonl` has a line for each
    record: what `msdctl bad --json` says of it, its files, and why it has none.
    """
    from msd_daemon.bad_export import export, job_of_folder
    from msd_daemon.verbs.local_stores import configure_local_stores

    bytes_max = parsed(_bytes, size, "--bytes")
    found = bad_records(socket_path, job, source, limit)
    configure_local_stores()
    done = export(job_of_folder(Path(found["folder"])), found["records"], out, bytes_max)
    if as_json:
        print_json("export_bad", {"job": found["job"], "out": str(out)} | vars(done))
        return
    say(
        f"{done.records:,} records in {out}, {format_size(done.written_bytes)}; {done.unreadable:,} "
        f"could not be written, {done.left_out:,} of them for --bytes: see manifest.jsonl"
    )
    if found["total"] > len(found["records"]):
        say(f"{found['total'] - len(found['records']):,} more are listed: raise --limit")
