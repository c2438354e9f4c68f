"""Plain text: a document is a whole file, or a run of lines between blank ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import ByteStream
from msd_daemon.sources.json_text import plain_extractor, strip_mark
from msd_daemon.sources.line_reader import (
    Line,
    RangeStream,
    ends_blank_line,
    find_line_start,
    read_lines,
)
from msd_daemon.sources.record import RawRecord, ReadMeter, lost_shard, unreadable
from msd_daemon.sources.shard_file import open_shard, open_stream

_TOO_LARGE = int(RecordStatus.TOO_LARGE)


class _Place(Enum):
    """Where the line reader stands: between records, in one of another block, in its own."""

    OUTSIDE = 0
    FOREIGN = 1
    INSIDE = 2


class TextFormat:
    """Records of text shards; CRLF line ends become LF, a byte-order mark is dropped."""

    def __init__(self, spec: SourceSpec, meter: ReadMeter) -> None:
        self.extract = plain_extractor(keeps_carriage_returns=False)
        self._is_file = spec.text_document == "file"
        self._record_bytes_max = spec.record_bytes_max
        self._block_bytes = spec.shuffle.block_bytes
        self._meter = meter

    def block_count(self, shard: Shard) -> int:
        """Return the blocks of a shard, at least 1; a file that is one record is one block."""
        if self._is_file:
            return 1
        return max(1, -(-shard.size_bytes // self._block_bytes))

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records that begin in the block's byte range."""
        try:
            file = open_shard(shard, self._meter)
        except (CorruptRecordError, OSError) as error:
            if block == 0:
                yield lost_shard(error, 1 if self._is_file else None)
            return
        try:
            if self._is_file:
                yield from self.whole_file(open_stream(file))
                return
            start = block * self._block_bytes
            stop = start + self._block_bytes
            first = find_line_start(file, start, stop)
            if first is None:
                return
            is_fresh = ends_blank_line(file, first)
            lines = read_lines(RangeStream(file, first, stop), first, self._record_bytes_max)
            yield from self.line_records(lines, is_fresh=is_fresh, stop=stop)
        except (CorruptRecordError, OSError) as error:
            yield unreadable(block * self._block_bytes, error)
        finally:
            file.close()

    def whole_file(self, stream: ByteStream) -> Iterator[RawRecord]:
        """Yield the one record of a stream, none where it is empty.

        Raises:
            CorruptRecordError: The stream is damaged; nothing was given.
        """
        parts: list[bytes] = []
        size_bytes = 0
        while data := stream.read():
            size_bytes += len(data)
            if size_bytes > self._record_bytes_max:
                yield self._too_large(0)
                return
            parts.append(data)
        content = strip_mark(b"".join(parts))
        if content:
            yield RawRecord(0, content)

    def line_records(
        self, lines: Iterable[Line], *, is_fresh: bool = True, stop: int | None = None
    ) -> Iterator[RawRecord]:
        """Yield runs of lines between blank ones.

        Args:
            lines: Lines in order.
            is_fresh: False where the first line goes on with a record begun before it.
            stop: Records that begin at or after this offset belong to the next block.
        """
        state = _Place.OUTSIDE if is_fresh else _Place.FOREIGN
        parts: list[bytes] = []
        size_bytes = begun = 0
        for offset, content, _ in lines:
            if offset == 0 and content is not None:
                content = strip_mark(content)
            is_beyond = stop is not None and offset >= stop
            is_blank = content is not None and (not content or content.isspace())
            if is_blank:
                if state is _Place.INSIDE:
                    yield self._join(begun, parts, size_bytes)
                state = _Place.OUTSIDE
            if is_beyond and state is not _Place.INSIDE:
                return
            if is_blank:
                continue
            if state is _Place.OUTSIDE:
                state, begun, size_bytes, parts = _Place.INSIDE, offset, 0, []
            if state is _Place.INSIDE:
                size_bytes += self._add_line(parts, content)
                if size_bytes > self._record_bytes_max + 1:
                    parts.clear()
        if state is _Place.INSIDE:
            yield self._join(begun, parts, size_bytes)

    def _add_line(self, parts: list[bytes], content: bytes | None) -> int:
        """Append a line to its record and return its bytes with the newline."""
        if content is None:
            return self._record_bytes_max + 2
        parts.append(content)
        return len(content) + 1

    def _join(self, begun: int, parts: list[bytes], size_bytes: int) -> RawRecord:
        if size_bytes > self._record_bytes_max + 1:
            return self._too_large(begun)
        return RawRecord(begun, b"\n".join(parts).removesuffix(b"\r"))

    def _too_large(self, place: int) -> RawRecord:
        limit = self._record_bytes_max
        return RawRecord(place, b"", _TOO_LARGE, f"longer than record_bytes_max = {limit}")
