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

from federation.model.chunk import ChunkMeta, RecordStatus
from federation.model.job import LongPolicy, SourceSpec, Unit
from federation.planning.cuts import (
    BLOCK_KEY,
    CUMULATIVE,
    FRAGMENT_COLUMNS,
    INDEX,
    LENGTH,
    OFFSET,
    RECORD_ORDER,
    SOURCE,
    RecordCutter,
    RunRecords,
)
from federation.planning.extra_rows import NO_EXTRA_ROWS, ExtraRows
from federation.planning.groups import GroupGatherer, RowLimits
from federation.planning.ordering import BlockWalk, ChunkMerger, Run
from federation.planning.passed_over import ErrorWindow, PassedOver
from federation.planning.run_marks import check_marks, continued_records
from msd_client.contract.errors import DataError, MsdError, SourceExhaustedError
from msd_client.contract.position import unpack_block_key

Int64Array = npt.NDArray[np.int64]

_FAULTS_TOLD = 3
"""Fault texts that the error of an epoch without a sample repeats."""


class FragmentQueue:
    """One source's fragments in order, fed by chunks; positions in it are absolute counts."""

    def __init__(
        self,
        spec: SourceSpec,
        source_index: int,
        row_tokens: int,
        long: LongPolicy,
        *,
        unit: Unit,
        epochs_max: int | None,
        is_wrapped: bool = False,
        is_ended: bool = False,
        cursor: tuple[int, int, int] = (0, 0, 0),
        record_order: int = 0,
        lanes_ended: int = 0,
        faults: tuple[int, ...] = (),
        extras: ExtraRows = NO_EXTRA_ROWS,
        limits: RowLimits | None = None,
    ) -> None:
        """Stand at a cursor.

        Args:
            spec: The source.
            source_index: Its number in the job.
            row_tokens: Longest fragment.
            long: What becomes of longer records.
            unit: Of the mixture.
            epochs_max: Passes that may be drawn, None for no end.
            is_wrapped: True where what lies behind the last pass may be drawn once `is_open`.
            is_ended: True where the draw passed the end of the last pass: what lies between the
                cursor and it was counted then.
            cursor: (block key, index, tokens drawn of that record).
            record_order: Records before the cursor's.
            lanes_ended: Bits of lanes that ended before the cursor.
            faults: Record orders of the faults in the error window.
            extras: Extra rows of the job's fragments.
            limits: What a row holds; of a source with groups.
        """
        block_key, index, self._resume_offset = cursor
        self.spec = spec
        self._source_index = source_index
        self._row_tokens = row_tokens
        self._extras = extras
        self._groups: GroupGatherer | None = None
        if spec.group is not None:
            assert limits is not None, "groups are judged by what a row holds"
            self._groups = GroupGatherer(spec.group, limits, extras)
        is_grouped = self._groups is not None
        self._cutter = RecordCutter(spec.name, row_tokens, long, extras, is_grouped=is_grouped)
        self._unit = unit
        self._epochs_max = epochs_max
        self._is_wrapped = is_wrapped
        self._is_counted = is_ended
        self._next_order = record_order
        walk = BlockWalk(spec, block_key, index, lanes_ended)
        self._merger = ChunkMerger(walk, is_begun=self._resume_offset > 0)
        self._epoch = self._merger.walk.epoch
        is_epoch_start = cursor == (self._epoch << 48, 0, 0)
        self._epoch_fragments = 0 if is_epoch_start else 1
        self._errors = ErrorWindow(spec, faults)
        self._known: Int64Array = np.zeros((FRAGMENT_COLUMNS + extras.count, 0), np.int64)
        self.base = 0
        """Absolute count of the first fragment in `columns`."""
        self._cumulative = 0
        self._expanded = 0
        self._notes = PassedOver()
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
        """Known fragments that may be drawn. Shape (FRAGMENT_COLUMNS + extra rows, n)."""
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
    def has_notes(self) -> bool:
        """True where the draw has to call `pass_records` when it moves on."""
        return bool(len(self._notes) or self._merger.walk.skips)

    def add(self, meta: ChunkMeta, drawn: int) -> bool:
        """Take a chunk; fragments before absolute count `drawn` may be forgotten.

        Returns:
            True where fragments, or the end of the source, became known.

        Raises:
            ProtocolError: The chunk contradicts itself.
            DataError: The record at the cursor is not what it was when the state was saved.
        """
        if meta.marks is not None:
            is_grouped = bool(self.spec.group_field)
            check_marks(meta, self._extras, self._row_tokens, self.spec.name, is_grouped=is_grouped)
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
        self, block_key: int, record_order: int, drawn_tokens: int, lanes_ended: int
    ) -> tuple[Int64Array, int]:
        """Settle what lies before the place that the draw reached.

        Args:
            block_key: Block of the last drawn record.
            record_order: Its order.
            drawn_tokens: Tokens of it up to the end of its last drawn fragment.
            lanes_ended: The ended lanes so far, already 0 where the epoch is a new one.

        Returns:
            Counts to add to the source's dropped column, shape (DROPPED_COLUMNS,), and the lanes
            that ended.
        """
        counts, faults = self._notes.settle(record_order, drawn_tokens)
        self._errors.passed(faults)
        epoch = block_key >> 48
        for key, lane in self._merger.walk.take_skips(block_key):
            if key >> 48 == epoch:
                lanes_ended |= 1 << lane
        return counts, lanes_ended

    def faults_in_window(self, record_order: int) -> list[int]:
        """Return the orders of passed faults that still count at a record; forgets the rest."""
        return self._errors.held_at(record_order)

    def _pieces(self, meta: ChunkMeta) -> Iterator[Int64Array]:
        for run in self._merger.add(meta):
            yield self._end_group()
            if self._check_epoch():
                return
            yield self._expand(run)
            if self._failure is not None:
                return
        yield self._end_group()
        if not self._check_epoch() and self._merger.short_of is not None:
            self._failure = self._short_block_error(meta, self._merger.short_of)

    def _short_block_error(self, meta: ChunkMeta, records: int) -> DataError:
        block_key, index = self.position
        place = unpack_block_key(block_key)
        return DataError(
            f"source {self.spec.name}: epoch {place.epoch}, window {place.window}, block {place.block} "
            f"had at least {index} records when they were read first, {records} can be read now: "
            f"{meta.fault or 'no fault'}; a shard is missing or was cut: restore it",
            source=self.spec.name,
            block_key=block_key,
            seen=records,
            limit=index,
        )

    def _end_group(self) -> Int64Array:
        """Return the group that is held back, where its block is over. Any number of fragments."""
        if self._groups is None or self._groups.block_key in (-1, self._merger.position[0]):
            return self._known[:, :0]
        return self._count(*self._groups.end())

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
        if self.spec.recipe is not None and self.spec.recipe.where:
            seen += f"; where {self.spec.recipe.where!r} refuses records"
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
            stop, self._failure = self._errors.take(meta, skip, status, self._next_order)
            lengths, status, is_dropped = lengths[:stop], status[:stop], is_dropped[:stop]
        count = len(lengths)
        order = np.arange(self._next_order, self._next_order + count)
        self._next_order += count
        matrix = np.empty((FRAGMENT_COLUMNS + self._extras.count, count), np.int64)
        matrix[SOURCE] = self._source_index
        matrix[BLOCK_KEY] = meta.block_key
        matrix[INDEX] = np.arange(meta.first_index + skip, meta.first_index + skip + count)
        matrix[OFFSET] = 0
        matrix[LENGTH] = lengths
        matrix[RECORD_ORDER] = order
        drawn_tokens = self._drawn_of_first(meta, matrix, is_dropped) if count else 0
        records = RunRecords(matrix, status, is_dropped, drawn_tokens)
        if meta.marks is None:
            matrix, notes = self._cutter.cut_plain(records)
        else:
            matrix, notes = self._cutter.cut_marked(records, meta.marks, skip)
        if self._groups is not None and count:
            is_continued = continued_records(meta.marks, skip, count)
            matrix, notes = self._groups.add(
                meta.block_key, int(order[0]), is_continued, matrix, notes
            )
        return self._count(matrix, notes)

    def _count(self, matrix: Int64Array, notes: Int64Array) -> Int64Array:
        """Note what is passed over, set CUMULATIVE of fragments that may be drawn; return these."""
        if notes.size and not self._is_counted:
            self._notes.add(notes)
        if matrix.shape[1]:
            np.cumsum(self._extras.draw_amounts(matrix, self._unit), out=matrix[CUMULATIVE])
            matrix[CUMULATIVE] += self._cumulative
            self._cumulative = int(matrix[CUMULATIVE, -1])
        self._epoch_fragments += matrix.shape[1]
        self._expanded += matrix.shape[1]
        return matrix

    def _drawn_of_first(
        self, meta: ChunkMeta, matrix: Int64Array, is_dropped: npt.NDArray[np.bool_]
    ) -> int:
        """Return the tokens of a run's first record that were drawn before the state was saved."""
        drawn_tokens = self._resume_offset
        length = int(matrix[LENGTH, 0])
        if drawn_tokens and (is_dropped[0] or length < drawn_tokens):
            place = unpack_block_key(meta.block_key)
            raise DataError(
                f"source {self.spec.name}: the record at the state's cursor (epoch {place.epoch}, "
                f"window {place.window}, block {place.block}) had at least {drawn_tokens} "
                f"tokens when the state was saved, {length} can be read now: "
                f"{meta.fault or 'no fault'}; restore the shard",
                source=self.spec.name,
            )
        self._resume_offset = 0
        return drawn_tokens
