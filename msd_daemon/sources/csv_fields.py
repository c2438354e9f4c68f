"""CSV and TSV: a header of names, then one record a row; fields are text.

The rules are RFC 4180's, as the csv module reads them when strict: fields may be quoted, quoted
ones may hold delimiters, line ends and doubled quotes. The delimiter is what parts the header: a
tab, else a comma, else a semicolon. Rows with more or fewer fields than the header, or with wrong
quotes, are faults that cost themselves alone. Blank lines are no rows.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import ByteStream, SeekPoint
from msd_daemon.sources.csv_cutter import CsvRecord, cut_records
from msd_daemon.sources.formats import Columns
from msd_daemon.sources.record import RawRecord, ReadMeter
from msd_daemon.sources.record_fields import media_names, wrap_media
from msd_daemon.sources.record_place import mark_place
from msd_daemon.sources.shard_file import open_shard, open_stream
from msd_daemon.sources.stream_formats import is_line_start

_BAD_SYNTAX = int(RecordStatus.BAD_SYNTAX)
_BAD_ENCODING = int(RecordStatus.BAD_ENCODING)
_TOO_LARGE = int(RecordStatus.TOO_LARGE)
_DELIMITERS = ("\t", ",", ";")
HEADER_BYTES_MAX = 1 << 20


class _Header(NamedTuple):
    """What the first row says."""

    names: tuple[str, ...]
    delimiter: str
    end: int
    """Offset of the row behind it."""


def open_csv(spec: SourceSpec, columns: Columns, meter: ReadMeter) -> CsvFormat:
    """Return the reader of a source of CSV or TSV."""
    del columns  # a row is parsed as a whole
    return CsvFormat(spec, meter)


class CsvFormat:
    """Records of CSV shards.

    Args:
        spec: The source.
        meter: Counts what is read beside the stream.
        shard: The shard whose header is read where a stream begins behind it.
    """

    def __init__(self, spec: SourceSpec, meter: ReadMeter, shard: Shard | None = None) -> None:
        self._spec = spec
        self._meter = meter
        self._shard = shard
        self._media = media_names(spec)
        # the library's own limit is 128 KiB; rows are bounded before they come to it
        csv.field_size_limit(max(csv.field_size_limit(), spec.record_bytes_max, HEADER_BYTES_MAX))

    def at(self, shard: Shard) -> CsvFormat:
        """Return the reader of one shard."""
        return CsvFormat(self._spec, self._meter, shard)

    def is_start(self, before: bytes) -> bool:
        """Tell whether the bytes before a place end a line."""
        return is_line_start(before)

    def records(self, stream: ByteStream, offset: int) -> Iterator[RawRecord]:
        """Yield the records of a stream.

        Raises:
            CorruptRecordError: The stream is damaged, or its header is none; the row before the
                damage is not given.
            OSError: The header cannot be read.
        """
        after = offset
        try:
            if offset == 0:
                beginning = _Beginning(stream)
                header = self._read_header(beginning)
                if header is None:
                    return
                stream, offset = beginning.behind(header.end), header.end
            else:
                header = self._header_of_shard()
            after = offset
            limit = self._spec.record_bytes_max
            for row in cut_records(stream, offset, header.delimiter.encode(), limit):
                after = row.next_offset
                record = self._record(row, header)
                if record is not None:
                    yield record
        except (CorruptRecordError, OSError) as error:
            mark_place(error, after)
            raise

    def _record(self, row: CsvRecord, header: _Header) -> RawRecord | None:
        """Return the record of a row, None for a blank line."""
        if row.content is None:
            fault = f"longer than record_bytes_max = {self._spec.record_bytes_max}"
            return RawRecord(row.offset, b"", _TOO_LARGE, fault)
        raw = row.content.removesuffix(b"\n").removesuffix(b"\r")
        if not raw:
            return None
        try:
            fields = _parse(row.content, header.delimiter)
        except UnicodeDecodeError as error:
            fault = f"not UTF-8 at byte {error.start} of the record"
            return RawRecord(row.offset, raw, _BAD_ENCODING, fault)
        except csv.Error as error:
            return RawRecord(row.offset, raw, _BAD_SYNTAX, f"no CSV row: {error}")
        if len(fields) != len(header.names):
            fault = f"{len(fields)} fields, the header has {len(header.names)}"
            return RawRecord(row.offset, raw, _BAD_SYNTAX, fault)
        named: dict[str, Any] = dict(zip(header.names, fields, strict=True))
        wrap_media(named, self._media)
        return RawRecord(row.offset, raw, fields=named)

    def _header_of_shard(self) -> _Header:
        if self._shard is None:
            raise self._damage("is read from its middle without its header", 0)
        file = open_shard(self._shard, self._meter)
        try:
            header = self._read_header(open_stream(file))
        finally:
            file.close()
        if header is None:
            raise self._damage("has no header", 0)
        return header

    def _read_header(self, stream: ByteStream) -> _Header | None:
        """Return the header of a shard, None where the shard is empty.

        Raises:
            CorruptRecordError: It is damaged, or is no list of distinct names.
        """
        for row in cut_records(stream, 0, "".join(_DELIMITERS).encode(), HEADER_BYTES_MAX):
            if row.content is None:
                raise self._damage(f"has a header of over {HEADER_BYTES_MAX} bytes", row.offset)
            if row.content.strip(b"\r\n"):
                return self._header(row, row.content)
        return None

    def _header(self, row: CsvRecord, content: bytes) -> _Header:
        try:
            delimiter = _delimiter_of(content)
            names = _parse(content, delimiter)
        except (UnicodeDecodeError, csv.Error) as error:
            raise self._damage(f"has a header that is none ({error})", row.offset) from error
        twice = [name for name, count in Counter(names).items() if count > 1 or not name]
        if twice:
            what = f"names column {twice[0]!r} twice, or not at all, in its header"
            raise self._damage(what, row.offset)
        return _Header(tuple(names), delimiter, row.next_offset)

    def _damage(self, what: str, offset: int) -> CorruptRecordError:
        path = "the CSV" if self._shard is None else self._shard.path
        return CorruptRecordError(
            f"{path} {what}; byte offset {offset}: mend the file", shard=path, byte_offset=offset
        )


class _Beginning:
    """A stream whose first bytes can be had once more."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._read = b""

    @property
    def seek_points(self) -> list[SeekPoint]:
        return self._stream.seek_points

    def read(self) -> bytes:
        data = self._stream.read()
        self._read += data
        return data

    def behind(self, offset: int) -> ByteStream:
        """Return the stream from an offset on that has been passed."""
        return _Rest(self._stream, self._read[offset:])


class _Rest:
    """Bytes that were read already, and the stream behind them."""

    def __init__(self, stream: ByteStream, data: bytes) -> None:
        self._stream = stream
        self._data = data

    @property
    def seek_points(self) -> list[SeekPoint]:
        return self._stream.seek_points

    def read(self) -> bytes:
        data, self._data = self._data, b""
        return data or self._stream.read()


def _delimiter_of(content: bytes) -> str:
    """Return what parts a header into more than one name, a comma where nothing does."""
    for delimiter in _DELIMITERS:
        with suppress(csv.Error):
            if len(_parse(content, delimiter)) > 1:
                return delimiter
    return ","


def _parse(content: bytes, delimiter: str) -> list[str]:
    """Return the fields of one record.

    Raises:
        UnicodeDecodeError: It is not UTF-8.
        csv.Error: Its quotes are wrong.
    """
    return next(csv.reader((content.decode(),), delimiter=delimiter, strict=True))
