"""`msdctl index`: build the indexes of a job's shards ahead of the first use, in parts if wanted.

An index saves reading; the stream is the same with and without it. Parts are dealt by shard, so n
machines with one shared index folder build it n times as fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import click

from federation.model.job import ResolvedJob, SourceSpec
from msd_client.contract.errors import DataError
from msd_client.msdctl.daemon_call import parsed
from msd_client.msdctl.job_argument import read_job
from msd_client.msdctl.output import json_option, print_json, say

INDEX_FOLDER = "index"
"""Below the daemon's state folder; the daemon looks there."""

Outcome = Literal["built", "present", "not needed", "failed"]


class IndexedShard(NamedTuple):
    """What became of one shard."""

    source: str
    path: str
    outcome: Outcome
    fault: str = ""


@click.command(name="index", short_help="Build the indexes of a job's shards.")
@click.argument("job")
@click.option("--part", default="1/1", show_default=True, help="Which part of how many, as 2/8.")
@click.option(
    "--index-dir", type=click.Path(path_type=Path), help="Folder; default: the daemon's own."
)
@json_option
def command(job: str, part: str, index_dir: Path | None, as_json: bool) -> None:
    """Build the indexes of the shards of JOB that have none yet."""
    from msd_daemon.config.resolve import resolve_job
    from msd_daemon.verbs.local_stores import configure_local_stores

    number, count = parsed(parse_part, part, "--part")
    config = configure_local_stores()
    written = read_job(job)
    resolved = resolve_job(written.text, Path(written.base_dir), written.name)
    folder = index_dir or config.state_dir / INDEX_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for result in index_shards(resolved, number, count, folder):
        results.append(result)
        if result.outcome == "failed":
            say(f"{result.source}: {result.path}: {result.fault}")
        elif not as_json:
            click.echo(f"{result.outcome:<10}  {result.source}  {result.path}")
    counts = Counter(result.outcome for result in results)
    if as_json:
        shards = [result._asdict() for result in results]
        print_json("index", {"index_dir": str(folder), "part": part, "shards": shards})
    else:
        summary = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
        click.echo(f"{summary or 'no shards in this part'}; in {folder}")
    if counts["failed"]:
        raise click.exceptions.Exit(1)


def parse_part(text: str) -> tuple[int, int]:
    """Return (part from 0, parts) of `2/8`.

    Raises:
        ValueError: Not of this form, or outside 1..parts.
    """
    number, separator, count = text.partition("/")
    is_sound = separator and number.isdigit() and count.isdigit()
    if not is_sound or not 1 <= int(number) <= int(count):
        raise ValueError(f"{text!r} is not PART/PARTS; write 1/8 to 8/8")
    return int(number) - 1, int(count)


def index_shards(
    job: ResolvedJob, part: int, parts: int, index_dir: Path
) -> Iterator[IndexedShard]:
    """Build the indexes of every shard whose number is `part` modulo `parts`.

    A shard that can't be read gives `failed` and the next one follows: whether it stops the job is
    for the source's error policy to say.

    Raises:
        ResourceError: An index can't be written.
    """
    shards = [(source, number) for source in job.sources for number in range(len(source.shards))]
    for source, number in shards[part::parts]:
        path = source.shards[number].path
        try:
            yield IndexedShard(source.name, path, _index_shard(source, number, index_dir))
        except (DataError, OSError) as error:
            yield IndexedShard(source.name, path, "failed", str(error))


def _index_shard(source: SourceSpec, number: int, index_dir: Path) -> Outcome:
    from msd_daemon.sources.index import IndexStore
    from msd_daemon.sources.index_build import build_index

    if IndexStore(index_dir, source).load(source.shards[number]) is not None:
        return "present"
    return "not needed" if build_index(source, number, index_dir) is None else "built"
