"""`msdctl bad`: the bad records of a job, each by its shard, place and key."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import format_table, json_option, print_json, say

PAGE_RECORDS = 1000
TEXT_SHOWN_MAX = 160
"""On a terminal; what is piped into a file or `grep` is whole, remedy and all."""


@click.command(name="bad", short_help="List the bad records of a job.")
@click.argument("job", required=False)
@click.option("--source", help="Of this source alone.")
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=200, help="Most records shown; 200."
)
@socket_option
@json_option
def command(
    job: str | None, source: str | None, limit: int, socket_path: Path | None, as_json: bool
) -> None:
    """List the bad records of JOB that were read, those that the draw passed and those ahead of it.

    JOB is a job that runs, or the last one of that name whose folder is there; it may be left out
    where only one runs.
    """
    found = bad_records(socket_path, job, source, limit)
    if as_json:
        print_json("bad", found)
        return
    records = found["records"]
    if not records and not found["unlisted"]:
        click.echo(f"job {found['job']}: no bad record was read")
        return
    characters = TEXT_SHOWN_MAX if sys.stdout.isatty() else None
    click.echo(format_table(_COLUMNS, [_row(record, characters) for record in records]))
    passed = sum(record["is_drawn"] for record in records)
    kinds = Counter(record["status"] for record in records)
    listed = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    say(
        f"job {found['job']}: {len(records):,} of {found['total']:,} ({listed}); the draw passed "
        f"{passed:,} of these"
    )
    for name, count in sorted(found["unlisted"].items()):
        say(f"source {name}: {count:,} more are counted, not listed")


_COLUMNS = ("source", "status", "drawn", "shard", "place", "key", "what is wrong")


def bad_records(
    socket_path: Path | None, job: str | None, source: str | None, limit: int
) -> dict[str, Any]:
    """Return up to `limit` bad records of a job, asked for page by page.

    Returns:
        `job`, `folder`, `total`, `unlisted` (count by source) and `records`: maps of source,
        status, is_drawn, shard, place_name, place, key, text, block_key and block_index.
    """
    found: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    while len(records) < limit:
        wanted = min(PAGE_RECORDS, limit - len(records))
        fields = {"job": job, "source": source, "offset": len(records), "limit": wanted}
        found = call(socket_path, "bad", **fields)
        records += found["records"]
        if len(found["records"]) < wanted:
            break
    return found | {"records": records}


def _row(record: dict[str, Any], characters: int | None) -> tuple[object, ...]:
    text = str(record["text"]).replace("\n", " ")
    return (
        record["source"],
        record["status"],
        "drawn" if record["is_drawn"] else "ahead",
        record["shard"],
        f"{record['place_name']} {record['place']}",
        record["key"] or "-",
        text if characters is None or len(text) <= characters else text[: characters - 3] + "...",
    )
