"""Megatron `.bin/.idx`: documents of token ids that lie ready, gathered without a tokenizer.

Layout of an idx (little-endian): 9 bytes magic, u64 version 1, u8 dtype code, u64 sequences n,
u64 document entries m, i32 sizes[n] in tokens, i64 pointers[n] in bytes, i64 documents[m]: entry d
is the first sequence of document d, the last entry ends the last one. All offsets are 64-bit. A
multimodal idx has i8 modes[n] behind that: 0 for text, which alone is read.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, ShuffleRule, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import ByteFile, ShardFile
from msd_daemon.sources.chunk_draft import TokenDtype, Tokens
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_path, open_shard, other_fingerprint
from msd_daemon.stores.data_path import P
from msd_daemon.stores.urls import is_url

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_U2, _I4 = np.dtype("<u2"), np.dtype("<i4")
_DTYPES: dict[int, tuple[np.dtype[Any], TokenDtype]] = {
    1: (np.dtype("u1"), _U2),
    2: (np.dtype("i1"), _I4),
    3: (np.dtype("<i2"), _I4),
    4: (_I4, _I4),
    5: (np.dtype("<i8"), _I4),
    8: (_U2, _U2),
}
"""By the idx's code: ids as they lie, and as they are given."""
_CHECKED_CODES = frozenset({2, 3, 5})
"""Of these a document is read before it is given: an id may be negative, or beyond int32."""
_DTYPE_NAMES = {6: "float64", 7: "float32"}
_ID_MAX = (1 << 31) - 1

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenBlock:
    """The documents of a block in file order; shapes (documents,)."""

    first_document: int
    begins: Ids
    """First token of each document, counted from the beginning of the bin."""
    lengths: Ids
    """Tokens of each document, 0 where the status is not OK."""
    sizes: Ids
    """Raw bytes of each document, which record windows count."""
    status: npt.NDArray[np.uint8]
    byte_begins: Ids


