"""`msdctl tokenize`: write a source once as Megatron pairs, read by any later run and epoch.

One pair a shard, in the order of the shards, each with the tokens that the source itself would give.
A run that is broken off goes on where it was: finished shards stay.
"""

from __future__ import annotations

import fcntl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from federation.model.job import ResolvedJob
from msd_client.contract.errors import ConfigError, DataError, MsdError
from msd_client.msdctl.output import format_size, json_option, print_json, say
from msd_daemon.sources.tokenized_shard import (
    TokenizedShard,
    check_tokenizable,
    write_tokenized,
)
from msd_daemon.verbs.shard_pool import ProgressLine, ShardPool, Tell, default_workers
from msd_daemon.verbs.tokenize_manifest import TokenizeManifest

FAULTS_SHOWN_MAX = 20


class Outcome(NamedTuple):
    """What a worker says of a shard."""

    result: TokenizedShard
    fault: str = ""
    """Why there is no pair of it."""


@click.command(name="tokenize", short_help="Write a source once as Megatron .bin/.idx pairs.")
@click.argument("job")
@click.option("--source", required=True, help="Name of the source in the job.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the pairs.")
@click.option(
    "--workers", type=click.IntRange(min=1), help="Processes; default: as many as there are cores."
)
@click.option("--rewrite", is_flag=True, help="Make pairs of another tokenizer or source anew.")
@json_option
def command(
    job: str, source: str, out: Path, workers: int | None, rewrite: bool, as_json: bool
) -> None:
    """Write the tokens of one source of JOB as pairs of .bin and .idx in a folder.

    Read them by `sources: {NAME: FOLDER}`, with the same tokenizer: BOS and EOS are in them. Bad
    records are counted and named in FOLDER/.msd-tokenize.json, which also says of which tokenizer
    the pairs are. Exit code 1 if a shard cannot be read at all.
    """
    from msd_daemon.verbs.local_job import resolve_local_job

    resolved, _ = resolve_local_job(job)
    try:
        index = resolved.source_index(source)
    except KeyError:
        names = ", ".join(one.name for one in resolved.sources)
        raise ConfigError(
            f"job {resolved.name!r} has no source {source!r}: it has {names}"
        ) from None
    check_tokenizable(resolved.sources[index])
    out.mkdir(parents=True, exist_ok=True)
    with _lock(out):
        manifest = TokenizeManifest(out, resolved, resolved.sources[index], is_rewritten=rewrite)
        failed = _tokenize(resolved, index, manifest, workers or default_workers())
    _report(manifest, failed, as_json)
    if failed:
        raise click.exceptions.Exit(1)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with (folder / ".msd-tokenize.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another msdctl tokenize writes into {folder}: wait for it, or name another --out"
            ) from None
        yield


def _tokenize(
    job: ResolvedJob, index: int, manifest: TokenizeManifest, workers: int
) -> dict[int, str]:
    """Write what is not finished; returns why by shard where there is no pair of it."""
    shards = job.sources[index].shards
    tasks = [number for number in range(len(shards)) if number not in manifest.finished]
    for note in manifest.notes:
        say(note)
    if len(tasks) < len(shards):
        say(f"{len(shards) - len(tasks)} of {len(shards)} shards are finished already")
    manifest.write()
    failed: dict[int, str] = {}
    progress = Progress(len(tasks), sum(shards[number].size_bytes for number in tasks))
    stems = {number: str(manifest.stem(number)) for number in tasks}
    pool = ShardPool(open_worker, (job, index, stems), workers, progress.tick)
    try:
        for number, outcome in pool.run(tasks):
            if outcome.fault:
                failed[number] = outcome.fault
                progress.line.clear()
                say(f"{shards[number].path}: {outcome.fault}")
            else:
                manifest.add(number, outcome.result)
            progress.done(shards[number].size_bytes)
    finally:
        manifest.write()
    progress.end()
    return failed


def open_worker(
    job: ResolvedJob, index: int, stems: dict[int, str]
) -> Callable[[int, Tell], Outcome]:
    """Return what writes the pair of a shard; opens the tokenizer once."""
    from msd_daemon.transforms import open_tokenizer
    from msd_daemon.verbs.local_stores import configure_local_stores

    configure_local_stores()
    tokenizer = open_tokenizer(job.tokenizer)

    def work(number: int, tell: Tell) -> Outcome:
        try:
            stem = Path(stems[number])
            return Outcome(write_tokenized(job, index, number, tokenizer, stem, tell))
        except (DataError, OSError) as error:
            message = error.message if isinstance(error, MsdError) else str(error)
            return Outcome(TokenizedShard(), message)

    return work


class Progress:
    """How far the work is, said on stderr.

    Args:
        shards: How many are to be done.
        size_bytes: Raw bytes of them.
    """

    def __init__(self, shards: int, size_bytes: int) -> None:
        self.line = ProgressLine()
        self._shards = shards
        self._size_bytes = size_bytes
        self._done = self._done_bytes = 0
        self._records = self._tokens = 0
        self._begun_s = time.monotonic()

    def tick(self, records: int, tokens: int) -> None:
        """Take the counts of all workers."""
        self._records, self._tokens = records, tokens
        self.line.say(self._text())

    def done(self, size_bytes: int) -> None:
        """Take note of a shard that is done."""
        self._done += 1
        self._done_bytes += size_bytes
        self.line.say(self._text())

    def end(self) -> None:
        """Say the last line."""
        self.line.say(self._text(), is_last=True)

    def _text(self) -> str:
        passed_s = max(time.monotonic() - self._begun_s, 1e-3)
        return (
            f"{self._done}/{self._shards} shards, {format_size(self._done_bytes)} of "
            f"{format_size(self._size_bytes)}, {self._records} records, {self._tokens} tokens, "
            f"{self._tokens / passed_s / 1e6:.2f} M tokens/s"
        )


def _report(manifest: TokenizeManifest, failed: dict[int, str], as_json: bool) -> None:
    entries = [manifest.finished[number] for number in sorted(manifest.finished)]
    dropped: Counter[str] = Counter()
    for entry in entries:
        dropped.update(entry["dropped"])
    totals: dict[str, Any] = {
        "documents": sum(entry["documents"] for entry in entries),
        "tokens": sum(entry["tokens"] for entry in entries),
        "dropped": dict(dropped),
        "faulty": sum(entry["faulty"] for entry in entries),
    }
    faults = [fault for entry in entries for fault in entry["faults"]]
    if as_json:
        print_json(
            "tokenize",
            {"manifest": str(manifest.path), "failed": {str(k): v for k, v in failed.items()}}
            | totals
            | {"shards": entries},
        )
        return
    for fault in faults[:FAULTS_SHOWN_MAX]:
        say(fault)
    if len(faults) > FAULTS_SHOWN_MAX:
        say(f"... {totals['faulty'] - FAULTS_SHOWN_MAX} more bad records, see {manifest.path}")
    left_out = ", ".join(f"{count} {name}" for name, count in sorted(dropped.items()))
    click.echo(
        f"{len(entries)} pairs, {totals['documents']} documents, {totals['tokens']} tokens; "
        f"left out: {left_out or 'nothing'}; in {manifest.path.parent}"
    )
