"""The records of one block in the source's order, handed out in runs that fit a chunk.

Two kinds: text that is read window by window and tokenized, and token ids that lie ready. Both give
the same records whatever the runs' sizes are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from federation.model.chunk import FAULT_STATUS_MIN, RecordStatus
from msd_daemon.sources.chunk_draft import TokenDtype, Tokens
from msd_daemon.sources.record import Extractor, RawRecord
from msd_daemon.transforms.tokenizer import Tokenizer


@dataclass
class Run:
    """Consecutive records of a block, encoded."""

    lengths: npt.NDArray[np.int32]
    status: npt.NDArray[np.uint8]
    payload: list[Tokens]
    dtype: TokenDtype
    fault: str = ""
    is_block_end: bool = False
    is_lane_end: bool = False


class BlockCursor(Protocol):
    """A place inside a block."""

    def skip(self, index: int) -> int:
        """Go to the record at an index of the order and return the index reached.

        The return value is smaller only where the block has fewer records.
        """
        ...

    def take(self, payload_bytes_max: int) -> Run:
        """Return the next records: at least one while there is one, as many as fit."""
        ...

    def pick(self, indices: Sequence[int]) -> Run:
        """Return exactly these records of the block, in the order given; the cursor is used up.

        Raises:
            IndexError: The block has no such record.
        """
        ...


class RawWindow(NamedTuple):
    """A record window as it lies in the shard."""

    records: list[RawRecord]
    is_block_end: bool
    is_lane_end: bool


@dataclass(frozen=True)
class RecordEncoder:
    """Turns raw records into token arrays."""

    extract: Extractor
    tokenizer: Tokenizer
    path: str
    place_name: str = "byte offset"
    """What `RawRecord.place` counts."""

    def encode(self, records: list[RawRecord]) -> _Encoded:
        """Return the tokens of records, in their order."""
        status = np.zeros(len(records), dtype=np.uint8)
        texts: list[str] = []
        good: list[int] = []
        faults: list[tuple[int, str]] = []
        for number, record in enumerate(records):
            code, fault = record.status, record.fault
            if not code:
                extracted = self.extract(record.raw)
                code, fault = extracted.status, extracted.fault
                if not code:
                    texts.append(extracted.text)
                    good.append(number)
                    continue
            status[number] = code
            if not fault.startswith(self.path):  # damage names the file and its own place
                fault = f"{self.path}: record at {self.place_name} {record.place}: {fault}"
            faults.append((number, fault))
        tokens, offsets = self.tokenizer.encode_batch(texts)
        lengths = np.zeros(len(records), dtype=np.int32)
        lengths[good] = np.diff(offsets)
        status[(lengths == 0) & (status == 0)] = RecordStatus.EMPTY
        return _Encoded(lengths, status, tokens, faults)


@dataclass
class _Encoded:
    """Records encoded and not yet handed out."""

    lengths: npt.NDArray[np.int32]
    status: npt.NDArray[np.uint8]
    tokens: Tokens
    faults: list[tuple[int, str]] = field(default_factory=list)
    done: int = 0
    done_tokens: int = 0

    @property
    def left(self) -> int:
        return len(self.lengths) - self.done

    def take(self, tokens_max: int, *, is_first: bool) -> _Encoded:
        """Return the next records up to a number of tokens; at least one where it is the first."""
        ends = np.cumsum(self.lengths[self.done :], dtype=np.int64)
        count = int(np.searchsorted(ends, tokens_max, side="right"))
        if is_first:
            count = max(count, 1)
        count = min(count, self.left)
        begin, end = self.done, self.done + count
        taken_tokens = int(ends[count - 1]) if count else 0
        taken = _Encoded(
            self.lengths[begin:end],
            self.status[begin:end],
            self.tokens[self.done_tokens : self.done_tokens + taken_tokens],
            [fault for fault in self.faults if begin <= fault[0] < end],
        )
        self.done = end
        self.done_tokens += taken_tokens
        return taken


class TextCursor:
    """A block of records that are tokenized window by window.

    Args:
        windows: The block's windows; the last one says so.
        window_order: Gives the order of the records of a window: (window number, records).
        encoder: Turns records into tokens.
    """

    def __init__(
        self,
        windows: Iterator[RawWindow],
        window_order: Callable[[int, int], npt.NDArray[np.int64]],
        encoder: RecordEncoder,
    ) -> None:
        self._windows = windows
        self._window_order = window_order
        self._encoder = encoder
        self._number = 0
        self._skip = 0
        self._first_index = 0
        self._pending: _Encoded | None = None
        self._is_block_end = False
        self._is_lane_end = False

    def skip(self, index: int) -> int:
        """Go to the record at an index; windows before it are read but not tokenized."""
        reached = 0
        while not self._is_block_end:
            ordered = self._next_window()
            if reached + len(ordered) > index:
                self._pending = self._encoder.encode(ordered[index - reached :])
                return index
            reached += len(ordered)
        return reached

    def take(self, payload_bytes_max: int) -> Run:
        """Return the next records: at least one while there is one, as many as fit."""
        dtype = self._encoder.tokenizer.dtype
        tokens_max = payload_bytes_max // dtype.itemsize
        taken: list[_Encoded] = []
        while True:
            if self._pending is None:
                if self._is_block_end:
                    break
                self._pending = self._encoder.encode(self._next_window())
            part = self._pending.take(tokens_max, is_first=not taken)
            tokens_max -= len(part.tokens)
            taken.append(part)
            if self._pending.left:
                break
            self._pending = None
            if tokens_max <= 0:
                break
        run = _join(taken, dtype)
        run.is_block_end = self._is_block_end and self._pending is None
        run.is_lane_end = run.is_block_end and self._is_lane_end
        return run

    def pick(self, indices: Sequence[int]) -> Run:
        """Return exactly these records of the block, in the order given."""
        wanted = set(indices)
        found: dict[int, RawRecord] = {}
        reached = 0
        while len(found) < len(wanted) and not self._is_block_end:
            ordered = self._next_window()
            found |= {
                index: record for index, record in enumerate(ordered, reached) if index in wanted
            }
            reached += len(ordered)
        if len(found) < len(wanted):
            raise IndexError(f"records {sorted(wanted - set(found))} of {reached}")
        encoded = self._encoder.encode([found[index] for index in indices])
        return _join([encoded], self._encoder.tokenizer.dtype)

    def _next_window(self) -> list[RawRecord]:
        window = next(self._windows)
        order = self._window_order(self._number, len(window.records))
        self._number += 1
        self._is_block_end = window.is_block_end
        self._is_lane_end = window.is_lane_end
        return [window.records[place] for place in order.tolist()]


def _join(parts: list[_Encoded], dtype: TokenDtype) -> Run:
    if not parts:
        return Run(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8), [], dtype)
    faults = [fault for part in parts for _, fault in part.faults]
    return Run(
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.status for part in parts]),
        [part.tokens for part in parts if len(part.tokens)],
        dtype,
        faults[0] if faults else "",
    )


class TokenReader(Protocol):
    """Reads token ids that lie one after the other."""

    def read_tokens(self, begin: int, count: int) -> Tokens:
        """Return tokens [begin, begin + count)."""
        ...


class TokenCursor:
    """A block of documents whose token ids lie ready; no Python runs per token.

    Args:
        begins: First token of each document in the reader, in order. Shape (documents,).
        lengths: Tokens of each document, in order. Shape (documents,).
        status: RecordStatus of each document, in order. Shape (documents,).
        reader: Where the tokens are; read once a block, at the first need.
        dtype: Of the tokens.
        fault: First fault of the block.
    """

    def __init__(
        self,
        begins: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        status: npt.NDArray[np.uint8],
        reader: TokenReader,
        dtype: TokenDtype,
        fault: str,
    ) -> None:
        self._begins = begins
        self._lengths = lengths
        self._status = status
        self._reader = reader
        self._dtype = dtype
        self._fault = fault
        self._next = 0
        self._buffer: Tokens | None = None
        self._buffer_begin = 0

    def skip(self, index: int) -> int:
        """Go to the record at an index."""
        self._next = min(index, len(self._lengths))
        return self._next

    def take(self, payload_bytes_max: int) -> Run:
        """Return the next records: at least one while there is one, as many as fit."""
        first = self._next
        ends = np.cumsum(self._lengths[first:])
        fitting = int(
            np.searchsorted(ends, payload_bytes_max // self._dtype.itemsize, side="right")
        )
        self._next = min(first + max(fitting, 1), len(self._lengths))
        run = self._run(np.arange(first, self._next))
        run.is_block_end = self._next == len(self._lengths)
        return run

    def pick(self, indices: Sequence[int]) -> Run:
        """Return exactly these records of the block, in the order given."""
        places = np.asarray(indices, dtype=np.int64)
        if len(places) and (places.min() < 0 or places.max() >= len(self._lengths)):
            raise IndexError(f"records {list(indices)} of {len(self._lengths)}")
        return self._run(places)

    def _run(self, places: npt.NDArray[np.int64]) -> Run:
        status = self._status[places]
        has_fault = bool((status >= FAULT_STATUS_MIN).any())
        lengths = self._lengths[places]
        return Run(
            lengths.astype(np.int32),
            status,
            self._slices(self._begins[places], lengths),
            self._dtype,
            self._fault if has_fault else "",
        )

    def _slices(
        self, begins: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> list[Tokens]:
        is_there = lengths > 0
        begins, lengths = begins[is_there], lengths[is_there]
        if not len(begins):
            return []
        if self._is_scattered():
            pairs = zip(begins.tolist(), lengths.tolist(), strict=True)
            return [self._reader.read_tokens(begin, count) for begin, count in pairs]
        buffer = self._load()
        starts = begins - self._buffer_begin
        ends = starts + lengths
        if (starts[1:] == ends[:-1]).all():
            return [buffer[int(starts[0]) : int(ends[-1])]]
        return [
            buffer[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    def _extent(self) -> tuple[int, int]:
        is_there = self._lengths > 0
        begins = self._begins[is_there]
        return int(begins.min()), int((begins + self._lengths[is_there]).max())

    def _is_scattered(self) -> bool:
        """Tell whether one read of the whole block would read much that is not needed."""
        begin, end = self._extent()
        return end - begin > 2 * int(self._lengths.sum()) + (1 << 16)

    def _load(self) -> Tokens:
        if self._buffer is None:
            begin, end = self._extent()
            self._buffer = self._reader.read_tokens(begin, end - begin)
            self._buffer_begin = begin
        return self._buffer
