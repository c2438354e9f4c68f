"""All that a step held: for each segment its record, its place in the document and in the batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from federation.journal_reader import JournalReader, KeptSteps
from federation.model.job import Shard
from federation.model.place_tree import STAGES, ClientPlaceTree
from federation.model.plan import StepPlan
from msd_client.contract.errors import DataError, NotFoundError
from msd_client.contract.position import unpack_block_key
from msd_daemon.history.media_seen import MediaSeen
from msd_daemon.history.record_names import Place, RecordName, RecordNames
from msd_daemon.history.runs import RunFolder, find_run, naming_others
from msd_daemon.history.shard_check import check_shards
from msd_daemon.history.step_replay import ReplayedStep, StepReplay
from msd_daemon.transforms import open_tokenizer


class LineageMedia(NamedTuple):
    """An image, video or sound of a segment."""

    modality: str
    offset: int
    """Its first placeholder token, counted in the document."""
    tokens: int
    grid: tuple[int, int, int]
    """Patches in time, height and width; of a sound (frames, 1, 1)."""
    encode_dp_group: int | None
    """Group that encodes it, where that may be another one than its text's."""


@dataclass(frozen=True, slots=True)
class LineageRow:
    """One segment of a step."""

    step: int
    plan_step: int
    """The planner's number of it; differs from `step` behind steps that were left out."""
    generation: int
    """Of the journal, which counts over all runs of the job."""
    source: str
    shard: str
    """Path."""
    shard_block: int | None
    """Row group or batch of the shard, in formats that number records by it."""
    place_name: str
    """What `place` counts: `byte offset` (of a compressed file decompressed), `row`, ..."""
    place: int
    key: str
    """Of the record; empty where nothing names it."""
    epoch: int
    """Pass over the source, from 0."""
    offset: int
    """First token of the segment inside its document."""
    length: int
    """Tokens of the segment."""
    dp_group: int
    microbatch: int
    row: int
    """Row of the microbatch."""
    column: int
    """First token of the segment in its row."""
    canonical_row: int
    """The row's number in the step, the same on any mesh."""
    ranks: tuple[int, ...]
    """That are given the row: all of its group's first and last pipeline stages. Context-parallel
    ranks get their slices of it."""
    begins_group: bool
    """False where it belongs to the group of the segment before it."""
    media: tuple[LineageMedia, ...]


@dataclass(frozen=True)
class StepLineage:
    """What one step held."""

    step: int
    plan_step: int
    generation: int
    rows: tuple[LineageRow, ...]
    """By DP group, microbatch, row and column."""
    digest: str
    """The journalled stream digest, which planning it again gave too."""


class LineageReader:
    """Lineage of the steps of one generation from a kept one on; use it in a `with`.

    Args:
        run: Whose steps.
        reader: Its journal.
        kept: The generation.
        step: The first step.

    Raises:
        See StepReplay.
    """

    def __init__(self, run: RunFolder, reader: JournalReader, kept: KeptSteps, step: int) -> None:
        job = reader.generation(kept.generation).job
        self._media = MediaSeen(job) if job.media else None
        keep = None if self._media is None else self._media.keep
        self._replay = StepReplay(run, reader, kept, step, keep)
        self.job, self.tree = self._replay.job, self._replay.generation.tree
        self._generation = kept.generation
        tokenizer = open_tokenizer(job.tokenizer)
        self._names = [
            RecordNames(job, source, tokenizer, run.index_dir) for source in range(len(job.sources))
        ]
        self._shards = [{shard.path: shard for shard in source.shards} for source in job.sources]
        self._checked: set[tuple[int, str]] = set()
        self._carried_before = self._replay.planner.carried()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._replay.__exit__()
        for names in self._names:
            names.close()

    def steps(self, end: int, rank: int | None = None) -> Iterator[StepLineage]:
        """Yield the lineage of the steps up to `end`, which is not among them.

        Args:
            end: One behind the last step.
            rank: Rows of this rank alone.

        Raises:
            CorruptRecordError: A shard of the step was changed since.
            DataError: The step planned again is not what was journalled.
            NotFoundError: The mesh has no such rank.
        """
        group = None if rank is None else self.tree.dp_group(rank)
        for replayed in self._replay.steps(end):
            check_equal(self._replay, replayed)
            rows = self._rows(replayed.plan, group)
            yield StepLineage(
                replayed.plan.step,
                replayed.plan.plan_step,
                self._generation,
                tuple(rows),
                replayed.journalled.digest,
            )
            self._forget()

    def _rows(self, plan: StepPlan, group: int | None) -> list[LineageRow]:
        names = self._name(plan)
        readers = readers_by_group(self.tree, plan.broadcast_axes)
        lines = zip(
            *(
                column.tolist()
                for column in (plan.source, plan.block_key, plan.index, plan.offset, plan.length)
            ),
            plan.row.tolist(),
            plan.column.tolist(),
            strict=True,
        )
        places = list(
            zip(
                plan.row_dp.tolist(),
                plan.row_microbatch.tolist(),
                plan.row_slot.tolist(),
                strict=True,
            )
        )
        rows = []
        for number, (source, key, index, offset, length, row, column) in enumerate(lines):
            dp_group, microbatch, slot = places[row]
            if group not in (None, dp_group):
                continue
            name = names[source][key, index]
            begins = plan.group_begins is None or bool(plan.group_begins[number])
            rows.append(
                LineageRow(
                    plan.step, plan.plan_step, self._generation, self.job.sources[source].name, name.shard,
                    name.shard_block, name.place_name, name.place, name.key,
                    unpack_block_key(key).epoch, offset, length,
                    dp_group, microbatch, slot, column, row, readers[dp_group], begins,
                    self._media_of(plan, number),
                )
            )  # fmt: skip
        rows.sort(key=lambda row: (row.dp_group, row.microbatch, row.row, row.column))
        return rows

    def _name(self, plan: StepPlan) -> list[dict[Place, RecordName]]:
        wanted: list[set[Place]] = [set() for _ in self._names]
        # Carried parts too: they are named while their block is read, not read for again later.
        for source, key, index, *_ in [*self._replay.planner.carried(), *self._carried_before]:
            wanted[source].add((key, index))
        for source, key, index in zip(
            plan.source.tolist(), plan.block_key.tolist(), plan.index.tolist(), strict=True
        ):
            wanted[source].add((key, index))
        found = []
        for source, (names, places) in enumerate(zip(self._names, wanted, strict=True)):
            named = names.of(places)
            self._check({name.shard for name in named.values()}, source)
            found.append(named)
        return found

    def _check(self, paths: set[str], source: int) -> None:
        new = [path for path in sorted(paths) if (source, path) not in self._checked]
        shards: list[Shard] = [self._shards[source][path] for path in new]
        check_shards(self.job.sources[source], shards)
        self._checked.update((source, path) for path in new)

    def _media_of(self, plan: StepPlan, number: int) -> tuple[LineageMedia, ...]:
        if self._media is None:
            return ()
        source, key, index = (
            int(column[number]) for column in (plan.source, plan.block_key, plan.index)
        )
        first = int(plan.offset[number])
        end = first + int(plan.length[number])
        found = []
        for kind, items in enumerate(self._media.of(source, key, index, self._replay.feed.loaders)):
            encoder = None if plan.encode_dp is None else int(plan.encode_dp[kind, number])
            found += [
                LineageMedia(self.job.media[kind].modality, begin, tokens, grid, encoder)
                for begin, tokens, grid in items
                if first <= begin and begin + tokens <= end
            ]
        return tuple(found)

    def _forget(self) -> None:
        carried: list[set[Place]] = [set() for _ in self._names]
        self._carried_before = []  # named by now
        for source, key, index, *_ in self._replay.planner.carried():
            carried[source].add((key, index))
        for source, (key, index) in enumerate(self._replay.planner.cursors()):
            self._names[source].forget((key, index), carried[source])
            if self._media is not None:
                self._media.forget(source, (key, index), carried[source])


