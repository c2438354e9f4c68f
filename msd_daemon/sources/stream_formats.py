"""What a streaming source is read by: lines and whole files of text, or a format of the registry.

Beside the protocol StreamFormat, a format may have two more methods, which lanes look for:
`at(shard)` gives the reader of one shard, for formats that need its beginning (the header of a CSV)
or name it in errors; `count_records(shard)` says how many records a shard should have, so that a
fault can say what it cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast, runtime_checkable

from federation.model.job import FieldRule, Shard, SourceSpec
from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.byte_stream import ByteStream
from msd_daemon.sources.formats import Columns, StreamFormat, format_of
from msd_daemon.sources.jsonl import JsonlFormat
from msd_daemon.sources.line_reader import Line, read_lines
from msd_daemon.sources.record import RawRecord, ReadMeter
from msd_daemon.sources.record_place import mark_place
from msd_daemon.sources.text import TextFormat

LineFormat = JsonlFormat | TextFormat


@runtime_checkable
class ShardFormat(Protocol):
    """A format whose readers differ by shard."""

    def at(self, shard: Shard) -> StreamFormat:
        """Return the reader of one shard.

        Raises:
            CorruptRecordError: Its beginning is damaged.
            OSError: It cannot be read.
        """
        ...


@runtime_checkable
class CountedFormat(Protocol):
    """A format whose shards have notes beside them that say what they hold."""

    def count_records(self, shard: Shard) -> int | None:
        """Return how many records a shard should have, None where nothing says."""
        ...


class LineStream:
    """Lines of JSONL or text, and texts that are one record, as a format of streams.

    Args:
        lines: Makes records of lines.
        spec: The source.
    """

    def __init__(self, lines: LineFormat, spec: SourceSpec) -> None:
        self._lines = lines
        self._is_file = isinstance(lines, TextFormat) and spec.text_document == "file"
        self._record_bytes_max = spec.record_bytes_max

    def records(self, stream: ByteStream, offset: int) -> Iterator[RawRecord]:
        """Yield the records of a stream, without fields.

        Raises:
            CorruptRecordError: The stream is damaged; the line before the damage is not given.
        """
        after = offset

        def read() -> Iterator[Line]:
            nonlocal after
            for line in read_lines(stream, offset, self._record_bytes_max):
                after = line.next_offset
                yield line

        try:
            if self._is_file:
                assert isinstance(self._lines, TextFormat)
                yield from self._lines.whole_file(stream)
            else:
                yield from self._lines.line_records(read())
        except (CorruptRecordError, OSError) as error:
            mark_place(error, after)
            raise

    def is_start(self, before: bytes) -> bool:
        """Tell whether the bytes before a place end a line."""
        return is_line_start(before)


def is_line_start(before: bytes) -> bool:
    """Tell whether a line begins behind these bytes; behind none it does."""
    return not before or before.endswith(b"\n")


def open_lines(
    spec: SourceSpec, meter: ReadMeter, fields: tuple[FieldRule, ...], vocabulary_count: int
) -> LineFormat | None:
    """Return what makes records of a source's lines, None where its records have fields."""
    if spec.format == "text":
        return TextFormat(spec, meter)
    if spec.format == "jsonl" and spec.recipe is None:
        return JsonlFormat(spec, meter, fields=fields, vocabulary_count=vocabulary_count)
    return None


def open_stream_format(spec: SourceSpec, columns: Columns, meter: ReadMeter) -> StreamFormat:
    """Return the registered reader of a streaming source.

    Raises:
        ConfigError: Its format is unknown, or cannot be read from front to end.
    """
    opened = format_of(spec.format).open(spec, columns, meter)
    if not hasattr(opened, "is_start"):
        raise ConfigError(
            f"source {spec.name!r}: format {spec.format} is not read as a stream: use files that "
            "are not compressed as a whole"
        )
    return cast(StreamFormat, opened)


def shard_format(stream_format: StreamFormat, shard: Shard) -> StreamFormat:
    """Return the reader of one shard.

    Raises:
        CorruptRecordError: Its beginning is damaged.
        OSError: It cannot be read.
    """
    return stream_format.at(shard) if isinstance(stream_format, ShardFormat) else stream_format


def count_records(stream_format: StreamFormat, shard: Shard) -> int | None:
    """Return how many records a shard should have, None where nothing says."""
    if isinstance(stream_format, CountedFormat):
        return stream_format.count_records(shard)
    return None
