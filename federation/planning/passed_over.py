"""What a source's draw passes over and counts, and the error budget that acts when it gets there."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from federation.model.chunk import FAULT_STATUSES, ChunkMeta, RecordStatus
from federation.model.job import SourceSpec
from msd_client.contract.errors import (
    CorruptRecordError,
    ErrorBudgetExceededError,
    MsdError,
    ProtocolError,
)
from msd_client.contract.position import unpack_block_key
from msd_client.contract.state import DROPPED_COLUMNS, DROPPED_TOKENS

Int64Array = npt.NDArray[np.int64]

LONG_SKIPPED = DROPPED_COLUMNS.index("long_skipped")
LONG_TRUNCATED = DROPPED_COLUMNS.index("long_truncated")
_EMPTY = DROPPED_COLUMNS.index("empty")

_REASONS = np.array(
    [
        _EMPTY if status == RecordStatus.OK else DROPPED_COLUMNS.index(status.name.lower())
        for status in RecordStatus
    ],
    np.int64,
)
"""Dropped column of each status; a good record without tokens is an empty one."""
_IS_FAULT = np.array([status in FAULT_STATUSES for status in RecordStatus])
_IS_FAULT_REASON = np.zeros(len(DROPPED_COLUMNS), bool)
_IS_FAULT_REASON[_REASONS[_IS_FAULT]] = True

ORDER, PLACE, REASON, TOKENS = range(4)
"""Rows of notes: a note is settled once the draw stands in record ORDER behind its first PLACE
tokens, or in a later record."""


def note(
    orders: Int64Array,
    places: Int64Array | int,
    reasons: Int64Array | int,
    tokens: Int64Array | int,
) -> Int64Array:
    """Return notes. Shape (4, n)."""
    notes = np.empty((4, len(orders)), np.int64)
    for row, values in enumerate((orders, places, reasons, tokens)):
        notes[row] = values
    return notes


def note_records(orders: Int64Array, status: npt.NDArray[np.uint8]) -> Int64Array:
    """Return notes of records that are passed over whole. Shape (4, n)."""
    return note(orders + 1, 0, _REASONS[status], 0)


class PassedOver:
    """Notes of one source that the draw did not reach yet, in its order."""

    def __init__(self) -> None:
        self._notes: Int64Array = np.zeros((4, 0), np.int64)

    def __len__(self) -> int:
        return int(self._notes.shape[1])

    def add(self, notes: Int64Array) -> None:
        """Note what lies behind all that was noted so far."""
        self._notes = np.concatenate((self._notes, notes), axis=1)

    def settle(self, order: int, place: int) -> tuple[Int64Array, list[int]]:
        """Forget what lies before a place.

        Args:
            order: Order of the last drawn record.
            place: Tokens of it that were drawn.

        Returns:
            Counts by DROPPED_COLUMNS, and the orders of the records that were faults.
        """
        orders = self._notes[ORDER]
        before = int(orders.searchsorted(order))
        here = self._notes[PLACE, before : int(orders.searchsorted(order, side="right"))]
        passed = before + int(here.searchsorted(place, side="right"))
        settled, self._notes = self._notes[:, :passed], self._notes[:, passed:]
        counts = np.bincount(settled[REASON], minlength=len(DROPPED_COLUMNS))
        counts[DROPPED_TOKENS] = settled[TOKENS].sum()
        faults = settled[ORDER][_IS_FAULT_REASON[settled[REASON]]] - 1
        return counts, faults.tolist()


class ErrorWindow:
    """Faults among the last records of one source, as far as they are known and as far as drawn.

    A source fails when more than `floor(budget_ratio * window_records)` of its last
    `window_records` records are faults. Records it has yet to see count as good, so that a small
    file with a handful of faults passes; a ratio of 1 never fails.
    """

    def __init__(self, spec: SourceSpec, faults: tuple[int, ...]) -> None:
        """Stand where these record orders are the faults of the window."""
        self._spec = spec
        self._known = deque(faults)
        self._passed = list(faults)
        rule = spec.on_error
        self._faults_max = int(rule.budget_ratio * rule.window_records)
        self._has_budget = rule.budget_ratio < 1

    def passed(self, orders: list[int]) -> None:
        """The draw passed these faults."""
        if self._has_budget:
            self._passed += orders

    def held_at(self, record_order: int) -> list[int]:
        """Return the orders of passed faults that still count at a record; forgets the rest."""
        first = record_order - self._spec.on_error.window_records
        if self._passed and self._passed[0] <= first:
            self._passed = [order for order in self._passed if order > first]
        return self._passed

    def take(
        self, meta: ChunkMeta, skip: int, status: npt.NDArray[np.uint8], order: int
    ) -> tuple[int, MsdError | None]:
        """Look at the records of a run.

        Args:
            meta: Their chunk.
            skip: Records of it before them.
            status: Theirs.
            order: Order of the first.

        Returns:
            How many of them may be used before a fault ends the source, and that fault.

        Raises:
            ProtocolError: A status is none.
        """
        if int(status.max()) > max(RecordStatus):
            raise ProtocolError(f"source {self._spec.name}: unknown record status {status.max()}")
        rule = self._spec.on_error
        is_failing = rule.policy == "fail"
        if not is_failing and not self._has_budget:
            return len(status), None
        for place in np.flatnonzero(_IS_FAULT[status]).tolist():
            self._known.append(order + place)
            while self._known[0] <= order + place - rule.window_records:
                self._known.popleft()
            if is_failing or len(self._known) > self._faults_max:
                return place, self._error(meta, skip + place, is_failing=is_failing)
        return len(status), None

    def _error(self, meta: ChunkMeta, place: int, *, is_failing: bool) -> MsdError:
        block = unpack_block_key(meta.block_key)
        index = meta.first_index + place
        name = RecordStatus(int(meta.status[place])).name.lower()
        where = (
            f"source {self._spec.name}: epoch {block.epoch}, window {block.window}, block "
            f"{block.block}, record {index} is {name} ({meta.fault or 'no text'})"
        )
        if is_failing:
            return CorruptRecordError(
                f"{where}; mend the shard or set on_error to skip",
                source=self._spec.name,
                block_key=meta.block_key,
                index=index,
                status=name,
            )
        rule = self._spec.on_error
        return ErrorBudgetExceededError(
            f"{where}; that makes {len(self._known)} faults in its last {rule.window_records} "
            f"records, the budget is {self._faults_max} ({rule.budget_ratio:g}); mend the shards "
            "or raise on_error.budget_ratio",
            source=self._spec.name,
            block_key=meta.block_key,
            index=index,
            seen=len(self._known),
            limit=self._faults_max,
        )
