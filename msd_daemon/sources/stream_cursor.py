"""A place in a byte stream that can be read, looked ahead of and skipped from; bounded memory."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from msd_daemon.sources.byte_stream import ByteStream


@runtime_checkable
class SkippingStream(Protocol):
    """A stream that can go on without reading."""

    def skip(self, count: int) -> int:
        """Go on and return how many bytes were skipped, fewer only at the end."""
        ...


class StreamCursor:
    """Reads a stream by counts.

    Args:
        stream: Where the bytes come from.
        offset: Offset of its next byte.
    """

    def __init__(self, stream: ByteStream, offset: int) -> None:
        self._stream = stream
        self._skipping = stream if isinstance(stream, SkippingStream) else None
        self._data = b""
        self._begin = 0  # of what is left in _data
        self._end_offset = offset  # in the stream, behind _data

    @property
    def position(self) -> int:
        """Offset of the next byte."""
        return self._end_offset - (len(self._data) - self._begin)

    def peek(self, count: int) -> bytes:
        """Return the next bytes and stay; fewer than `count` only at the end.

        Raises:
            CorruptRecordError: The stream is damaged before it has as many.
        """
        while len(self._data) - self._begin < count and self._read_on():
            pass
        return self._data[self._begin : self._begin + count]

    def take(self, count: int) -> bytes:
        """Return the next bytes and go behind them; fewer than `count` only at the end.

        Raises:
            CorruptRecordError: The stream is damaged before it has as many.
        """
        if len(self._data) - self._begin >= count:
            taken = self._data[self._begin : self._begin + count]
            self._begin += count
            return taken
        parts = [self._data[self._begin :]]
        missing = count - len(parts[0])
        self._begin = len(self._data)
        while missing and self._read_on():
            part = self._data[:missing]
            self._begin = len(part)
            missing -= len(part)
            parts.append(part)
        return b"".join(parts)

    def skip(self, count: int) -> int:
        """Go on and return how many bytes were skipped, fewer than `count` only at the end.

        Raises:
            CorruptRecordError: The stream is damaged before it has as many.
        """
        left = count - min(count, len(self._data) - self._begin)
        self._begin += count - left
        if left and self._skipping is not None:
            skipped = self._skipping.skip(left)
            self._end_offset += skipped
            return count - left + skipped
        while left and self._read_on():
            self._begin = min(left, len(self._data))
            left -= self._begin
        return count - left

    def _read_on(self) -> bool:
        data = self._stream.read()
        self._end_offset += len(data)
        self._data = self._data[self._begin :] + data
        self._begin = 0
        return bool(data)
