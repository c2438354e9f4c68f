"""An open Arrow IPC file or stream: record batches by number, read through a memory map.

What lies uncompressed on this machine is never copied whole: a batch of gigabytes costs the rows
that are looked at. Compressed batches, and those with dictionaries, are decoded one at a time, up
to a limit; of an object in a store each batch is fetched as a whole.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Self

from federation.model.job import Shard
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.arrow_messages import (
    BadMessageError,
    Data,
    Message,
    Messages,
    decoded_bytes,
    read_messages,
)
from msd_daemon.sources.parquet_file import arrow_modules, first_line
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_shard
from msd_daemon.stores.urls import is_url

DECODED_BYTES_MAX = 1 << 30
"""Of a compressed batch, or one with dictionaries, together with those."""
_FEATHER_V1 = b"FEA1"
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class OpenArrow:
    """An open Arrow file or stream; every failure leaves it as CorruptRecordError.

    Args:
        shard: Which file.
        meter: Counts what is read.
        window: First byte and bytes of what is Arrow in it; None: all.
        messages: What it holds, where that is known; None: its headers are walked.

    Raises:
        CorruptRecordError: It is none, or its schema cannot be read.
        OSError: It cannot be opened.
    """

    def __init__(
        self,
        shard: Shard,
        meter: ReadMeter,
        window: tuple[int, int] | None = None,
        messages: Messages | None = None,
    ) -> None:
        self._path = shard.path
        self._meter = meter
        self._arrow, _ = arrow_modules()
        self._file = open_shard(shard, meter)
        self._begin, self._size_bytes = window or (0, self._file.size_bytes)
        self._map: Any = None
        self._whole: Any = None
        try:
            self._open(shard, messages)
        except BaseException:
            self.close()
            raise

    def _open(self, shard: Shard, messages: Messages | None) -> None:
        if not self._size_bytes:
            raise self.fault("is empty, no Arrow file or stream")
        if not is_url(shard.path):
            self._map = self._arrow.memory_map(shard.path)
            self._whole = self._map.read_buffer().slice(self._begin, self._size_bytes)
        if bytes(self._read(0, 4)) == _FEATHER_V1:
            raise self.fault(
                "is a Feather V1 file, which is not read (pyarrow crashes on damaged ones): "
                "write it anew as V2"
            )
        self.messages = messages or read_messages(self._read, self._size_bytes)
        self.schema: Any = self._schema()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the map goes with the last row that looks into it."""
        self._whole = None
        if self._map is not None:
            self._map.close()
            self._map = None
        self._file.close()

    @property
    def can_split(self) -> bool:
        """True where some rows of a batch can be read without the others."""
        return not self.messages.is_compressed and not self.messages.dictionaries

    def batches(self, begin: int, end: int, columns: list[str]) -> Iterator[Any]:
        """Yield the record batches [begin, end) with just some columns, validated but for contents.

        Raises:
            CorruptRecordError: One is damaged, or too large to decode.
        """
        try:
            found = (
                self._plain(begin, end) if self.can_split else self._decoded(begin, end, columns)
            )
            for batch in found:
                batch = batch.select(columns)
                batch.validate()
                yield batch
        except (self._arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self.fault(
                f"is damaged in batches {begin} to {end - 1} ({first_line(error)})"
            ) from error

    def fault(self, what: str) -> CorruptRecordError:
        """Return the error of this shard."""
        return CorruptRecordError(f"{self._path} {what}", shard=self._path)

    def _read(self, offset: int, count: int) -> Data:
        if self._whole is not None:
            return memoryview(self._whole)[offset : offset + count]
        count = max(0, min(count, self._size_bytes - offset))
        return memoryview(self._file.read_at(self._begin + offset, count))

    def _buffer(self, message: Message) -> Any:
        """Return prefix, header and body of a message, of a map without a copy."""
        count = message.end - message.offset
        if self._whole is not None:
            return self._whole.slice(message.offset, count)
        return self._arrow.py_buffer(self._read(message.offset, count))

    def _schema(self) -> Any:
        message = self.messages.schema
        if message is None:
            damage = self.messages.damage or "holds no schema"
            raise self.fault(f"is no Arrow file or stream: it {damage}")
        try:
            schema = self._arrow.ipc.read_schema(self._arrow.BufferReader(self._buffer(message)))
            schema.names  # noqa: B018 - raises where a name is not UTF-8
            return schema
        except (self._arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise self.fault(f"has a schema that cannot be read ({first_line(error)})") from error

    def _plain(self, begin: int, end: int) -> Iterator[Any]:
        ipc = self._arrow.ipc
        for number in range(begin, end):
            message = self.messages.batch(number)
            if self._whole is not None:
                self._meter.read_bytes += message.header_bytes
            read = ipc.read_message(self._arrow.BufferReader(self._buffer(message)))
            yield ipc.read_record_batch(read, self.schema)

    def _decoded(self, begin: int, end: int, columns: list[str]) -> Iterator[Any]:
        if begin == end:
            return
        wanted = [self.schema.get_field_index(name) for name in columns]
        parts = self._parts(begin, end)
        if self._whole is not None:
            self._meter.read_bytes += sum(part.end - part.offset for part in parts)
        file = self._arrow.PythonFile(_Pieces(self._read, parts), mode="r")
        options = self._arrow.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
        yield from self._arrow.ipc.open_stream(file, options=options)

    def _parts(self, begin: int, end: int) -> list[Message]:
        """Return schema, the dictionaries that hold, and the batches, as a stream has them."""
        messages = self.messages
        assert messages.schema is not None
        batches = [messages.batch(number) for number in range(begin, end)]
        dictionaries, later = messages.dictionaries, []
        if not messages.has_footer:
            first, last = batches[0].offset, batches[-1].offset
            dictionaries = _holding([d for d in messages.dictionaries if d.offset < first])
            later = [d for d in messages.dictionaries if first < d.offset < last]
            batches = sorted([*batches, *later], key=lambda part: part.offset)
        try:
            held_bytes = sum(decoded_bytes(self._read, part) for part in [*dictionaries, *later])
            sizes = [decoded_bytes(self._read, part) for part in batches]
        except BadMessageError as error:
            raise self.fault(f"is damaged in batches {begin} to {end - 1} ({error})") from error
        if held_bytes + max(sizes) > DECODED_BYTES_MAX:
            raise self.fault(
                f"has a batch of {max(sizes)} bytes with {held_bytes} bytes of dictionaries among "
                f"batches {begin} to {end - 1}, at most {DECODED_BYTES_MAX} are decoded: write it "
                "anew in smaller batches"
            )
        return [messages.schema, *dictionaries, *batches]


def _holding(dictionaries: list[Message]) -> list[Message]:
    """Return those that are not replaced by a later one of the same number."""
    last = {d.dictionary: place for place, d in enumerate(dictionaries) if not d.is_delta}
    return [d for place, d in enumerate(dictionaries) if place >= last.get(d.dictionary, 0)]


class _Pieces(io.RawIOBase):
    """Messages of a shard, read one behind the other and ended as a stream."""

    def __init__(self, read: Any, messages: list[Message]) -> None:
        super().__init__()
        self._read = read
        self._left = [(message.offset, message.end) for message in messages]
        self._end = _END

    def readable(self) -> bool:
        return True

    def read(self, count: int = -1, /) -> bytes:
        wanted = count if count >= 0 else sum(end - begin for begin, end in self._left)
        taken: list[Any] = []
        while self._left and wanted > 0:
            begin, end = self._left[0]
            piece = self._read(begin, min(end - begin, wanted))
            if not len(piece):
                raise OSError(f"ended at byte {begin}")
            begin += len(piece)
            self._left[:1] = [(begin, end)] if begin < end else []
            taken.append(piece)
            wanted -= len(piece)
        if not self._left and wanted > 0:
            taken.append(self._end[:wanted])
            self._end = self._end[wanted:]
        return b"".join(taken)
