"""Plans the first step of a job inside one process, to look at rows without daemon or trainer.

The same loaders and the same planner as in a run, so that the rows are those that training sees
first. Holds the tokens that the step needed in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import ResolvedJob
from federation.model.place_tree import ClientPlaceTree
from federation.model.plan import StepPlan
from federation.planning.planner import Ended, StepPlanner
from federation.planning.step_change import first_state
from federation.user_strategy import load_strategy
from msd_client.contract.errors import SourceExhaustedError
from msd_daemon.inline_feed import InlineFeed
from msd_daemon.inline_media import InlineItem, ItemsByRule, items_of_part, items_of_records
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT
from msd_daemon.sources.chunk_draft import ChunkDraft

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PreviewSegment:
    """A piece of a document in a row."""

    source: str
    offset: int
    """First token of the piece inside its document."""
    document_tokens: int
    """Tokens of the whole document, BOS and EOS included."""
    tokens: Tokens
    """Shape (tokens,)."""
    is_trained: npt.NDArray[np.bool_]
    """Shape (tokens,); False of what chats and media leave out of the loss."""
    items: ItemsByRule = ()
    """Images, videos and sounds inside it, by media rule of the job; empty where it has none."""
    begins_group: bool | None = None
    """False where it is of the group of the piece before it; None in jobs without groups."""

    def spans(self) -> list[PreviewSpan]:
        """Return the runs of trained and untrained tokens, and the items between them, in order."""
        placed = [(item.begin, kind, item) for kind, own in enumerate(self.items) for item in own]
        found: list[PreviewSpan] = []
        at = 0
        for begin, kind, item in sorted(placed, key=lambda one: one[0]):
            found += self._runs(at, begin)
            at = begin + item.tokens
            found.append(PreviewSpan(begin, at, False, kind, item))
        return found + self._runs(at, len(self.tokens))

    def _runs(self, begin: int, end: int) -> list[PreviewSpan]:
        flags = self.is_trained[begin:end]
        cuts = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
        return [
            PreviewSpan(begin + first, begin + last, bool(flags[first]))
            for first, last in pairwise(cuts)
            if last > first
        ]


class PreviewSpan(NamedTuple):
    """Tokens of a segment that are alike."""

    begin: int
    """First token in the segment."""
    end: int
    is_trained: bool
    kind: int = -1
    """Number of the media rule where it is the placeholder of an item."""
    item: InlineItem | None = None


@dataclass(frozen=True)
class PreviewRow:
    """A packed row of the first step, in the order in which one rank would receive it."""

    number: int
    segments: tuple[PreviewSegment, ...]
    pad_tokens: int


class _Records(NamedTuple):
    first_index: int
    offsets: Tokens
    tokens: npt.NDArray[np.generic]
    items: list[ItemsByRule]
    """Of each record."""


class StreamPreview:
    """The start of a job's stream.

    Args:
        job: The resolved job.
        index_dir: Where indexes are kept, None for none.
    """

    def __init__(self, job: ResolvedJob, index_dir: Path | None = None) -> None:
        self._job = job
        self._feed = InlineFeed(job, self._keep, index_dir)
        self._records: dict[tuple[int, int], list[_Records]] = defaultdict(list)

    def close(self) -> None:
        """Close all shards."""
        self._feed.close()

    def plan_first_step(self) -> StepPlan:
        """Return the plan of step 0 for a single rank, reading what it needs.

        Raises:
            SourceExhaustedError: The sources hold nothing for a first step.
            DataError: The draw reached a fault that the job does not skip.
            MeshMismatchError: The batch does not fit even one rank.
        """
        job = self._job
        tree = ClientPlaceTree.from_mesh({})
        planner = StepPlanner(job, tree, first_state(job), load_strategy(job))
        planned = self._feed.next_step(planner)
        if isinstance(planned, Ended):
            raise SourceExhaustedError(
                f"job {job.name!r} ends before its first step ({planned.reason}): "
                "check its sources with msdctl check"
            )
        return planned

    def rows(self, plan: StepPlan, count: int) -> Iterator[PreviewRow]:
        """Yield the first rows of a plan with their tokens.

        Args:
            plan: What `plan_first_step` returned.
            count: Most rows.
        """
        order = np.lexsort((plan.row_slot, plan.row_microbatch))
        starts = np.searchsorted(plan.row, np.arange(plan.rows + 1))
        for number, row in enumerate(order[:count]):
            begin, end = int(starts[row]), int(starts[row + 1])
            segments = tuple(self._segment(plan, i) for i in range(begin, end))
            used = sum(len(segment.tokens) for segment in segments)
            yield PreviewRow(number, segments, plan.row_tokens - used)

    def _keep(self, draft: ChunkDraft) -> None:
        meta = draft.meta
        offsets = np.zeros(len(meta.lengths) + 1, dtype=np.int64)
        np.cumsum(meta.lengths, out=offsets[1:])
        tokens = np.concatenate(draft.payload) if draft.payload else np.zeros(0, dtype=np.int32)
        items = items_of_records(draft.media, len(meta.lengths))
        place = (meta.source_index, meta.block_key)
        self._records[place].append(_Records(meta.first_index, offsets, tokens, items))

    def _segment(self, plan: StepPlan, number: int) -> PreviewSegment:
        source, index = int(plan.source[number]), int(plan.index[number])
        for records in self._records[source, int(plan.block_key[number])]:
            place = index - records.first_index
            if 0 <= place < len(records.offsets) - 1:
                break
        else:
            raise AssertionError(f"segment {number} of the plan names a record that was not read")
        document, end = int(records.offsets[place]), int(records.offsets[place + 1])
        offset, length = int(plan.offset[number]), int(plan.length[number])
        begin = document + offset
        pool = records.tokens[begin : begin + length].astype(np.int64)
        has_masks = self._job.sources[source].has_masks
        return PreviewSegment(
            source=self._job.sources[source].name,
            offset=offset,
            document_tokens=end - document,
            tokens=pool & ~UNTRAINED_BIT if has_masks else pool,
            is_trained=(pool & UNTRAINED_BIT) == 0 if has_masks else np.ones(length, np.bool_),
            items=items_of_part(records.items[place], offset, length),
            begins_group=None if plan.group_begins is None else bool(plan.group_begins[number]),
        )