def check_equal(replay: StepReplay, replayed: ReplayedStep) -> None:
    """Refuse a step that is not what was journalled.

    Raises:
        CorruptRecordError: Since a shard was changed; it is named.
        DataError: For another reason.
    """
    if replayed.is_equal:
        return
    replay.check_sources()
    told = replayed.journalled
    raise DataError(
        f"step {told.step} planned again is not what was journalled (digest "
        f"{replayed.plan.stream_digest} instead of {told.digest}; {', '.join(replayed.differing)} "
        "differ), though every shard has its size and fingerprint: a file was changed inside, or "
        "the journal was; compare with msdctl verify",
        step=told.step,
    )


def readers_by_group(tree: ClientPlaceTree, broadcast_axes: str) -> list[tuple[int, ...]]:
    """Return the ranks that are given the rows of each DP group.

    All but middle pipeline stages, and along axes of `broadcast_at` the first rank alone.

    Args:
        tree: The mesh.
        broadcast_axes: Axes joined by commas, as plans name them.
    """
    is_reader = tree.stage_numbers != STAGES.index("middle")
    for axis in filter(None, broadcast_axes.split(",")):
        is_first = np.zeros(tree.rank_count, np.bool_)
        is_first[list(tree.first_ranks(axis))] = True
        is_reader &= is_first
    return [tuple(ranks[is_reader[ranks]].tolist()) for ranks in tree.group_ranks]


def lineage(
    job: str,
    step: int,
    *,
    rank: int | None = None,
    generation: int | None = None,
    state_dir: str | os.PathLike[str] | None = None,
) -> StepLineage:
    """Return what a step of a run held.

    Reads the run's journal and the records of that one step in this process; needs no daemon.

    Args:
        job: The job's name, its folder's, or the first 6 or more digits of its digest.
        step: The trainer's number of the step.
        rank: Rows of this rank alone.
        generation: Of the journal; None: the newest one that holds the step.
        state_dir: The daemon's state folder; None: the default one.

    Raises:
        NotFoundError: No such run, step, generation or rank; what is kept is named.
        CorruptRecordError: A shard was changed since.
        ResourceError: The journal can't be read, or is damaged.
        DataError: The step planned again is not what was journalled.
    """
    if state_dir is None:
        from msd_daemon.config.daemon_file import load_daemon_config

        state_dir = load_daemon_config().state_dir
    run = find_run(job, Path(state_dir))
    with naming_others(run), JournalReader(run.journal) as reader:
        kept = reader.holding(step, generation)
        with LineageReader(run, reader, kept, step) as opened:
            for found in opened.steps(step + 1, rank):
                return found
    raise NotFoundError(f"step {step} is not journalled", step=step)
