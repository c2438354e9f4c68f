"""`msdctl find`: in which steps, and to which ranks, a record was delivered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from msd_client.msdctl.numbers import GENERATION
from msd_client.msdctl.output import format_table, json_option, print_json, say
from msd_daemon.verbs.run_options import run_of, run_options


@click.command(name="find", short_help="Say in which steps of a run a record was delivered.")
@click.argument("job")
@click.argument("source")
@click.argument("key")
@click.option("--generation", type=GENERATION, help="Of the journal; default: all kept.")
@run_options
@json_option
def command(
    job: str,
    source: str,
    key: str,
    generation: int | None,
    state_dir: Path | None,
    socket_path: Path | None,
    as_json: bool,
) -> None:
    """Say in which steps of JOB a record of SOURCE was delivered, and to whom.

    KEY is the record's key, or SHARD:PLACE as `msdctl lineage` and `msdctl bad` show them; of the
    shard's path the end is enough. By a key the whole source is read once, without tokenizing.
    """
    from federation.journal_reader import JournalReader
    from msd_daemon.history.find_record import RecordFinder

    run = run_of(job, state_dir, socket_path)
    with JournalReader(run.journal) as reader, _counting() as tell:
        found = RecordFinder(run, reader, tell).find(source, key, generation)
    if as_json:
        told = {
            "job": found.job,
            "source": source,
            "key": key,
            "kept": [one._asdict() for one in found.kept],
            "occurrences": [
                asdict(one) | {"name": one.name._asdict()} for one in found.occurrences
            ],
        }
        print_json("find", told)
        return
    lines = [line for one in found.occurrences for line in _lines(one)]
    click.echo(format_table(_COLUMNS, lines))
    say(f"job {found.job}, source {source}; kept: " + "; ".join(map(str, found.kept)))


_COLUMNS = (
    "generation", "epoch", "shard", "place", "key", "fate", "step", "dp", "microbatch", "row",
    "column", "offset", "tokens", "ranks",
)  # fmt: skip


def _lines(one: Any) -> list[tuple[object, ...]]:
    name = one.name
    block = "" if name.shard_block is None else f" of block {name.shard_block}"
    place = f"{name.place_name} {name.place}{block}"
    fate = one.fate + (f" ({one.reason})" if one.reason else "")
    head = (one.generation, one.epoch, name.shard, place, name.key or "-")
    if not one.deliveries:
        return [(*head, fate, *["-"] * 6, one.tokens, "-")]
    return [
        (
            *head,
            "superseded" if row.step in one.superseded else fate,
            row.step,
            row.dp_group,
            row.microbatch,
            row.row,
            row.column,
            row.offset,
            row.length,
            ",".join(map(str, row.ranks)),
        )
        for row in one.deliveries
    ]


@contextmanager
def _counting() -> Iterator[Callable[[int], None]]:
    """Show how many records were looked at on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:,} records"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda count: progress.advance(task, count)
