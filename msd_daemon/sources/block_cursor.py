"""The records of one block in the source's order, handed out in runs that fit a chunk.

Two kinds: records that are read window by window and encoded, and token ids that lie ready. Both
give the same records whatever the runs' sizes are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from federation.model.chunk import Marks
from federation.model.job import FieldRule
from msd_daemon.shm.field_layout import ValueArray, value_bytes
from msd_daemon.shm.media_layout import MediaColumn
from msd_daemon.sources.bad_record import Numbered
from msd_daemon.sources.chunk_draft import TokenDtype, Tokens
from msd_daemon.sources.encoded import EncodedRecords, join_columns, join_records, no_records
from msd_daemon.sources.item_columns import join_marks, join_media
from msd_daemon.sources.record import RawRecord

Places = npt.NDArray[np.int64]
ENCODE_NS_MAX = 100_000_000
RUN_NS_MAX = 200_000_000
"""A run ends behind so much work on it, however few its records are: those who wait for slow records
get them soon, and a worker that dies loses little."""
FIRST_RECORDS = 4
"""Encoded at once of a source before it is known how long one takes."""


class Pace:
    """How many records of a source are encoded at once: as many as take a tenth of a second."""

    def __init__(self) -> None:
        self._record_ns = ENCODE_NS_MAX // FIRST_RECORDS

    @property
    def records(self) -> int:
        """At least one."""
        return max(ENCODE_NS_MAX // self._record_ns, 1)

    def took(self, records: int, nanoseconds: int) -> None:
        """So many took so long."""
        if records:
            self._record_ns = max(nanoseconds // records, 1)


@dataclass
class Run:
    """Consecutive records of a block, encoded."""

    lengths: npt.NDArray[np.int32]
    status: npt.NDArray[np.uint8]
    payload: list[Tokens]
    dtype: TokenDtype
    bad: Numbered = field(default_factory=list)
    """Bad records by their number in the run."""
    is_block_end: bool = False
    is_lane_end: bool = False
    values: tuple[ValueArray, ...] = ()
    """Of the job's fields, per token or per record; none where the source carries no fields."""
    marks: Marks | None = None
    media: tuple[MediaColumn, ...] = ()

    @property
    def fault(self) -> str:
        """What is wrong with the first bad record; empty where none is."""
        return self.bad[0][1].text if self.bad else ""


class BlockCursor(Protocol):
    """A place inside a block."""

    def skip(self, index: int) -> int:
        """Go to the record at an index of the order and return the index reached.

        The return value is smaller only where the block has fewer records.
        """
        ...

    def take(self, payload_bytes_max: int) -> Run:
        """Return the next records: at least one while there is one, as many as fit.

        Args:
            payload_bytes_max: Bytes of tokens and field values.
        """
        ...

    def pick(self, indices: Sequence[int]) -> Run:
        """Return exactly these records of the block, in the order given; the cursor is used up.

        Raises:
            IndexError: The block has no such record.
        """
        ...


class Window(Protocol):
    """A record window: a short run of records that are permuted among themselves."""

    @property
    def count(self) -> int:
        """Records of the window."""
        ...

    @property
    def is_block_end(self) -> bool:
        """True for the block's last window."""
        ...

    @property
    def is_lane_end(self) -> bool:
        """True where the lane has no block after this one."""
        ...


AnyWindow = TypeVar("AnyWindow", bound=Window)


@dataclass(frozen=True, slots=True)
class RawWindow:
    """A record window as it lies in the shard."""

    records: list[RawRecord]
    is_block_end: bool
    is_lane_end: bool

    @property
    def count(self) -> int:
        """Records of the window."""
        return len(self.records)


