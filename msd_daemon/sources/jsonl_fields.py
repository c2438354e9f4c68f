"""JSONL whose records have fields: the objects of its lines. NeMo manifests are JSONL of sounds.

Lines, blocks and places are those of JSONL read for its texts alone, and so is what is a bad line.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import cast

from federation.model.chunk import RecordStatus
from federation.model.job import Shard, SourceSpec
from msd_daemon.sources.byte_stream import ByteStream
from msd_daemon.sources.formats import Columns
from msd_daemon.sources.json_text import read_object
from msd_daemon.sources.jsonl import JsonlFormat
from msd_daemon.sources.record import Extracted, RawRecord, ReadMeter
from msd_daemon.sources.record_fields import is_encodable, is_wanted, media_names, wrap_media
from msd_daemon.sources.stream_formats import LineStream

_BAD_ENCODING = int(RecordStatus.BAD_ENCODING)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_RECORDS_UNKNOWN = -1


def open_jsonl(spec: SourceSpec, columns: Columns, meter: ReadMeter) -> JsonlBlocks | JsonlStream:
    """Return the reader of a source of JSONL, by its order class."""
    lines = JsonlFormat(spec, meter)
    fields = LineFields(spec, columns)
    if spec.order_class == "streaming":
        return JsonlStream(LineStream(lines, spec), fields)
    return JsonlBlocks(lines, fields)


def open_nemo_manifest(
    spec: SourceSpec, columns: Columns, meter: ReadMeter
) -> JsonlBlocks | JsonlStream:
    """Return the reader of a source of NeMo manifests.

    `audio_filepath` is the path of a sound, from the manifest's folder unless the recipe has a root
    of media.
    """
    return open_jsonl(spec, columns, meter)


class LineFields:
    """Gives records of lines their fields; the line stays in `raw`, where content is hashed.

    Args:
        spec: The source, whose recipe names the fields of media.
        columns: Fields that are wanted: only they are checked for lone surrogates.
    """

    def __init__(self, spec: SourceSpec, columns: Columns) -> None:
        self._columns = columns
        self._media = media_names(spec)

    def fill(self, record: RawRecord) -> RawRecord:
        """Return a record with the fields of its line, or with what is wrong with it."""
        if record.status:
            return record
        value = read_object(record.raw, is_exact=True)
        if isinstance(value, Extracted):
            record.status, record.fault = value.status, value.fault
            return record
        if b"\\u" in record.raw and _SURROGATE.search(record.raw):
            for name, one in value.items():
                if is_wanted(name, self._columns) and not is_encodable([name, one]):
                    record.status = _BAD_ENCODING
                    record.fault = f"a lone surrogate escape in field {name!a}"
                    return record
        wrap_media(value, self._media)
        record.fields = value
        return record


class JsonlBlocks:
    """Plain JSONL: blocks are byte ranges, found without any index."""

    def __init__(self, lines: JsonlFormat, fields: LineFields) -> None:
        self._lines = lines
        self._fields = fields

    def measure(self, shard: Shard) -> tuple[int, int]:
        """Return the blocks of a shard, and -1: its lines are not counted."""
        return self._lines.block_count(shard), _RECORDS_UNKNOWN

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records that begin in the block's byte range."""
        with closing(
            cast("Generator[RawRecord, None, None]", self._lines.records(shard, block))
        ) as records:
            for record in records:
                yield self._fields.fill(record)


class JsonlStream:
    """Compressed JSONL, from front to end."""

    def __init__(self, lines: LineStream, fields: LineFields) -> None:
        self._lines = lines
        self._fields = fields

    def records(self, stream: ByteStream, offset: int) -> Iterator[RawRecord]:
        """Yield the records of a stream.

        Raises:
            CorruptRecordError: The stream is damaged; the line before the damage is not given.
        """
        return map(self._fields.fill, self._lines.records(stream, offset))

    def is_start(self, before: bytes) -> bool:
        """Tell whether the bytes before a place end a line."""
        return self._lines.is_start(before)
