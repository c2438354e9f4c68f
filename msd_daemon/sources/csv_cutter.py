"""Cuts a stream of CSV into its records: line ends inside quotes do not count. Bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from msd_daemon.sources.byte_stream import ByteStream
from msd_daemon.sources.line_reader import BYTE_ORDER_MARK

_QUOTE = ord('"')
_NEWLINE = ord("\n")


class CsvRecord(NamedTuple):
    """A record with its line ends; `content` is None where it is longer than the limit."""

    offset: int
    content: bytes | None
    next_offset: int
    is_open: bool
    """True where the stream ends inside its quotes."""


class _State(Enum):
    """Where in a record the cutter stands."""

    FIELD_BEGIN = 0
    PLAIN = 1
    QUOTED = 2
    QUOTE_SEEN = 3


def cut_records(
    stream: ByteStream, offset: int, delimiters: bytes, record_bytes_max: int
) -> Iterator[CsvRecord]:
    """Yield the records of a stream, blank lines too; the last one may lack its line end.

    Quotes count where a field begins with one, and two in a row inside of them stand for one: what
    the csv module takes.

    Args:
        stream: Where the bytes come from; a byte-order mark is passed over at offset 0.
        offset: Offset of its first byte.
        delimiters: Bytes that end a field.
        record_bytes_max: A longer record is passed over and given without content.

    Raises:
        CorruptRecordError: The stream is damaged; the record before the damage is not given.
    """
    scanner = _Scanner(delimiters)
    parts: list[bytes] = []  # of the record that has begun
    begun_bytes = 0
    data = _begin(stream, offset)
    if offset == 0 and data.startswith(BYTE_ORDER_MARK):
        data, offset = data[len(BYTE_ORDER_MARK) :], len(BYTE_ORDER_MARK)
        data = data or stream.read()
    while data:
        begin = 0
        while begin < len(data):
            end = scanner.scan(data, begin)
            is_whole = end >= 0
            part = data[begin : end if is_whole else len(data)]
            begin += len(part)
            begun_bytes += len(part)
            parts.append(part)
            if begun_bytes > record_bytes_max:
                parts.clear()
            if is_whole:
                is_kept = begun_bytes <= record_bytes_max
                content = b"".join(parts) if is_kept else None
                yield CsvRecord(offset, content, offset + begun_bytes, False)
                offset += begun_bytes
                begun_bytes = 0
                parts.clear()
        data = stream.read()
    if begun_bytes:
        content = b"".join(parts) if begun_bytes <= record_bytes_max else None
        yield CsvRecord(offset, content, offset + begun_bytes, scanner.is_quoted)


def _begin(stream: ByteStream, offset: int) -> bytes:
    """Return the first bytes, enough to tell a byte-order mark at the beginning."""
    data = stream.read()
    while offset == 0 and data and len(data) < len(BYTE_ORDER_MARK):
        more = stream.read()
        if not more:
            break
        data += more
    return data


class _Scanner:
    """Finds where records end, piece by piece."""

    def __init__(self, delimiters: bytes) -> None:
        self._delimiters = delimiters
        self._field_end = re.compile(b"[\n" + re.escape(delimiters) + b"]")
        self._state = _State.FIELD_BEGIN

    @property
    def is_quoted(self) -> bool:
        """True inside quotes."""
        return self._state is _State.QUOTED

    def scan(self, data: bytes, begin: int) -> int:
        """Return where the record at a place ends, behind its line end; -1 if not in the data."""
        if self._state is not _State.QUOTED:
            newline = data.find(b"\n", begin)
            line_end = newline if newline >= 0 else len(data)
            if data.find(b'"', begin, line_end) < 0:  # nearly always: no quotes in the line
                return self._pass_plain(data, begin, newline)
        while begin < len(data):
            if self._state is _State.QUOTED:
                begin = self._pass_quoted(data, begin)
                continue
            if self._state is _State.PLAIN:
                found = self._field_end.search(data, begin)
                if found is None:
                    return -1
                begin = found.start()
            byte = data[begin]
            begin += 1
            if byte == _NEWLINE:
                self._state = _State.FIELD_BEGIN
                return begin
            self._turn(byte)
        return -1

    def _pass_plain(self, data: bytes, begin: int, newline: int) -> int:
        if newline >= 0:
            self._state = _State.FIELD_BEGIN
            return newline + 1
        if begin < len(data):
            is_end = data[-1] in self._delimiters
            self._state = _State.FIELD_BEGIN if is_end else _State.PLAIN
        return -1

    def _pass_quoted(self, data: bytes, begin: int) -> int:
        quote = data.find(b'"', begin)
        if quote < 0:
            return len(data)
        self._state = _State.QUOTE_SEEN
        return quote + 1

    def _turn(self, byte: int) -> None:
        if byte in self._delimiters:
            self._state = _State.FIELD_BEGIN
        elif byte == _QUOTE and self._state is not _State.PLAIN:
            self._state = _State.QUOTED  # a field's first quote, or the second of two
        else:
            self._state = _State.PLAIN
