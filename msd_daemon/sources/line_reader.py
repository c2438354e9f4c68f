"""Lines of a byte stream with their offsets; a line over the limit is never held whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msd_daemon.sources.byte_stream import ByteFile, ByteStream

_PIECE_BYTES = 256 * 1024
_TAIL_BYTES = 16 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line without its newline; `content` is None where it is longer than the limit."""

    offset: int
    content: bytes | None
    next_offset: int


class RangeStream:
    """The bytes of a file from an offset on; reads little beyond `stop`, where a block ends."""

    def __init__(self, file: ByteFile, start: int, stop: int) -> None:
        self._file = file
        self._offset = start
        self._stop = stop
        file.advise(start, stop - start + _TAIL_BYTES)

    def read(self) -> bytes:
        """Return the next bytes, empty at the end of the file."""
        left = self._stop - self._offset
        data = self._file.read_at(
            self._offset, min(_PIECE_BYTES, left) if left > 0 else _TAIL_BYTES
        )
        self._offset += len(data)
        return data


def read_lines(
    stream: ByteStream | RangeStream, offset: int, line_bytes_max: int
) -> Iterator[Line]:
    """Yield the lines of a stream; the last one may lack its newline.

    Args:
        stream: Where the bytes come from.
        offset: Offset of the stream's first byte.
        line_bytes_max: A longer line is passed over and given without content.

    Raises:
        CorruptRecordError: The stream is damaged; the line before the damage is not given.
    """
    parts: list[bytes] = []  # of the line that has begun
    begun_bytes = 0
    while data := stream.read():
        first, *rest = data.split(b"\n")
        begun_bytes += len(first)
        if begun_bytes > line_bytes_max:
            parts.clear()
        else:
            parts.append(first)
        if not rest:
            continue
        begin, offset = offset, offset + begun_bytes + 1
        yield Line(begin, b"".join(parts) if begun_bytes <= line_bytes_max else None, offset)
        last = rest.pop()
        for content in rest:
            begin, offset = offset, offset + len(content) + 1
            yield Line(begin, content if len(content) <= line_bytes_max else None, offset)
        begun_bytes = len(last)
        parts = [last] if begun_bytes <= line_bytes_max else []
    if begun_bytes:
        is_whole = begun_bytes <= line_bytes_max
        yield Line(offset, b"".join(parts) if is_whole else None, offset + begun_bytes)


def find_line_start(file: ByteFile, start: int, stop: int) -> int | None:
    """Return the first line start in [start, stop) of a file, None if there is none."""
    file.advise(max(0, start - 1), stop - start + 1 + _TAIL_BYTES)
    if start == 0:
        return 0
    offset = start - 1  # a newline just before `start` begins a line at it
    while offset < stop - 1:
        data = file.read_at(offset, min(_PIECE_BYTES, stop - 1 - offset))
        if not data:
            return None
        found = data.find(b"\n")
        if found >= 0:
            line_start = offset + found + 1
            return line_start if line_start < file.size_bytes else None
        offset += len(data)
    return None


def ends_blank_line(file: ByteFile, line_start: int) -> bool:
    """Tell whether the line before a line start is blank, or there is none."""
    offset = line_start - 1  # the newline that ends the line before
    while offset > 0:
        start = max(0, offset - 4096)
        data = file.read_at(start, offset - start)
        kept = data.rstrip(b" \t\r\f\v")
        if kept:
            return kept.endswith(b"\n") or (start == 0 and kept == BYTE_ORDER_MARK)
        offset = start
    return True
