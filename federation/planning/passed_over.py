"""What a source's draw passes over and counts, and the error budget that acts when it gets there."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from federation.model.chunk import IS_FAULT, ChunkMeta, RecordStatus
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
_IS_FAULT_REASON = np.zeros(len(DROPPED_COLUMNS), bool)
_IS_FAULT_REASON[_REASONS[IS_FAULT]] = True

_UNTRAINED = DROPPED_COLUMNS.index("untrained")
LISTED_MAX = 10_000
"""Bad records that may lie between two good ones under `quarantine`: those behind the cursor."""
_UNTRAINED_RATIO_INVERSE = 100
"""Chats without a trained token that a window may hold: one in a hundred (E12)."""

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


def merged_notes(notes: Int64Array, more: Int64Array) -> Int64Array:
    """Return notes and more of them, in the order in which a draw passes them. Shape (4, n)."""
    both = np.concatenate((notes, more), axis=1)
    merged: Int64Array = both[:, np.lexsort((both[PLACE], both[ORDER]))]
    return merged


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
            Counts by DROPPED_COLUMNS, and the orders of the records that were faults, with the
            complements (~order) of those without a trained token.
        """
        orders = self._notes[ORDER]
        before = int(orders.searchsorted(order))
        here = self._notes[PLACE, before : int(orders.searchsorted(order, side="right"))]
        passed = before + int(here.searchsorted(place, side="right"))
        settled, self._notes = self._notes[:, :passed], self._notes[:, passed:]
        counts = np.bincount(settled[REASON], minlength=len(DROPPED_COLUMNS))
        counts[DROPPED_TOKENS] = settled[TOKENS].sum()
        reasons, records = settled[REASON], settled[ORDER] - 1
        is_untrained = reasons == _UNTRAINED
        records = np.where(is_untrained, ~records, records)
        return counts, records[_IS_FAULT_REASON[reasons] | is_untrained].tolist()


class ErrorWindow:
    """Faults among the last records of one source, as far as they are known and as far as drawn.

    A source fails when more than `floor(budget_ratio * window_records)` of its last
    `window_records` records are faults. Records it has yet to see count as good, so that a small
    file with a handful of faults passes; a ratio of 1 never fails. `quarantine` has no budget: it
    fails where more than LISTED_MAX bad records follow each other, as so many would be listed at the
    cursor. Whatever the policy, a source of chats fails when more than 1 % of the window has no
    trained token: its template or its turns are not what the job thinks they are.
    """

    def __init__(self, spec: SourceSpec, faults: tuple[int, ...]) -> None:
        """Stand where these record orders are the faults of the window."""
        self._spec = spec
        rule = spec.on_error
        self._known = deque(order for order in faults if order >= 0)
        self._untrained = deque(~order for order in faults if order < 0)
        self._passed = list(self._known)
        self._passed_untrained = list(self._untrained)
        self._faults_max = int(rule.budget_ratio * rule.window_records)
        self._has_budget = rule.policy != "quarantine" and rule.budget_ratio < 1
        self._has_chats = spec.recipe is not None and spec.recipe.chat is not None
        self._untrained_max = rule.window_records // _UNTRAINED_RATIO_INVERSE
        self._listed = 0
        """Faults since the last good record."""
        self._end = -1
        """Order behind the last run that was looked at."""

    def passed(self, orders: list[int]) -> None:
        """The draw passed these faults; complements are of records without a trained token."""
        if self._has_budget:
            self._passed += [order for order in orders if order >= 0]
        if self._has_chats:
            self._passed_untrained += [~order for order in orders if order < 0]

    def held_at(self, record_order: int) -> list[int]:
        """Return what passed and still counts at a record, as `passed` took it; forgets the rest."""
        first = record_order - self._spec.on_error.window_records
        if self._passed and self._passed[0] <= first:
            self._passed = [order for order in self._passed if order > first]
        if self._passed_untrained and self._passed_untrained[0] <= first:
            self._passed_untrained = [order for order in self._passed_untrained if order > first]
        return self._passed + [~order for order in self._passed_untrained]

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
        stop: tuple[int, MsdError | None] = (len(status), None)
        if self._spec.on_error.policy == "quarantine":
            stop = self._take_listed(meta, skip, status, order)
        elif self._spec.on_error.policy == "fail" or self._has_budget:
            stop = self._take_budgeted(meta, skip, status, order)
        if self._has_chats:
            stop = min(stop, self._take_untrained(status, order), key=lambda found: found[0])
        return stop

    def _take_budgeted(
        self, meta: ChunkMeta, skip: int, status: npt.NDArray[np.uint8], order: int
    ) -> tuple[int, MsdError | None]:
        rule = self._spec.on_error
        is_failing = rule.policy == "fail"
        for place in np.flatnonzero(IS_FAULT[status]).tolist():
            _slide(self._known, order + place, rule.window_records)
            if is_failing or len(self._known) > self._faults_max:
                return place, self._error(meta, skip + place, is_failing=is_failing)
        return len(status), None

    def _take_listed(
        self, meta: ChunkMeta, skip: int, status: npt.NDArray[np.uint8], order: int
    ) -> tuple[int, MsdError | None]:
        """Count faults between good records: a function of the content, not of what is read ahead."""
        if order != self._end:
            self._listed = 0  # the runs between were all good
        self._end = order + len(status)
        places = np.flatnonzero(IS_FAULT[status] | (status == RecordStatus.OK))
        for place in places.tolist():
            self._listed = self._listed + 1 if status[place] else 0
            if self._listed > LISTED_MAX:
                return place, ErrorBudgetExceededError(
                    f"{self._where(meta, skip + place)}; {self._listed} bad records follow each "
                    f"other, {LISTED_MAX} may be listed at the cursor; mend the shards, see msdctl bad",
                    source=self._spec.name,
                    seen=self._listed,
                    limit=LISTED_MAX,
                )
        return len(status), None

    def _take_untrained(
        self, status: npt.NDArray[np.uint8], order: int
    ) -> tuple[int, MsdError | None]:
        records = self._spec.on_error.window_records
        for place in np.flatnonzero(status == RecordStatus.UNTRAINED).tolist():
            _slide(self._untrained, order + place, records)
            if len(self._untrained) > self._untrained_max:
                return place, ErrorBudgetExceededError(
                    f"source {self._spec.name}: {len(self._untrained)} of its last {records} chats "
                    f"have no trained token, {self._untrained_max} (1 %) may; see whether chat names "
                    "the roles that are in the records, and which turns are trained (msdctl preview)",
                    source=self._spec.name,
                    seen=len(self._untrained),
                    limit=self._untrained_max,
                )
        return len(status), None

    def _error(self, meta: ChunkMeta, place: int, *, is_failing: bool) -> MsdError:
        index = meta.first_index + place
        name = RecordStatus(int(meta.status[place])).name.lower()
        where = self._where(meta, place)
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

    def _where(self, meta: ChunkMeta, place: int) -> str:
        block = unpack_block_key(meta.block_key)
        name = RecordStatus(int(meta.status[place])).name.lower()
        return (
            f"source {self._spec.name}: epoch {block.epoch}, window {block.window}, block "
            f"{block.block}, record {meta.first_index + place} is {name} ({meta.fault or 'no text'})"
        )


def _slide(window: deque[int], order: int, records: int) -> None:
    """Add a record to those among the last `records`."""
    window.append(order)
    while window[0] <= order - records:
        window.popleft()
