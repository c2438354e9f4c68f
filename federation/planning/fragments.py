"""The fragments of one source that are known and not yet drawn, and what lies between them.

A record that is longer than a row becomes fragments here (`split`), loses its tail (`truncate`) or
is passed over (`skip`). Records that are not OK are passed over and counted when the draw passes
them. What stops a source for good - its last epoch, a fault under `fail`, a spent error budget -
stands at the end of the queue as a mark that acts only when the draw gets there.

A queue cuts for one row length and goes on from any cursor: where rows change their length, a new
queue goes on from the state, just as after a restore. A record that was begun goes on behind the
tokens that were drawn of it (`split`) or is finished (`truncate`, `skip`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from federation.model.chunk import FAULT_STATUS_MIN, ChunkMeta, RecordStatus
from federation.model.job import LongPolicy, SourceSpec
from federation.planning.ordering import BlockWalk, ChunkMerger, Run
from msd_client.contract.errors import (
    CorruptRecordError,
    DataError,
    ErrorBudgetExceededError,
    MsdError,
    ProtocolError,
    SourceExhaustedError,
)
from msd_client.contract.position import unpack_block_key
from msd_client.contract.state import DROPPED_COLUMNS, DROPPED_TOKENS

Int64Array = npt.NDArray[np.int64]

SOURCE, BLOCK_KEY, INDEX, OFFSET, LENGTH, RECORD_ORDER, CUMULATIVE = range(7)
"""Rows of a fragment matrix. CUMULATIVE counts in the mixture's unit up to and with a fragment."""
FRAGMENT_COLUMNS = 7

_LONG_SKIPPED = DROPPED_COLUMNS.index("long_skipped")
_LONG_TRUNCATED = DROPPED_COLUMNS.index("long_truncated")
_DROP_THRESHOLD, _DROP_REASON, _DROP_TOKENS = range(3)
_FAULTS_TOLD = 3
"""Fault texts that the error of an epoch without a sample repeats."""


