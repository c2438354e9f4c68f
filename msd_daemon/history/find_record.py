"""In which steps, and to which ranks, a record was delivered."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from federation.journal_reader import Generation, JournalReader, KeptSteps
from federation.model.chunk import MARK_BEGIN, MARK_KIND, MARK_SAMPLE, RecordStatus
from federation.model.job import ResolvedJob
from msd_client.contract.errors import NotFoundError, ResourceError
from msd_client.contract.position import unpack_block_key
from msd_daemon.history.drawn_steps import cursor_of, drawn_steps
from msd_daemon.history.lineage_rows import LineageReader, LineageRow
from msd_daemon.history.record_names import Place, RecordName
from msd_daemon.history.record_search import (
    FoundRecord,
    RecordSearch,
    Tell,
    WantedRecord,
    source_number,
)
from msd_daemon.history.runs import RunFolder, find_run
from msd_daemon.services.quarantine import guards_of
from msd_daemon.sources.loader import open_source_loader
from msd_daemon.transforms import open_tokenizer
from msd_daemon.transforms.tokenizer import Tokenizer


@dataclass(frozen=True)
class Occurrence:
    """A record in one pass over its source, as one generation went."""

    name: RecordName
    epoch: int
    """Pass over the source, from 0."""
    generation: int
    """Of the journal."""
    fate: str
    """`delivered`; `begun`: a part waits for a step that is not planned yet; `dropped`; `ahead`: the draw has
    not come to it; `before`: the draw passed it before the kept steps."""
    reason: str
    """Why it was dropped, or of which part nothing was delivered."""
    tokens: int
    """Of the whole record."""
    deliveries: tuple[LineageRow, ...]
    superseded: tuple[int, ...]
    """Steps of these that a newer generation planned anew."""


class _Sample(NamedTuple):
    tokens: int
    status: int
    drawn_tokens: int
    """Behind which nothing more of it is drawn."""


@dataclass(frozen=True)
class FoundRecords:
    """What is known of all records of a name."""

    job: str
    source: str
    wanted: str
    kept: tuple[KeptSteps, ...]
    """Generations, newest first."""
    occurrences: tuple[Occurrence, ...]


class RecordFinder:
    """Finds records of one run.

    Args:
        run: The run.
        reader: Its journal.
        tell: Told of records as they are looked at.
    """

    def __init__(self, run: RunFolder, reader: JournalReader, tell: Tell = lambda _: None) -> None:
        self._run = run
        self._reader = reader
        self._tell = tell
        self._searches: dict[str, RecordSearch] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._samples: dict[tuple[str, Place], _Sample] = {}

    def find(self, source: str, wanted: str, generation: int | None = None) -> FoundRecords:
        """Return every occurrence of a record in the kept steps.

        Args:
            source: Name of the source.
            wanted: The record's key, or `shard:place` with a shard's path or the end of one.
            generation: Of the journal; None: all that are kept.

        Raises:
            NotFoundError: The source has no such record, or nothing is kept.
            ConfigError: The job has no such source.
            ResourceError: A row of the journal that is needed is damaged.
        """
        kept = [one for one in self._reader.kept() if generation in (None, one.generation)]
        if not kept:
            raise NotFoundError(
                f"the journal {self._reader.path} keeps "
                + ("nothing" if generation is None else f"no generation {generation}"),
                generation=generation,
            )
        found: list[Occurrence] = []
        is_known = False
        for one in kept:
            opened = self._reader.generation(one.generation)
            number = source_number(opened.job, source)
            for epoch in self._epochs(one, number):
                records = self._search(opened.job, number, wanted).in_epoch(epoch)
                is_known |= bool(records)
                found += [self._occurrence(one, opened, number, record) for record in records]
        if not is_known:
            raise NotFoundError(
                f"source {source} has no record {wanted!r}: give its key, as the source's `key` names "
                "it, or shard:place as msdctl lineage shows them",
                source=source,
                key=wanted,
            )
        found.sort(key=lambda one: (one.epoch, -one.generation, one.name))
        return FoundRecords(self._run.name, source, wanted, tuple(kept), tuple(found))

    def _epochs(self, kept: KeptSteps, source: int) -> range:
        """Return the passes over a source that the kept steps of a generation touch."""
        first = self._reader.state_before(kept.first, kept.generation)
        last = self._reader.state_before(kept.end, kept.generation)
        carried = first.carried[1][first.carried[0] == source]
        oldest = min([cursor_of(first, source).place[0], *carried.tolist()])
        newest = cursor_of(last, source).place[0]
        return range(unpack_block_key(oldest).epoch, unpack_block_key(newest).epoch + 1)

    def _search(self, job: ResolvedJob, source: int, wanted: str) -> RecordSearch:
        key = job.digest()
        if key not in self._searches:
            paths = tuple(shard.path for shard in job.sources[source].shards)
            self._tokenizers[key] = open_tokenizer(job.tokenizer)
            self._searches[key] = RecordSearch(
                job,
                source,
                WantedRecord(wanted, paths),
                self._tokenizers[key],
                self._run.index_dir,
                self._tell,
            )
        return self._searches[key]

    def _occurrence(
        self, kept: KeptSteps, opened: Generation, source: int, record: FoundRecord
    ) -> Occurrence:
        job, place = opened.job, record.place
        sample = self._sample(job, source, place)
        length, status = sample.tokens, sample.status
        drawn = drawn_steps(self._reader, kept, source, place, sample.drawn_tokens)
        rows: list[LineageRow] = []
        for step in drawn.steps:
            rows += self._rows(kept, step, job.sources[source].name, record.name, place)
        fate, reason = "delivered", ""
        placed = sum(row.length for row in rows)
        if not drawn.is_reached:
            fate = "ahead"
        elif status != RecordStatus.OK or not length:
            fate, reason = "dropped", RecordStatus(status).name.lower()
        elif drawn.is_waiting:
            fate = "begun"
        elif drawn.is_drawn_before and not rows:
            fate = "before"
        elif placed < length and drawn.is_drawn_before:
            reason = "the rest in steps before the kept ones"
        elif placed < length and drawn.is_left_out:
            fate, reason = ("delivered" if placed else "dropped"), "skipped"
        elif placed < length:
            fate, reason = _cut(job, placed)
        superseded = tuple(
            step
            for step in sorted({row.step for row in rows})
            if self._reader.holding(step).generation != kept.generation
        )
        epoch = unpack_block_key(place[0]).epoch
        return Occurrence(
            record.name, epoch, kept.generation, fate, reason, length, tuple(rows), superseded
        )

    def _rows(
        self, kept: KeptSteps, step: int, source: str, name: RecordName, place: Place
    ) -> list[LineageRow]:
        """Return the segments of a record that a step held, by planning the step again."""
        epoch = unpack_block_key(place[0]).epoch
        with LineageReader(self._run, self._reader, kept, step) as opened:
            return [
                row
                for found in opened.steps(step + 1)
                for row in found.rows
                if row.source == source
                and row.epoch == epoch
                and (row.shard, row.shard_block, row.place, row.key)
                == (name.shard, name.shard_block, name.place, name.key)
            ]

    def _sample(self, job: ResolvedJob, source: int, place: Place) -> _Sample:
        """Return a record as a run loads it."""
        key = (job.digest(), place)
        if key not in self._samples:
            try:
                guard = guards_of(self._run.quarantine, job)[source]
            except OSError as error:
                raise ResourceError(f"{self._run.quarantine} can't be read: {error}") from error
            loader = open_source_loader(
                job, source, self._tokenizers[key[0]], index_dir=self._run.index_dir, guard=guard
            )
            with closing(loader):
                meta = loader.fetch(place[0], [place[1]]).meta
            tokens = drawn_tokens = int(meta.lengths[0])
            if tokens and job.batch.long == "truncate":
                # What does not fit the row that its last sample begins is never drawn.
                drawn_tokens = 1
                if meta.marks is not None:
                    table = meta.marks.table
                    begins = table[table[:, MARK_KIND] == MARK_SAMPLE, MARK_BEGIN]
                    drawn_tokens += int(begins.max(initial=0))
            self._samples[key] = _Sample(tokens, int(meta.status[0]), drawn_tokens)
        return self._samples[key]


def _cut(job: ResolvedJob, placed: int) -> tuple[str, str]:
    """Return fate and reason of a sample of which less was placed than it has tokens."""
    reason = {"skip": "long_skipped", "truncate": "long_truncated"}.get(job.batch.long, "no_label")
    if job.has_groups and not placed:
        reason = "of a group that no row holds"
    return ("delivered" if placed else "dropped"), reason


def find(
    job: str,
    source: str,
    key: str,
    *,
    generation: int | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    tell: Callable[[int], None] = lambda _: None,
) -> FoundRecords:
    """Return in which steps, and to which ranks, a record was delivered.

    Reads the source's names up to the record, then plans the steps again that held it.

    Args:
        job: The job's name, its folder's, or the first 6 or more digits of its digest.
        source: Name of the source.
        key: The record's key, or `shard:place` as lineage tells them.
        generation: Of the journal; None: all that are kept.
        state_dir: The daemon's state folder; None: the default one.
        tell: Told of records as they are looked at.

    Raises:
        NotFoundError: No such run, record or generation.
        ConfigError: The job has no such source.
        ResourceError: The journal can't be read, or is damaged.
        DataError: A shard was changed since.
    """
    if state_dir is None:
        from msd_daemon.config.daemon_file import load_daemon_config

        state_dir = load_daemon_config().state_dir
    run = find_run(job, Path(state_dir))
    with JournalReader(run.journal) as reader:
        return RecordFinder(run, reader, tell).find(source, key, generation)
