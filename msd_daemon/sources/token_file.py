"""Raw token ids without an index: nanoGPT's `train.bin`, llm.c's and modded-nanogpt's shards.

A file has no documents, so it is cut into records of so many tokens, or behind each end-of-text id
(`eot_id`; a document longer than a record is cut too). With a header of 256 int32 the first says
which ids follow: 20240520 uint16, 20240801 uint32; the third how many. Without one they have the
job's `token_bytes`, or as many as its vocabulary needs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federation.model.job import Shard, SourceSpec
from federation.model.recipe import TokenFileRule
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import ByteFile
from msd_daemon.sources.formats import Columns
from msd_daemon.sources.record import RawRecord, ReadMeter, lost_shard, unreadable
from msd_daemon.sources.shard_file import open_shard

TOKENS = "tokens"
"""The field of each record."""
_HEADER_BYTES = 1024
_MAGICS = {20240520: 2, 20240801: 4}
_ID_MAX = (1 << 31) - 1

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.int32]


def open_token_file(spec: SourceSpec, columns: Columns, meter: ReadMeter) -> TokenFile:
    """Return the reader of a source of files of ids; `spec.token_file` says how they are cut."""
    del columns  # there is one field
    return TokenFile(spec, meter, spec.token_file or TokenFileRule())


@dataclass(frozen=True)
class _Layout:
    begin: int
    """First byte of the ids."""
    width: int
    count: int


class TokenFile:
    """Records of files of ids; places are tokens of the file.

    Args:
        spec: The source.
        meter: Counts what is read.
        rule: How files are cut.
    """

    def __init__(self, spec: SourceSpec, meter: ReadMeter, rule: TokenFileRule) -> None:
        self._meter = meter
        self._rule = rule
        self._width = rule.id_bytes or spec.token_bytes
        records = min(spec.shuffle.block_records, spec.shuffle.block_bytes // (4 * self._span))
        self._block_tokens = max(1, records) * self._span
        """A function of the rule alone, so blocks lie alike for 16 and 32 bits."""

    @property
    def _span(self) -> int:
        return self._rule.record_tokens

    def measure(self, shard: Shard) -> tuple[int, int]:
        """Return the blocks of a file and its records, of cut files at least so many.

        Raises:
            CorruptRecordError: Its size contradicts its header or the width of ids.
            OSError: It cannot be read.
        """
        file = open_shard(shard, self._meter)
        try:
            layout = self._layout(file)
        finally:
            file.close()
        blocks = max(1, -(-layout.count // self._block_tokens))
        return blocks, -(-layout.count // self._span)

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records that begin in a block; damage ends it with one unreadable record."""
        begin = block * self._block_tokens
        try:
            file = open_shard(shard, self._meter)
        except (CorruptRecordError, OSError) as error:
            yield lost_shard(error)
            return
        place = begin
        try:
            layout = self._layout(file)
            end = min(begin + self._block_tokens, layout.count)
            for first, last, known in self._cuts(file, layout, begin, end):
                place = first
                ids = self._read(file, layout, first, last) if known is None else known
                yield RawRecord(first, b"", fields={TOKENS: ids}, fields_bytes=4 * len(ids))
        except (CorruptRecordError, OSError) as error:
            yield unreadable(place, error)
        finally:
            file.close()

    def _layout(self, file: ByteFile) -> _Layout:
        head = file.read_at(0, 12)
        if len(head) == 12:
            magic, version, count = struct.unpack("<3i", head)
            if magic in _MAGICS and version >= 1:
                width = _MAGICS[magic]
                needed = _HEADER_BYTES + width * count
                if count < 0 or needed != file.size_bytes:
                    raise _fault(
                        file.path, f"has {file.size_bytes} bytes, {count} tokens need {needed}"
                    )
                return _Layout(_HEADER_BYTES, width, count)
        if file.size_bytes % self._width:
            raise _fault(
                file.path,
                f"has {file.size_bytes} bytes, no multiple of {self._width} a token: "
                "write token_bytes as the ids were written, or restore the file",
            )
        return _Layout(0, self._width, file.size_bytes // self._width)

    def _cuts(
        self, file: ByteFile, layout: _Layout, begin: int, end: int
    ) -> Iterator[tuple[int, int, Ids | None]]:
        """Yield (first token, token behind the last, ids) of the records that begin in [begin, end).

        The ids are there where their end had to be looked for.

        A document is cut every `record_tokens` from its own beginning on; where that lies before
        the block, cuts go on from the block's beginning.
        """
        if self._rule.eot_id is None:
            for first in range(begin, end, self._span):
                yield first, min(first + self._span, layout.count), None
            return
        if begin >= end:
            return
        first = begin
        while first < end:
            ids = self._read(file, layout, first, min(first + self._span, end))
            found = np.flatnonzero(ids == self._rule.eot_id)
            last = first + (int(found[0]) + 1 if len(found) else len(ids))
            yield first, last, ids[: last - first].copy()
            first = last

    def _read(self, file: ByteFile, layout: _Layout, first: int, last: int) -> Ids:
        count = last - first
        raw = file.read_at(layout.begin + first * layout.width, count * layout.width)
        if len(raw) < count * layout.width:
            raise _fault(file.path, f"ends at token {first + len(raw) // layout.width}")
        if layout.width == 2:
            return np.frombuffer(raw, "<u2")
        ids = np.frombuffer(raw, "<u4")
        if len(ids) and int(ids.max()) > _ID_MAX:
            at = first + int(np.flatnonzero(ids > _ID_MAX)[0])
            raise _fault(file.path, f"holds an id beyond {_ID_MAX} at token {at}")
        return ids.view("<i4")


def _fault(path: str, what: str) -> CorruptRecordError:
    return CorruptRecordError(f"{path} {what}", shard=path)
