"""One lane of a streaming source: its shards one after the other, a block of records at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from federation.model.job import FieldRule, Shard, ShuffleRule, SourceSpec
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.block_cursor import RawWindow
from msd_daemon.sources.byte_stream import START, ByteFile, ByteStream, PlainStream, SeekPoint
from msd_daemon.sources.field_numbers import ID_COUNT_MAX
from msd_daemon.sources.formats import Columns, StreamFormat
from msd_daemon.sources.index import IndexStore, ShardIndex
from msd_daemon.sources.order import record_windows
from msd_daemon.sources.record import RawRecord, ReadMeter, lost_records, lost_shard, unreadable
from msd_daemon.sources.record_guard import NO_GUARD, Loss
from msd_daemon.sources.record_place import marked_place
from msd_daemon.sources.shard_door import (
    ShardDoor,
    is_passed,
    loss_text,
    lost_count,
    lost_records_of,
)
from msd_daemon.sources.shard_file import open_shard, open_stream
from msd_daemon.sources.stream_formats import (
    CountedFormat,
    LineFormat,
    LineStream,
    count_records,
    open_lines,
    open_stream_format,
    shard_format,
)

_BEFORE_BYTES = 512
"""What a format is shown of a stream before a place that an index names."""


class _StaleIndexError(Exception):
    """The index sent the reader to a place where no record begins."""


class _Rest:
    """A stream from a record on, found by an index.

    Args:
        stream: The stream from a place before it on.
        skip_bytes: How far before.
        stream_format: Tells whether a record can begin there.

    Raises:
        _StaleIndexError: On read, where the stream ends or is damaged before the record, or none
            can begin behind the bytes before it.
    """

    def __init__(self, stream: ByteStream, skip_bytes: int, stream_format: StreamFormat) -> None:
        self._stream = stream
        self._skip_bytes = skip_bytes
        self._format = stream_format
        self._is_begun = False

    @property
    def seek_points(self) -> list[SeekPoint]:
        return self._stream.seek_points

    def read(self) -> bytes:
        if self._is_begun:
            return self._stream.read()
        try:
            return self._begin()
        except CorruptRecordError as error:
            raise _StaleIndexError from error

    def _begin(self) -> bytes:
        before = b""
        while True:
            data = self._stream.read()
            if not data:
                raise _StaleIndexError
            skip, self._skip_bytes = self._skip_bytes, max(0, self._skip_bytes - len(data))
            before = (before + data[:skip])[-_BEFORE_BYTES:]
            if len(data) > skip:
                _check_start(self._format, before)
                self._is_begun = True
                return data[skip:]


def _check_start(stream_format: StreamFormat, before: bytes) -> None:
    if not stream_format.is_start(before):
        raise _StaleIndexError


class StreamReader:
    """What all lanes of a source share: how its records are read, where its indexes are kept.

    Args:
        spec: The source.
        store: Of its indexes.
        meter: Counts what is read.
        fields: The job's, whose values lines of JSONL carry beside their text.
        vocabulary_count: Ids of a pre-tokenized line are below it.
        columns: Names of the fields that are wanted of records with fields, None for all.
        door: Of the source's shards; None: none is waited for.
    """

    def __init__(
        self,
        spec: SourceSpec,
        store: IndexStore,
        meter: ReadMeter,
        *,
        fields: tuple[FieldRule, ...] = (),
        vocabulary_count: int = ID_COUNT_MAX,
        columns: Columns = None,
        door: ShardDoor | None = None,
    ) -> None:
        self.spec = spec
        self.door = door or ShardDoor(NO_GUARD.source)
        self.store = store
        self.meter = meter
        self._lines = open_lines(spec, meter, fields, vocabulary_count)
        self.stream_format: StreamFormat
        if self._lines is not None:
            self.stream_format = LineStream(self._lines, spec)
        else:
            self.stream_format = open_stream_format(spec, columns, meter)

    @property
    def format(self) -> LineFormat:
        """What makes records of lines; only of sources whose records are lines or texts."""
        assert self._lines is not None, f"records of {self.spec.name!r} have fields"
        return self._lines


class ShardRun:
    """The records of one streamed shard from a block on; writes the index as it goes.

    Args:
        reader: Format, index store and meter of the source.
        shard: The shard; it is opened at the first record asked for.
        block: First block wanted, counted from the shard's beginning.
        epoch: The pass over the source.
    """

    def __init__(self, reader: StreamReader, shard: Shard, block: int, epoch: int = 0) -> None:
        self._reader = reader
        self._shard = shard
        self._epoch = epoch
        self._wanted = block * reader.spec.shuffle.stream_block_records
        """First record wanted."""
        self._stride = reader.spec.shuffle.stream_block_records
        self._file: ByteFile | None = None
        self._stream: ByteStream | None = None
        self._starts: list[int] | None = None  # kept while the index is being made
        self._count = 0
        self._is_intact = True
        self._is_broken = False
        self._peeked: RawRecord | None = None
        self._records = self._open(block)

    @property
    def block_count(self) -> int:
        """Blocks of the shard, known once its records have been read to the end."""
        return -(-self._count // self._stride)

    def peek(self) -> RawRecord | None:
        """Return the next record without taking it, None at the end."""
        if self._peeked is None:
            self._peeked = next(self._records, None)
        return self._peeked

    def block(self) -> Iterator[RawRecord]:
        """Yield the records up to the block's end."""
        for _ in range(self._stride):
            record = self.peek()
            if record is None:
                return
            self._peeked = None
            yield record

    def close(self) -> None:
        """Close the shard's file."""
        self._records = iter(())
        self._peeked = None
        self._stream = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, block: int) -> Iterator[RawRecord]:
        index = self._reader.store.load(self._shard)
        if index is not None and block > 0:
            if block >= len(index.starts):
                self._count = index.records
                return iter(())
            try:
                return self._open_at(index, block)
            except _StaleIndexError:
                self.close()
                self._reader.store.discard(self._shard)
                self._count = 0
                self._is_intact, self._is_broken = True, False
                index = None
        if index is None:
            self._starts = []
        records = self._read(START, 0)
        skipped = sum(1 for _ in islice(records, block * self._stride))
        return records if skipped == block * self._stride else iter(())

    def _open_at(self, index: ShardIndex, block: int) -> Iterator[RawRecord]:
        self._count = block * self._stride
        offset = int(index.starts[block])
        records = self._read(index.point_before(offset), offset)
        # The first record is read here, where a wrong index can still be passed over.
        self._peeked = next(records, None)
        if self._peeked is None or self._is_broken:
            raise _StaleIndexError
        return records

    def _read(self, point: SeekPoint, offset: int) -> Iterator[RawRecord]:
        for record in self._records_from(point, offset):
            if self._starts is not None and self._count % self._stride == 0:
                self._starts.append(record.place)
            self._count += 1
            yield record
        if self._starts is not None and self._is_intact:
            points = [] if self._stream is None else self._stream.seek_points
            self._reader.store.save(self._shard, self._count, self._starts, points)
        self.close()

    def _records_from(self, point: SeekPoint, offset: int) -> Iterator[RawRecord]:
        shard, last = self._shard, offset
        noted = self._reader.door.first_loss(shard, self._epoch)
        if noted is not None and self._count >= noted[0]:
            yield from self._lost(*noted)
            return
        fault = self._reader.door.fault(shard, self._epoch)
        if fault is not None:
            self._reader.meter.lost.add(shard.path)
            yield from self._lost(self._wanted, self._lose(fault))
            return
        try:
            self._file = open_shard(shard, self._reader.meter)
            stream_format = shard_format(self._reader.stream_format, shard)
        except (CorruptRecordError, OSError) as error:
            self._is_intact = False  # nor is it known that the shard has one record
            yield lost_shard(error, self._records_of_lost())
            return
        try:
            stream = self._open_stream(self._file, stream_format, point, offset)
            for record in stream_format.records(stream, offset):
                if noted is not None and self._count >= noted[0]:
                    yield from self._lost(*noted)
                    return
                last = record.place
                yield record
        except CorruptRecordError as error:
            place = marked_place(error)
            self._is_intact = place is not None  # else no index could lead there
            self._is_broken = True
            yield self._lost_rest(last if place is None else place, error)
        except OSError as error:
            self._is_intact = False  # of this machine, not of the content: no index is made of it
            place = marked_place(error)
            yield unreadable(last if place is None else place, error)

    def _lose(self, fault: OSError) -> Loss:
        """Return, and have noted, what is lost from the block on that was wanted."""
        spec, known = self._reader.spec, self._records_of_lost()
        total = lost_count(spec, known)
        count = max(total - self._wanted, 1)
        loss = Loss(count, loss_text(fault, known, total))
        if is_passed(spec, count):
            self._reader.door.lose(self._shard, self._wanted, self._epoch, loss)
        return loss

    def _lost(self, first: int, loss: Loss) -> Iterator[RawRecord]:
        """Yield what stands for the records from the present one on, of which those of a loss are lost."""
        self._is_intact = False
        before = Loss(max(first - self._count, 0), loss.text)
        yield from lost_records_of(before, self._count)
        yield from islice(lost_records_of(loss, first), max(self._count - first, 0), None)

    def _open_stream(
        self, file: ByteFile, stream_format: StreamFormat, point: SeekPoint, offset: int
    ) -> ByteStream:
        """Return the stream from an offset on, which lies at or behind a seek point."""
        self._stream = open_stream(file, point)
        if not offset:
            return self._stream
        if not isinstance(self._stream, PlainStream):
            return _Rest(self._stream, offset - point.decompressed, stream_format)
        begin = max(0, offset - _BEFORE_BYTES)
        _check_start(stream_format, file.read_at(begin, offset - begin))
        if offset >= file.size_bytes:
            raise _StaleIndexError
        self._stream = PlainStream(file, SeekPoint(offset, offset))
        return self._stream

    def _lost_rest(self, place: int, error: CorruptRecordError) -> RawRecord:
        """Return the record that stands for the rest of a damaged shard."""
        record = unreadable(place, error)
        stream_format = self._reader.stream_format
        if isinstance(stream_format, CountedFormat):
            total = stream_format.count_records(self._shard)
            if total is None:
                record.fault += f"; {lost_records(None)}"
            else:
                record.fault += f"; {max(1, total - self._count)} of its {total} records are lost"
        return record

    def _records_of_lost(self) -> int | None:
        """Return how many records a shard had that cannot be opened now."""
        known = self._reader.store.records_of_lost(self._shard)
        return count_records(self._reader.stream_format, self._shard) if known is None else known


