"""Where one source stands behind a number of its samples or tokens that something else has consumed.

Goes through the source's own order as a draw does, with the draw's own queue: what is cut, passed
over and counted is what a run would have cut, passed over and counted. Pure; chunks come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from federation.model.chunk import ChunkMeta
from federation.model.job import ResolvedJob
from federation.planning import cuts
from federation.planning.epochs import epochs_max
from federation.planning.extra_rows import ExtraRows
from federation.planning.fragments import FragmentQueue
from federation.planning.groups import RowLimits
from federation.planning.step_change import first_state
from msd_client.contract.errors import SourceExhaustedError
from msd_client.contract.position import pack_block_key, unpack_block_key
from msd_client.contract.state import (
    CURSOR_BLOCK_KEY,
    CURSOR_INDEX,
    CURSOR_OFFSET,
    DELIVERED_SAMPLES,
    DELIVERED_TOKENS,
    DRAWN_SAMPLES,
    DRAWN_TOKENS,
    DROPPED_COLUMNS,
    LANES_ENDED,
    PROGRESS_COLUMNS,
    RECORD_ORDER,
    VALID_TOKENS,
    StreamState,
)

Int64Array = npt.NDArray[np.int64]
CountUnit = Literal["samples", "tokens"]
_COUNTS = [
    DRAWN_TOKENS, DRAWN_SAMPLES, DELIVERED_TOKENS, DELIVERED_SAMPLES, VALID_TOKENS,
]  # fmt: skip


@dataclass(frozen=True)
class Consumed:
    """How much of a source was consumed elsewhere."""

    count: int
    unit: CountUnit


@dataclass(frozen=True)
class SourcePoint:
    """Where a source stands, as columns of a state have it."""

    progress: Int64Array
    """Shape (PROGRESS_COLUMNS,)."""
    dropped: Int64Array
    """Shape (DROPPED_COLUMNS,)."""
    faults: tuple[int, ...] = ()
    """Orders of the faults in the error window."""

    def behind(self, passes: int) -> SourcePoint:
        """Return the beginning of a later pass: this is what one whole pass gave."""
        progress = passes * self.progress
        progress[CURSOR_BLOCK_KEY] = pack_block_key(passes, 0, 0)
        progress[[CURSOR_INDEX, CURSOR_OFFSET, LANES_ENDED]] = 0
        return SourcePoint(progress, passes * self.dropped)


_START = SourcePoint(
    np.zeros(len(PROGRESS_COLUMNS), np.int64), np.zeros(len(DROPPED_COLUMNS), np.int64)
)


class MidStream:
    """The draw of one source alone, up to a count.

    Samples are taken whole. Tokens are taken exactly where the job's documents may be cut anywhere
    (`long: split`, no masks, media or groups), else up to the end of the fragment, or group, that
    reaches the count.

    Args:
        job: The resolved job.
        source: Index of the source in it.
        step: Step that the stream goes on with: fragments are cut for its rows.
        start: Where to begin; `SourcePoint.behind` for a later pass.
    """

    def __init__(
        self, job: ResolvedJob, source: int, step: int, start: SourcePoint = _START
    ) -> None:
        self._job, self._source = job, source
        self._extras = ExtraRows.of(job)
        self._is_cut_anywhere = job.batch.long == "split" and not self._extras.count
        self._is_trained = job.sources[source].loss_weight > 0
        self._progress, self._dropped = start.progress.copy(), start.dropped.copy()
        self._queue = self._open_queue(step)
        self._taken = 0
        """Absolute count of fragments that were taken."""
        self._pass_records = 0
        self._is_pass_clean = not start.progress.any()

    @property
    def cursor(self) -> tuple[int, int]:
        """Where its loader starts: (block key, index)."""
        return int(self._progress[CURSOR_BLOCK_KEY]), int(self._progress[CURSOR_INDEX])

    @property
    def point(self) -> SourcePoint:
        """Where the source stands now."""
        faults = self._queue.faults_in_window(int(self._progress[RECORD_ORDER]))
        return SourcePoint(self._progress.copy(), self._dropped.copy(), tuple(faults))

    def go(
        self, consumed: Consumed, read: Callable[[], ChunkMeta | None]
    ) -> Iterator[SourcePoint | None]:
        """Take what was consumed, chunk by chunk.

        Args:
            consumed: From the stream's beginning on.
            read: Gives the next chunk of the source in its order, None where none follows.

        Yields:
            None after each chunk; once what the first whole pass gave, where it had no fault: a
            caller who knows that later passes give the same may begin anew behind some of them.

        Raises:
            SourceExhaustedError: The source's passes hold less.
            DataError: What a draw would meet on the way: a fault under `fail`, a spent budget.
        """
        while self._count_of(consumed) < consumed.count:
            known = self._queue.columns[:, self._taken - self._queue.base :]
            if known.shape[1]:
                self._take(known, consumed)
                continue
            if self._queue.failure is not None:
                raise self._queue.failure
            if (first := self._first_pass()) is not None:
                yield first
            meta = None if self._queue.is_complete else read()
            if meta is None:
                raise self._too_few(consumed)
            if unpack_block_key(meta.block_key).epoch == 0:
                self._pass_records += len(meta.lengths)
                self._is_pass_clean &= not meta.fault
            self._queue.add(meta, self._taken)
            yield None

    def _count_of(self, consumed: Consumed) -> int:
        column = DRAWN_SAMPLES if consumed.unit == "samples" else DRAWN_TOKENS
        return int(self._progress[column])

    def _take(self, known: Int64Array, consumed: Consumed) -> None:
        """Take known fragments, all or up to the count; a record's are all known together."""
        left = consumed.count - self._count_of(consumed)
        begins = self._extras.begins(known)
        if consumed.unit == "samples":
            end = int(np.searchsorted(np.cumsum(begins), left, side="right"))
        else:
            through = np.cumsum(known[cuts.LENGTH])
            end = min(int(np.searchsorted(through, left)) + 1, known.shape[1])
            excess = int(through[end - 1]) - left
            if excess > 0 and self._is_cut_anywhere:
                known = known.copy()
                known[cuts.LENGTH, end - 1] -= excess
        if self._extras.has_groups and end:
            end += int(self._extras.follow(known)[end - 1])
        self._note(known[:, :end], int(begins[:end].sum()))

    def _note(self, drawn: Int64Array, samples: int) -> None:
        """Set the cursor behind fragments and count them, and what lies before it."""
        progress, last = self._progress, drawn[:, -1]
        self._taken += drawn.shape[1]
        tokens = int(drawn[cuts.LENGTH].sum())
        progress[_COUNTS] += (tokens, samples, tokens, samples, self._valid(drawn))
        key = int(last[cuts.BLOCK_KEY])
        if unpack_block_key(key).epoch != unpack_block_key(self.cursor[0]).epoch:
            progress[LANES_ENDED] = 0
        progress[CURSOR_BLOCK_KEY] = key
        progress[CURSOR_INDEX] = last[cuts.INDEX]
        progress[CURSOR_OFFSET] = last[cuts.OFFSET] + last[cuts.LENGTH]
        progress[RECORD_ORDER] = last[cuts.RECORD_ORDER]
        if self._queue.has_notes:
            counts, lanes = self._queue.pass_records(
                key,
                int(progress[RECORD_ORDER]),
                int(progress[CURSOR_OFFSET]),
                int(progress[LANES_ENDED]),
            )
            self._dropped += counts
            progress[LANES_ENDED] = lanes

    def _valid(self, drawn: Int64Array) -> int:
        """Return the labels that fragments have, each in a row by itself."""
        if not self._is_trained:
            return 0
        if self._extras.has_trained:
            trained = self._extras.trained(drawn)
            return int((trained // 2 - trained % 2).sum())
        return int((drawn[cuts.LENGTH] - 1).sum())

    def _first_pass(self) -> SourcePoint | None:
        """Return what the first pass gave once all of it was taken, and it had no fault."""
        is_known = unpack_block_key(self._queue.position[0]).epoch > 0
        if not self._is_pass_clean or not is_known or self._queue.is_complete:
            return None
        self._is_pass_clean = False  # told once
        progress, dropped = self._progress.copy(), self._dropped.copy()
        counts, _ = self._queue.pass_records(self.cursor[0], self._pass_records, 0, 0)
        dropped += counts
        self._dropped += counts
        progress[RECORD_ORDER] = self._pass_records
        return SourcePoint(progress, dropped)

    def _too_few(self, consumed: Consumed) -> SourceExhaustedError:
        spec = self._job.sources[self._source]
        held = self._count_of(consumed)
        return SourceExhaustedError(
            f"source {spec.name}: {consumed.count} {consumed.unit} were consumed, all its passes hold "
            f"{held}: give at most {held}, or raise max_epochs",
            source=spec.name,
            seen=consumed.count,
            limit=held,
        )

    def _open_queue(self, step: int) -> FragmentQueue:
        job, progress = self._job, self._progress.tolist()
        row_tokens = job.batch.at(step, 0).row_tokens
        return FragmentQueue(
            job.sources[self._source],
            self._source,
            row_tokens,
            job.batch.long,
            unit=job.mixture.unit,
            epochs_max=epochs_max(job, self._source),
            cursor=(progress[CURSOR_BLOCK_KEY], progress[CURSOR_INDEX], progress[CURSOR_OFFSET]),
            record_order=progress[RECORD_ORDER],
            extras=self._extras,
            limits=RowLimits(row_tokens, job.batch.row_segments_max, job.batch.segment_multiple),
        )


def state_at(job: ResolvedJob, step: int, points: dict[int, SourcePoint]) -> StreamState:
    """Return the state of a stream whose sources stand at points; nothing is carried.

    The draw begins anew: its accumulators are those of a first step.

    Args:
        job: The resolved job.
        step: The step that follows.
        points: By index of the source; those that lack stand at their beginning.
    """
    state = first_state(job)
    progress, dropped = state.progress.copy(), state.dropped.copy()
    faults: list[tuple[int, int]] = []
    for source, point in sorted(points.items()):
        progress[:, source], dropped[:, source] = point.progress, point.dropped
        faults += [(source, fault) for fault in point.faults]
    columns = np.array(faults, np.int64).reshape(-1, 2).T
    return replace(
        state,
        step=step,
        progress=progress,
        dropped=dropped,
        faults=np.ascontiguousarray(columns),
    )
