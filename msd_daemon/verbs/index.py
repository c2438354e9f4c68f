"""`msdctl index`: build the indexes of a job's shards ahead of the first use, in parts if wanted.

An index saves reading; the stream is the same with and without it. Parts are dealt by shard, so n
machines with one shared index folder build it n times as fast, each with as many processes as it
has cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import click

from federation.model.job import ResolvedJob, Shard, SourceSpec
from msd_client.contract.errors import DataError, MsdError
from msd_client.msdctl.daemon_call import parsed
from msd_client.msdctl.output import format_size, json_option, print_json, say
from msd_daemon.verbs.shard_pool import ProgressLine, ShardPool, Tell, default_workers

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
@click.option(
    "--workers", type=click.IntRange(min=1), help="Processes; default: as many as there are cores."
)
@json_option
def command(
    job: str, part: str, index_dir: Path | None, workers: int | None, as_json: bool
) -> None:
    """Build the indexes of the shards of JOB that have none yet."""
    from msd_daemon.verbs.local_job import resolve_local_job

    number, count = parsed(parse_part, part, "--part")
    resolved, config = resolve_local_job(job)
    folder = index_dir or config.state_dir / INDEX_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    progress = _Progress(resolved, number, count)
    results = []
    for result in index_shards(
        resolved, number, count, folder, workers or default_workers(), progress.show
    ):
        progress.done(result)
        results.append(result)
        if result.outcome == "failed":
            progress.line.clear()
            say(f"{result.source}: {result.path}: {result.fault}")
        elif not as_json:
            progress.line.clear()
            click.echo(f"{result.outcome:<10}  {result.source}  {result.path}")
    progress.show(is_last=True)
    order = {(one.name, shard.path): at for at, (one, shard) in enumerate(_shards(resolved))}
    results.sort(key=lambda result: order[result.source, result.path])
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
    job: ResolvedJob,
    part: int,
    parts: int,
    index_dir: Path,
    workers: int = 1,
    on_tick: Callable[[], None] = lambda: None,
) -> Iterator[IndexedShard]:
    """Build the indexes of every shard whose number is `part` modulo `parts`, as they are done.

    A shard that can't be read gives `failed` and the others follow: whether it stops the job is for
    the source's error policy to say.

    Args:
        job: The job.
        part: Which part.
        parts: How many.
        index_dir: Where indexes are kept.
        workers: Processes.
        on_tick: Called about once a second.

    Raises:
        ResourceError: An index can't be written.
        WorkerLostError: A process died.
    """
    numbers = range(part, sum(1 for _ in _shards(job)), parts)
    pool = ShardPool(_open_worker, (job, index_dir), workers, lambda *_: on_tick())
    for _, result in pool.run(numbers):
        yield result


def _shards(job: ResolvedJob) -> list[tuple[SourceSpec, Shard]]:
    return [(source, shard) for source in job.sources for shard in source.shards]


def _open_worker(job: ResolvedJob, index_dir: Path) -> Callable[[int, Tell], IndexedShard]:
    from msd_daemon.verbs.local_stores import configure_local_stores

    configure_local_stores()
    places = [(source, at) for source in job.sources for at in range(len(source.shards))]

    def work(number: int, tell: Tell) -> IndexedShard:
        source, at = places[number]
        path = source.shards[at].path
        try:
            result = IndexedShard(source.name, path, _index_shard(source, at, index_dir))
        except (DataError, OSError) as error:
            message = error.message if isinstance(error, MsdError) else str(error)
            result = IndexedShard(source.name, path, "failed", message)
        tell(1, 0)
        return result

    return work


class _Progress:
    """How far the work is, said on stderr."""

    def __init__(self, job: ResolvedJob, part: int, parts: int) -> None:
        self.line = ProgressLine()
        own = _shards(job)[part::parts]
        self._sizes = {(source.name, shard.path): shard.size_bytes for source, shard in own}
        self._count = len(own)
        self._size_bytes = sum(shard.size_bytes for _, shard in own)
        self._done = self._done_bytes = 0

    def done(self, result: IndexedShard) -> None:
        self._done += 1
        self._done_bytes += self._sizes[result.source, result.path]

    def show(self, *, is_last: bool = False) -> None:
        if self._count:
            self.line.say(
                f"{self._done}/{self._count} shards, {format_size(self._done_bytes)} of "
                f"{format_size(self._size_bytes)}",
                is_last=is_last,
            )


def _index_shard(source: SourceSpec, number: int, index_dir: Path) -> Outcome:
    from msd_daemon.sources.index import IndexStore
    from msd_daemon.sources.index_build import build_index

    if IndexStore(index_dir, source).load(source.shards[number]) is not None:
        return "present"
    return "not needed" if build_index(source, number, index_dir) is None else "built"