class MegatronShard:
    """An open pair of `.bin` and `.idx`, the idx mapped; the caller closes it.

    Raises:
        CorruptRecordError: Magic, version or dtype are wrong, or a file is shorter than it says.
        OSError: A file cannot be opened.
    """

    def __init__(self, shard: Shard, meter: ReadMeter) -> None:
        self.path = shard.path
        self._meter = meter
        self._file: ByteFile | None = open_shard(shard, meter)
        try:
            self._open_index(shard)
        except BaseException:
            self.close()
            raise

    def _open_index(self, shard: Shard) -> None:
        assert self._file is not None
        path = index_path(shard.path)
        raw = _map_remote(shard, path) if is_url(path) else _map_file(path)
        size_bytes = len(raw)
        if size_bytes < _HEAD.size:
            raise _fault(path, f"has {size_bytes} bytes, less than an idx header")
        magic, version, code, sequences, entries = _HEAD.unpack(raw[: _HEAD.size].tobytes())
        if magic != _MAGIC or version != 1:
            raise _fault(path, f"starts with {magic!r} version {version}: no Megatron idx")
        if code not in _DTYPES:
            name = _DTYPE_NAMES.get(code, f"code {code}")
            raise _fault(path, f"holds {name} tokens, no ids: only integers are read")
        needed = _HEAD.size + 12 * sequences + 8 * entries
        if size_bytes < needed or entries < 1:
            raise _fault(
                path, f"has {size_bytes} bytes, {sequences} sequences need {needed}: it is cut"
            )
        self._stored, self.dtype = _DTYPES[code]
        self._is_checked = code in _CHECKED_CODES
        end_sizes = _HEAD.size + 4 * sequences
        end_pointers = end_sizes + 8 * sequences
        self._sizes = raw[_HEAD.size : end_sizes].view("<i4")
        self._pointers = raw[end_sizes:end_pointers].view("<i8")
        self._documents = raw[end_pointers : end_pointers + 8 * entries].view("<i8")
        self._sequences = int(sequences)
        self.document_count = int(entries) - 1
        self._check_ends(path)
        modes = raw[needed:]
        if len(modes) == sequences and modes.any():
            other = int(np.flatnonzero(modes)[0])
            raise _fault(
                path,
                f"is multimodal: sequence {other} is of mode {int(modes[other])}, only texts (mode "
                "0) are read",
            )

    def _check_ends(self, path: str) -> None:
        assert self._file is not None
        if self._sequences:
            end = int(self._pointers[-1]) + int(self._sizes[-1]) * self._stored.itemsize
            if end > self._file.size_bytes:
                raise _fault(
                    self.path,
                    f"has {self._file.size_bytes} bytes, its idx says {end}: the bin is cut",
                )
        if int(self._documents[0]) != 0 or int(self._documents[-1]) != self._sequences:
            raise _fault(
                path,
                f"documents run over sequences {int(self._documents[0])} to "
                f"{int(self._documents[-1])} of {self._sequences}",
            )

    @property
    def sequence_count(self) -> int:
        """Sequences of the pair; a document is one or more of them."""
        return self._sequences

    def block_starts(self, rule: ShuffleRule) -> Ids:
        """Return the first document of each block, with the document count at the end.

        A block holds at most `block_records` documents and closes before the document that would
        take it over `block_bytes`, so a larger document stands alone.
        """
        starts = [0]
        first, count = 0, self.document_count
        while first < count:
            last = min(first + rule.block_records, count)
            begins, ends = self._byte_extents(first, last)
            fitting = int(np.searchsorted(ends, int(begins[0]) + rule.block_bytes, side="right"))
            first = min(first + max(fitting, 1), last)
            starts.append(first)
        if count == 0:
            starts.append(0)
        return np.array(starts, dtype=np.int64)

    def _byte_extents(self, first: int, last: int) -> tuple[Ids, Ids]:
        """Return where documents [first, last) begin and end in the bin, in bytes, unchecked."""
        entries = np.clip(self._documents[first : last + 1].astype(np.int64), 0, self._sequences)
        begins = self._sequence_begins(entries[:-1])
        last_sequences = np.maximum(entries[1:] - 1, 0)
        ends = self._sequence_begins(last_sequences)
        if self._sequences:
            ends = ends + self._sizes[last_sequences].astype(np.int64) * self._stored.itemsize
        return begins, np.where(entries[1:] > entries[:-1], ends, begins)

    def _sequence_begins(self, sequences: Ids) -> Ids:
        if not self._sequences:
            return np.zeros(len(sequences), dtype=np.int64)
        found = np.minimum(sequences, self._sequences - 1)
        begins: Ids = self._pointers[found].astype(np.int64)
        is_end = sequences >= self._sequences
        if is_end.any():
            begins[is_end] += int(self._sizes[-1]) * self._stored.itemsize
        return begins

    def open_block(self, first: int, last: int, record_bytes_max: int) -> TokenBlock:
        """Return the documents [first, last), each checked against idx and bin."""
        assert self._file is not None
        width = self._stored.itemsize
        entries = self._documents[first : last + 1].astype(np.int64)
        begins, ends, overlaps = self._extents_and_overlaps(first, last)
        sizes = np.maximum(ends - begins, 0)
        is_bad = (begins < 0) | (ends > self._file.size_bytes) | (begins % width != 0)
        is_bad |= (ends < begins) | (np.diff(entries) < 0)
        is_bad |= (entries[1:] > self._sequences) | (entries[:-1] < 0)
        is_bad |= overlaps | self._is_torn(entries, ends - begins)
        status = np.zeros(last - first, dtype=np.uint8)
        status[sizes == 0] = RecordStatus.EMPTY
        status[sizes > record_bytes_max] = RecordStatus.TOO_LARGE
        status[is_bad] = RecordStatus.UNREADABLE
        if self._is_checked:
            for number in np.flatnonzero(status == RecordStatus.OK).tolist():
                if not self._holds_ids(int(begins[number]) // width, int(sizes[number]) // width):
                    status[number] = RecordStatus.UNREADABLE
        lengths = np.where(status == RecordStatus.OK, sizes // width, 0)
        return TokenBlock(
            first,
            begins // width,
            lengths,
            sizes,
            status,
            begins,
        )

    def _extents_and_overlaps(
        self, first: int, last: int
    ) -> tuple[Ids, Ids, npt.NDArray[np.bool_]]:
        """Return begins and ends in bytes, and which documents reach into the one behind."""
        begins, ends = self._byte_extents(first, min(last + 1, self.document_count))
        overlaps = np.zeros(last - first, dtype=np.bool_)
        behind = begins[1:]
        reaches = (behind > begins[:-1]) & (behind < ends[:-1])
        overlaps[: len(reaches)] = reaches
        return begins[: last - first], ends[: last - first], overlaps

    def _is_torn(self, entries: Ids, extents: Ids) -> npt.NDArray[np.bool_]:
        """Tell which documents have sequences that do not lie one after the other."""
        low, high = int(entries.min()), int(entries.max())
        if low < 0 or high > self._sequences:
            return np.zeros(len(extents), dtype=np.bool_)
        if high - low == len(extents):  # one sequence a document: its extent is its own size
            return np.zeros(len(extents), dtype=np.bool_)
        totals = np.zeros(high - low + 1, dtype=np.int64)
        np.cumsum(self._sizes[low:high], dtype=np.int64, out=totals[1:])
        counts: Ids = totals[entries[1:] - low] - totals[entries[:-1] - low]
        is_torn: npt.NDArray[np.bool_] = counts * self._stored.itemsize != extents
        return is_torn

    def _holds_ids(self, begin: int, count: int) -> bool:
        try:
            return _are_ids(self._read(begin, count))
        except CorruptRecordError:
            return False

    def fault_of(self, block: TokenBlock, number: int) -> str:
        """Return what is wrong with a bad document of a block, by its number in file order."""
        status, begin = int(block.status[number]), int(block.byte_begins[number])
        return self._describe(block.first_document + number, status, begin)

    def _describe(self, document: int, status: int, begin: int) -> str:
        what = "is out of place"
        if status == RecordStatus.TOO_LARGE:
            what = "is too large"
        elif self._is_checked:
            what += f" or holds an id outside 0 to {_ID_MAX}"
        return f"{self.path}: document {document} at byte {begin} {what}"

    def read_tokens(self, begin: int, count: int) -> Tokens:
        """Return `count` tokens from token `begin` on; of documents that are OK they are ids.

        Raises:
            CorruptRecordError: The bin ends before.
        """
        ids = self._read(begin, count)
        if self.dtype == _U2:
            return ids.astype(np.uint16, copy=False)
        return ids.astype(np.int32, copy=False)

    def _read(self, begin: int, count: int) -> npt.NDArray[Any]:
        assert self._file is not None
        raw = np.empty(count * self._stored.itemsize, dtype=np.uint8)
        view = raw.data
        offset = begin * self._stored.itemsize
        done = 0
        while done < len(view):
            got = self._read_into(view[done:], offset + done)
            if got == 0:
                raise _fault(self.path, f"ends at byte {offset + done}, tokens were to follow")
            done += got
        return raw.view(self._stored)

    def _read_into(self, view: memoryview, offset: int) -> int:
        if isinstance(self._file, ShardFile):
            got = os.preadv(self._file.descriptor, [view], offset)
            self._meter.read_bytes += got
            return got
        assert self._file is not None
        data = self._file.read_at(offset, len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the bin; the idx is unmapped once its last view is gone."""
        if self._file is not None:
            self._file.close()
            self._file = None


def companion_files(shard: P) -> list[P]:
    """Return the `.idx` of a `.bin`."""
    return [shard.parent / Path(shard.name).with_suffix(".idx").name]


def index_path(bin_path: str) -> str:
    """Return the path of the idx beside a bin."""
    folder, separator, name = bin_path.rpartition("/")
    return f"{folder}{separator}{Path(name).with_suffix('.idx')}"


def _map_file(path: str) -> npt.NDArray[np.uint8]:
    if not os.stat(path).st_size:
        return np.zeros(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def _map_remote(shard: Shard, path: str) -> npt.NDArray[np.uint8]:
    from msd_daemon.stores.local_copy import map_object

    return map_object(path, other_fingerprint(shard))


def count_documents(shard: Shard) -> int | None:
    """Return the documents that a shard's idx tells of, None where it tells nothing."""
    try:
        file = open_path(index_path(shard.path), ReadMeter())
        try:
            head = file.read_at(0, _HEAD.size)
        finally:
            file.close()
    except OSError:
        return None
    if len(head) < _HEAD.size:
        return None
    magic, version, _, _, entries = _HEAD.unpack(head)
    return int(entries) - 1 if (magic, version) == (_MAGIC, 1) and entries else None


def check_megatron(spec: SourceSpec, shard: Shard) -> None:
    """Refuse a pair that cannot be opened or has a document out of place.

    Raises:
        CorruptRecordError: What is wrong.
        OSError: A file cannot be opened.
    """
    opened = MegatronShard(shard, ReadMeter())
    try:
        for first in range(0, opened.document_count, 1 << 16):
            last = min(first + (1 << 16), opened.document_count)
            block = opened.open_block(first, last, spec.record_bytes_max)
            if (block.status == RecordStatus.UNREADABLE).any():
                bad = int(np.flatnonzero(block.status >= RecordStatus.BAD_SYNTAX)[0])
                fault = opened.fault_of(block, bad)
                raise CorruptRecordError(fault, shard=shard.path, byte_offset=0)
    finally:
        opened.close()


def _are_ids(values: npt.NDArray[Any]) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) <= _ID_MAX)


def _fault(path: str, what: str) -> CorruptRecordError:
    return CorruptRecordError(
        f"{path} {what}; byte offset 0: make the pair anew", shard=path, byte_offset=0
    )
