"""JSONL: one record a line. Plain files are cut into blocks by byte range, without any index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from federation.model.chunk import RecordStatus
from federation.model.job import FieldRule, Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.field_numbers import ID_COUNT_MAX
from msd_daemon.sources.json_record import json_extractor
from msd_daemon.sources.json_text import strip_line
from msd_daemon.sources.line_reader import Line, RangeStream, find_line_start, read_lines
from msd_daemon.sources.record import RawRecord, ReadMeter, lost_shard, unreadable
from msd_daemon.sources.shard_file import open_shard

_TOO_LARGE = int(RecordStatus.TOO_LARGE)


class JsonlFormat:
    """Records of JSONL shards.

    Args:
        spec: The source.
        meter: Counts what is read.
        fields: The job's, whose values are read beside the text.
        vocabulary_count: Ids of a pre-tokenized record are below it.
    """

    def __init__(
        self,
        spec: SourceSpec,
        meter: ReadMeter,
        *,
        fields: tuple[FieldRule, ...] = (),
        vocabulary_count: int = ID_COUNT_MAX,
    ) -> None:
        self.extract = json_extractor(spec, fields, vocabulary_count)
        self._record_bytes_max = spec.record_bytes_max
        self._block_bytes = spec.shuffle.block_bytes
        self._meter = meter

    def block_count(self, shard: Shard) -> int:
        """Return the blocks of a shard, at least 1."""
        return max(1, -(-shard.size_bytes // self._block_bytes))

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records that begin in the block's byte range."""
        start = block * self._block_bytes
        stop = start + self._block_bytes
        try:
            file = open_shard(shard, self._meter)
        except (CorruptRecordError, OSError) as error:
            if block == 0:
                yield lost_shard(error)
            return
        try:
            first = find_line_start(file, start, stop)
            if first is None:
                return
            stream = RangeStream(file, first, stop)
            for line in read_lines(stream, first, self._record_bytes_max):
                if line.offset >= stop:
                    return
                record = line_record(line, self._record_bytes_max)
                if record is not None:
                    yield record
        except (CorruptRecordError, OSError) as error:
            yield unreadable(start, error)
        finally:
            file.close()

    def line_records(self, lines: Iterable[Line]) -> Iterator[RawRecord]:
        """Yield the records of lines."""
        for line in lines:
            record = line_record(line, self._record_bytes_max)
            if record is not None:
                yield record


def line_record(line: Line, record_bytes_max: int) -> RawRecord | None:
    """Return the record of a line, None for a blank one."""
    if line.content is None:
        return RawRecord(
            line.offset, b"", _TOO_LARGE, f"longer than record_bytes_max = {record_bytes_max}"
        )
    content = strip_line(line.content)
    if not content or content.isspace():
        return None
    return RawRecord(line.offset, content)