class Lane:
    """The shards of one lane in an epoch.

    Args:
        reader: Format, index store and meter of the source.
        shards: (position in the epoch's order, shard), in the lane's order.
        epoch: The pass over the source.
    """

    def __init__(
        self, reader: StreamReader, shards: list[tuple[int, Shard]], epoch: int = 0
    ) -> None:
        self._reader = reader
        self._epoch = epoch
        self._shards = iter(shards)
        self._rule: ShuffleRule = reader.spec.shuffle
        self._run: ShardRun | None = None
        self.position = -1
        """Position of the shard that the next block lies in."""
        self.shard: Shard | None = None
        self.shard_block = 0
        """The next block, counted in its shard."""
        self.lane_block = 0
        """The next block, counted in the lane."""
        self._wanted = 0
        """Block that was sought and not looked for yet; 0 for none."""

    def seek(self, lane_block: int) -> None:
        """Go to a block; the lane has ended where it has fewer.

        Nothing is read before the block's turn comes: a compressed shard has up to 16 MiB before it,
        and other lanes come first.
        """
        self.lane_block = self._wanted = lane_block

    def _find(self, lane_block: int) -> None:
        remaining = lane_block
        for position, shard in self._shards:
            run = ShardRun(self._reader, shard, remaining, self._epoch)
            if run.peek() is not None:
                self._run, self.position, self.shard = run, position, shard
                self.shard_block = remaining
                return
            remaining -= run.block_count
            run.close()

    def has_block(self) -> bool:
        """Tell whether there is a block at the place of the lane; opens the next shard for it."""
        if self._wanted:
            wanted, self._wanted = self._wanted, 0
            self._find(wanted)
        while self._run is None or self._run.peek() is None:
            self.close()
            entry = next(self._shards, None)
            if entry is None:
                return False
            self.position, self.shard = entry
            self.shard_block = 0
            self._run = ShardRun(self._reader, self.shard, 0, self._epoch)
        return True

    def windows(self) -> Iterator[RawWindow]:
        """Yield the windows of the next block and go past it.

        A lane without a block gives one empty window that ends it.
        """
        if not self.has_block():
            yield RawWindow([], True, True)
            return
        assert self._run is not None
        for records, is_last in record_windows(self._run.block(), self._rule):
            if is_last:
                self.shard_block += 1
                self.lane_block += 1
            yield RawWindow(records, is_last, is_last and not self.has_block())

    def close(self) -> None:
        """Close the shard that is open."""
        if self._run is not None:
            self._run.close()
            self._run = None