class WindowCursor(Generic[AnyWindow]):
    """A block of records that are encoded window by window.

    Args:
        windows: The block's windows; the last one says so.
        window_order: Gives the order of the records of a window: (window number, window).
        encode: Gives the records at places of a window, encoded, in the places' order.
        dtype: Of the tokens.
        fields: The job's, where the records carry their values.
        encode_records_max: Records that are encoded at once; None: a whole window. Of images few
            may lie decoded at any time.
        pace: Of the source; None: one of its own.
    """

    def __init__(
        self,
        windows: Iterator[AnyWindow],
        window_order: Callable[[int, AnyWindow], Places],
        encode: Callable[[AnyWindow, Places], EncodedRecords],
        dtype: TokenDtype,
        fields: tuple[FieldRule, ...] = (),
        encode_records_max: int | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._windows = windows
        self._window_order = window_order
        self._encode = encode
        self._dtype = dtype
        token_bytes, self._record_bytes = value_bytes(fields)
        self._token_bytes = dtype.itemsize + token_bytes
        self._encode_records_max = encode_records_max
        self._number = 0
        self._window: AnyWindow | None = None
        self._places: Places = np.zeros(0, np.int64)
        """Of the window, in order, those that are not encoded yet."""
        self._pending: _Pending | None = None
        self._is_block_end = False
        self._is_lane_end = False
        self._pace = pace or Pace()

    def skip(self, index: int) -> int:
        """Go to the record at an index; windows before it are read but not encoded."""
        reached = 0
        while not self._is_block_end:
            window, order = self._next_window()
            if reached + len(order) > index:
                self._window, self._places = window, order[index - reached :]
                return index
            reached += len(order)
        return reached

    def take(self, payload_bytes_max: int) -> Run:
        """Return the next records: at least one while there is one, as many as fit."""
        bytes_left = payload_bytes_max
        taken: list[EncodedRecords] = []
        begun_ns = time.monotonic_ns()
        while bytes_left >= self._token_bytes or not taken:
            if self._pending is None:
                if not len(self._places):
                    if self._is_block_end:
                        break
                    self._window, self._places = self._next_window()
                self._encode_next()
            assert self._pending is not None
            part, part_bytes = self._pending.take(bytes_left, is_first=not taken)
            bytes_left -= part_bytes
            taken.append(part)
            if self._pending.left:
                break
            self._pending = None
            if time.monotonic_ns() - begun_ns > RUN_NS_MAX:
                break
        run = _run(taken, self._dtype)
        is_done = self._pending is None and not len(self._places)
        run.is_block_end = self._is_block_end and is_done
        run.is_lane_end = run.is_block_end and self._is_lane_end
        return run

    def pick(self, indices: Sequence[int]) -> Run:
        """Return exactly these records of the block, in the order given."""
        wanted = np.unique(np.asarray(indices, dtype=np.int64))
        found: list[EncodedRecords] = []
        count = reached = 0
        while count < len(wanted) and not self._is_block_end:
            window, order = self._next_window()
            last = reached + len(order)
            here = wanted[(wanted >= reached) & (wanted < last)] - reached
            if len(here):
                found.append(self._encode(window, order[here]))
                count += len(here)
            reached = last
        if count < len(wanted):
            raise IndexError(f"records {wanted[count:].tolist()} of {reached}")
        if not found:
            return _run([], self._dtype)
        places = np.searchsorted(wanted, np.asarray(indices, dtype=np.int64)).astype(np.int64)
        return _run([join_records(found).rows(places)], self._dtype)

    def _encode_next(self) -> None:
        assert self._window is not None
        count = min(self._pace.records, len(self._places))
        count = min(count, self._encode_records_max or count)
        begun_ns = time.monotonic_ns()
        encoded = self._encode(self._window, self._places[:count])
        self._pace.took(count, time.monotonic_ns() - begun_ns)
        self._places = self._places[count:]
        if not len(self._places):
            self._window = None
        self._pending = _Pending(encoded, self._token_bytes, self._record_bytes)

    def _next_window(self) -> tuple[AnyWindow, Places]:
        window = next(self._windows)
        order = self._window_order(self._number, window)
        self._number += 1
        self._is_block_end = window.is_block_end
        self._is_lane_end = window.is_lane_end
        return window, order


class _Pending:
    """Records encoded and not yet handed out."""

    def __init__(self, records: EncodedRecords, token_bytes: int, record_bytes: int) -> None:
        self._records = records
        sizes = records.lengths.astype(np.int64) * token_bytes + record_bytes
        if records.media:
            sizes += records.media_bytes()
        self._ends = np.cumsum(sizes)
        self._done = 0

    @property
    def left(self) -> int:
        return len(self._records) - self._done

    def take(self, bytes_max: int, *, is_first: bool) -> tuple[EncodedRecords, int]:
        """Return the next records up to a number of bytes, and theirs; at least one of a run."""
        begin = self._done
        before = int(self._ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(self._ends, before + bytes_max, side="right"))
        if is_first:
            end = max(end, begin + 1)
        self._done = end = min(end, len(self._records))
        taken_bytes = int(self._ends[end - 1]) - before if end > begin else 0
        return self._records.part(begin, end), taken_bytes


def _run(parts: list[EncodedRecords], dtype: TokenDtype) -> Run:
    parts = parts or [no_records(dtype)]
    starts = itertools.accumulate((len(part) for part in parts), initial=0)
    return Run(
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.status for part in parts]),
        [part.tokens for part in parts if len(part.tokens)],
        dtype,
        [(start + at, bad) for start, part in zip(starts, parts) for at, bad in part.faults],  # noqa: B905 - one start more
        values=tuple(column.array for column in join_columns(parts)),
        marks=join_marks([(part.marks, len(part)) for part in parts]),
        media=join_media([part.media for part in parts]),
    )