class FragmentQueue:
    """One source's fragments in order, fed by chunks; positions in it are absolute counts.

    The error budget: a source fails when more than `floor(budget_ratio * window_records)` of its
    last `window_records` records are faults. Records it has yet to see count as good, so that a
    small file with a handful of faults passes; a ratio of 1 never fails.
    """

    def __init__(
        self,
        spec: SourceSpec,
        source_index: int,
        row_tokens: int,
        long: LongPolicy,
        *,
        is_sample_unit: bool,
        epochs_max: int | None,
        is_wrapped: bool = False,
        is_ended: bool = False,
        cursor: tuple[int, int, int] = (0, 0, 0),
        record_order: int = 0,
        lanes_ended: int = 0,
        faults: tuple[int, ...] = (),
    ) -> None:
        """Stand at a cursor.

        Args:
            spec: The source.
            source_index: Its number in the job.
            row_tokens: Longest fragment.
            long: What becomes of longer records.
            is_sample_unit: True where the mixture counts samples.
            epochs_max: Passes that may be drawn, None for no end.
            is_wrapped: True where what lies behind the last pass may be drawn once `is_open`.
            is_ended: True where the draw passed the end of the last pass: what lies between the
                cursor and it was counted then.
            cursor: (block key, index, tokens drawn of that record).
            record_order: Records before the cursor's.
            lanes_ended: Bits of lanes that ended before the cursor.
            faults: Record orders of the faults in the error window.
        """
        block_key, index, self._resume_offset = cursor
        self.spec = spec
        self._source_index = source_index
        self._row_tokens = row_tokens
        self._long = long
        self._is_sample_unit = is_sample_unit
        self._epochs_max = epochs_max
        self._is_wrapped = is_wrapped
        self._is_counted = is_ended
        self._next_order = record_order
        self._merger = ChunkMerger(BlockWalk(spec, block_key, index, lanes_ended))
        self._epoch = self._merger.walk.epoch
        is_epoch_start = cursor == (self._epoch << 48, 0, 0)
        self._epoch_fragments = 0 if is_epoch_start else 1
        self._faults = deque(faults)
        self._passed_faults = list(faults)
        rule = spec.on_error
        self._faults_max = int(rule.budget_ratio * rule.window_records)
        self._has_budget = rule.budget_ratio < 1
        self._known: Int64Array = np.zeros((FRAGMENT_COLUMNS, 0), np.int64)
        self.base = 0
        """Absolute count of the first fragment in `columns`."""
        self._cumulative = 0
        self._expanded = 0
        self._drops: Int64Array = np.zeros((3, 0), np.int64)
        self._end_count: int | None = None
        self.end_order = record_order
        """Order of the first record behind the last pass, once the queue is complete."""
        self.is_open = False
        """Set to draw on behind the last pass, where the queue is a wrapped one."""
        self._failure: MsdError | None = None
        self._fault_texts: deque[str] = deque(maxlen=_FAULTS_TOLD)
        self._check_epoch()

    @property
    def columns(self) -> Int64Array:
        """Known fragments that may be drawn. Shape (FRAGMENT_COLUMNS, n)."""
        if self._end_count is None or self.is_open:
            return self._known
        columns: Int64Array = self._known[:, : max(0, self._end_count - self.base)]
        return columns

    @property
    def count(self) -> int:
        """Absolute count of the known fragments that may be drawn, drawn ones included."""
        return self.base + int(self.columns.shape[1])

    @property
    def is_complete(self) -> bool:
        """True where no fragment will follow: the last allowed epoch is known to its end."""
        return self._end_count is not None and not self.is_open

    @property
    def failure(self) -> MsdError | None:
        """Why no fragment will follow, if it is an error."""
        return None if self.is_complete else self._failure

    @property
    def position(self) -> tuple[int, int]:
        """(block key, index) of the first record that is not known yet."""
        return self._merger.position

    @property
    def is_over(self) -> bool:
        """True where nothing will follow what is known."""
        return self.is_complete or self.failure is not None

    @property
    def is_resuming(self) -> bool:
        """True while the record at the cursor, of which more may be to draw, is not known."""
        return bool(self._resume_offset)

    @property
    def has_marks(self) -> bool:
        """True where the draw has to call `pass_records` when it moves on."""
        return bool(self._drops.shape[1] or self._merger.walk.skips)

    def add(self, meta: ChunkMeta, drawn: int) -> bool:
        """Take a chunk; fragments before absolute count `drawn` may be forgotten.

        Returns:
            True where fragments, or the end of the source, became known.

        Raises:
            ProtocolError: The chunk contradicts itself.
            DataError: The record at the cursor is not what it was when the state was saved.
        """
        pieces: list[Int64Array] = []
        if not self._is_closed:
            if meta.fault and meta.fault not in self._fault_texts:
                self._fault_texts.append(meta.fault)
            pieces = [piece for piece in self._pieces(meta) if piece.shape[1]]
        if pieces:
            kept = self._known[:, drawn - self.base :]
            self.base = drawn
            self._known = np.concatenate((kept, *pieces), axis=1)
        return bool(pieces) or self.is_over

    def pass_records(
        self, block_key: int, record_order: int, lanes_ended: int
    ) -> tuple[Int64Array, int]:
        """Settle what lies before the record that the draw reached.

        Args:
            block_key: Block of the last drawn record.
            record_order: Its order.
            lanes_ended: The ended lanes so far, already 0 where the epoch is a new one.

        Returns:
            Counts to add to the source's dropped column, shape (DROPPED_COLUMNS,), and the lanes
            that ended.
        """
        counts = np.zeros(len(DROPPED_COLUMNS), np.int64)
        passed = int(np.searchsorted(self._drops[_DROP_THRESHOLD], record_order, side="right"))
        if passed:
            drops = self._drops[:, :passed]
            counts += np.bincount(drops[_DROP_REASON], minlength=len(counts))
            counts[DROPPED_TOKENS] = drops[_DROP_TOKENS].sum()
            if self._has_budget:
                is_fault = _is_fault(drops[_DROP_REASON] + 1)
                self._passed_faults += (drops[_DROP_THRESHOLD][is_fault] - 1).tolist()
            self._drops = self._drops[:, passed:]
        epoch = block_key >> 48
        for key, lane in self._merger.walk.take_skips(block_key):
            if key >> 48 == epoch:
                lanes_ended |= 1 << lane
        return counts, lanes_ended

    def faults_in_window(self, record_order: int) -> list[int]:
        """Return the orders of passed faults that still count at a record; forgets the rest."""
        first = record_order - self.spec.on_error.window_records
        if self._passed_faults and self._passed_faults[0] <= first:
            self._passed_faults = [order for order in self._passed_faults if order > first]
        return self._passed_faults

    def _pieces(self, meta: ChunkMeta) -> Iterator[Int64Array]:
        for run in self._merger.add(meta):
            if self._check_epoch():
                return
            yield self._expand(run)
            if self._failure is not None:
                return
        self._check_epoch()

    @property
    def _is_closed(self) -> bool:
        """True where nothing more is taken in."""
        is_ended = self._end_count is not None and not self._is_wrapped
        return is_ended or self._failure is not None

    def _check_epoch(self) -> bool:
        """Note that the order came to another epoch; True where nothing more is taken in."""
        epoch = self._merger.walk.epoch
        is_behind = self._epochs_max is not None and epoch >= self._epochs_max
        if is_behind and self._end_count is None:
            self._end_count, self.end_order = self._expanded, self._next_order
            self._is_counted = False
        elif epoch == self._epoch:
            return False
        elif not self._epoch_fragments:
            self._failure = self._no_sample_error()
        self._epoch = epoch
        self._epoch_fragments = 0
        return self._is_closed

    def _no_sample_error(self) -> SourceExhaustedError:
        seen = "".join(f"; {text}" for text in self._fault_texts)
        if self.spec.hold_out and self.spec.part == "train":
            seen += f"; hold_out {self.spec.hold_out:g} keeps records for validation"
        return SourceExhaustedError(
            f"source {self.spec.name}: epoch {self._epoch} of its {len(self.spec.shards)} "
            f"shards holds no sample{seen}; remove the source or set its weight to 0",
            source=self.spec.name,
            epoch=self._epoch,
        )

    def _expand(self, run: Run) -> Int64Array:
        meta, skip = run
        lengths = meta.lengths[skip:].astype(np.int64)
        status = meta.status[skip:]
        is_dropped = (status != RecordStatus.OK) | (lengths < 1)
        if is_dropped.any():
            stop = self._stop_at_fault(meta, skip, status)
            lengths, status, is_dropped = lengths[:stop], status[:stop], is_dropped[:stop]
        count = len(lengths)
        order = np.arange(self._next_order, self._next_order + count)
        self._next_order += count
        matrix = np.empty((FRAGMENT_COLUMNS, count), np.int64)
        matrix[SOURCE] = self._source_index
        matrix[BLOCK_KEY] = meta.block_key
        matrix[INDEX] = np.arange(meta.first_index + skip, meta.first_index + skip + count)
        matrix[OFFSET] = 0
        matrix[LENGTH] = lengths
        matrix[RECORD_ORDER] = order
        if self._resume_offset and count:
            first = self._resume(meta, matrix, is_dropped)
            matrix, status, is_dropped = matrix[:, first:], status[first:], is_dropped[first:]
        is_long = matrix[LENGTH] > self._row_tokens
        if is_dropped.any() or is_long.any():
            matrix = self._cut(matrix, status, is_dropped, is_long)
        weights = matrix[OFFSET] == 0 if self._is_sample_unit else matrix[LENGTH]
        if matrix.shape[1]:
            np.cumsum(weights, out=matrix[CUMULATIVE])
            matrix[CUMULATIVE] += self._cumulative
            self._cumulative = int(matrix[CUMULATIVE, -1])
        self._epoch_fragments += matrix.shape[1]
        self._expanded += matrix.shape[1]
        return matrix

    def _cut(
        self,
        matrix: Int64Array,
        status: npt.NDArray[np.uint8],
        is_dropped: npt.NDArray[np.bool_],
        is_long: npt.NDArray[np.bool_],
    ) -> Int64Array:
        row_tokens = self._row_tokens
        reasons = np.maximum(status.astype(np.int64), int(RecordStatus.EMPTY)) - 1
        tokens = np.zeros(len(reasons), np.int64)
        thresholds = matrix[RECORD_ORDER] + 1
        is_noted = is_dropped
        if self._long == "skip":
            reasons[is_long & ~is_dropped] = _LONG_SKIPPED
            tokens[is_long] = matrix[LENGTH, is_long]
            is_noted = is_dropped = is_dropped | is_long
        elif self._long == "truncate":
            reasons[is_long & ~is_dropped] = _LONG_TRUNCATED
            tokens[is_long] = matrix[LENGTH, is_long] - row_tokens
            thresholds[is_long] -= 1
            matrix[LENGTH, is_long] = row_tokens
            is_noted = is_dropped | is_long
        if not self._is_counted:
            noted = np.vstack((thresholds, reasons, tokens))[:, is_noted]
            self._drops = np.concatenate((self._drops, noted), axis=1)
        if is_dropped.any():
            matrix = matrix[:, ~is_dropped]
        if self._long == "split" and is_long.any():
            parts = -(-matrix[LENGTH] // row_tokens)
            starts = np.repeat(np.cumsum(parts) - parts, parts)
            matrix = np.repeat(matrix, parts, axis=1)
            skipped = (np.arange(matrix.shape[1]) - starts) * row_tokens
            matrix[OFFSET] += skipped
            matrix[LENGTH] = np.minimum(matrix[LENGTH] - skipped, row_tokens)
        return matrix

    def _resume(
        self, meta: ChunkMeta, matrix: Int64Array, is_dropped: npt.NDArray[np.bool_]
    ) -> int:
        """Cut what was drawn off the record at the cursor; 1 where nothing of it is left, else 0."""
        length = int(matrix[LENGTH, 0])
        if is_dropped[0] or length < self._resume_offset:
            place = unpack_block_key(meta.block_key)
            raise DataError(
                f"source {self.spec.name}: the record at the state's cursor (epoch {place.epoch}, "
                f"window {place.window}, block {place.block}) had at least {self._resume_offset} "
                f"tokens when the state was saved, {length} can be read now: "
                f"{meta.fault or 'no fault'}; restore the shard",
                source=self.spec.name,
            )
        if self._long == "split":
            matrix[OFFSET, 0] = self._resume_offset
            matrix[LENGTH, 0] -= self._resume_offset
            is_finished = length == self._resume_offset
        else:
            is_finished = True  # begun under another row length, or drawn whole
        self._resume_offset = 0
        return int(is_finished)

    def _stop_at_fault(self, meta: ChunkMeta, skip: int, status: npt.NDArray[np.uint8]) -> int:
        """Return how many records of a run may be used before a fault ends the source."""
        if int(status.max()) > max(RecordStatus):
            raise ProtocolError(f"source {self.spec.name}: unknown record status {status.max()}")
        rule = self.spec.on_error
        is_failing = rule.policy == "fail"
        if not is_failing and not self._has_budget:
            return len(status)
        for place in np.flatnonzero(_is_fault(status)).tolist():
            order = self._next_order + place
            self._faults.append(order)
            while self._faults[0] <= order - rule.window_records:
                self._faults.popleft()
            if is_failing or len(self._faults) > self._faults_max:
                self._failure = self._fault_error(meta, skip + place, is_failing=is_failing)
                return int(place)
        return len(status)

    def _fault_error(self, meta: ChunkMeta, place: int, *, is_failing: bool) -> MsdError:
        block = unpack_block_key(meta.block_key)
        index = meta.first_index + place
        name = RecordStatus(int(meta.status[place])).name.lower()
        where = (
            f"source {self.spec.name}: epoch {block.epoch}, window {block.window}, block "
            f"{block.block}, record {index} is {name} ({meta.fault or 'no text'})"
        )
        if is_failing:
            return CorruptRecordError(
                f"{where}; mend the shard or set on_error to skip",
                source=self.spec.name,
                block_key=meta.block_key,
                index=index,
                status=name,
            )
        rule = self.spec.on_error
        return ErrorBudgetExceededError(
            f"{where}; that makes {len(self._faults)} faults in its last {rule.window_records} "
            f"records, the budget is {self._faults_max} ({rule.budget_ratio:g}); mend the shards "
            "or raise on_error.budget_ratio",
            source=self.spec.name,
            block_key=meta.block_key,
            index=index,
            seen=len(self._faults),
            limit=self._faults_max,
        )


def _is_fault(status: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    return (status >= FAULT_STATUS_MIN) & (status <= RecordStatus.UNREADABLE)
