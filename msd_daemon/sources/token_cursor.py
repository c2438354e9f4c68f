"""A block of documents whose token ids lie ready in their shard (Megatron)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from federation.model.chunk import IS_FAULT, RecordStatus
from msd_daemon.sources.bad_record import BadRecord, Numbered
from msd_daemon.sources.block_cursor import Places, Run
from msd_daemon.sources.chunk_draft import TokenDtype, Tokens
from msd_daemon.sources.hold_out import HoldOut


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
        tell: Names a bad document by its number in the order.
        hold_out: Tells by the bytes of its ids which document is a sample; None: all are.
        is_naming: Runs name all documents, by `tell`.
        has_tokens: False: runs tell lengths alone, and no id is read unless `hold_out` asks for it.
    """

    def __init__(
        self,
        begins: Places,
        lengths: Places,
        status: npt.NDArray[np.uint8],
        reader: TokenReader,
        dtype: TokenDtype,
        tell: Callable[[int], BadRecord],
        hold_out: HoldOut | None = None,
        *,
        is_naming: bool = False,
        has_tokens: bool = True,
    ) -> None:
        self._is_naming = is_naming
        self._has_tokens = has_tokens
        self._begins = begins
        self._lengths = lengths
        self._status = status
        self._reader = reader
        self._dtype = dtype
        self._tell = tell
        self._hold_out = hold_out
        self._next = 0
        self._buffer: Tokens | None = None
        self._buffer_begin = 0

    def skip(self, index: int) -> int:
        """Go to the record at an index."""
        self._next = min(index, len(self._lengths))
        return self._next

    def take(self, payload_bytes_max: int) -> Run:
        """Return the next records: at least one while there is one, as many as fit."""
        if self._hold_out is not None:
            self._leave_out(self._hold_out, np.arange(len(self._lengths)))
            self._hold_out = None  # all were asked for
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
        if self._hold_out is not None:
            self._leave_out(self._hold_out, places)
        return self._run(places)

    def _leave_out(self, hold_out: HoldOut, places: Places) -> None:
        """Leave out those of the documents at places that are no samples; reads their ids."""
        places = places[self._lengths[places] > 0]
        if not len(places):
            return
        documents = self._documents(self._begins[places], self._lengths[places])
        is_sample = hold_out.are_samples(documents)
        others = places[~is_sample]
        self._lengths[others] = 0
        self._status[others] = RecordStatus.HELD_OUT

    def _run(self, places: Places) -> Run:
        status = self._status[places]
        numbers = np.flatnonzero(IS_FAULT[status] | self._is_naming).tolist()
        bad: Numbered = [(number, self._tell(int(places[number]))) for number in numbers]
        lengths = self._lengths[places]
        return Run(
            lengths.astype(np.int32),
            status,
            self._slices(self._begins[places], lengths) if self._has_tokens else [],
            self._dtype,
            bad,
        )

    def _slices(self, begins: Places, lengths: Places) -> list[Tokens]:
        is_there = lengths > 0
        begins, lengths = begins[is_there], lengths[is_there]
        if not len(begins):
            return []
        if not self._is_scattered() and (begins[1:] == begins[:-1] + lengths[:-1]).all():
            begins, lengths = begins[:1], lengths.sum(keepdims=True)
        return self._documents(begins, lengths)

    def _documents(self, begins: Places, lengths: Places) -> list[Tokens]:
        """Return runs of ids, each by itself."""
        pairs = zip(begins.tolist(), lengths.tolist(), strict=True)
        if self._is_scattered():
            return [self._reader.read_tokens(begin, count) for begin, count in pairs]
        buffer, first = self._load(), self._buffer_begin
        return [buffer[begin - first : begin - first + count] for begin, count in pairs]

    def _extent(self) -> tuple[int, int]:
        is_there = self._lengths > 0
        begins = self._begins[is_there]
        return int(begins.min()), int((begins + self._lengths[is_there]).max())

    def _is_scattered(self) -> bool:
        """Tell whether one read of the whole block would read much that is not needed."""
        if self._buffer is not None:
            return False
        begin, end = self._extent()
        return end - begin > 2 * int(self._lengths.sum()) + (1 << 16)

    def _load(self) -> Tokens:
        if self._buffer is None:
            begin, end = self._extent()
            self._buffer = self._reader.read_tokens(begin, end - begin)
            self._buffer_begin = begin
        return self._buffer
