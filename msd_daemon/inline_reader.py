"""A job's stream in one process: no daemon, no shared memory, no planner process, nothing ahead.

For notebooks, debuggers and unit tests, and the yardstick for the real thing: steps, rows and
states are the same bytes that a daemon serves.

    for step in msd_daemon.inline("job.yaml"):
        for row in step.rows:
            print(row.tokens, [(s.source, s.epoch, s.offset, s.length) for s in row.segments])

Records come from the source loaders and plans from the planner, both in this process; rows are put
together here, segment by segment. Slow on purpose, and as large as the documents that it holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from federation.model.job import FieldRule, ResolvedJob
from federation.model.media import MediaRule
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, StepPlanner
from federation.planning.step_change import first_state
from federation.user_strategy import load_strategy
from msd_client.arguments import saved_bytes
from msd_client.contract.errors import StateMismatchError, UsageError
from msd_client.contract.position import unpack_block_key
from msd_client.contract.state import StreamState
from msd_daemon.given_job import GivenJob, given_job
from msd_daemon.inline_documents import ReadDocuments
from msd_daemon.inline_feed import InlineFeed
from msd_daemon.inline_rows import (
    InlineBatch,
    InlineRow,
    InlineSegment,
    Piece,
    batch_of,
    fill_row,
)
from msd_daemon.sources.chunk_draft import ChunkDraft


@dataclass(frozen=True, eq=False)
class InlineStep:
    """One optimizer step, all DP groups."""

    number: int
    plan_step: int
    valid_tokens: int
    """Labels trained in the whole step."""
    rows: tuple[InlineRow, ...]
    """By canonical number."""
    plan: StepPlan
    """What the planner made of it."""
    fields: tuple[FieldRule, ...] = ()
    """User fields of the job."""
    media: tuple[MediaRule, ...] = ()
    """Media rules of the job."""

    def microbatches(self, dp_group: int = 0) -> list[InlineBatch]:
        """Return what a DP group receives, in order.

        Raises:
            UsageError: There is no such group.
        """
        if not 0 <= dp_group < self.plan.dp_count:
            raise UsageError(f"DP group {dp_group} of {self.plan.dp_count} does not exist")
        mine = [row for row in self.rows if row.dp_group == dp_group]
        mine.sort(key=lambda row: (row.microbatch, row.slot))
        size = self.plan.microbatch_rows
        return [
            batch_of(
                mine[first : first + size],
                self.fields,
                self.media,
                has_groups=self.plan.group_begins is not None,
            )
            for first in range(0, len(mine), size)
        ]


class InlineStream:
    """The steps of a job, one after the other; iterate it.

    Args:
        job: The resolved job.
        dp: Data-parallel groups; decides who receives a row, never what a step holds.
        state: A `state_dict()`, of this class or of a trainer's loader; None starts afresh.
        index_dir: Where indexes are kept, None for none.

    Raises:
        StateMismatchError: The state is of other samples, or damaged.
        MeshMismatchError: The rows do not divide among the groups.
    """

    def __init__(
        self,
        job: ResolvedJob,
        *,
        dp: int = 1,
        state: Mapping[str, bytes] | None = None,
        index_dir: Path | None = None,
    ) -> None:
        self.job = job
        self._tree = ClientPlaceTree.from_mesh({"dp": dp})
        self._feed = InlineFeed(job, self._keep, index_dir)
        are_per_token = tuple(field.per == "token" for field in job.fields)
        self._documents = [ReadDocuments(loader, are_per_token) for loader in self._feed.loaders]
        self._planner = StepPlanner(job, self._tree, first_state(job), load_strategy(job))
        if state is not None:
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, bytes]:
        """Return the state after the last step that was given out."""
        return {"msd": self._planner.state().encode()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Continue from a state.

        Raises:
            StateMismatchError: Not a state of this job, or damaged.
        """
        try:
            decoded = StreamState.decode(saved_bytes(state["msd"]))
        except (KeyError, TypeError) as error:
            raise StateMismatchError('a state is a dict with the key "msd"') from error
        self._planner = StepPlanner(self.job, self._tree, decoded, load_strategy(self.job))
        for documents, (block_key, index) in zip(
            self._documents, self._planner.cursors(), strict=True
        ):
            documents.seek(block_key, index)

    def set_mixture(self, weights: Mapping[str, float], at_step: int | None = None) -> int:
        """Change the mixture from a step on, by default the next one; return that step.

        Raises:
            ConfigError: A weight is no weight, or the step was given out already.
        """
        step = self._planner.state().step if at_step is None else at_step
        self._planner.change_mixture(weights, step)
        return step

    def __iter__(self) -> Iterator[InlineStep]:
        while (step := self.next_step()) is not None:
            yield step

    def next_step(self) -> InlineStep | None:
        """Return the next step, None at the end of the stream.

        Raises:
            DataError: The draw reached a fault that the job does not skip, or a source's end.
        """
        planned = self._feed.next_step(self._planner)
        if isinstance(planned, Ended):
            return None
        step = InlineStep(
            planned.step,
            planned.plan_step,
            planned.valid_tokens,
            self._rows(planned),
            planned,
            self.job.fields,
            self.job.media,
        )
        self._forget()
        return step

    def __repr__(self) -> str:
        return (
            f"InlineStream({self.job.name!r}, {self._tree.dp_count} DP groups, next step "
            f"{self._planner.state().step})"
        )

    def close(self) -> None:
        """Close all shards."""
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, draft: ChunkDraft) -> None:
        self._documents[draft.meta.source_index].keep(draft)

    def _rows(self, plan: StepPlan) -> tuple[InlineRow, ...]:
        segments: list[list[InlineSegment]] = [[] for _ in range(plan.rows)]
        pieces: list[list[Piece]] = [[] for _ in range(plan.rows)]
        columns = np.stack(
            (plan.source, plan.block_key, plan.index, plan.offset, plan.length, plan.column)
        )
        begins = np.ones(len(plan.source), np.bool_)
        if plan.group_begins is not None:
            begins = plan.group_begins
        lines = zip(plan.row.tolist(), columns.T.tolist(), begins.tolist(), strict=True)
        for row, column, is_begin in lines:
            source, block_key, index, offset, length, start = column
            name = self.job.sources[source].name
            place = unpack_block_key(block_key)
            segments[row].append(
                InlineSegment(name, source, *place, index, offset, length, start, is_begin)
            )
            pieces[row].append(self._documents[source].piece(block_key, index, offset, length))
        rows = []
        for number in range(plan.rows):
            arrays = fill_row(self.job, plan.row_tokens, segments[number], pieces[number])
            dp_group, microbatch = int(plan.row_dp[number]), int(plan.row_microbatch[number])
            slot = int(plan.row_slot[number])
            rows.append(
                InlineRow(number, dp_group, microbatch, slot, *arrays, tuple(segments[number]))
            )
        return tuple(rows)

    def _forget(self) -> None:
        carried: list[set[tuple[int, int]]] = [set() for _ in self._documents]
        for source, block_key, index, *_ in self._planner.carried():
            carried[source].add((block_key, index))
        for documents, keep, cursor in zip(
            self._documents, carried, self._planner.cursors(), strict=True
        ):
            documents.forget((cursor[0], cursor[1]), keep)


def inline(
    job: GivenJob,
    *,
    state: Mapping[str, bytes] | None = None,
    base_dir: str | os.PathLike[str] | None = None,
    dp: int = 1,
) -> InlineStream:
    """Return a job's stream, read in this process.

    Args:
        job: Path of a job file, a job as a dict, or a resolved job.
        state: A `state_dict()` to continue from, of any mesh.
        base_dir: Folder that relative paths start from; None takes that of the job file, or the
            current one.
        dp: Data-parallel groups that rows are dealt to.

    Raises:
        ConfigError: The job is refused, all faults are listed, or its file can't be read.
        UsageError: `job` is no job at all.
        StateMismatchError: The state is of another job, or damaged.
        MeshMismatchError: The rows do not divide among the groups.
    """
    return InlineStream(given_job(job, base_dir, "inline"), dp=dp, state=state)
