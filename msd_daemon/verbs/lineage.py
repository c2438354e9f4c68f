"""`msdctl lineage`: what a step of a run held, record by record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from msd_client.msdctl.daemon_call import parsed
from msd_client.msdctl.job_argument import parse_steps
from msd_client.msdctl.numbers import GENERATION, STEP
from msd_client.msdctl.output import format_table, json_option, print_json, say
from msd_daemon.verbs.run_options import run_of, run_options


@click.command(name="lineage", short_help="List the records that a step of a run held.")
@click.argument("job")
@click.option("--step", type=STEP, help="The trainer's number of the step.")
@click.option("--steps", help="Steps a:b, b not among them; with --parquet.")
@click.option("--rank", type=click.IntRange(min=0), help="What this rank was given alone.")
@click.option(
    "--generation",
    type=GENERATION,
    help="Of the journal; default: the newest that holds the step.",
)
@click.option(
    "--parquet",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a row for each segment there instead of listing them.",
)
@run_options
@json_option
def command(
    job: str,
    step: int | None,
    steps: str | None,
    rank: int | None,
    generation: int | None,
    parquet: Path | None,
    state_dir: Path | None,
    socket_path: Path | None,
    as_json: bool,
) -> None:
    """List all that a step of JOB held: source, shard, record, offsets, and who was given it.

    JOB is a job that runs, or one that ran and whose folder is there: its name, its folder's, or
    the first digits of its digest. The step is planned again from the journal, and so checked
    against it; the records of that step alone are read, in this process.
    """
    from federation.journal_reader import JournalReader
    from msd_daemon.history.lineage_rows import LineageReader
    from msd_daemon.history.runs import naming_others

    if (step is None) == (steps is None):
        raise click.UsageError("give --step N, or --steps a:b with --parquet FILE")
    if steps is not None and parquet is None:
        raise click.UsageError("--steps needs --parquet FILE; --step N lists one step here")
    first, end = (
        (step or 0, (step or 0) + 1) if steps is None else parsed(parse_steps, steps, "--steps")
    )
    run = run_of(job, state_dir, socket_path)
    with naming_others(run), JournalReader(run.journal) as reader:
        kept = reader.holding(first, generation)
        if parquet is not None:
            _export(run, reader, generation, (first, end), rank, parquet, as_json)
            return
        others = [
            other.generation
            for other in reader.kept()
            if other.first <= first < other.end and other.generation != kept.generation
        ]
        with LineageReader(run, reader, kept, first) as opened:
            mesh = opened.tree.describe()
            (found,) = opened.steps(end, rank)
    if as_json:
        rows = [
            asdict(row) | {"media": [item._asdict() for item in row.media]} for row in found.rows
        ]
        told = {
            "job": run.name,
            "step": first,
            "plan_step": found.plan_step,
            "generation": kept.generation,
        }
        told |= {"other_generations": others, "mesh": mesh, "digest": found.digest, "rows": rows}
        print_json("lineage", told)
        return
    click.echo(format_table(_COLUMNS, _lines(found.rows)))
    numbered = "" if found.plan_step == first else f" (plan step {found.plan_step})"
    shown = f" of rank {rank}" if rank is not None else ""
    say(
        f"job {run.name}: step {first}{numbered}{shown}, generation {kept.generation} ({mesh}): "
        f"{len(found.rows):,} segments, {sum(row.length for row in found.rows):,} tokens; digest "
        f"{found.digest[:16]} as journalled"
    )
    if others:
        listed = ", ".join(map(str, others))
        say(f"generations {listed} planned this step too (see --generation)")


_COLUMNS = (
    "dp", "microbatch", "row", "column", "tokens", "source", "shard", "place", "key", "epoch", "offset",
    "ranks", "media",
)  # fmt: skip


def _lines(rows: Iterable[Any]) -> list[tuple[object, ...]]:
    return [
        (
            row.dp_group,
            row.microbatch,
            row.row,
            row.column,
            row.length,
            row.source,
            row.shard,
            f"{row.place_name} {row.place}"
            + ("" if row.shard_block is None else f" of block {row.shard_block}"),
            row.key or "-",
            row.epoch,
            row.offset,
            ",".join(map(str, row.ranks)),
            " ".join(f"{item.modality}@{item.offset}+{item.tokens}" for item in row.media) or "-",
        )
        for row in rows
    ]


def _export(
    run: Any,
    reader: Any,
    generation: int | None,
    steps: tuple[int, int],
    rank: int | None,
    path: Path,
    as_json: bool,
) -> None:
    from msd_daemon.history.parquet_export import export_steps
    from msd_daemon.verbs.step_progress import step_progress

    with step_progress(steps[1] - steps[0], "steps written") as tell:
        done = export_steps(run, reader, steps, path, generation=generation, rank=rank, tell=tell)
    told = {"job": run.name, "file": str(path), "steps": list(steps)} | done._asdict()
    if as_json:
        print_json("lineage_export", told)
        return
    say(f"wrote {path}: {done.rows:,} segments of {done.steps:,} steps")
